"""Where drafts come from: each source gives every rank the same drafts, or says to all that it is
lost; a new drafter is taken over with the plan that counts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.steps.drafts import (
    ConnectedDrafts,
    HostedDrafter,
    SentProposal,
    host_rows,
    merge_shares,
    own_share,
)
from actors.steps.messages import (
    DraftEntry,
    DraftTokens,
    FrameKind,
    RowStats,
    StepPlan,
    token_array,
)
from actors.steps.protocols import Proposal, Verified
from actors.steps.serve import serve_draft
from actors.steps.shared_drafts import QColumns, SharedDrafts, all_agree
from actors.steps.target_step import TargetStep
from parallel.groups import TPGroup, join_group
from parallel.topology import split_range
from parallel.transport.frames import TransportError
from parallel.transport.shared import SharedReader, SharedRows, SharedWriter
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
from tests.unit.parallel.conftest import CPU, Ranks

ROOT = Path(__file__).parents[3]
VOCAB = 11
VERIFIED = Verified(RowStats(0, token_array([]), {}))


def plan(step: int, asks: list[int], generation: int = 0) -> StepPlan:
    """Slot i asks for asks[i] drafts."""
    entries = tuple(DraftEntry(i, 0, 1, 0, token_array([1]), n) for i, n in enumerate(asks))
    return StepPlan(1, step, draft=entries, draft_generation=generation)


class CountingDraft:
    """Drafts 100 * slot + i, one fewer than asked in odd steps; q of each row says its token."""

    def __init__(self, with_q: bool = False) -> None:
        self.with_q = with_q

    def propose(self, step_plan: StepPlan) -> Proposal:
        ids: list[int] = []
        counts = []
        for entry in step_plan.draft:
            if entry.num_drafts:
                count = entry.num_drafts - step_plan.step % 2
                ids += [100 * entry.slot + i for i in range(count)]
                counts.append(count)
        tokens = DraftTokens(step_plan.step, token_array(ids), token_array(counts))
        confidences = np.asarray(ids, dtype=np.float32) / 7
        return Proposal(tokens, confidences, laws(ids) if self.with_q else None)

    def absorb(self, step_plan: StepPlan, verified: Verified) -> None:
        return


def laws(ids: list[int]) -> torch.Tensor:
    return (torch.tensor(ids)[:, None] + torch.arange(VOCAB) / 100).float().reshape(-1, VOCAB)


def told(proposal: Proposal | SentProposal | None) -> Any:
    if proposal is None:
        return None
    confidences = proposal.confidences
    return (
        proposal.tokens.token_ids.tolist(),
        proposal.tokens.counts.tolist(),
        None if confidences is None else np.asarray(confidences).tolist(),
    )


# --- a proposal between processes -------------------------------------------------------------


@settings(deadline=None)
@given(
    asks=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    step=st.integers(0, 1),
    num_shares=st.sampled_from([1, 2, 3, 4]),
)
def test_shares_by_slot_come_back_in_the_plans_order_with_their_laws(
    asks: list[int], step: int, num_shares: int
) -> None:
    whole = CountingDraft(with_q=True).propose(plan(step, asks))
    writers = [SharedWriter("test") for _ in range(num_shares)]
    parts = []
    for share, writer in enumerate(writers):
        own = CountingDraft(with_q=True).propose(own_share(plan(step, asks), share, num_shares))
        assert own.q is not None
        sent = SentProposal(own.tokens, own.confidences, (writer.write(host_rows(own.q)),))
        parts.append(SentProposal.unpack(sent.pack()))
    merged = merge_shares(plan(step, asks), parts)
    assert told(merged) == told(whole)
    for rank in range(2):
        begin, end = split_range(VOCAB, rank, 2)
        found = QColumns((begin, end), num_shares, CPU).open(plan(step, asks), merged)
        assert found is not None and whole.q is not None
        assert torch.equal(found, whole.q[:, begin:end])
    for writer in writers:
        writer.close()


# --- over ranks -------------------------------------------------------------------------------


def drafts_of_rank_0(group: TPGroup, with_q: bool) -> list[Any]:
    hosted = HostedDrafter(CountingDraft(with_q)) if group.rank == 0 else None
    columns = split_range(VOCAB, group.rank, group.size)
    source = SharedDrafts(hosted, group, CPU, QColumns(columns, 1, CPU))
    found: list[Any] = []
    for step, asks in enumerate([[2, 0, 3], [1, 1], [0, 0], [4], [2, 2], [1]]):
        if step == 4 and hosted is not None:
            hosted.withdraw()
            hosted._fail("gone")
        proposal, lost = source.propose(plan(step, asks))
        q = None if proposal is None else proposal.q
        found.append((told(proposal), lost is not None, q))
    source.close()
    return found


@pytest.mark.parametrize("with_q", [False, True])
def test_every_rank_gets_rank_0s_drafts_and_its_columns_of_their_laws(
    ranks: Ranks, with_q: bool
) -> None:
    results = ranks.run(4, drafts_of_rank_0, with_q)
    for step, asks in enumerate([[2, 0, 3], [1, 1]]):
        whole = CountingDraft(with_q).propose(plan(step, asks))
        assert [found[step][:2] for found in results] == [(told(whole), False)] * 4
        if with_q:
            assert whole.q is not None
            assert torch.equal(torch.cat([found[step][2] for found in results], 1), whole.q)
    assert all(found[2][0][0] == [] for found in results), "no drafts were asked for"
    assert [found[4][:2] for found in results] == [(None, True)] * 4
    assert [found[5][:2] for found in results] == [(None, True)] * 4


class SplitDraft:
    """A shard that sums over the drafter's ranks. On rank 1 it fails when told to."""

    def __init__(self, group: TPGroup, fails_in: str = "") -> None:
        self._group = group
        self._fails_in = fails_in if group.rank == 1 else ""

    def propose(self, step_plan: StepPlan) -> Proposal:
        if step_plan.step == 2 and self._fails_in == "propose":
            raise MemoryError("of this rank only")
        token = int(self._group.all_reduce(torch.tensor([1.0 + step_plan.step]))[0])
        return Proposal(DraftTokens(step_plan.step, token_array([token]), token_array([1])))

    def absorb(self, step_plan: StepPlan, verified: Verified) -> None:
        if step_plan.step == 1 and self._fails_in == "absorb":
            raise MemoryError("of this rank only")


