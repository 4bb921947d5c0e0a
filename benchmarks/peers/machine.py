"""What the figures were measured on: the machine, how busy it was, how fast its memory is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[2]
_OURS: Final = ("ray", "torch", "transformers")
_VERSIONS: Final = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({n: v for n in sys.argv[1:] if (v := version(n))}))
"""
# Torch's own sum is bound by the memory, and threads share it as a forward does.
_READ: Final = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
array = torch.ones(int(sys.argv[2]) // 4)
times = []
for _ in range(8):
    began = time.perf_counter(); array.sum(); times.append(time.perf_counter() - began)
print(array.numel() * 4 / min(times))
"""


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {"paceline": _commit(), **{name: _version(name) for name in _OURS}},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions_of(python: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Versions of packages in another environment, those that it has."""
    import json

    out = subprocess.run(
        [python, "-c", _VERSIONS, *names], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, str] = json.loads(out)
    return found


def load_average() -> float:
    """Of the last minute. A quiet machine is near 0 before something starts on it."""
    return round(os.getloadavg()[0], 2)


def read_bandwidth(num_bytes: int = 512 << 20) -> float:
    """GB/s at which all cores together read memory, the best of a few passes (two seconds)."""
    cores = len(os.sched_getaffinity(0))
    out = subprocess.run(
        [sys.executable, "-c", _READ, str(cores), str(num_bytes)],
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    return round(float(out) / 1e9, 2)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None
