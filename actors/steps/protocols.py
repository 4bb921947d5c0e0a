"""The contracts between the verifier and what it drives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actors.steps.messages import (
    DraftTokens,
    Float32Array,
    Int32Array,
    RowMasks,
    RowStats,
    StepPlan,
)

if TYPE_CHECKING:
    from torch import Tensor

# The masks of a step whose drafts are known (None: they were lost).
MaskSource = Callable[[StepPlan, DraftTokens | None], RowMasks]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one step inside a compute process; on the wire only `tokens` travel.

    `confidences` float32 [sum(counts)]: the drafter's own estimate that each draft is accepted.
    `q` float32 [sum(counts), this rank's columns]: the law each draft was drawn from, processed
    logits of the columns that the target's shard of the vocabulary has.
    """

    tokens: DraftTokens
    confidences: Float32Array | None = None
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What one forward of the target gave: statistics for the verifier, states for the drafter.

    `taps`: `actors.model.taps.Taps` of the step's rows, where the drafter asked for any.
    """

    stats: RowStats
    taps: Any = None


class TargetRunnerLike(Protocol):
    """A target shard as the step sees it."""

    def run(
        self, plan: StepPlan, proposal: Proposal | None, masks: RowMasks | None = None
    ) -> Verified:
        """Execute the plan's target part. `proposal` fills the pending rows; `masks` are those of
        a two-phase step (others ride in the plan)."""


class Drafter(Protocol):
    """A drafter in a compute process: one rank of a separate draft model, or one that lives with
    the target and reads its states. For each plan `propose` comes before the target's forward and
    `absorb` after it."""

    def propose(self, plan: StepPlan) -> Proposal:
        """Follow admissions and block tables, feed what can be fed, draft. Called for every plan
        that concerns it, also without draft entries."""

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        """Take the states of this step's rows: feed those of the plan's draft entries whose rows
        ran in this forward, keep the rest for the next step. A drafter that reads no states
        needs nothing of it; in a process of its own it is not called."""


class StepClient(Protocol):
    """The verifier's side of one step, whatever carries it (same process or sockets)."""

    def send(self, plan: StepPlan) -> None:
        """Start a step. At most one step is in flight."""

    def recv(self, timeout_s: float, mask_source: MaskSource | None = None) -> RowStats:
        """Result of the step in flight. Raises WorkerLost or StepTimeout.

        `mask_source` is asked once the drafts of a plan that `awaits_masks` are known.
        """

    def close(self) -> None:
        """End the workers' loops. Idempotent."""


class LookupDrafter(ABC):
    """A drafter that needs tokens only and runs in the verifier's process. The base of each.

    Deterministic given the tokens. A context is the request's known tokens, prompt and output,
    unverified drafts excluded. All calls but `begin` come from the step's thread, which waits.

    `num_confidence_levels`: how many kinds of proposal it tells apart; see `confidence`.
    """

    num_confidence_levels: int = 1

    def begin(self, key: int, prompt_token_ids: Int32Array, scope: str | None) -> None:
        """Request `key` was admitted. Called on the thread of who asks, beside running steps: work
        that grows with the prompt belongs here. `scope`: only requests of the same scope may
        learn from each other (the request's `cache_salt`)."""
        return

    @abstractmethod
    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        """Up to `max_drafts` (at least 1) draft tokens that continue `token_ids` (int32 [T])."""

    def confidence(self, key: int) -> int:
        """The level, below `num_confidence_levels`, of what was last proposed for request `key`.
        Acceptance is counted for each level apart, so proposals that hold alike belong to one;
        levels need no order, and a drafter that cannot tell has one."""
        return 0

    def observe(self, key: int, token_ids: Int32Array, num_new: int) -> None:
        """The last `num_new` of `token_ids` were committed, in a step with drafts or without."""
        return

    def finish(self, key: int, token_ids: Int32Array) -> None:
        """Request `key` ended with these tokens, or failed: drop its state."""
        return
