"""Coordinator and ranks over real sockets; each rank is a thread."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.errors import EngineDead
from actors.stats import EngineStats
from actors.steps.client import InProcessStepClient
from actors.steps.messages import DraftTokens, RowStats, Stat, StepPlan, token_array
from actors.steps.protocols import Proposal, Verified
from actors.steps.target_step import no_drafts
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from actors.verifier.loop import StepLoop
from parallel.gang.coordinator import Coordinator
from parallel.gang.member import GangMember, Turn
from parallel.transport.frames import TransportError
from tests.unit.engine import fakes

DELAY_S = 0.2  # far above what two busy cores add
TABLE = {1: 4, 2: 4, 3: 1}  # batch -> K; more than 3: 1


def k_for(batch):
    return TABLE.get(batch, 1)


@pytest.fixture
def gang():
    with contextlib.ExitStack() as stack:

        def make(size, *, delay=DELAY_S, lockstep=False, watchdog=20.0):
            coordinator = Coordinator("127.0.0.1", size, "d", delay, lockstep=lockstep)
            stack.callback(coordinator.close)
            members = [
                GangMember(
                    coordinator.address, rank, "d", delay,
                    lockstep=lockstep, timeout_s=5, watchdog_s=watchdog,
                )
                for rank in range(size)
            ]  # fmt: skip
            for member in members:
                stack.callback(member.close)
            return coordinator, members

        yield make


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(20) for future in [pool.submit(call) for call in calls]]


def test_ranks_take_the_largest_batch_of_the_same_step(gang) -> None:
    _, members = gang(3, delay=10.0)
    joined = set()

    def run(member):
        def turn():
            return member.next_turn(1 + member.rank).batch

        while len(joined) < 3:  # the first rounds close before the others are known to be busy
            turn()
            joined.add(member.rank)
        batches = [turn() for _ in range(20)]
        member.idle()  # one may have begun a round or two before another
        return batches[:15]

    assert together(*[lambda m=m: run(m) for m in members]) == [[3] * 15] * 3


def test_an_idle_rank_costs_nothing_and_a_stuck_one_costs_one_wait(gang) -> None:
    coordinator, (a, b) = gang(2)
    together(lambda: a.next_turn(1), lambda: b.next_turn(7))
    b.idle()
    b.idle()
    while a.next_turn(2).batch != 2:
        pass  # until the coordinator has read it
    started = time.monotonic()
    for _ in range(20):
        assert a.next_turn(2) == Turn(2)
    assert time.monotonic() - started < 5 * DELAY_S, "20 rounds, none of them waited"
    together(lambda: a.next_turn(1), lambda: b.next_turn(7))
    together(lambda: a.next_turn(1), lambda: b.next_turn(7))
    started = time.monotonic()
    assert a.next_turn(1) == Turn(7), "the stuck rank's last batch counts"
    assert time.monotonic() - started > DELAY_S / 2
    started = time.monotonic()
    for _ in range(20):
        assert a.next_turn(1) == Turn(7)
    assert time.monotonic() - started < 5 * DELAY_S, "20 rounds, none of them waited"
    assert coordinator.num_late >= 1


def test_a_rank_that_is_gone_ends_the_agreement_for_all(gang) -> None:
    coordinator, (a, b, c) = gang(3)
    together(*[lambda m=m: m.next_turn(2) for m in (a, b, c)])
    c.close()
    deadline = time.monotonic() + 5
    while a.next_turn(2) is not None:
        assert time.monotonic() < deadline
    while b.next_turn(2) is not None:
        assert time.monotonic() < deadline
    assert "rank 2 is gone" in a.fallback and "rank 2 is gone" in b.fallback
    assert "rank 2 is gone" in coordinator.fallback
    started = time.monotonic()
    assert [a.next_turn(1) for _ in range(1000)] == [None] * 1000
    assert time.monotonic() - started < 1


def test_the_end_of_the_coordinator_is_noticed_at_once(gang) -> None:
    coordinator, (a, _b) = gang(2)
    threading.Timer(0.1, coordinator.close).start()
    started = time.monotonic()
    while a.next_turn(2) is not None:
        assert time.monotonic() - started < 10
    assert a.fallback


def test_a_silent_coordinator_costs_bounded_waits_then_ends_the_agreement(
    gang, monkeypatch
) -> None:
    coordinator, (a, b) = gang(2, delay=0.005, watchdog=0.2)
    together(lambda: a.next_turn(1), lambda: b.next_turn(6))
    monkeypatch.setattr(coordinator._rounds, "decide", lambda now: None)
    started = time.monotonic()
    turns = []
    while (turn := a.next_turn(2)) is not None:
        turns.append(turn)
    assert 0.15 < time.monotonic() - started < 5
    assert turns and {t.batch for t in turns} <= {2, 6}
    assert a.num_unanswered >= len(turns)
    assert "silent" in a.fallback


def test_other_configurations_strangers_and_wrong_ranks_do_not_join(gang) -> None:
    coordinator, _ = gang(1)
    with pytest.raises(TransportError, match="configuration"):
        GangMember(coordinator.address, 0, "another", timeout_s=5)
    with pytest.raises(TransportError, match="rank 5 in a gang of 1"):
        GangMember(coordinator.address, 5, "d", timeout_s=5)
    with pytest.raises(TransportError):
        GangMember(coordinator.address._replace(secret=b"guess"), 0, "d", timeout_s=5)
    assert coordinator.fallback is None


# --- with engines -----------------------------------------------------------------------------


def limits(**kw):
    return EngineLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, block_size=4,
        num_blocks=300, vocab_size=fakes.VOCAB, eos_token_ids=(fakes.EOS,),
        num_speculative_tokens=4, law=fakes.draft_model_law(4),
        num_speculative_tokens_for_batch=k_for, **kw,
    )  # fmt: skip


class CountingDraft:
    """Drafts nothing right; remembers the largest K of each step, which is its passes."""

    def __init__(self):
        self.passes = []

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        return

    def propose(self, plan: StepPlan) -> Proposal:
        k = max((entry.num_drafts for entry in plan.draft), default=0)
        self.passes.append(k)
        counts = [entry.num_drafts for entry in plan.draft if entry.num_drafts]
        return Proposal(DraftTokens(plan.step, token_array([0] * sum(counts)), token_array(counts)))


class CountingTarget:
    def __init__(self, barrier=None, step_s=0.0):
        self.num_forwards = 0
        self.barrier = barrier
        self.step_s = step_s

    def run(self, plan, proposal, masks=None) -> Verified:
        time.sleep(self.step_s)
        if self.barrier is not None:
            self.barrier()
        self.num_forwards += 1
        drafts = no_drafts(plan) if proposal is None else proposal.tokens
        given = iter(drafts.counts.tolist())
        rows = []
        for entry in plan.target:
            arrived = next(given) if entry.num_pending_drafts else 0
            rows.append(1 + arrived if entry.num_logits else 0)
        sampled = {Stat.SAMPLED: token_array([7] * sum(rows))}
        return Verified(RowStats(plan.step, token_array(rows), sampled))


def params(n, tokens=24):
    return fakes.request(n, [1, 2, 3], max_tokens=tokens, temperature=0.0)


def run_engine(member, num_requests, *, step_s=0.002, tokens=24, barrier=None):
    draft = CountingDraft()
    target = CountingTarget(barrier, step_s)
    engine = VerifierEngine(limits(), InProcessStepClient(target, draft), gang=member)
    ended = threading.Semaphore(0)
    outputs = {n: [] for n in range(num_requests)}

    def sink(n):
        def take(out):
            outputs[n].extend(out.token_ids)
            if out.finish_reason is not None:
                ended.release()

        return take

    for n in range(num_requests):
        engine.add_request(params(str(n), tokens), sink(n))
    for _ in range(num_requests):
        assert ended.acquire(timeout=30), "a request hangs"
    stats = engine.stats
    return engine, draft, target, stats, outputs


def test_divergent_batches_under_agree_and_disable(gang) -> None:
    _, (a, b) = gang(2, delay=0.5)
    (one, d1, _, s1, out1), (many, d8, _, _, _) = together(
        lambda: run_engine(a, 1), lambda: run_engine(b, 8)
    )
    one.stop()
    many.stop()
    assert set(d8.passes) == {0, 1}
    # Alone it would draft 4. It may do so before the other rank has its first request, and when
    # that one is done.
    assert d1.passes.count(1) >= 10, d1.passes
    assert out1[0] == [7] * 24
    assert s1.num_dp_fallbacks == 0 and s1.dp_wait_s.count == s1.num_steps

    alone, d, _, _, _ = run_engine(None, 1)  # disable: nobody to ask; here with its table
    alone.stop()
    assert d.passes[:4] == [0, 4, 4, 4]


def test_a_rank_killed_in_the_middle_leaves_the_others_serving_with_static_k(gang) -> None:
    _, (a, b) = gang(2)
    (engine, draft, _, stats, outputs), _ = together(
        lambda: run_engine(a, 8, tokens=60),
        lambda: (b.next_turn(8), time.sleep(0.05), b.close()),
    )
    assert all(tokens == [7] * 60 for tokens in outputs.values()), "no request is lost"
    assert stats.num_dp_fallbacks == 1
    assert 4 in draft.passes, "static K, whatever the batch"
    engine.stop()


class Collective:
    """A barrier of all ranks: a rank that makes one call more or less than the others hangs."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self.num_calls = 0

    def __call__(self):
        if self._barrier.wait(20) == 0:
            self.num_calls += 1


def test_lockstep_ranks_without_work_run_dummy_steps_with_the_same_collectives(gang) -> None:
    _, (a, b) = gang(2, lockstep=True)
    barrier = Collective(2)
    (e1, _, t1, _, o1), (e2, _, t2, s2, o2) = together(
        lambda: run_engine(a, 5, barrier=barrier, tokens=40),
        lambda: (time.sleep(0.05), run_engine(b, 1, tokens=9, barrier=barrier))[1],
    )
    assert all(tokens == [7] * 40 for tokens in o1.values()) and o2[0] == [7] * 9
    assert t1.num_forwards == t2.num_forwards
    assert s2.num_dp_dummy_steps > 0
    e1.stop()
    e2.stop()


def test_lockstep_without_a_rank_ends_the_engine_instead_of_hanging(gang) -> None:
    _, (a, b) = gang(2, lockstep=True)
    loop = StepLoop(limits(), InProcessStepClient(CountingTarget(), CountingDraft()),
                    stats=EngineStats(), gang=a)  # fmt: skip
    b.close()
    with pytest.raises((EngineDead, TransportError)):
        for _ in range(100):
            loop.stand_by(0.1)
