"""Bringing a lost drafter back. Requests go on without drafts meanwhile. The same for every
placement: what differs is how a new drafter is made, and how the steps change over to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0

# Changes over to the new drafter, between two steps.
Switch = Callable[[], None]


class NotRebuildable(Exception):
    """Where this drafter lives it cannot be made again; the message says why and what would do."""


class EngineLike(Protocol):
    """The part of `VerifierEngine` that is watched."""

    def restore_draft(self, connect: Switch, generation: int) -> Future[None]: ...
    def draft_lost(self) -> str | None: ...
    def is_running(self) -> bool: ...


class DraftWatch:
    """Rebuilds a lost drafter, in a thread of its own.

    Args:
        engine: Whose drafter it is.
        rebuild: Makes the drafter of a generation and returns how to change over to it. What it
            raises ends the attempt, `NotRebuildable` the watch.
        max_per_hour: Rebuilds; a drafter that fails more often has something wrong with it, and
            each rebuild makes running requests start over.
        period_s: Between two looks at the engine.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        engine: EngineLike,
        rebuild: Callable[[int], Switch],
        max_per_hour: int = 5,
        period_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._rebuild = rebuild
        self._max_per_hour = max_per_hour
        self._period_s = period_s
        self._clock = clock
        self._started: deque[float] = deque(maxlen=max_per_hour)
        self._is_stopping = threading.Event()
        self._generation = 0
        self._was_refused = False
        self.num_rebuilds = 0
        self.state = "well"
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the watch is to stop: for a rebuild to call while it waits."""
        if self._is_stopping.is_set():
            raise InterruptedError("the replica stops")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the watch; a rebuild in progress ends at its next `check`. Idempotent."""
        self._is_stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_stopping.wait(self._period_s) and self._engine.is_running():
            lost = self._engine.draft_lost()
            if lost is None:
                self.state = "well"
            elif self._may_rebuild(lost):
                self._bring_back(lost)

    def _may_rebuild(self, lost: str) -> bool:
        now = self._clock()
        if len(self._started) < self._max_per_hour or now - self._started[0] >= _HOUR_S:
            self._started.append(now)
            self._was_refused = False
            return True
        if not self._was_refused:
            self._was_refused = True
            self.state = f"lost {self._max_per_hour} times within an hour, at last: {lost}"
            logger.error("the drafter was %s; serving without drafts for now", self.state)
        return False

    def _bring_back(self, lost: str) -> None:
        logger.warning("the drafter was lost (%s); rebuilding it", lost)
        self.state = f"being rebuilt after: {lost}"
        self._generation += 1  # of each attempt, so that no leftover of one passes for the next
        try:
            switch = self._rebuild(self._generation)
            self.check()
            applied = self._engine.restore_draft(switch, self._generation)
            # Until then the engine still says that the drafter is lost.
            while self._engine.is_running():
                self.check()
                try:
                    applied.result(self._period_s)
                except NotYet:
                    continue
                break
            self.num_rebuilds += 1
            logger.info("the drafter is back")
        except InterruptedError:
            logger.info("the replica stops while its drafter is rebuilt")
        except NotRebuildable as error:
            self.state = f"lost ({lost}) for good: {error}"
            logger.error("the drafter is %s", self.state)
            self._is_stopping.set()
        except Exception as error:
            self.state = f"lost ({lost}); rebuilding it failed: {error}"
            logger.exception("rebuilding the drafter failed")