def failing_steps(group: TPGroup, first: Any, second: Any, fails_in: str) -> list[Any]:
    """Lost before step 2, rebuilt before step 4."""
    draft_group = join_group(first, group.rank, CPU, timeout_s=30.0)
    hosted = HostedDrafter(
        SplitDraft(draft_group, fails_in),
        draft_group.close,
        lambda is_well: all_agree(is_well, group, CPU),
    )
    found: list[Any] = []
    started = time.monotonic()
    for step in range(6):
        if step == 4:
            draft_group = join_group(second, group.rank, CPU, timeout_s=30.0)
            hosted.offer(SplitDraft(draft_group), 1, draft_group.close)
        step_plan = plan(step, [1], generation=int(step >= 5))
        proposal, lost = hosted.propose(step_plan)
        hosted.absorb(step_plan, VERIFIED)
        found.append((None if proposal is None else told(proposal)[0], lost is not None))
        assert int(group.all_reduce(torch.ones(1))[0]) == group.size, "the target goes on"
    assert time.monotonic() - started < 20.0
    hosted.close()
    return found


@pytest.mark.parametrize("fails_in", ["propose", "absorb"])
def test_a_split_drafter_that_fails_on_one_rank_is_lost_on_all_and_meets_again(
    ranks: Ranks, fails_in: str
) -> None:
    meetings = [ranks.meeting("draft", 4) for _ in range(2)]
    results = ranks.run(4, failing_steps, *meetings, fails_in)
    assert all(found == results[0] for found in results)
    assert results[0] == [
        ([4], False), ([8], False), (None, True), (None, True),
        (None, True),  # offered, but this plan is still for the old one
        ([24], False),
    ]  # fmt: skip


# --- over connections -------------------------------------------------------------------------


@pytest.fixture
def link() -> Any:
    sockets = SocketDir()
    listener = FrameListener(sockets.socket_path("d"), 0)
    yield listener
    listener.close()
    sockets.close()


def connect(link: FrameListener, rank: int, generation: int) -> FrameSocket:
    return FrameSocket.connect(link.path, "draft", rank, generation, os.getpid(), 5.0)


def send(connection: FrameSocket, step_plan: StepPlan, share: int, num_shares: int) -> None:
    proposal = CountingDraft().propose(own_share(step_plan, share, num_shares))
    body = SentProposal(proposal.tokens, proposal.confidences).pack()
    connection.send(FrameKind.DRAFTS, step_plan.step, body, 5.0)


