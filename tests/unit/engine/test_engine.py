"""The engine's promises with scripted models: same output for any drafter, exact ends, no leaks."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from actors.acceptance.base import Verdict
from actors.draft.drafters.ngram import NgramDrafter
from actors.errors import EngineDead, InvalidRequest, PromptTooLong, QueueFull, RequestLost
from actors.requests import FinishReason, RunOutput
from actors.sampling.uniforms import Stream, uniforms
from actors.steps.client import InProcessStepClient
from actors.steps.messages import INVALID_SAMPLE, RowMasks, Stat, token_array
from actors.steps.patience import StepPatience
from actors.verifier.engine import VerifierEngine
from actors.verifier.scheduler import FEED_INTERVAL
from tests.unit.engine import fakes
from tests.unit.engine.test_text import BYTES

PROMPT = [1, 2, 3, 4, 5]
SCRIPT = fakes.whole()


class Engines:
    """Builds engines and checks at the end that each is idle, whole and without an error."""

    def __init__(self):
        self.made = []

    def __call__(
        self, k, guess=None, script=SCRIPT, tokenizer=None, own_kv=False, lookup=fakes.FakeLookup,
        **changes,
    ):  # fmt: skip
        limits = fakes.make_limits(k, has_draft_model=own_kv, **changes)
        target = fakes.ScriptedTarget(limits, script)
        drafter = host = None
        if own_kv:
            host = fakes.FakeDraftHost(limits, guess or fakes.mixed(script, limits.vocab_size))
        elif guess is not None:
            drafter = lookup(guess)
        client = InProcessStepClient(target, host)
        engine = VerifierEngine(limits, client, tokenizer, drafter, patience=StepPatience(10.0))
        engine.target, engine.host, engine.drafter = target, host, drafter
        self.made.append(engine)
        return engine

    def check(self):
        for engine in self.made:
            wait_idle(engine)
            status = engine.status()
            assert status.error is None, status.error
            assert status.num_running == status.num_waiting == 0
            assert status.num_referenced_blocks == 0
            assert status.num_free_blocks + status.num_cached_blocks == status.num_blocks
            engine._loop.scheduler.check_idle()
            assert engine._requests == {}
            if engine.drafter is not None:
                assert engine.drafter.table == {}
            check_metrics(engine.stats)
            engine.stop()


def wait_idle(engine, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while engine._loop.scheduler.has_work or engine._requests:
        assert time.monotonic() < deadline, engine.status()
        time.sleep(0.002)


def check_metrics(stats):
    """Counters agree with each other."""
    per_pos = stats.num_accepted_tokens_per_pos
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert sum(per_pos) == stats.num_accepted_tokens
    assert sum(stats.num_draft_tokens_per_pos) == stats.num_draft_tokens
    assert per_pos == sorted(per_pos, reverse=True)
    if stats.num_drafts:
        assert stats.num_draft_tokens_per_pos[0] == stats.num_drafts
        rates = sum(n / stats.num_drafts for n in per_pos)
        assert stats.acceptance_length == pytest.approx(1 + rates, abs=1e-12)


@pytest.fixture
def engines():
    made = Engines()
    yield made
    made.check()


def one(engine, prompt=PROMPT, **changes):
    (got,) = fakes.run_all(engine, [fakes.request("r", prompt, **changes)])
    got.check()
    return got


GUESSES = {
    "perfect": fakes.perfect,
    "wrong": fakes.wrong,
    "mixed": fakes.mixed,
    "illegal_-1": lambda _script: fakes.illegal(-1),
    "illegal_vocab": lambda _script: fakes.illegal(fakes.VOCAB),
    "illegal_big": lambda _script: fakes.illegal(2**40),
    "eos": lambda _script: fakes.illegal(fakes.EOS),
}


@pytest.mark.parametrize("name", GUESSES)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_no_drafter_changes_output(engines, name, k):
    engine = engines(k, GUESSES[name](SCRIPT))
    for prompt in ([3], PROMPT, [7] * 48):
        assert one(engine, prompt, max_tokens=40).token_ids == fakes.plain(SCRIPT, prompt, 40)
    if name.startswith("illegal"):
        assert engine.stats.num_draft_tokens == 0 and engine.stats.num_drafter_failures > 0


def test_a_raising_drafter_costs_speed_only(engines):
    engine = engines(3, fakes.perfect(SCRIPT))
    engine.drafter.fail = True
    assert one(engine, max_tokens=20).token_ids == fakes.plain(SCRIPT, PROMPT, 20)
    assert engine.stats.num_drafter_failures == 19 - 1


def test_perfect_drafts_count_exactly(engines):
    """10 steps of K = 4: the prompt's step, then 40 drafts, all accepted."""
    for own_kv in (False, True):
        engine = engines(4, fakes.perfect(SCRIPT), own_kv=own_kv)
        got = one(engine, max_tokens=51)
        stats = engine.stats
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 40, 40)
        assert stats.num_output_tokens == 51 and stats.acceptance_length == 5.0
        assert got.last.speculation.num_accepted_tokens_per_pos == (10, 10, 10, 10)
        assert got.last.speculation.acceptance_length == 5.0
        assert sum(map(sum, (run.accepted for run in got.runs))) == 40


def test_golden_metrics():
    from actors.stats import EngineStats

    stats = EngineStats()
    for drafts, accepted in ((3, 3), (3, 0), (1, 1), (3, 3)):
        stats.observe_drafts(drafts, accepted)
    stats.observe_drafts(0, 0)
    snapshot = stats.snapshot()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 10, 7)
    assert snapshot["num_accepted_tokens_per_pos"] == [3, 2, 2]
    assert snapshot["num_draft_tokens_per_pos"] == [4, 3, 3]
    assert snapshot["acceptance_length"] == 2.75


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 4])
def test_eos_ends_a_run_at_every_index(engines, k):
    body = fakes.plain(SCRIPT, PROMPT, 14)
    for j in range(1, 13):
        at = body.index(body[j])
        engine = engines(k, fakes.perfect(SCRIPT), eos_token_ids=(body[j],))
        got = one(engine, max_tokens=40)
        assert got.token_ids == body[: at + 1]
        assert (got.last.finish_reason, got.last.stop_reason) == (FinishReason.STOP, None)
        assert engine.stats.num_output_tokens == at + 1
        assert engine.stats.num_requests["stop"] == 1
        assert engine.stats.num_accepted_tokens <= at


