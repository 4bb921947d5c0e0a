"""Every law of a drafter, under thousands of random schedules: what it reads is right, what comes
out is what plain decoding gives, and nothing is left behind."""

from __future__ import annotations

import os
import random

import pytest

from actors.requests import RunOutput
from actors.stats import EngineStats
from actors.verifier.admission import admit
from actors.verifier.loop import StepLoop
from actors.verifier.request import Request, RequestStatus
from tests.unit.engine import fakes
from tests.unit.engine.law_fakes import LAWS, K, LawClient, LawDrafter

SCRIPT = fakes.hashed(vocab=6, window=2)  # few tokens: prefixes meet, prompts repeat
# Of each law. More of them, by hand: PACELINE_NUM_SCHEDULES=3000.
NUM_SCHEDULES = int(os.environ.get("PACELINE_NUM_SCHEDULES", "100"))


class Schedule:
    """One random run of an engine: requests come, are preempted, chunked, aborted; K changes."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = rng = random.Random(f"{name} {seed}")
        law = LAWS[name]
        k_max = rng.randint(1, 7)
        if law.num_next_tokens > 1 or law.num_extra_rows or law.max_num_active_seqs:
            k_max = K  # the law's numbers are those of this K
        self.table = [rng.randint(0, k_max) for _ in range(8)]
        block_size = rng.choice([1, 2, 4] if law.num_next_tokens <= 1 else [4, 8])
        num_seqs = min(rng.randint(1, 5), law.max_num_active_seqs or 8)
        max_len = 64
        least = max_len // block_size + 1
        lookahead = law.num_lookahead_tokens and law.num_lookahead_tokens + k_max - K
        self.limits = fakes.make_limits(
            k_max,
            law=law.model_copy(update={"num_lookahead_tokens": lookahead}),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=rng.randint(max(num_seqs, 3), 40),
            max_model_len=max_len,
            block_size=block_size,
            num_blocks=rng.randint(least, 3 * least),
            enable_prefix_caching=rng.random() < 0.8,
            num_speculative_tokens_for_batch=lambda n: self.table[min(n, 7)],
        )
        target = fakes.ScriptedTarget(self.limits, SCRIPT)
        guess = fakes.mixed(SCRIPT, self.limits.vocab_size, modulus=rng.choice([1, 3, 9]))
        self.client = LawClient(target, lambda: LawDrafter(self.limits, target, guess))
        self.loop = StepLoop(self.limits, self.client, stats=EngineStats())
        self.requests: list[tuple[Request, list[int]]] = []
        self.num_admitted = 0

    def arrive(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(6) for _ in range(rng.randint(1, 30))]
        if self.requests and rng.random() < 0.6:  # a prefix of somebody else's tokens
            known = rng.choice(self.requests)[0].token_ids.tolist()
            prompt = known[: rng.randint(1, min(len(known), 40))] + prompt[: rng.randint(0, 4)]
        params = fakes.request(
            f"r{self.num_admitted}",
            prompt,
            max_tokens=rng.randint(1, 20),
            speculation_enabled=rng.random() < 0.9,
            num_speculative_tokens=rng.choice([None, None, rng.randint(0, 7)]),
        )
        self.num_admitted += 1
        rules, text = admit(params, self.limits, None)
        out: list[int] = []

        def sink(run: RunOutput) -> None:
            assert run.error is None, run.error
            out.extend(run.token_ids)

        request = Request(self.num_admitted, params, rules, text, sink, 0.0)
        self.requests.append((request, out))
        self.loop.add(request)

    def disturb(self) -> None:
        """One of the things that happen between two steps, seldom."""
        rng, scheduler = self.rng, self.loop.scheduler
        what = rng.random()
        if what < 0.04 and scheduler.running:
            scheduler.preempt_youngest()
        elif what < 0.06 and scheduler.running:
            self.loop.abort(rng.choice(scheduler.running))
        elif what < 0.08:
            scheduler.speculation_enabled = rng.random() < 0.7
        elif what < 0.10:
            scheduler.max_speculative_tokens = rng.choice([None, 0, 1, 3])
        elif what < 0.115:
            self.client.lose()
        if self.loop.draft_lost is not None and rng.random() < 0.3:
            self.client.replace()
            generation = scheduler.draft_generation
            self.loop.restore_draft()
            assert scheduler.draft_generation == generation + 1

    def run(self) -> None:
        for _ in range(self.rng.randint(2, 5)):
            self.arrive()
        late = self.rng.randint(0, 4)
        for _ in range(400):
            self.disturb()
            if late and self.rng.random() < 0.3:
                late -= 1
                self.arrive()
            if not self.loop.step() and not late:
                break
        assert not self.loop.scheduler.has_work
        self.loop.scheduler.check_idle()
        self.client.close()
        for request, out in self.requests:
            prompt = list(request.params.prompt_token_ids)
            expected = fakes.plain(SCRIPT, prompt, request.rules.max_tokens)
            assert request.status is RequestStatus.FINISHED
            assert out == expected[: len(out)]


@pytest.mark.parametrize("name", LAWS)
def test_a_drafter_reads_only_what_was_made_from_the_right_tokens_and_states(name: str) -> None:
    checked = drafted = accepted = hits = preempted = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(name, seed)
        try:
            schedule.run()
        except BaseException:
            print(f"schedule {name} {seed}: {schedule.limits}")
            raise
        stats = schedule.loop.stats
        checked += schedule.client.num_checked
        drafted += schedule.client.num_drafted
        accepted += stats.num_accepted_tokens
        hits += stats.num_cached_prompt_tokens
        preempted += stats.num_preemptions
    num = NUM_SCHEDULES
    assert hits > 2 * num and preempted > num / 3
    assert (checked > 200 * num) == LAWS[name].keeps_kv
    assert (drafted > 8 * num and 2 * num < accepted < drafted) == LAWS[name].proposes


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle", {"num_next_tokens": 0}),
        ("eagle", {"kv_survives_drafting": True}),
        ("eagle", {"drops_tail_block": False}),
        ("eagle_hashed", {"num_hash_lookahead_tokens": 0}),
        ("mtp_modules", {"num_hash_lookahead_tokens": 1}),
        ("pard", {"kv_survives_drafting": True}),
        ("dflash", {"kv_survives_drafting": True}),
    ],
)
def test_a_wrong_law_is_noticed(name: str, changes: dict[str, int]) -> None:
    """The schedules are hard enough: a scheduler with a wrong law fails the drafter's checks."""
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(NUM_SCHEDULES):
            schedule = Schedule(name, seed)
            schedule.loop.scheduler._law = schedule.limits.law.model_copy(update=changes)
            schedule.run()
