"""The rule of the agreement, without sockets or clock, and what its frames say."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

# A wait costs a step's speed, an early close only the K of one step.
MAX_DELAY_S = 0.005
# A coordinator that is silent for that long is taken for dead. In lockstep it is silent while
# another rank's step runs, so that what such a step may take comes on top.
WATCHDOG_S = 30.0
SEND_S = 1.0
BATCH = struct.Struct("<I")


class Kind(enum.IntEnum):
    """What a frame between rank and coordinator says. 0 is the transport's hello."""

    DIGEST = 1  # rank: text, must equal the coordinator's
    REPORT = 2  # rank: requests of its next step
    IDLE = 3  # rank: no work; not waited for
    ANSWER = 4  # coordinator: the largest batch; the step of the frame is the report's
    DUMMY = 5  # coordinator, lockstep: run a dummy step; the largest batch
    FALLBACK = 6  # coordinator: text, why there is no agreement any more
    SHARE = 7  # rank 0 to the coordinator, and from there to each other rank: bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """A closed round. `late` were waited for in vain; `dummies` have no work (lockstep only)."""

    round: int
    batch: int
    reporters: tuple[int, ...]
    late: tuple[int, ...]
    dummies: tuple[int, ...]


@dataclass(slots=True)
class _Rank:
    batch: int = 0  # last reported; 0 when idle
    has_reported: bool = False
    is_late: bool = False


class Rounds:
    """Who has reported, when a round closes, what it decides. Time is given, never read."""

    def __init__(self, max_delay_s: float = MAX_DELAY_S, *, lockstep: bool = False) -> None:
        self._max_delay_s = max_delay_s
        self._lockstep = lockstep
        self._ranks: dict[int, _Rank] = {}
        self._opened_s: float | None = None
        self.round = 0

    def join(self, rank: int) -> None:
        self._ranks[rank] = _Rank()

    def leave(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def report(self, rank: int, batch: int, now: float) -> None:
        state = self._ranks[rank]
        state.batch, state.has_reported, state.is_late = batch, True, False
        if self._opened_s is None:
            self._opened_s = now

    def idle(self, rank: int) -> None:
        state = self._ranks[rank]
        state.batch, state.has_reported, state.is_late = 0, False, False

    @property
    def deadline(self) -> float | None:
        """When the open round closes at the latest; None without one, or in lockstep."""
        if self._opened_s is None or self._lockstep:
            return None
        return self._opened_s + self._max_delay_s

    def decide(self, now: float) -> Decision | None:
        """Close the round if every busy rank has reported, or its time is up."""
        if self._opened_s is None:
            return None
        missing = [r for r, s in self._ranks.items() if s.batch and not s.has_reported]
        waited_for = [r for r in missing if not self._ranks[r].is_late]
        deadline = self.deadline
        if waited_for and (deadline is None or now < deadline):
            return None
        for rank in waited_for:
            self._ranks[rank].is_late = True
        reporters = tuple(sorted(r for r, s in self._ranks.items() if s.has_reported))
        dummies: tuple[int, ...] = ()
        if self._lockstep:
            dummies = tuple(sorted(r for r, s in self._ranks.items() if not s.batch))
        batch = max((s.batch for s in self._ranks.values()), default=0)
        for rank in reporters:
            self._ranks[rank].has_reported = False
        self._opened_s = None
        if not reporters:
            return None  # all who had reported left or went idle
        self.round += 1
        return Decision(self.round, batch, reporters, tuple(sorted(waited_for)), dummies)
