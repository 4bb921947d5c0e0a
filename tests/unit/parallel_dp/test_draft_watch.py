"""The watch over a lost drafter, with an engine and a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from actors.startup.draft_watch import DraftWatch, NotRebuildable

WAIT_S = 20.0


class Engine:
    """Loses its drafter when told to; restores when the test lets it."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.runs = True
        self.looks = threading.Semaphore(0)
        self.beats = threading.Semaphore(0)
        self.restored: list[int] = []
        self.holds = False
        self.held: Future[None] | None = None
        self.asked = threading.Event()

    def draft_lost(self) -> str | None:
        self.looks.release()
        return self.lost

    def is_running(self) -> bool:
        self.beats.release()
        return self.runs

    def restore_draft(self, connect: Callable[[], None], generation: int) -> Future[None]:
        connect()
        self.restored.append(generation)
        done: Future[None] = Future()
        self.held = done
        if not self.holds:
            self.apply()
        self.asked.set()
        return done

    def apply(self) -> None:
        assert self.held is not None
        self.lost = None
        self.held.set_result(None)

    def wait_looks(self, num: int) -> None:
        for _ in range(num):
            assert self.looks.acquire(timeout=WAIT_S)


@contextmanager
def watching(engine: Engine, **kw: object) -> Iterator[tuple[DraftWatch, list[int]]]:
    tried: list[int] = []

    def rebuild(generation: int) -> Callable[[], None]:
        tried.append(generation)
        if generation in failing:
            raise failing[generation]
        return lambda: None

    failing: Any = kw.pop("failing", {})
    watch = DraftWatch(engine, rebuild, period_s=0.002, **kw)  # type: ignore[arg-type]
    try:
        yield watch, tried
    finally:
        watch.stop()
        assert not watch._thread.is_alive()


def lose(engine: Engine, num_looks: int = 3) -> None:
    engine.lost = "gone"
    while engine.looks.acquire(blocking=False):
        pass
    engine.wait_looks(num_looks)


def test_a_rebuild_waits_until_it_is_in_use_and_each_attempt_has_a_number_of_its_own() -> None:
    engine = Engine()
    engine.holds = True
    with watching(engine, failing={1: MemoryError("no room")}) as (watch, tried):
        engine.lost = "gone"
        assert engine.asked.wait(WAIT_S)
        # The step in flight is long: the engine still says that the drafter is lost.
        assert tried == [1, 2] and engine.restored == [2]
        for _ in range(10):
            assert engine.beats.acquire(timeout=WAIT_S)
        assert tried == [1, 2], "it is not rebuilt again meanwhile"
        while engine.looks.acquire(blocking=False):
            pass
        engine.apply()
        engine.wait_looks(2)
        assert watch.state == "well" and watch.num_rebuilds == 1


def test_the_budget_is_per_hour_and_what_was_not_possible_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, now = Engine(), [0.0]
    with watching(engine, max_per_hour=2, clock=lambda: now[0]) as (watch, tried):
        for _ in range(3):
            lose(engine)
        assert tried == [1, 2] and "lost 2 times within an hour" in watch.state
        assert sum("serving without drafts" in r.message for r in caplog.records) == 1
        now[0] = 3601.0
        lose(engine)
        engine.wait_looks(3)
        assert tried == [1, 2, 3] and engine.lost is None
        assert watch.state == "well"


def test_a_drafter_that_cannot_be_made_again_stays_lost_and_says_why() -> None:
    engine = Engine()
    with watching(engine, failing={1: NotRebuildable("it is split")}) as (watch, tried):
        engine.lost = "gone"
        watch._thread.join(WAIT_S)
        assert tried == [1] and watch.state == "lost (gone) for good: it is split"


def test_a_stop_ends_a_rebuild_at_its_next_check_and_the_watch_ends_with_its_engine() -> None:
    engine = Engine()
    begun = threading.Event()
    watches: list[DraftWatch] = []

    def rebuild(generation: int) -> Callable[[], None]:
        begun.set()
        while True:
            watches[0].check()

    watches.append(DraftWatch(engine, rebuild, period_s=0.002))
    engine.lost = "gone"
    assert begun.wait(WAIT_S)
    watches[0].stop()
    assert not watches[0]._thread.is_alive() and engine.restored == []

    engine.lost = None
    other = DraftWatch(engine, rebuild, period_s=0.002)
    engine.runs = False
    other._thread.join(WAIT_S)
    assert not other._thread.is_alive()
