"""How the same drafts reach every target rank in the same step.

Rank 0 hears of them, from a draft process or from a draft model of its own, and broadcasts. How
much is sent follows from the plan, which every rank has, so no rank can wait for what another does
not send. A lost draft is part of the message: all ranks go on without drafts, or none does.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from actors.steps.client import (
    DraftSource,
    InProcessStepClient,
    concerns_draft,
    no_drafts,
    run_target,
)
from actors.steps.messages import DraftTokens, RowStats, StepPlan, token_array
from actors.steps.protocols import DraftHostLike, TargetRunnerLike
from parallel.groups import SingleRank, TPGroup

logger = logging.getLogger(__name__)

Drafted = tuple[DraftTokens | None, str | None]


class SharedDrafts:
    """A `DraftSource` for all ranks of a target: rank 0's own source, broadcast.

    Args:
        source: Where rank 0 gets drafts; not asked on other ranks.
        group: The target's ranks.
        device: Of the group's tensors.
    """

    def __init__(self, source: DraftSource | None, group: TPGroup, device: torch.device) -> None:
        self._source = source
        self._group = group
        self._device = device

    def __call__(self, plan: StepPlan) -> Drafted:
        drafts: DraftTokens | None = None
        lost: str | None = "rank 0 got no drafts"
        if self._group.rank == 0:
            assert self._source is not None
            drafts, lost = self._source(plan)
        asked = [entry.num_drafts for entry in plan.draft if entry.num_drafts > 0]
        if not asked:
            return (drafts, lost) if self._group.rank == 0 else (no_drafts(plan), None)
        message = np.zeros(1 + len(asked) + sum(asked), dtype=np.int64)
        if drafts is not None:
            message[0] = 1
            message[1 : 1 + len(asked)] = drafts.counts
            first = 1 + len(asked)
            message[first : first + len(drafts.token_ids)] = drafts.token_ids
        sent = torch.from_numpy(message).to(self._device)
        message = self._group.broadcast(sent).cpu().numpy()
        if self._group.rank == 0:
            return drafts, lost
        if not message[0]:
            return None, lost
        counts = token_array(message[1 : 1 + len(asked)])
        first = 1 + len(asked)
        ids = token_array(message[first : first + int(counts.sum())])
        return DraftTokens(plan.step, ids, counts), None


class HostedDrafts:
    """A `DraftSource`: the draft model, or this rank's shard of it, in the target's process.

    A draft that raises is lost, as a draft process that died would be. Where the draft is split,
    the target's ranks agree on that after every attempt.

    Args:
        draft: None on ranks that hold no part of the draft.
        draft_group: The draft's ranks.
        target_group: The target's ranks.
        device: Of the groups' tensors.
    """

    def __init__(
        self,
        draft: DraftHostLike | None,
        draft_group: TPGroup,
        target_group: TPGroup,
        device: torch.device,
    ) -> None:
        self._draft = draft
        self._draft_group = draft_group
        self._agreement = target_group if draft_group.size > 1 else SingleRank()
        self._device = device

    def follow(self, plan: StepPlan) -> None:
        """Take over block tables from a plan without draft entries."""
        if self._draft is not None:
            self._draft.run(plan)

    def __call__(self, plan: StepPlan) -> Drafted:
        if self._draft is None:
            return None, "no draft model"
        drafts: DraftTokens | None = None
        lost: str | None = None
        try:
            drafts = self._draft.run(plan)
        except Exception as error:
            logger.exception("the draft model failed")
            self._draft_group.close()  # the other ranks must not wait for this one
            lost = repr(error)
        worked = torch.tensor([drafts is not None], dtype=torch.int64, device=self._device)
        if not bool(self._agreement.all_gather(worked).all()):
            self._draft_group.close()
            self._draft = None
            return None, lost or "the draft failed on another rank"
        return drafts, None


class FusedRank:
    """A target rank with the draft model in the target's processes."""

    def __init__(self, target: TargetRunnerLike, hosted: HostedDrafts, source: DraftSource) -> None:
        self._target = target
        self._hosted = hosted
        self._source = source

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        del drafts  # nobody else proposes
        if not plan.draft and concerns_draft(plan):
            self._hosted.follow(plan)
        return run_target(self._target, plan, self._source)


class FusedTarget:
    """A target with the draft model in its process: the drafts come first in the same call."""

    def __init__(self, target: TargetRunnerLike, draft: DraftHostLike) -> None:
        self._client = InProcessStepClient(target, draft)

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        del drafts  # nobody else proposes
        self._client.send(plan)
        return self._client.recv(0.0)
