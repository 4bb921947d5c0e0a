"""Compile and load the C kernels that the CPU path uses.

Plain C through ctypes: no PyTorch headers, so a build takes under a second, and the object is
linked against the OpenMP runtime that torch has already loaded (one thread pool, not two). Built
objects are cached by source, flags and machine. Without a C compiler `load_kernels` returns None
and callers use their torch path.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from actors.threads import cache_dir

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("paged_attention.c")
_FOLDER = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")

_VECTOR = 8  # W of paged_attention.c

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


@dataclass(frozen=True)
class AttentionKernels:
    """The functions of paged_attention.c for one (head_dim, block_size).

    Both take raw data pointers; shapes and layouts are in the C file's head comment.
    """

    head_dim: int
    block_size: int
    write_kv: ctypes._NamedFuncPointer
    paged_attention: ctypes._NamedFuncPointer


@lru_cache(maxsize=16)
def load_kernels(head_dim: int, block_size: int) -> AttentionKernels | None:
    """The compiled kernels, built on first use, or None when this machine cannot build them, or
    heads are not whole vectors. Block sizes other than 8, 16, ... 256 work, more slowly."""
    if head_dim % _VECTOR:
        logger.warning(
            "head_dim %d is no multiple of %d: attention runs on torch, slower and not bit-exact "
            "across batch shapes", head_dim, _VECTOR,
        )  # fmt: skip
        return None
    lib = load_library(_SOURCE, (f"-DHEAD_DIM={head_dim}", f"-DBLOCK={block_size}"), "attention")
    if lib is None:
        return None
    lib.write_kv.argtypes = [_P] * 5 + [_I] * 6
    lib.write_kv.restype = None
    lib.paged_attention.argtypes = [_P] * 7 + [_I] * 6 + [_P, _F, _F, _I, _N, _N]
    lib.paged_attention.restype = _N
    return AttentionKernels(head_dim, block_size, lib.write_kv, lib.paged_attention)


def load_library(source: Path, flags: tuple[str, ...], purpose: str) -> ctypes.CDLL | None:
    """`source` compiled (or from the cache) and loaded; None, with a warning, where that fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning(
            "no C compiler found: %s runs on torch, slower%s; install gcc or clang",
            purpose,
            " and not bit-exact across batch shapes" if source == _SOURCE else "",
        )
        return None
    path = _build(compiler, source, flags, purpose)
    if path is None:
        return None
    torch.get_num_threads()  # torch's OpenMP runtime must be loaded first: ours resolves to it
    return ctypes.CDLL(str(path))


def load_text(name: str, text: str, purpose: str) -> ctypes.CDLL | None:
    """As `load_library`, of C code that was generated; it stays beside what was built of it."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    path = cache_dir() / "native" / f"{name}-{digest}.c"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as tmp:
            tmp.write(text)
        Path(tmp.name).replace(path)
    return load_library(path, (), purpose)


def _cpu_identity() -> str:
    """What `-march=native` depends on, so that a cache on shared storage is not misused."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    except OSError:
        pass
    return platform.machine() + platform.processor()


def _build(compiler: str, source: Path, flags: tuple[str, ...], purpose: str) -> Path | None:
    key = hashlib.sha256(
        b"\0".join(
            [source.read_bytes(), compiler.encode(), _cpu_identity().encode()]
            + [f.encode() for f in _FLAGS + flags]
            # What it may include.
            + [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]"))]
        )
    ).hexdigest()[:20]
    folder = cache_dir() / "native"
    path = folder / f"{source.stem}-{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Built beside the final name and renamed: several processes may start at once.
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as tmp:
        scratch = Path(tmp.name)
    command = [compiler, *_FLAGS, *flags, f"-I{_FOLDER}", "-o", str(scratch), str(source), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        scratch.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        scratch.unlink(missing_ok=True)
        detail = getattr(error, "stderr", "") or str(error)
        logger.warning(
            "building the native %s failed, using torch: %s", purpose, detail.strip()[:400]
        )
        return None
    return path
