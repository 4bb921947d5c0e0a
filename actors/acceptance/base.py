"""What every acceptance method takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from actors.steps.messages import Int32Array, Stat

# By `Stat`, one item a row.
Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Drafts of a step beside the target's rows for them. Requests without a row are left out.

    `columns`: row statistics, each [N]: SAMPLED and what the method needs. Request r owns
    1 + num_drafts[r] rows, in order; its row i is for the place that draft i took, its last row
    for the bonus. `draft_ids` [sum(num_drafts)]: drafts of all requests, concatenated.
    """

    columns: Columns
    draft_ids: Int32Array
    num_drafts: Int32Array

    @property
    def sampled(self) -> Int32Array:
        """int32 [N]: the target's own sample of each row."""
        return self.columns[Stat.SAMPLED]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per request: how many leading drafts survive, and the recovered or bonus token after them."""

    num_accepted: Int32Array
    next_token: Int32Array


class AcceptanceMethod(Protocol):
    """A pure function of its input: no hidden state, no global random numbers.

    Made with the options that the configuration resolved for it, as keyword arguments. `needs`:
    the columns, besides SAMPLED, that the target's ranks (UNIFORM: the verifier) must provide.
    """

    @property
    def needs(self) -> frozenset[Stat]: ...

    def __call__(self, rows: VerifyRows) -> Verdict:
        """Decide every request of a step at once."""