@pytest.mark.parametrize("name", ["perfect", "mixed"])
@pytest.mark.parametrize("k", range(7))
def test_max_tokens_and_its_counts_are_exact(engines, k, name):
    engine = engines(k, GUESSES[name](SCRIPT), eos_token_ids=())
    for max_tokens in range(1, 13):
        before = engine.stats.num_output_tokens
        got = one(engine, max_tokens=max_tokens, num_logprobs=0)
        assert len(got.token_ids) == got.last.num_output_tokens == max_tokens
        assert sum(len(run.logprobs) for run in got.runs) == max_tokens
        assert engine.stats.num_output_tokens - before == max_tokens
        assert got.last.finish_reason == FinishReason.LENGTH
        assert engine.target.entries[-1][3] <= max(max_tokens - 1, 0)
    drafts_beyond = [d for *_, d in engine.target.entries if d > k]
    assert not drafts_beyond


@pytest.mark.parametrize("k", range(7))
def test_min_tokens_is_exact(engines, k):
    script = fakes.cycle([fakes.EOS])
    for stop_ids in ((), (7,)):
        engine = engines(
            k,
            fakes.illegal(fakes.EOS),
            script=fakes.cycle([7]) if stop_ids else script,
            eos_token_ids=() if stop_ids else (fakes.EOS,),
        )
        for min_tokens in range(8):
            got = one(engine, max_tokens=10, min_tokens=min_tokens, stop_token_ids=stop_ids)
            ends = {fakes.EOS} if not stop_ids else {7}
            assert [t in ends for t in got.token_ids] == [False] * min_tokens + [True]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("k", [0, 3, 8])
def test_a_stop_string_ends_anywhere_in_a_run(engines, k, include):
    ids = BYTES.encode("aa<END>bb\u4f60\u597d" + "c" * 60).ids
    prompt = BYTES.encode("p").ids
    script = fakes.fixed(len(prompt), ids)
    vocab = BYTES.get_vocab_size()
    for guess in (fakes.perfect(script), *(fakes.replay(script, [a]) for a in range(k))):
        engine = engines(k, guess, script=script, tokenizer=BYTES, vocab_size=vocab)
        got = one(
            engine,
            prompt,
            max_tokens=60,
            stop=("zz", "<END>"),
            include_stop_str_in_output=include,
            num_logprobs=2,
        )
        assert got.text == ("aa<END>" if include else "aa")
        assert got.token_ids == ids[:7]
        assert got.last.num_output_tokens == 7 and engine.stats.num_output_tokens == 7
        assert sum(len(run.logprobs) for run in got.runs) == 7
        assert (got.last.finish_reason, got.last.stop_reason) == (FinishReason.STOP, "<END>")


@pytest.mark.parametrize("k", [0, 4])
def test_ignore_eos_goes_on(engines, k):
    script = fakes.cycle([fakes.EOS, 1, fakes.EOS])
    engine = engines(k, fakes.perfect(script), script=script)
    got = one(engine, [5] * 3, max_tokens=20, ignore_eos=True)
    assert len(got.token_ids) == 20 and got.token_ids[0] == fakes.EOS
    assert got.last.finish_reason == FinishReason.LENGTH


def test_streams_have_one_end_and_the_first_token_alone(engines):
    engine = engines(4, fakes.perfect(SCRIPT))
    got = one(engine, max_tokens=30)
    assert [run.finish_reason is not None for run in got.runs] == [False] * (len(got.runs) - 1) + [
        True
    ]
    assert len(got.runs[0].token_ids) == 1  # at once, before anything was drafted
    assert max(len(run.token_ids) for run in got.runs) == 5


@pytest.mark.parametrize("k", [0, 2, 5])
def test_stream_3_text_equals_the_full_decode(engines, k):
    ids = BYTES.encode("\u4f60\u597d \U0001f600 caf\u00e9 " * 4).ids
    prompt = [1, 2]
    script = fakes.fixed(2, ids)
    for guess in (fakes.perfect, fakes.mixed):
        engine = engines(
            k,
            guess(script),
            script=script,
            tokenizer=BYTES,
            vocab_size=BYTES.get_vocab_size(),
            eos_token_ids=(),
        )
        for max_tokens in range(1, 41, 3):
            got = one(engine, prompt, max_tokens=max_tokens)
            assert got.text == BYTES.decode(ids[:max_tokens])
            assert not any("\ufffd" in run.text for run in got.runs[:-1])


# --- context, sizes, batches ------------------------------------------------------------------


