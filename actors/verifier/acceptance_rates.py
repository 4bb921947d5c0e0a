"""How likely drafts are to be accepted: what the server has seen, and how a request differs.

For each draft position (given that those before it were accepted) and each level of confidence that
the drafter states, the server counts, forgetting slowly. A request adds one number, its log-odds
against the server: a one-dimensional Kalman filter, which moves far while little is known of a
request and finds its way back where a text changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from actors.steps.messages import Int32Array

# Trials that a position's estimate before it is worth: of the position before it, and, for a level
# of confidence, of all levels together.
_NUM_POSITION_TRIALS: Final = 2.0
_NUM_LEVEL_TRIALS: Final = 4.0
# Of the trials of a position, about a hundred are remembered.
_MEMORY: Final = 1 - 1 / 128
# Variance of a request's log-odds: at its start and at most, and what a step adds (texts change).
_MOST_VARIANCE: Final = 1.0
_DRIFT: Final = 0.01
# Without a trial a request comes back to the server's rates by this much a step.
_RETURN: Final = 1 / 64
_LEAST: Final = 0.002


@dataclass(slots=True)
class RequestRates:
    """What is known of one request's drafts.

    `shift`: log-odds against the server's, `variance` of it. `level`: confidence in the drafts at
    hand. `last_k`: drafts chosen last. `watched`: drafts that were not sent, of `watched_level`,
    whose first `num_watched` have come true so far.
    """

    shift: float = 0.0
    variance: float = _MOST_VARIANCE
    level: int = 0
    last_k: int = 0
    watched: Int32Array | None = None
    watched_level: int = 0
    num_watched: int = 0


class AcceptanceRates:
    """Args:
    max_drafts: Draft positions.
    num_levels: Levels of confidence of the drafter.
    first_rate: Expected of the first position while nothing is known.
    """

    def __init__(self, max_drafts: int, num_levels: int = 1, first_rate: float = 0.5) -> None:
        self._first_rate = first_rate
        self._max_drafts = max_drafts
        self._tried = [[0.0] * max_drafts for _ in range(num_levels)]
        self._right = [[0.0] * max_drafts for _ in range(num_levels)]
        self._all_tried = [0.0] * max_drafts
        self._all_right = [0.0] * max_drafts
        self._odds: dict[int, list[float]] = {}  # log-odds of each position, by level
        self._is_stale = False

    def observe(
        self, of: RequestRates, level: int, first: int, num_right: int, num_tried: int
    ) -> None:
        """`num_tried` positions from `first` on were tried, the first `num_right` held.

        No more than one of them failed: what follows a failure was not tried.
        """
        tried, right = self._tried[level], self._right[level]
        odds = self._log_odds(level)
        for i in range(num_tried):
            position, outcome = first + i, 1.0 if i < num_right else 0.0
            rate = 1 / (1 + math.exp(-odds[position] - of.shift))
            gain = of.variance / (1 + of.variance * rate * (1 - rate))
            of.shift += gain * (outcome - rate)
            of.variance = min(gain + _DRIFT, _MOST_VARIANCE)
            tried[position] = tried[position] * _MEMORY + 1
            right[position] = right[position] * _MEMORY + outcome
            self._all_tried[position] = self._all_tried[position] * _MEMORY + 1
            self._all_right[position] = self._all_right[position] * _MEMORY + outcome
        self._is_stale = True

    @staticmethod
    def miss(of: RequestRates) -> None:
        """A step in which nothing of this request was tried."""
        of.shift *= 1 - _RETURN
        of.variance = min(of.variance + _DRIFT, _MOST_VARIANCE)

    def of(self, request: RequestRates, num_drafts: int) -> list[float]:
        """The rate of each of `num_drafts` positions, if those before it hold."""
        self.refresh()
        shift = request.shift
        return [
            1 / (1 + math.exp(-odds - shift)) for odds in self._log_odds(request.level)[:num_drafts]
        ]

    def refresh(self) -> None:
        """Have the rates follow what was observed. Once a step is enough: not with every
        request's outcome."""
        if not self._is_stale:
            return
        levels = list(self._odds)
        self._odds.clear()
        self._is_stale = False
        for level in levels:
            self._log_odds(level)

    @property
    def overall(self) -> list[float]:
        """The server's rate of each position, given those before it; all levels together."""
        rates: list[float] = []
        before = self._first_rate
        for tried, right in zip(self._all_tried, self._all_right, strict=True):
            before = (right + _NUM_POSITION_TRIALS * before) / (tried + _NUM_POSITION_TRIALS)
            rates.append(before)
        return rates

    def _log_odds(self, level: int) -> list[float]:
        odds = self._odds.get(level)
        if odds is None:
            odds = self._odds[level] = []
            for tried, right, overall in zip(
                self._tried[level], self._right[level], self.overall, strict=True
            ):
                rate = (right + _NUM_LEVEL_TRIALS * overall) / (tried + _NUM_LEVEL_TRIALS)
                rate = min(max(rate, _LEAST), 1 - _LEAST)
                odds.append(math.log(rate / (1 - rate)))
        return odds
