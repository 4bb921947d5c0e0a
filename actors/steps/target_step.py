"""One step of a target rank: drafts, masks, the forward, and what the drafter learns of it.

The same for every transport and placement. What differs is where the drafts come from.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from actors.steps.messages import DraftTokens, RowStats, StepPlan, token_array
from actors.steps.protocols import MaskSource, Proposal, TargetRunnerLike, Verified

# What a source gave for a plan, or why it gave nothing. Neither: nothing was asked.
Proposed = tuple[Proposal | None, str | None]


class DraftSource(Protocol):
    """Where a target rank's drafts come from. With several ranks each has one, and all give the
    same drafts for a plan, or none does."""

    def propose(self, plan: StepPlan) -> Proposed:
        """Drafts of the plan, before its forward. Called for every plan. Never raises for a
        drafter's sake: a lost drafter costs speed, not the step."""

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        """What the forward gave, after it. A drafter that fails here is lost with the next plan
        that concerns it."""

    def close(self) -> None:
        """Let go of connections and communicators. Idempotent."""


def concerns_draft(plan: StepPlan) -> bool:
    """A drafter has entries to run, or block tables to follow for those that come later."""
    return bool(plan.draft or plan.blocks or plan.admissions)


def no_drafts(plan: StepPlan) -> DraftTokens:
    """An answer to the plan's draft entries without a single draft."""
    num_entries = sum(1 for entry in plan.draft if entry.num_drafts > 0)
    return DraftTokens(plan.step, token_array([]), token_array([0] * num_entries))


class TargetStep:
    """A target rank as a step sees it: its shard of the model and its source of drafts."""

    def __init__(self, target: TargetRunnerLike, source: DraftSource | None = None) -> None:
        self._target = target
        self._source = source
        self._absorb_ms = 0.0  # of the last step

    def run(self, plan: StepPlan, mask_source: MaskSource | None = None) -> RowStats:
        """Run the plan. `mask_source` is asked in two-phase steps, once the drafts are known."""
        started = time.perf_counter()
        proposal: Proposal | None = None
        lost: str | None = None
        if self._source is not None:
            proposal, lost = self._source.propose(plan)
        elif plan.draft:
            lost = "there is no drafter"
        drafts = proposal.tokens if proposal is not None and plan.draft else None
        draft_ms = (time.perf_counter() - started) * 1e3
        masks = None
        if plan.awaits_masks:
            assert mask_source is not None, "a two-phase step needs someone to ask for masks"
            masks = mask_source(plan, drafts)
        if proposal is None and plan.draft:
            proposal = Proposal(no_drafts(plan))
        verified = self._target.run(plan, proposal, masks)
        stats = verified.stats
        if stats.gap_ms is not None:
            stats = replace(stats, gap_ms=max(stats.gap_ms - self._absorb_ms - draft_ms, 0.0))
        if self._source is not None:
            started = time.perf_counter()
            self._source.absorb(plan, verified)
            self._absorb_ms = (time.perf_counter() - started) * 1e3
            draft_ms += self._absorb_ms
        if lost is None and drafts is None:
            return stats
        return replace(stats, drafts=drafts, draft_lost=lost, draft_ms=draft_ms)

    def close(self) -> None:
        """Close the source. Idempotent."""
        if self._source is not None:
            self._source.close()