@pytest.mark.parametrize("own_kv", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_ctx_1_context_end(engines, k, own_kv):
    engine = engines(k, fakes.perfect(SCRIPT), own_kv=own_kv, max_model_len=64, num_blocks=17)
    for prompt_len in range(50, 64):
        for max_tokens in (None, 100, 64 - prompt_len):
            got = one(engine, [3] * prompt_len, max_tokens=max_tokens, ignore_eos=True)
            assert len(got.token_ids) == 64 - prompt_len
            assert got.last.finish_reason == FinishReason.LENGTH
    for prompt_len in (64, 65, 200):
        with pytest.raises(PromptTooLong, match=f"{prompt_len} tokens.*64"):
            engine.add_request(fakes.request("x", [3] * prompt_len), print)
    assert one(engine, max_tokens=5).token_ids == fakes.plain(SCRIPT, PROMPT, 5)


@pytest.mark.parametrize("own_kv", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7, 8])
def test_ctx_3_edge_sizes(engines, k, own_kv):
    one_seat = engines(
        k, own_kv=own_kv, guess=fakes.mixed(SCRIPT), max_num_seqs=1, max_num_batched_tokens=3
    )
    prompts = [[i + 1] * (i + 1) for i in range(4)]
    for got, prompt in zip(
        fakes.run_all(one_seat, [fakes.request(str(i), p) for i, p in enumerate(prompts)]),
        prompts,
        strict=True,
    ):
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 16)
    for batch in range(1, 18, 4):
        engine = engines(k, fakes.mixed(SCRIPT), own_kv=own_kv, max_num_seqs=17, block_size=2)
        prompts = [[i + 1] * (3 * i + 1) for i in range(batch)]
        requests = [fakes.request(str(i), p, max_tokens=9) for i, p in enumerate(prompts)]
        for got, prompt in zip(fakes.run_all(engine, requests), prompts, strict=True):
            assert got.token_ids == fakes.plain(SCRIPT, prompt, 9)


@pytest.mark.parametrize("own_kv", [False, True])
def test_kvb_1_requests_equal_their_solo_runs(engines, own_kv):
    """Acceptance differs by row and step; arrivals and ends are staggered."""

    def run(requests, **changes):
        engine = engines(4, fakes.mixed(SCRIPT), own_kv=own_kv, **changes)
        return fakes.run_all(engine, requests)

    requests = [
        fakes.request(
            str(i), [i + 1] * (3 + 8 * i), max_tokens=10 + 5 * i, num_logprobs=i % 3, seed=i
        )
        for i in range(8)
    ]
    together = run(requests, max_num_seqs=5)
    for params, got in zip(requests, together, strict=True):
        (solo,) = run([params])
        assert got.token_ids == solo.token_ids
        assert [lp for r in got.runs for lp in r.logprobs] == [
            lp for r in solo.runs for lp in r.logprobs
        ]
        assert got.last.speculation == solo.last.speculation
        assert got.last.num_prompt_tokens == len(params.prompt_token_ids)


@pytest.mark.parametrize("own_kv", [False, True])
def test_chunk_size_and_prefix_cache_change_nothing(engines, own_kv):
    prompt = [i % 40 for i in range(83)]
    expected = fakes.plain(SCRIPT, prompt, 30)
    counts = set()
    for chunk in (8, 16, 256):
        for caching in (False, True):
            engine = engines(
                3,
                fakes.mixed(SCRIPT),
                own_kv=own_kv,
                max_num_batched_tokens=chunk,
                enable_prefix_caching=caching,
            )
            first, again = (one(engine, prompt, max_tokens=30) for _ in range(2))
            assert first.token_ids == again.token_ids == expected
            # The last block holds the prompt's last token, which is always computed.
            assert again.last.num_cached_tokens == (80 if caching else 0)
            assert engine.target.entries[0][3] == 0  # KVS-3: no drafts before the prompt is done
            for got in (first, again):
                counts.add(got.last.speculation.num_accepted_tokens)
            if own_kv and caching:
                assert engine.host.num_fed < 2 * len(prompt) + 100
    assert len(counts) == 1


@pytest.mark.parametrize("own_kv", [False, True])
def test_shared_prefixes_hit_whole_blocks_only(engines, own_kv):
    engine = engines(2, fakes.mixed(SCRIPT), own_kv=own_kv)
    base = [(7 * i) % 40 for i in range(23)]
    one(engine, base, max_tokens=3)
    for shared in (0, 3, 4, 9, 16, 19):
        prompt = base[:shared] + [41 + shared % 7] * 7
        got = one(engine, prompt, max_tokens=12)
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 12)
        assert got.last.num_cached_tokens == shared // 4 * 4


def test_resent_conversation_hits_generated_tokens_but_never_rejected_drafts(engines):
    for own_kv in (False, True):
        engine = engines(4, fakes.mixed(SCRIPT), own_kv=own_kv)
        prompt = list(PROMPT)
        for turn in range(4):
            got = one(engine, prompt, max_tokens=20, ignore_eos=True)
            assert got.token_ids == fakes.plain(SCRIPT, prompt, 20, eos=())
            if turn:
                assert got.last.num_cached_tokens >= len(prompt) - 8
            prompt += [*got.token_ids, 2]


def test_dynamic_k_by_batch_size_and_zero(engines):
    table = {1: 4, 2: 2, 3: 0}
    for own_kv in (False, True):
        engine = engines(
            4,
            fakes.perfect(SCRIPT),
            own_kv=own_kv,
            num_speculative_tokens_for_batch=lambda n: table.get(n, 0),
        )
        prompts = [[i + 1] * 5 for i in range(3)]
        requests = [
            fakes.request(str(i), p, max_tokens=20 + 15 * i, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
        for got, params in zip(fakes.run_all(engine, requests), requests, strict=True):
            assert got.token_ids == fakes.plain(
                SCRIPT, params.prompt_token_ids, params.max_tokens, eos=()
            )
        drafted = {d for *_, d in engine.target.entries}
        assert drafted >= {0, 2, 4}
        # Draft KV stayed whole through the steps with K = 0: acceptance is complete at once.
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("own_kv", [False, True])
def test_requests_only_lower_what_the_server_allows(engines, own_kv):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=own_kv)
    expected = fakes.plain(SCRIPT, PROMPT, 30)
    for changes, most in (
        ({}, 3),
        ({"num_speculative_tokens": 9}, 3),
        ({"num_speculative_tokens": 1}, 1),
        ({"num_speculative_tokens": 0}, 0),
        ({"speculation_enabled": False}, 0),
    ):
        first = len(engine.target.entries)
        got = one(engine, max_tokens=30, **changes)
        assert got.token_ids == expected
        assert max(d for *_, d in engine.target.entries[first:]) == most
    for enabled, cap, most in ((False, None, 0), (True, 2, 2), (True, None, 3)):
        engine.set_speculation(enabled, cap)
        first = len(engine.target.entries)
        assert one(engine, max_tokens=30).token_ids == expected
        assert max(d for *_, d in engine.target.entries[first:]) == most


def test_draft_catches_up_when_speculation_is_switched_on_in_the_middle(engines):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True, max_num_batched_tokens=16)
    engine.set_speculation(False)
    seen = []

    def sink(out):
        seen.append(out)
        if out.num_output_tokens >= 40 and not any(r.num_output_tokens >= 40 for r in seen[:-1]):
            assert engine.host.num_forwards == 0
            engine.set_speculation(True)
        if out.finish_reason is not None:
            over.set()

    over = threading.Event()
    engine.add_request(fakes.request("a", PROMPT, max_tokens=100, ignore_eos=True), sink)
    assert over.wait(20)
    tokens = [t for out in seen for t in out.token_ids]
    assert tokens == fakes.plain(SCRIPT, PROMPT, 100, eos=())
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 20


