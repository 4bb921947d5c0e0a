"""Threads on purpose: how many an engine process gets, and how they wait for each other.

Target, draft and verifier share the cores and take turns, so each compute process gets all of
them. What must not happen is one process's threads spinning at a barrier while another computes:
with OpenMP's default (spin for milliseconds) a busy neighbour made steps 16 to 30 times slower. A
bounded spin keeps the fast hand-over of a quiet machine and gives the core back soon after.
Values and measurements: docs/adr/0009; measure with `benchmarks.run --suites neighbour`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

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
    }


# At most 15 characters, which is what the system keeps of a thread's name.
COMPUTE_NAME = "paceline-torch"


class ComputeThread:
    """The one thread of a process that runs torch's kernels and ours, from load to the last step.

    OpenMP keeps a team of threads for each thread that asks for one. With two teams it counts more
    threads than cores, and its threads sleep where they should wait: 90 products took 28 ms beside
    a second team that did nothing, and 16 without it (docs/adr/0009).
    """

    def __init__(self, name: str = COMPUTE_NAME) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `call` there, after what was started before."""
        done: Future[R] = Future()

        def run() -> None:
            try:
                done.set_result(call(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        self._calls.put(run)
        return done

    def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `start`; waits for the result, or raises what was raised."""
        return self.start(call, *args, **kwargs).result()

    def end(self) -> None:
        """Let the thread end once it has done what was started. Idempotent."""
        self._calls.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for its end; at once when called there."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        # What `top -H` shows of it, and of the team that OpenMP makes for it.
        with suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._thread.name)
        while (call := self._calls.get()) is not None:
            call()


def compute_alone() -> None:
    """Make this thread, beside the compute thread, run every kernel by itself: no second team.

    Calls of torch in threads that have made none yet are alone, too.
    """
    import torch

    torch.set_num_threads(1)
