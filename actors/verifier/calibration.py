"""What a step costs by its number of rows, measured once, at start, while there is no work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from actors.verifier.limits import EngineLimits

# Each number of rows is run so often, in turn, and the fastest counts.
_NUM_ROUNDS: Final = 3
# Numbers of rows beyond the drafts of one request grow by this factor.
_GROWTH: Final = 1.5
_NUM_EXACT: Final = 8
# Measuring ends after so long. What is missing is learnt from the steps of requests.
_BUDGET_S: Final = 1.5


class Calibration:
    """Which steps to run next, and the fastest time of each. Requests may come in between."""

    def __init__(self, limits: EngineLimits) -> None:
        most_each = limits.num_speculative_tokens + 1
        most = min(limits.max_num_seqs * most_each, limits.max_num_batched_tokens)
        sizes: list[int] = []
        size = 1
        while size < most:
            sizes.append(size)
            size = size + 1 if size < _NUM_EXACT else int(size * _GROWTH)
        self._due: Iterator[int] = iter([*sizes, most] * _NUM_ROUNDS)
        self._spent_s = 0.0
        self.seconds: dict[int, float] = {}

    def next_rows(self) -> int | None:
        """Rows of the next step to run; None: all is measured."""
        return next(self._due, None) if self._spent_s < _BUDGET_S else None

    def observe(self, num_rows: int, seconds: float) -> None:
        self._spent_s += seconds
        self.seconds[num_rows] = min(seconds, self.seconds.get(num_rows, seconds))