def test_losing_and_restoring_the_draft_model(engines):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True)
    engine.host.fail_at = 4
    prompt = [(5 * i) % 40 for i in range(30)]
    expected = fakes.plain(SCRIPT, prompt, 40)
    assert one(engine, prompt, max_tokens=40).token_ids == expected
    assert "broke" in engine.status().draft_lost and engine.stats.num_draft_losses == 1
    again = one(engine, prompt, max_tokens=40)
    assert again.token_ids == expected and again.last.speculation.num_drafts == 0
    assert again.last.num_cached_tokens > 0
    engine.restore_draft(lambda: 1 / 0)
    still = one(engine, prompt, max_tokens=40)
    assert still.token_ids == expected and engine.status().draft_lost

    def connect():
        host = fakes.FakeDraftHost(engine.limits, fakes.perfect(SCRIPT))
        engine._client.replace_drafter(host)

    engine.restore_draft(connect)
    restored = one(engine, prompt, max_tokens=40)
    assert restored.token_ids == expected and restored.last.num_cached_tokens == 0
    stats = restored.last.speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert engine.status().draft_lost is None


def test_a_draft_model_restored_in_the_middle_of_requests(engines):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True)
    engine.host.fail_at = 4

    def connect():
        host = fakes.FakeDraftHost(engine.limits, fakes.perfect(SCRIPT))
        engine._client.replace_drafter(host)

    schedule = engine._loop.scheduler.schedule
    steps = iter(range(10_000))

    def hooked(generation=0):
        if next(steps) == 12:
            connect()
            engine._loop.restore_draft()
        return schedule(generation)

    engine._loop.scheduler.schedule = hooked
    prompts = [[i + 1] * (5 + 9 * i) for i in range(4)]
    requests = [
        fakes.request(str(i), p, max_tokens=50, ignore_eos=True) for i, p in enumerate(prompts)
    ]
    for got, prompt in zip(fakes.run_all(engine, requests), prompts, strict=True):
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 50, eos=())
        assert got.last.speculation.num_accepted_tokens > 20
    assert engine.status().draft_lost is None and engine.stats.num_draft_losses == 1


def test_a_request_that_drafts_catches_up_on_a_prefix_without_draft_kv(engines):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True)
    first = one(engine, max_tokens=40, ignore_eos=True, speculation_enabled=False)
    prompt = [*PROMPT, *first.token_ids, 1]
    fed = []
    for _ in range(2):
        before = engine.host.num_fed
        got = one(engine, prompt, max_tokens=20)
        fed.append(engine.host.num_fed - before)
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 20)
        assert got.last.num_cached_tokens >= 40
        assert got.last.speculation.num_accepted_tokens == got.last.speculation.num_draft_tokens > 5
    assert fed[0] - fed[1] >= 40  # the second time the draft's part is found too
    assert engine.status().draft_lost is None  # the fake asserts its KV


@pytest.mark.parametrize(
    ("server", "params"),
    [
        ((True, None), {"num_speculative_tokens": 0}),
        ((True, None), {"speculation_enabled": False}),
        ((True, 0), {}),
        ((False, None), {}),
    ],
)
def test_a_draft_model_does_not_run_while_speculation_is_off(engines, server, params):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True, max_num_batched_tokens=16)
    engine.set_speculation(*server)
    prompt = [(5 * i) % 40 for i in range(30)]
    for num_cached in (0, 28):  # prompts are found without the draft's part
        got = one(engine, prompt, max_tokens=40, ignore_eos=True, **params)
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 40, eos=())
        assert got.last.num_cached_tokens == num_cached
    assert engine.host.num_forwards == 0
    engine.set_speculation(True)
    again = one(engine, prompt, max_tokens=40, ignore_eos=True).last
    assert again.num_cached_tokens == 28
    assert again.speculation.num_accepted_tokens == again.speculation.num_draft_tokens > 20


def test_a_request_that_never_drafts_is_not_fed_beside_one_that_does(engines):
    engine = engines(3, fakes.perfect(SCRIPT), own_kv=True, enable_prefix_caching=False)
    with_k = fakes.request("a", [1] * 20, max_tokens=40, ignore_eos=True)
    without = fakes.request("b", [2] * 60, max_tokens=40, num_speculative_tokens=0, ignore_eos=True)
    for got, params in zip(
        fakes.run_all(engine, [with_k, without]), (with_k, without), strict=True
    ):
        assert got.token_ids == fakes.plain(SCRIPT, params.prompt_token_ids, 40, eos=())
    assert engine.host.num_fed <= 60  # of the first alone


