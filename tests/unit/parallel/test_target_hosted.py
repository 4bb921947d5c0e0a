"""A drafter that lives with the target: serves, is lost where it fails, and is rebuilt beside
running steps; the output is that of plain decoding all along."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from actors.startup.draft_watch import DraftWatch, Switch
from actors.startup.in_process import build_in_process
from actors.verifier.engine import VerifierEngine
from parallel.transport.socket import FrameListener, SocketDir
from tests.unit.parallel import toy
from tests.unit.parallel.conftest import Ranks
from tests.unit.parallel.test_engine import answers, config, expected, running, tiny_pair

__all__ = ["expected", "tiny_pair"]


def spec(fails_in: str | None, rank: int = 0) -> dict[str, Any]:
    options = {} if fails_in is None else {"fails_in": fails_in, "rank": rank}
    return {"method": "toy", "num_speculative_tokens": 3, "speculator_options": options}


def lose_and_find(engine: VerifierEngine, expected: dict[str, list[int]]) -> None:
    """Serve until the drafter was lost and is back, and some more."""
    deadline = time.monotonic() + 60
    while engine.stats.num_draft_losses == 0 or engine.draft_lost() is not None:
        assert answers(engine) == expected
        assert time.monotonic() < deadline, engine.draft_lost()
    before = engine.stats.num_draft_tokens
    assert answers(engine) == expected
    assert engine.stats.num_draft_tokens > before
    assert engine.stats.num_draft_losses == 1 and engine.draft_lost() is None


@pytest.mark.parametrize("fails_in", [None, "propose", "absorb"])
def test_in_the_engine_s_process(
    tiny_pair: tuple[Path, Path], expected: dict[str, list[int]], fails_in: str | None
) -> None:
    toy.ToyDrafter.num_made.clear()
    engine = build_in_process(config(tiny_pair[0], 1, spec(fails_in)), warm_up=False)
    try:
        if fails_in is not None:
            lose_and_find(engine, expected)
        assert answers(engine) == expected
        assert engine.stats.num_draft_tokens > 0
    finally:
        engine.stop()
    assert toy.ToyDrafter.num_made.total() == 1 + (fails_in is not None)


@pytest.mark.parametrize("fails_in", ["propose", "absorb"])
def test_split_over_target_processes_of_which_one_fails(
    ranks: Ranks, tiny_pair: tuple[Path, Path], expected: dict[str, list[int]], fails_in: str
) -> None:
    sockets = SocketDir()
    gate = FrameListener(sockets.socket_path("control"), 0)
    cfg = config(tiny_pair[0], 2, spec(fails_in, rank=1))
    with running(ranks, cfg, control=gate.path, rebuild_at=ranks.meeting("draft", 2)) as engine:
        controls = [gate.accept(30.0)[0] for _ in range(2)]

        def rebuild(generation: int) -> Switch:
            for connection in controls:
                connection.send(1, generation, b"", 5.0)
            for connection in controls:
                assert connection.recv(60.0).step == generation
            return lambda: None

        watch = DraftWatch(engine, rebuild, period_s=0.01)
        try:
            lose_and_find(engine, expected)
            assert watch.num_rebuilds == 1
        finally:
            watch.stop()
            for connection in controls:
                connection.close()
    gate.close()
    sockets.close()
