"""Every field of a request, through a real model: what it does, alone and beside an innocent."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from actors.requests import FinishReason, GenerateRequest, RunOutput
from deploy.runs import merge
from tests.tiny import EOS_ID

PROMPT = [70, 71, 72, 73] * 8
BASE: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
GREEDY = {**BASE, "temperature": 0.0}

# Changes of a field and others, the answers of the base and of the changed request, and K.
Check = Callable[[RunOutput, RunOutput, int], bool]


def _is_greedy(base: RunOutput, got: RunOutput, k: int) -> bool:
    return got.token_ids != base.token_ids


# Field -> (values, the request they change, what must hold).
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], Check]] = {
    "max_tokens": (
        {"max_tokens": 3},
        BASE,
        lambda base, got, k: (
            got.token_ids == base.token_ids[:3] and got.finish_reason is FinishReason.LENGTH
        ),
    ),
    # Every token ends the answer, once it may.
    "min_tokens": (
        {"min_tokens": 6},
        {**BASE, "stop_token_ids": tuple(range(0, 256, 2))},
        lambda base, got, k: (
            len(base.token_ids) < 6 <= len(got.token_ids)
            and got.finish_reason is FinishReason.STOP
            and all(token % 2 for token in got.token_ids[:5])
        ),
    ),
    "temperature": ({"temperature": 0.0}, BASE, _is_greedy),
    "top_k": ({"top_k": 1}, BASE, _is_greedy),
    "top_p": ({"top_p": 1e-9}, BASE, _is_greedy),
    "min_p": ({"min_p": 1.0}, BASE, _is_greedy),
    "seed": ({"seed": 6}, BASE, lambda base, got, k: got.token_ids != base.token_ids),
    "stop_token_ids": (
        {"stop_token_ids": tuple(range(1, 256, 2))},
        BASE,
        lambda base, got, k: (
            got.token_ids == base.token_ids[: len(got.token_ids)]
            and got.finish_reason is FinishReason.STOP
            and got.stop_reason == got.token_ids[-1]
            and [token % 2 for token in got.token_ids] == [0] * (len(got.token_ids) - 1) + [1]
        ),
    ),
    "num_logprobs": (
        {"num_logprobs": 2},
        BASE,
        lambda base, got, k: (
            base.logprobs is None
            and got.token_ids == base.token_ids
            and [entry.token_id for entry in got.logprobs or ()] == list(base.token_ids)
            and all(len(entry.top) == 2 for entry in got.logprobs or ())
        ),
    ),
    "speculation_enabled": (
        {"speculation_enabled": False},
        GREEDY,
        lambda base, got, k: (
            got.token_ids == base.token_ids
            and (base.speculation.num_drafts > 0) == (k > 0)
            and got.speculation.num_drafts == 0
        ),
    ),
    "num_speculative_tokens": (
        {"num_speculative_tokens": 1},
        GREEDY,
        lambda base, got, k: (
            got.token_ids == base.token_ids
            and got.speculation.num_draft_tokens == got.speculation.num_drafts
            and (k == 0 or base.speculation.num_draft_tokens > base.speculation.num_drafts)
        ),
    ),
    "cache_salt": (
        {"cache_salt": "mine"},
        BASE,
        lambda base, got, k: (
            got.token_ids == base.token_ids and got.num_cached_tokens < base.num_cached_tokens
        ),
    ),
}
# Of text, and of what ends it: `check_text` below.
TEXT_FIELDS = {
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
}
# No way to sample. That of earlier output is tested with decoders that look at it
# (tests/unit/deploy/test_recovery_text.py).
APART = {"request_id", "prompt_token_ids", "num_prior_output_tokens"}


def check_every_field(engine: Any, k: int, plain: dict[str, RunOutput] | None = None) -> Any:
    """All of the above on an engine with K drafts; its answers, for the next engine to equal."""
    names = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert set(FIELDS) | TEXT_FIELDS | APART == names, "a field without a test"
    innocent = ask(engine, [GREEDY])[0]
    answers = {"": innocent}
    for name, (values, base, holds) in FIELDS.items():
        without = ask(engine, [base])[0]
        alone = ask(engine, [{**base, **values}])[0]
        assert holds(without, alone, k), (name, without, alone)
        beside = ask(engine, [GREEDY, {**base, **values}, GREEDY])
        same = [run.token_ids == innocent.token_ids for run in (beside[0], beside[2])]
        assert same == [True, True], f"{name} changed the answers beside it"
        assert (beside[1].token_ids, beside[1].logprobs) == (alone.token_ids, alone.logprobs)
        answers[name] = alone
    greedy = {name: answers[name].token_ids for name in ("", "temperature", "top_k", "top_p")}
    assert len({*greedy.values(), answers["min_p"].token_ids}) == 1, greedy
    answers |= check_text(engine)
    if plain is not None:
        for name, run in answers.items():
            assert run.token_ids == plain[name].token_ids, name
            assert (run.text, run.stop_reason) == (plain[name].text, plain[name].stop_reason), name
    return answers


def check_same_answers(engine: Any, plain: dict[str, RunOutput]) -> None:
    """Every field's answer, of all requests at once, is that of `plain`: `check_every_field` of
    another engine."""
    names = ["", *FIELDS]
    requests = [GREEDY, *({**base, **values} for values, base, _ in FIELDS.values())]
    for name, run in zip(names, ask(engine, requests), strict=True):
        assert (run.token_ids, run.text) == (plain[name].token_ids, plain[name].text), name
        ours, theirs = run.logprobs or (), plain[name].logprobs or ()
        # Sums over ranks differ in their last bits.
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(ours, theirs, strict=True))


def check_text(engine: Any) -> dict[str, RunOutput]:
    """Stop strings, the end of sequence and special tokens."""
    answers = {}
    base = ask(engine, [BASE])[0]
    stop = next(char for char in base.text[4:] if char not in base.text[:4])
    before = base.text.partition(stop)[0]
    stopped, included, innocent = ask(
        engine,
        [
            {**BASE, "stop": ("never so", stop)},
            {**BASE, "stop": (stop,), "include_stop_str_in_output": True},
            BASE,
        ],
    )
    assert (stopped.text, stopped.stop_reason, innocent.text) == (before, stop, base.text)
    assert included.text == before + stop and included.token_ids == stopped.token_ids
    answers |= {"stop": stopped, "include_stop_str_in_output": included}

    # Hot enough that one of some seeds ends by itself before the limit.
    hot = {**BASE, "temperature": 2.0, "max_tokens": 60, "ignore_eos": False}
    seeds = range(16)
    ended = ask(engine, [{**hot, "seed": seed} for seed in seeds])
    seed = next(s for s in seeds if ended[s].finish_reason is FinishReason.STOP)
    assert ended[seed].token_ids[-1] == EOS_ID and "<|eos|>" not in ended[seed].text
    on, shown = ask(
        engine,
        [
            {**hot, "seed": seed, "ignore_eos": True},
            {**hot, "seed": seed, "ignore_eos": True, "skip_special_tokens": False},
        ],
    )
    assert len(on.token_ids) == len(shown.token_ids) == 60
    assert on.token_ids[: len(ended[seed].token_ids)] == ended[seed].token_ids
    assert "<|eos|>" in shown.text and "<|eos|>" not in on.text
    return answers | {"ignore_eos": on, "skip_special_tokens": shown}


def ask(engine: Any, requests: list[dict[str, Any]]) -> list[RunOutput]:
    """Whole answers to requests that run at once."""
    counter = iter(range(10**6))

    async def one(fields: dict[str, Any]) -> RunOutput:
        request = GenerateRequest(f"f-{next(counter)}", PROMPT, **fields)
        runs = [run async for run in engine.generate(request)]
        assert runs[-1].error is None, runs[-1].error
        return merge(runs)

    async def everyone() -> list[RunOutput]:
        return list(await asyncio.gather(*map(one, requests)))

    return asyncio.run(everyone())