def test_a_draft_model_runs_in_few_steps_while_the_batch_is_too_large(engines):
    k_of_batch = 0
    engine = engines(
        3,
        fakes.perfect(SCRIPT),
        own_kv=True,
        num_speculative_tokens_for_batch=lambda _n: k_of_batch,
    )
    counts = []

    def sink(out):
        nonlocal k_of_batch
        first(out)
        if out.num_output_tokens == 90:  # the batch gets smaller
            counts.extend((engine.host.num_forwards, engine.host.num_fed, engine.target.num_steps))
            k_of_batch = 3
        if out.finish_reason is not None:
            over.set()

    first, over = fakes.Collected(), threading.Event()
    engine.add_request(fakes.request("a", [9] * 8, max_tokens=118, ignore_eos=True), sink)
    prompts = [[i + 1] * (5 + 9 * i) for i in range(3)]
    others = [
        fakes.request(str(i), p, max_tokens=60, ignore_eos=True) for i, p in enumerate(prompts)
    ]
    for got, prompt in zip(fakes.run_all(engine, others), prompts, strict=True):
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 60, eos=())
    assert over.wait(20)
    assert first.token_ids == fakes.plain(SCRIPT, [9] * 8, 118, eos=())
    num_forwards, num_fed, num_steps = counts
    assert 2 <= num_forwards <= num_steps // FEED_INTERVAL
    assert num_fed > 2 * FEED_INTERVAL  # a forward takes all that came in between
    stats = first.last.speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 15


def test_a_prompt_of_whole_blocks_still_computes_its_last_token(engines):
    engine = engines(2, fakes.mixed(SCRIPT))
    for num_cached in (0, 16, 16):
        got = one(engine, [9] * 20, max_tokens=4)
        assert got.last.num_cached_tokens == num_cached
        assert got.token_ids == fakes.plain(SCRIPT, [9] * 20, 4)


# --- preemption, aborts, leaks ----------------------------------------------------------------


@pytest.mark.parametrize("own_kv", [False, True])
@pytest.mark.parametrize("k", range(6))
def test_kvs_1_a_small_pool_preempts_without_a_trace(engines, k, own_kv):
    engine = engines(
        k, fakes.mixed(SCRIPT), own_kv=own_kv, max_model_len=64, num_blocks=20, block_size=4
    )
    prompts = [[i + 1] * (5 + 3 * i) for i in range(6)]
    requests = [
        fakes.request(str(i), p, max_tokens=30, num_logprobs=0) for i, p in enumerate(prompts)
    ]
    for got, prompt in zip(fakes.run_all(engine, requests), prompts, strict=True):
        got.check()
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 30)
        history = list(prompt)
        for lp in (lp for run in got.runs for lp in run.logprobs):
            assert lp.logprob == pytest.approx(fakes.logprob_of(history, lp.token_id))
            history.append(lp.token_id)
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("own_kv", [False, True])
@pytest.mark.parametrize("k", [0, 2, 5])
def test_kvs_1_preempt_and_abort_at_every_step(engines, k, own_kv):
    prompts = [[i + 1] * (4 + 5 * i) for i in range(4)]
    expected = [fakes.plain(SCRIPT, p, 20) for p in prompts]
    for at in range(21):
        engine = engines(k, fakes.mixed(SCRIPT), own_kv=own_kv, max_num_batched_tokens=16)
        loop = engine._loop
        schedule = loop.scheduler.schedule
        steps = iter(range(1000))

        def hooked(generation=0, loop=loop, schedule=schedule, steps=steps, at=at, engine=engine):
            if next(steps) == at:
                if len(loop.scheduler.running) > 1:
                    loop.scheduler.preempt_youngest()
                victim = engine._requests.get("1")
                if victim is not None:
                    loop.abort(victim)
            return schedule(generation)

        loop.scheduler.schedule = hooked
        results = fakes.run_all(
            engine,
            [fakes.request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)],
        )
        for i, (got, tokens) in enumerate(zip(results, expected, strict=True)):
            if got.last.finish_reason == FinishReason.ABORT:
                assert i == 1 and got.token_ids == tokens[: len(got.token_ids)]
            else:
                assert got.token_ids == tokens


