"""Four real processes that tests use as ranks, started once for all tests of this folder."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.groups import GroupHost, TPGroup, join_group
from parallel.topology import Rendezvous

MAX_RANKS = 4
TIMEOUT_S = 120.0
START_S = 300.0
CPU = torch.device("cpu")


def _serve(pipe: Connection) -> None:
    # What most functions need, and seconds on a busy machine: before anyone's clock runs.
    import actors.draft.actor
    import actors.target.actor  # noqa: F401

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        function, rendezvous, rank, args = pipe.recv()
        try:
            if rendezvous is None:
                pipe.send((True, function(rank, *args)))
                continue
            group = join_group(rendezvous, rank, CPU, timeout_s=30.0)
            try:
                pipe.send((True, function(group, *args)))
            finally:
                group.close()
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """Runs `function(group, *args)` on the first `size` processes at once."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        # The server imports once what each rank would import in seconds, and forks the ranks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["actors.draft.actor", "actors.target.actor"])
        self._host = GroupHost("127.0.0.1")
        self._generation = 0
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(START_S) and pipe.recv() == "ready"

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order; the first failure is raised with the rank's traceback."""
        results = self.outcomes(size, function, *args)
        for rank, (is_fine, value) in enumerate(results):
            assert is_fine, f"rank {rank}: {value}"
        return [value for _, value in results]

    def outcomes(
        self, size: int, function: Callable[..., Any], *args: Any
    ) -> list[tuple[bool, Any]]:
        """(whether it returned, result or traceback) in rank order."""
        meeting = self.meeting("target", size)
        for rank in range(size):
            self._pipes[rank].send((function, meeting, rank, args))
        return self.finish(size)

    def start(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        """Begin `function(rank, *args)` on the first `size` processes; `finish` waits for it."""
        for rank in range(size):
            self._pipes[rank].send((function, None, rank, args))

    def finish(self, size: int) -> list[tuple[bool, Any]]:
        results = []
        for rank in range(size):
            assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} hangs"
            results.append(self._pipes[rank].recv())
        return results

    def meeting(self, role: str, size: int) -> Rendezvous:
        self._generation += 1
        return Rendezvous("127.0.0.1", self._host.port, role, size, self._generation, "k")

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    from tests.unit.model.conftest import write_family

    made: dict[str, Path] = {}

    def get(name: str, **overrides: Any) -> Path:
        key = f"{name}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = write_family(tmp_path_factory.mktemp(name), name, **overrides)
        return made[key]

    return get


__all__ = ["CPU", "Ranks", "TPGroup"]
