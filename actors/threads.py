"""Threads on purpose: how many an engine process gets, and how they wait for each other.

Target, draft and verifier share the cores and take turns, so each compute process gets all of
them. What must not happen is one process's threads spinning at a barrier while another computes:
with OpenMP's default (spin for milliseconds) a busy neighbour made steps 16 to 30 times slower. A
bounded spin keeps the fast hand-over of a quiet machine and gives the core back soon after.
Values and measurements: docs/adr/0009; measure with `benchmarks.run --suites neighbour`.
"""

from __future__ import annotations

import os
from pathlib import Path

# libgomp iterations; about 10 us. 0 would sleep at once (OMP_WAIT_POLICY=PASSIVE).
SPIN_COUNT = 2000


def cache_dir() -> Path:
    """Folder for what Paceline builds or converts: `$PACELINE_CACHE` or `~/.cache/paceline`."""
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def usable_cores() -> int:
    """Cores that this process may run on (cgroup and affinity respected where visible)."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def compute_environment(num_threads: int | None) -> dict[str, str]:
    """Environment of a target or draft process; must be set before torch is imported."""
    threads = str(num_threads or usable_cores())
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "OMP_DYNAMIC": "FALSE",
        # Compiled layers live beside our own kernels, so that a restart finds both.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor")
        ),
    }