@pytest.mark.parametrize("own_kv", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_life_1_nothing_leaks(engines, block_size, own_kv):
    """Every kind of end, many times, with few blocks; `engines` checks what is left."""
    engine = engines(
        3,
        fakes.mixed(SCRIPT),
        own_kv=own_kv,
        block_size=block_size,
        max_model_len=64,
        num_blocks=160 // block_size + 2,
        tokenizer=BYTES,
    )
    done = threading.Semaphore(0)
    everything = []
    text = BYTES.decode(fakes.plain(SCRIPT, [1] * 4, 6)[4:5])
    for i in range(100):
        kind = i % 5
        aborted_at = i % 7 + 1
        collected = fakes.Collected()
        everything.append(collected)

        def sink(out, kind=kind, i=i, at=aborted_at, collected=collected):
            if out.finish_reason is not None:
                done.release()
            if kind == 3 and len(collected.runs) == at:
                engine.abort(f"r{i}")
            collected(out)
            if kind == 4 and out.finish_reason is None and len(collected.runs) == at:
                raise RuntimeError("the consumer is gone")

        engine.add_request(
            fakes.request(
                f"r{i}",
                [i % 40] * (i % 30 + 1),
                max_tokens=(5, 40)[kind > 0],
                stop=(text,) if kind == 2 else (),
            ),
            sink,
        )
    for _ in range(100):
        assert done.acquire(timeout=20), engine.status()
    wait_idle(engine)
    assert sum(engine.stats.num_requests.values()) == 100
    assert sum(len(c.token_ids) for c in everything) == engine.stats.num_output_tokens
    assert all(engine.stats.num_requests[kind] > 0 for kind in ("length", "abort", "error"))


def test_n_gram_drafts_only_from_its_own_request(engines):
    """State is per request and gone after it."""
    script = fakes.cycle([3, 4, 5, 6])
    limits = fakes.make_limits(4)
    drafter = NgramDrafter(1, 3)
    engine = VerifierEngine(
        limits, InProcessStepClient(fakes.ScriptedTarget(limits, script)), drafter=drafter
    )
    counts = set()
    for i in range(10):
        (got,) = fakes.run_all(engine, [fakes.request(str(i), [3, 4, 5, 6, 3], max_tokens=40)])
        counts.add((got.last.speculation.num_drafts, got.last.speculation.num_accepted_tokens))
        assert got.token_ids == fakes.plain(script, [3, 4, 5, 6, 3], 40)
    assert len(counts) == 1 and counts.pop()[1] > 20
    assert len(drafter) == 0
    engine.stop()


# --- admission, control, failure --------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "0.*at least 1"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "9.*5"),
        ({"temperature": -0.5}, "temperature", "-0.5"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"top_k": -1}, "top_k", "-1"),
        ({"top_p": 0.0}, "top_p", "0.0"),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"seed": 2**63}, "seed", "64-bit"),
        ({"num_logprobs": 21}, "num_logprobs", "21.*20"),
        ({"stop": ("",)}, "stop", "empty"),
        ({"stop": ("x",)}, "stop", "tokenizer"),
        ({"stop_token_ids": (50,)}, "stop_token_ids", "50.*49"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "-1"),
        ({"prompt_token_ids": []}, "prompt", "0 tokens"),
        ({"prompt_token_ids": [1, -1]}, "prompt", "-1.*49"),
        ({"prompt_token_ids": [1, 50]}, "prompt", "50.*49"),
        ({"prompt_token_ids": [1, 2**70]}, "prompt", "token ids"),
    ],
)
def test_refusals_name_field_value_and_limit(engines, changes, param, words):
    engine = engines(2)
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.add_request(fakes.request("a", **{"prompt": PROMPT, **_prompt(changes)}), print)
    assert caught.value.param == param


def _prompt(changes):
    changes = dict(changes)
    if "prompt_token_ids" in changes:
        changes["prompt"] = changes.pop("prompt_token_ids")
    return changes


def test_without_chunking_a_prompt_must_fit_a_step(engines):
    engine = engines(2, enable_chunked_prefill=False, max_num_batched_tokens=20, num_blocks=33)
    with pytest.raises(InvalidRequest, match=r"21 tokens.*max_num_batched_tokens is 20"):
        engine.add_request(fakes.request("a", [1] * 21), print)
    prompts = [[i + 1] * 18 for i in range(5)]
    requests = [fakes.request(str(i), p, max_tokens=60) for i, p in enumerate(prompts)]
    for got, prompt in zip(fakes.run_all(engine, requests), prompts, strict=True):
        assert got.token_ids == fakes.plain(SCRIPT, prompt, 60)
    assert engine.stats.num_preemptions > 0  # and resumed prefills beyond a step got through


def test_a_full_queue_refuses_with_both_numbers(engines):
    gate = threading.Event()
    engine = engines(0, max_num_seqs=1, max_num_queued_requests=2)
    outs = fakes.Collected()
    release = threading.Semaphore(0)

    def blocking(out):
        gate.wait(10)
        if out.finish_reason is not None:
            release.release()

    def count(out):
        if out.finish_reason is not None:
            release.release()

    engine.add_request(fakes.request("0", PROMPT), blocking)
    deadline = time.monotonic() + 5
    while engine.status().num_running == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    engine.add_request(fakes.request("1", PROMPT), count)
    engine.add_request(fakes.request("2", PROMPT), count)
    with pytest.raises(QueueFull, match=r"2 requests.*limit is 2") as caught:
        engine.add_request(fakes.request("3", PROMPT), outs)
    assert 1 <= caught.value.retry_after_s <= 60
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request(fakes.request("1", PROMPT), outs)
    gate.set()
    for _ in range(3):
        assert release.acquire(timeout=5)
    assert one(engine).token_ids == fakes.plain(SCRIPT, PROMPT, 16)


def test_async_streams_from_several_event_loops_and_cancel(engines):
    # A request whose prompt starts with one of these stands still after its first tokens, until
    # its gate opens: whoever cancels it finds it waiting.
    gates = {first: threading.Event() for first in (40, 41, 42)}

    def script(history):
        if history[0] in gates and len(history) > len(PROMPT) + 8:
            assert gates[history[0]].wait(20)
        return SCRIPT(history)

    engine = engines(3, fakes.mixed(SCRIPT), script=script)

    async def collect(rid, prompt=PROMPT, limit=None, on_run=lambda: None):
        tokens = []
        stream = engine.generate(fakes.request(rid, prompt, max_tokens=40))
        async for out in stream:
            tokens += out.token_ids
            on_run()
            if limit is not None and len(tokens) >= limit:
                await stream.aclose()
                break
        return tokens

    async def scenario(first):
        whole, cut = await asyncio.gather(collect(f"{first}-a"), collect(f"{first}-b", limit=5))
        started = asyncio.Event()
        task = asyncio.create_task(collect(f"{first}-c", [first, *PROMPT[1:]], on_run=started.set))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gates[first].set()
        return whole, cut

    expected = fakes.plain(SCRIPT, PROMPT, 40)
    with ThreadPoolExecutor(len(gates)) as pool:
        results = list(pool.map(lambda first: asyncio.run(scenario(first)), gates, timeout=60))
    for whole, cut in results:
        assert whole == expected and cut == expected[: len(cut)]
    wait_idle(engine)
    ends = engine.stats.num_requests
    assert ends["stop"] + ends["length"] >= 3 and ends["abort"] >= 3


