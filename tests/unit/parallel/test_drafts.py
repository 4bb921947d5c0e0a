"""Drafts reach every target rank, or none: broadcast, shares by slot, a draft that fails."""

from __future__ import annotations

import time
from typing import Any

import torch

from actors.steps.client import DraftShare, merge_shares
from actors.steps.drafts import HostedDrafts, SharedDrafts
from actors.steps.messages import DraftEntry, DraftTokens, StepPlan, token_array
from parallel.groups import TPGroup
from tests.unit.parallel.conftest import CPU, Ranks


def plan(step: int, asks: list[int]) -> StepPlan:
    """Slot i asks for asks[i] drafts."""
    entries = tuple(DraftEntry(i, 0, 1, 0, token_array([1]), n) for i, n in enumerate(asks))
    return StepPlan(1, step, draft=entries)


class CountingDraft:
    """Drafts 100 * slot + i, one fewer than asked in odd steps."""

    def run(self, step_plan: StepPlan) -> DraftTokens:
        ids: list[int] = []
        counts = []
        for entry in step_plan.draft:
            if entry.num_drafts:
                count = entry.num_drafts - step_plan.step % 2
                ids += [100 * entry.slot + i for i in range(count)]
                counts.append(count)
        return DraftTokens(step_plan.step, token_array(ids), token_array(counts))


def same(one: DraftTokens | None, other: DraftTokens | None) -> bool:
    assert one is not None and other is not None
    return one.token_ids.tolist() == other.token_ids.tolist() and (
        one.counts.tolist() == other.counts.tolist()
    )


def broadcast_steps(group: TPGroup) -> list[Any]:
    def source(step_plan: StepPlan) -> tuple[DraftTokens | None, str | None]:
        if step_plan.step == 4:
            return None, "the draft process is gone"
        return CountingDraft().run(step_plan), None

    shared = SharedDrafts(source if group.rank == 0 else None, group, CPU)
    found: list[Any] = []
    for step, asks in enumerate([[2, 0, 3], [1, 1], [0, 0], [4], [2, 2]]):
        drafts, lost = shared(plan(step, asks))
        found.append((None if drafts is None else drafts.pack(), lost is not None))
    return found


def test_every_rank_gets_rank_0s_drafts(ranks: Ranks) -> None:
    results = ranks.run(4, broadcast_steps)
    assert all(found == results[0] for found in results)
    drafts = DraftTokens.unpack(results[0][0][0])
    assert same(drafts, CountingDraft().run(plan(0, [2, 0, 3])))
    assert results[0][4] == (None, True)


class SplitDraft:
    """A shard that sums over the draft's ranks; rank 1's fails in step 2."""

    def __init__(self, group: TPGroup) -> None:
        self._group = group

    def run(self, step_plan: StepPlan) -> DraftTokens:
        if step_plan.step == 2 and self._group.rank == 1:
            raise MemoryError("of this rank only")
        token = int(self._group.all_reduce(torch.tensor([1.0 + step_plan.step]))[0])
        return DraftTokens(step_plan.step, token_array([token]), token_array([1]))


def failing_steps(group: TPGroup, draft_meeting: Any) -> list[Any]:
    from parallel.groups import join_group

    draft_group = join_group(draft_meeting, group.rank, CPU, timeout_s=30.0)
    hosted = HostedDrafts(SplitDraft(draft_group), draft_group, group, CPU)
    found: list[Any] = []
    started = time.monotonic()
    for step in range(4):
        drafts, lost = hosted(plan(step, [1]))
        found.append((None if drafts is None else drafts.token_ids.tolist(), lost is not None))
        assert int(group.all_reduce(torch.ones(1))[0]) == group.size, "the target goes on"
    assert time.monotonic() - started < 20.0
    return found


def test_a_split_draft_that_fails_on_one_rank_is_lost_on_all(ranks: Ranks) -> None:
    results = ranks.run(4, failing_steps, ranks.meeting("draft", 4))
    assert all(found == results[0] for found in results)
    assert results[0] == [([4], False), ([8], False), (None, True), (None, True)]


def test_shares_by_slot_are_put_in_the_plans_order() -> None:
    for asks in ([2, 3, 0, 1, 4], [1], [0, 2], [3, 3, 3, 3]):
        for step in range(2):
            whole = CountingDraft().run(plan(step, asks))
            for count in (1, 2, 4):
                parts = [
                    DraftShare(CountingDraft(), share, count).run(plan(step, asks))
                    for share in range(count)
                ]
                assert same(merge_shares(plan(step, asks), parts), whole)