@pytest.mark.parametrize("num_shares", [1, 3])
def test_connections_of_each_generation_are_kept_apart(
    link: FrameListener, num_shares: int
) -> None:
    source = ConnectedDrafts(link, num_shares)
    asks = [2, 1, 0, 3]
    step = 0
    leftovers = []
    for generation in (0, 2, 3):
        # Of an attempt that came to nothing, and of the last drafter: queued before the new ones.
        leftovers += [connect(link, rank, max(generation - 1, 0)) for rank in range(num_shares)]
        if generation == 0:
            own = leftovers
        else:
            own = [connect(link, rank, generation) for rank in range(num_shares)]
        for _ in range(2):
            step += 1
            late = plan(step - 1, asks, generation)
            now = plan(step, asks, generation)
            for rank, connection in enumerate(own):
                send(connection, late, rank, num_shares)
                send(connection, now, rank, num_shares)
            proposal, lost = source.propose(now)
            assert lost is None and told(proposal) == told(CountingDraft().propose(now))
        own[-1].close()
        step += 1
        for _ in range(2):
            proposal, lost = source.propose(replace(plan(step, asks, generation), limit_s=1.0))
            assert proposal is None and lost is not None and f"step {step}" in lost
    assert source.propose(plan(step + 1, [])) == (None, None), "nothing is asked of anyone"
    source.close()
    for connection in leftovers:
        connection.close()


# --- large rows -------------------------------------------------------------------------------


def test_shared_rows_grow_keep_their_bits_and_say_when_they_cannot_be_read() -> None:
    writer, reader = SharedWriter("test"), SharedReader()
    rng = np.random.default_rng(3)
    for num_rows, width in ((1, 3), (40, 999), (2, 5), (0, 5)):
        rows = rng.random((num_rows, width), dtype=np.float32)
        where = writer.write(rows, first=10)
        assert np.array_equal(reader.read(where, 0, 2000), rows)
        assert np.array_equal(reader.read(where, 11, 13), rows[:, 1:3])
        assert reader.read(where, 0, 10).shape == (num_rows, 0)
    with pytest.raises(TransportError, match="less than it says"):
        reader.read(where._replace(num_rows=10_000_000), 0, 1)
    with pytest.raises(TransportError, match="cannot be opened"):
        SharedReader().read(SharedRows(where.pid, 9999, 1, 0, 1), 0, 1)
    writer.close()
    reader.close()


def draft_process(verifier_path: str, link_path: str) -> None:
    """Runs in a process of its own: the draft side as it serves."""
    verifier = FrameSocket.connect(verifier_path, "draft", 0, 0, os.getpid(), 10.0)
    target = FrameSocket.connect(link_path, "draft", 0, 0, os.getpid(), 10.0)
    serve_draft(verifier, CountingDraft(with_q=True), target)


class Taker:
    def __init__(self) -> None:
        self.proposals: list[Proposal | None] = []

    def run(self, step_plan: StepPlan, proposal: Proposal | None, masks: Any = None) -> Verified:
        self.proposals.append(proposal)
        return Verified(RowStats(step_plan.step, token_array([]), {}))


def test_laws_of_a_draft_process_reach_the_target_bit_for_bit_until_it_is_killed(
    link: FrameListener,
) -> None:
    gate = FrameListener(link.path + "v", 0)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.parallel.test_drafts", gate.path, link.path],
        cwd=ROOT, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        verifier, _ = gate.accept(60.0)
        q = QColumns((0, VOCAB), 1, CPU)
        taker = Taker()
        step = TargetStep(taker, ConnectedDrafts(link, 1, q.open))
        for number, asks in enumerate([[2, 0, 3], [1, 2], [4] * 8, [1]]):
            now = plan(number, asks)
            verifier.send(FrameKind.PLAN, number, now.pack(), 5.0)
            stats = step.run(now)
            whole = CountingDraft(with_q=True).propose(now)
            got = taker.proposals[-1]
            assert stats.draft_lost is None and told(got) == told(whole)
            assert got is not None and got.q is not None and whole.q is not None
            assert torch.equal(got.q, whole.q)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        stats = step.run(plan(9, [1]))
        assert stats.drafts is None and stats.draft_lost is not None
        assert not Path(f"/proc/{child.pid}").exists()
        assert child.stderr is not None and child.stderr.read() == b"", "no tracker's complaints"
        step.close()
    finally:
        child.kill()
        gate.close()


if __name__ == "__main__":
    draft_process(*sys.argv[1:])