def test_a_consumers_closed_event_loop_ends_its_request(engines):
    engine = engines(0)
    slow = threading.Event()

    async def leave():
        stream = engine.generate(fakes.request("a", PROMPT, max_tokens=100, ignore_eos=True))
        await anext(stream)
        slow.set()
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(leave())
    loop.close()
    del stream
    wait_idle(engine)


def test_a_broken_target_fails_requests_and_health():
    limits = fakes.make_limits(0)
    target = fakes.ScriptedTarget(limits, SCRIPT)
    target.fail_at = 4
    engine = VerifierEngine(limits, InProcessStepClient(target))
    all_are_in, ended = threading.Event(), threading.Semaphore(0)
    run = target.run
    target.run = lambda *args: (all_are_in.wait(20), run(*args))[1]
    results = [fakes.Collected() for _ in range(3)]

    def sink(got, out):
        got(out)
        if out.finish_reason is not None:
            ended.release()

    for i, got in enumerate(results):
        engine.add_request(fakes.request(str(i), PROMPT), partial(sink, got))
    all_are_in.set()
    assert all(ended.acquire(timeout=20) for _ in results)
    for got in results:
        assert "the target broke" in got.last.error
        assert got.last.finish_reason == FinishReason.ABORT
    status = engine.status()
    assert not status.is_healthy and "the target broke" in status.error
    assert status.num_running == status.num_waiting == status.num_referenced_blocks == 0
    with pytest.raises(EngineDead, match="the target broke"):
        engine.add_request(fakes.request("late", PROMPT), print)
    engine.stop()
    engine.stop()


def test_a_stream_on_an_engine_that_breaks_says_that_the_request_is_not_at_fault():
    limits = fakes.make_limits(0)
    target = fakes.ScriptedTarget(limits, SCRIPT)
    target.fail_at = 4
    engine = VerifierEngine(limits, InProcessStepClient(target))

    async def read():
        return [out async for out in engine.generate(fakes.request("a", PROMPT, max_tokens=40))]

    with pytest.raises(RequestLost, match="the target broke"):
        asyncio.run(read())
    engine.stop()


def test_one_request_that_breaks_leaves_the_others_alone(engines):
    class Broken:
        backend_tokenizer = None

        def decode(self, ids, skip_special_tokens=True):
            if 13 in ids:
                raise RuntimeError("cannot decode 13")
            return "x" * len(ids)

    tokenizer = Broken()
    tokenizer.backend_tokenizer = tokenizer
    script = fakes.cycle([11, 12, 13, 14])
    engine = engines(2, fakes.perfect(script), script=script, tokenizer=tokenizer)
    for stop in ((), ("never",)):
        bad, good = fakes.run_all(
            engine,
            [
                fakes.request("bad", [1] * 4, stop=stop),
                fakes.request("good", [1], stop_token_ids=(12,)),
            ],
        )
        assert "cannot decode 13" in bad.last.error
        assert good.last.error is None and good.last.finish_reason == FinishReason.STOP


class CountingTokenizer:
    """Counts how often its added tokens are read."""

    def __init__(self):
        self.num_reads = 0

    def get_added_tokens_decoder(self):
        self.num_reads += 1
        return BYTES.get_added_tokens_decoder()

    def decode(self, ids, skip_special_tokens=True):
        return BYTES.decode(ids, skip_special_tokens=skip_special_tokens)


def test_the_added_tokens_are_read_once_for_all_requests(engines):
    tokenizer = CountingTokenizer()
    engine = engines(2, fakes.perfect(SCRIPT), tokenizer=tokenizer)
    fakes.run_all(engine, [fakes.request(f"r{i}", [1, 2, 3]) for i in range(5)])
    assert tokenizer.num_reads == 1


def test_stop_ends_requests_in_flight():
    limits = fakes.make_limits(0)
    engine = VerifierEngine(limits, InProcessStepClient(fakes.ScriptedTarget(limits, SCRIPT)))
    outs: list[RunOutput] = []

    def sink(out):
        outs.append(out)
        time.sleep(0.005)

    engine.add_request(fakes.request("a", PROMPT, max_tokens=100, ignore_eos=True), sink)
    while not outs:
        time.sleep(0.001)
    engine.stop()
    assert outs[-1].finish_reason == FinishReason.ABORT and "stopped" in outs[-1].error
    with pytest.raises(EngineDead, match="stopped"):
        engine.add_request(fakes.request("b", PROMPT), sink)


def test_seeds_are_drawn_once_and_survive_preemption(engines):
    engine = engines(0, max_num_seqs=4)
    seen = {}
    run = engine.target.run

    def spy(plan, *args):
        for params in plan.admissions:
            seen.setdefault(params.slot, []).append(params.seed)
        return run(plan, *args)

    engine.target.run = spy
    schedule = engine._loop.scheduler.schedule
    steps = iter(range(1000))

    def hooked(generation=0):
        if next(steps) == 3:
            engine._loop.scheduler.preempt_youngest()
        return schedule(generation)

    engine._loop.scheduler.schedule = hooked
    one(engine, max_tokens=20, ignore_eos=True)
    (seeds,) = seen.values()
    assert len(seeds) == 2 and len(set(seeds)) == 1


def test_status_and_snapshot_are_plain_numbers(engines):
    engine = engines(2, fakes.perfect(SCRIPT))
    one(engine, max_tokens=20)
    wait_idle(engine)
    status = engine.status()
    assert status.is_healthy and status.seconds_since_step >= 0
    snapshot = status.stats
    assert snapshot["num_output_tokens"] == len(fakes.plain(SCRIPT, PROMPT, 20))
    assert snapshot["time_to_first_token_s"]["count"] == 1
    itl = snapshot["inter_token_latency_s"]
    assert sum(itl["counts"]) == itl["count"] == snapshot["num_output_tokens"] - 1
    assert snapshot["step_time_s"]["count"] == snapshot["num_steps"]


