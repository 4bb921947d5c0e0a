"""How long a step may take before its processes count as hung, learnt from the steps before.

A replica that is ended for being slow is worse than one that is found hung some seconds later, so
the limit is many times what such a step took: a machine that is busy with something else for a
while loses nothing.
"""

from __future__ import annotations

from typing import Final

# Times the slowest of the last steps of that size, and never less than the floor.
_FACTOR: Final = 20.0
_FLOOR_S: Final = 10.0
# Nothing is known yet: first kernels, compilation, weights that are paged in.
_FIRST_S: Final = 600.0
# No step takes longer, whatever was learnt; `step_timeout_s` of the configuration has this bound.
LONGEST_S: Final = 3600.0
# Of a step's limit: what waits for drafts may take, so that a hung draft never costs the target.
DRAFT_SHARE: Final = 0.5
# Of a step's limit: from here on the replica is not said to be well, though it is not ended yet.
SUSPECT_SHARE: Final = 0.5
# Each step makes room for faster ones; about a hundred are remembered.
_MEMORY: Final = 63 / 64


class StepPatience:
    """Limits of steps by their number of rows.

    Steps are remembered in classes, each of twice as many rows as the one below: the slowest of
    late. A step of no more rows than a known one takes no longer; beyond the largest known one,
    time grows with the rows.

    Args:
        fixed_s: The user's word: the limit of every step. None: learnt.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._slowest_s: dict[int, float] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` took `seconds`."""
        size = num_rows.bit_length()
        self._slowest_s[size] = max(seconds, self._slowest_s.get(size, 0.0) * _MEMORY)

    def limit_s(self, num_rows: int) -> float:
        """Seconds that a step of `num_rows` may take."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._slowest_s:
            return _FIRST_S
        size, largest = num_rows.bit_length(), max(self._slowest_s)
        if size <= largest:
            expected_s = self._slowest_s[min(s for s in self._slowest_s if s >= size)]
        else:
            expected_s = self._slowest_s[largest] * 2.0 ** (size - largest)
        return min(max(_FLOOR_S, _FACTOR * expected_s), LONGEST_S)
