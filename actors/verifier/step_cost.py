"""What a step costs by its number of rows, learnt from the steps themselves.

Only ratios decide how many drafts pay, and a busy machine makes all steps slower alike. So a time
is taken apart into the cost of that many rows and a level that all costs share: the level follows
the last three steps at once, a cost moves only by what the level does not explain. A neighbour who
takes half the processor for a while changes no cost; rows that became dearer than others do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

# Up to here each number of rows has a cost of its own, beyond it eight share each octave.
_NUM_EXACT: Final = 16
# How far a cost follows the median of its last times, a step.
_RATE: Final = 0.2
_NUM_REMEMBERED: Final = 5
_LEVEL_WIDTH: Final = 3
_SLOW_RATE: Final = 1 / 16
# A cost is old after so many steps, or sooner if the level is another one by this much (log): as
# far as it is known, all costs have changed then, but maybe only those that were seen since.
_OLD_STEPS: Final = 512
_OLD_SOONEST: Final = 128
_OLD_SHIFT: Final = 0.3
# A new cost is seen so often before it moves, and an old one before it is trusted again; in the
# meantime it says nothing of the level, and is measured again soon.
_NUM_YOUNG: Final = 3
_YOUNG_STEPS: Final = 8


@dataclass(slots=True)
class _Cost:
    """Of steps with about so many rows; logarithms of seconds, without the level.

    `misses`: what the last times had more than that. `seen`: the step of the last of `num_seen`,
    `level` the slow level then.
    """

    value: float
    seen: int
    level: float
    num_seen: int
    misses: list[float]


def _median(values: list[float]) -> float:
    """The lower one of two: steps are held up at random, never sped up."""
    return sorted(values)[(len(values) - 1) // 2]


def _class_of(num_rows: int) -> int:
    """The number of rows that stands for all of its class."""
    if num_rows <= _NUM_EXACT:
        return num_rows
    shift = num_rows.bit_length() - 4
    return (num_rows >> shift << shift) + (1 << shift >> 1)


class StepCost:
    """Seconds by rows. Rows that were never seen lie on the line between those that were; beyond
    the most rows seen, more are taken to cost nothing until they are tried."""

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        self._recent: list[float] = []
        self._level = 0.0
        self._slow_level = 0.0
        self._step = 0
        self._classes: list[int] = []  # of rows that were seen, ascending
        self._line: list[float] | None = None  # seconds of each class without the level; None: old

    def __bool__(self) -> bool:
        return bool(self._costs)

    def seed(self, seconds_by_rows: dict[int, float]) -> None:
        """Start from these, measured without disturbance."""
        for num_rows, seconds in seconds_by_rows.items():
            self._learn(_class_of(num_rows), math.log(seconds) - self._level, _NUM_YOUNG)

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` took `seconds`."""
        self._step += 1
        size, log_s = _class_of(num_rows), math.log(max(seconds, 1e-9))
        cost = self._costs.get(size)
        if cost is None:
            self._learn(size, log_s - self._level, 1)
            return
        if self._is_old(cost) and cost.num_seen >= _NUM_YOUNG:
            cost.num_seen = 0
            cost.misses.clear()
        if cost.num_seen >= _NUM_YOUNG:
            self._recent = [*self._recent[1 - _LEVEL_WIDTH :], log_s - cost.value]
            self._level = _median(self._recent)
            self._slow_level += (self._level - self._slow_level) * _SLOW_RATE
        cost.misses = [*cost.misses[1 - _NUM_REMEMBERED :], log_s - self._level - cost.value]
        cost.seen, cost.level = self._step, self._slow_level
        cost.num_seen += 1
        if cost.num_seen < _NUM_YOUNG:
            return
        rate = 1.0 if cost.num_seen == _NUM_YOUNG else _RATE
        moved = rate * _median(cost.misses)
        cost.value += moved
        cost.misses = [miss - moved for miss in cost.misses]
        self._line = None

    def _learn(self, size: int, value: float, num_seen: int) -> None:
        self._costs[size] = _Cost(value, self._step, self._slow_level, num_seen, [0.0])
        self._classes = sorted(self._costs)
        self._line = None

    def seconds(self, first: int, last: int) -> list[float]:
        """Of steps of `first` to `last` rows, each; never less for more rows."""
        if not self._costs:
            return [1.0] * (last - first + 1)
        scale = math.exp(self._level)
        line = [scale * seconds for seconds in self.refresh()]
        found: list[float] = []
        above = bisect_left(self._classes, first)  # the class that rows lie at or below
        for num_rows in range(first, last + 1):
            if above < len(line) and num_rows > self._classes[above]:
                above += 1
            if above in (0, len(line)):
                found.append(line[min(above, len(line) - 1)])
                continue
            low, high = self._classes[above - 1], self._classes[above]
            share = (num_rows - low) / (high - low)
            found.append(line[above - 1] + share * (line[above] - line[above - 1]))
        return found

    def refresh(self) -> list[float]:
        """Have the line follow what was observed."""
        if self._line is None:
            self._line = self._rising()
        return self._line

    def _rising(self) -> list[float]:
        """Seconds of each class without the level. Where costs contradict each other, more rows
        being cheaper, the one that was seen last is right."""
        sizes: list[int] = []
        line: list[float] = []
        for size, cost in sorted(self._costs.items(), key=lambda item: -item[1].seen):
            place = bisect_left(sizes, size)
            seconds = math.exp(cost.value)
            if place > 0:
                seconds = max(seconds, line[place - 1])
            if place < len(line):
                seconds = min(seconds, line[place])
            sizes.insert(place, size)
            line.insert(place, seconds)
        return line

    def is_old(self, num_rows: int) -> bool:
        """Whether what is known of so many rows should be measured again."""
        if not self._costs:
            return True
        nearest = min(self._classes, key=lambda known: abs(known - num_rows))
        return self._is_old(self._costs[nearest])

    def _is_old(self, cost: _Cost) -> bool:
        age = self._step - cost.seen
        has_moved = abs(self._slow_level - cost.level) > _OLD_SHIFT
        is_young = cost.num_seen < _NUM_YOUNG
        return (
            age >= _OLD_STEPS
            or (age >= _OLD_SOONEST and has_moved)
            or (age >= _YOUNG_STEPS and is_young)
        )

    @property
    def fewest(self) -> int:
        """Rows of the smallest step seen."""
        return self._classes[0]

    def table(self) -> dict[str, float]:
        """Seconds by rows, of the numbers of rows that were seen or stand for those that were."""
        return {str(size): self.seconds(size, size)[0] for size in self._classes}