def test_logits_that_are_not_numbers_fail_their_request_only(engines):
    engine = engines(2, fakes.perfect(SCRIPT))
    honest = engine.target.run

    def poisoned(*args):
        verified = honest(*args)
        stats, row = verified.stats, 0
        sampled = stats.sampled.copy()
        for entry, count in zip(args[0].target, stats.num_rows.tolist(), strict=True):
            if count and engine.target.kv.slots[entry.slot].params.prompt_len == 4:
                sampled[row] = INVALID_SAMPLE
            row += count
        columns = {**stats.columns, Stat.SAMPLED: sampled}
        return replace(verified, stats=replace(stats, columns=columns))

    engine.target.run = poisoned
    bad, good = fakes.run_all(
        engine, [fakes.request("bad", [1] * 4), fakes.request("good", [1], max_tokens=6)]
    )
    assert bad.last.finish_reason is FinishReason.ABORT
    assert "not numbers" in bad.last.error
    assert good.last.finish_reason is FinishReason.LENGTH and good.last.error is None


def test_a_server_with_a_seed_gives_its_requests_the_same_seeds_again(engines):
    def seeds(base):
        engine = engines(0, seed=base)
        seen = []
        run = engine.target.run

        def spy(plan, *args):
            seen.extend(params.seed for params in plan.admissions)
            return run(plan, *args)

        engine.target.run = spy
        for own in (None, None, 7):
            one(engine, max_tokens=2, seed=own)
        return seen

    first, again, other, fresh = seeds(1), seeds(1), seeds(2), seeds(None)
    assert first == again and first[2] == 7
    assert len({*first[:2], *other[:2], *fresh[:2]}) == 6


def test_a_lookup_drafter_hears_of_prompts_tokens_ends_and_scopes(engines):
    # FakeLookup itself checks that it hears of every token, in steps with drafts or without.
    engine = engines(3, fakes.mixed(SCRIPT))
    off = one(engine, max_tokens=9, speculation_enabled=False, cache_salt="a")
    on = one(engine, [7, 8], max_tokens=9, cache_salt="b")
    wait_idle(engine)
    assert engine.drafter.ended == [PROMPT + off.token_ids, [7, 8, *on.token_ids]]
    assert list(engine.drafter.scopes.values()) == ["a", "b"]


def test_requests_of_different_salts_share_no_cached_prefix(engines):
    engine = engines(0)
    prompt = list(range(20))
    hits = [one(engine, prompt, cache_salt=salt).last.num_cached_tokens for salt in "aab"]
    assert hits == [0, 16, 0]
    with pytest.raises(InvalidRequest, match="cache_salt"):
        one(engine, cache_salt="x" * 2000)


class UniformRule:
    """Accepts nothing; remembers what it was given."""

    needs = frozenset({Stat.UNIFORM})

    def __init__(self):
        self.seen = []

    def __call__(self, rows):
        self.seen.append(rows.columns[Stat.UNIFORM].tolist())
        assert len(rows.sampled) == len(self.seen[-1])
        first = np.cumsum(rows.num_drafts + 1) - rows.num_drafts - 1
        return Verdict(np.zeros(len(first), dtype=np.int32), rows.sampled[first])


def test_an_acceptance_method_gets_its_columns_and_one_uniform_a_row():
    limits = fakes.make_limits(2)
    rule, drafter = UniformRule(), fakes.FakeLookup(fakes.perfect(SCRIPT))
    target = fakes.ScriptedTarget(limits, SCRIPT)
    engine = VerifierEngine(limits, InProcessStepClient(target), None, drafter, rule)
    one(engine, max_tokens=4, seed=5)
    engine.stop()
    # Steps of 1, 3, 3 and, near the end, 1 row; each row by its own position and step.
    sizes = [(1, 5), (3, 6), (2, 7), (1, 8)]
    assert rule.seen == [
        uniforms([5] * n, range(p, p + n), Stream.ACCEPT, [step] * n).tolist()
        for step, (n, p) in enumerate(sizes, 1)
    ]


def test_masks_of_two_phase_steps_hold_for_every_row(engines):
    limits = fakes.make_limits(3)
    asked = []

    def masks(plan, drafts):
        # Even tokens only, whatever was drafted.
        rows = sum(entry.num_logits for entry in plan.target)
        asked.append(rows)
        bits = np.full((rows, 2), 0x55555555, dtype=np.uint32)
        return RowMasks(token_array(range(rows)), bits)

    engine = VerifierEngine(
        limits,
        InProcessStepClient(fakes.ScriptedTarget(limits, SCRIPT)),
        drafter=fakes.FakeLookup(fakes.perfect(SCRIPT)),
        mask_source=masks,
    )
    got = one(engine, max_tokens=30)
    engine.stop()
    assert len(got.token_ids) == 30 and all(token % 2 == 0 for token in got.token_ids)
    assert max(asked) == 4 and got.last.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "values", [{"top_k": 10**20}, {"min_tokens": 2**70}, {"cache_salt": "\ud800"}]
)
def test_what_cannot_be_planned_ends_its_own_request_only(engines, monkeypatch, values):
    """Values that admission should have refused, as if a rule for them were missing."""
    engine = engines(3, fakes.mixed(SCRIPT))
    monkeypatch.setattr("actors.verifier.admission.check_sampling", lambda *_: None)
    innocent = fakes.Collected()
    engine.add_request(fakes.request("innocent", PROMPT, max_tokens=40), innocent)
    with pytest.raises((OverflowError, UnicodeEncodeError)):
        engine.add_request(fakes.request("bad", PROMPT, **values), fakes.Collected())
    after = one(engine, max_tokens=40)
    wait_idle(engine)
    assert innocent.token_ids == after.token_ids == fakes.plain(SCRIPT, PROMPT, 40)
