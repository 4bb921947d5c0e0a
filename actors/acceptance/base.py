"""What every acceptance method takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actors.steps.messages import Int32Array


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Drafts of a step beside the target's rows for them. Requests without a row are left out.

    `sampled` [N]: request r owns 1 + num_drafts[r] rows, in order; its row i is the target's own
    sample for the place that draft i took, its last row the bonus.
    `draft_ids` [sum(num_drafts)]: drafts of all requests, concatenated.
    """

    sampled: Int32Array
    draft_ids: Int32Array
    num_drafts: Int32Array


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per request: how many leading drafts survive, and the recovered or bonus token after them."""

    num_accepted: Int32Array
    next_token: Int32Array


class AcceptanceMethod(Protocol):
    """A pure function of its input: no hidden state, no global random numbers."""

    def __call__(self, rows: VerifyRows) -> Verdict:
        """Decide every request of a step at once."""
