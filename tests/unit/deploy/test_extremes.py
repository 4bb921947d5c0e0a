"""Every field of every route, and of the engine's request, with values nobody should send.

The fields come from the models themselves: a new one is covered without a line here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

from actors.checks import RULES, check_prompt, check_sampling
from actors.errors import InvalidRequest, RequestError
from actors.requests import GenerateRequest
from actors.steps.messages import StepPlan
from actors.verifier.finish import FinishRules
from actors.verifier.request import Request
from deploy.openai import unsupported
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deploy.text import Conversation, Text, TextProcessor, messages_of
from tests.unit.deploy.conftest import SERVED, Connect
from tests.unit.deploy.fakes import ScriptedEngine

# As JSON writes them: some have no Python value that `json.dumps` would write so.
NUMBERS = (
    "0", "-0.0", "1", "-1", "2", "2.0", "0.5", "1e-320", "1e20", "-1e20", "1e400", "-1e400", "NaN",
    "Infinity", "-Infinity", str(2**31), str(2**63), str(-(2**63) - 1), "1" + 400 * "0",
    "1" + 5000 * "0",
)  # fmt: skip
WORDS = ('""', '"x"', '"5"', '"\\ud83d"', '"a\\udc00b"', '"\\u0000"', json.dumps("long" * 5000))
OTHERS = (
    "null", "true", "false", "[]", "{}", "[[]]", "[[[]]]", "[null]", "[true]", "[1e20]", "[1.5]",
    '["x", 1]', '[1, "x"]', "[-1]", '["\\ud83d"]', '[{"x": "\\udfff"}]', '{"\\ud83d": 1}',
    "[" * 200 + "]" * 200, '{"type": "text"}', "[" + "7," * 20000 + '"x"]',
)  # fmt: skip
JSON_VALUES = (*NUMBERS, *WORDS, *OTHERS)
MESSAGES = '[{"role": "user", "content": "hi"}]'
ROUTES: dict[str, tuple[type[BaseModel], dict[str, str]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": '"hi"'}),
    "/tokenize": (TokenizeRequest, {"prompt": '"hi"'}),
    "/detokenize": (DetokenizeRequest, {"tokens": "[1]"}),
}


def fields_of(model: type[BaseModel]) -> dict[str, str]:
    """A body's field, and how to write it: `%s` stands for the value."""
    found = dict.fromkeys([*model.model_fields, *model.table, "unknown"], "%s")  # type: ignore[attr-defined]
    for name, field in model.model_fields.items():
        for member in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(member, type) and issubclass(member, BaseModel):
                found |= {f"{name}.{inner}": f'{{"{inner}": %s}}' for inner in member.model_fields}
    if "messages" in model.model_fields:
        for inner in ("role", "content", "name", "tool_calls", "reasoning_content", "unknown"):
            message = {"role": '"user"', "content": '"hi"', inner: "%s"}
            found[f"messages[0].{inner}"] = "[" + _object(message) + "]"
        for inner in ("type", "text", "unknown"):
            part = {"type": '"text"', "text": '"hi"', inner: "%s"}
            found[f"messages[0].content[0].{inner}"] = (
                '[{"role": "user", "content": [' + _object(part) + "]}]"
            )
    return found


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def plan_of(request: GenerateRequest) -> None:
    """Tell the workers of the request, as the engine would."""
    check_prompt(request, SERVED)
    check_sampling(request, SERVED)
    rules = FinishRules(5, request.min_tokens, frozenset({1}), frozenset(request.stop_token_ids))
    admitted = Request(1, request, rules, None, print, 0.0)
    plan = StepPlan(0, 0, admissions=(admitted.slot_params(),))
    assert StepPlan.unpack(plan.pack()).admissions == plan.admissions


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_a_client_sends_is_a_500(
    connect: Connect, engine: ScriptedEngine, path: str
) -> None:
    model, base = ROUTES[path]

    async def go() -> list[tuple[str, str, httpx.Response]]:
        made = []
        async with connect() as client:
            for field, written in fields_of(model).items():
                top = field.partition(".")[0].partition("[")[0]
                for value in JSON_VALUES:
                    body = _object({**base, top: written % value})
                    made.append((field, value, await client.post(path, content=body)))
        return made

    for field, value, answer in asyncio.run(go()):
        case = f"{field}: {value[:60]} -> {answer.status_code} {answer.text[:300]}"
        assert answer.status_code in (200, 400, 404), case
        if answer.status_code != 200:
            error = answer.json()["error"]
            top = field.partition(".")[0].partition("[")[0]
            # An integer of thousands of digits is no JSON that Python reads.
            if error["code"] != "invalid_json" or len(value) < 4300:
                named = str(error["param"])
                assert named.partition(".")[0].partition("[")[0] in (top, "prompt"), case
                assert named in error["message"] or "prompt" in error["message"], case
            assert len(error["message"]) <= 2000
    for request in engine.requests:
        plan_of(request)


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.0, 1e-320, 1e20, -1e20, float("nan"), float("inf"), 2**31, 2**63,
    -(2**63), 10**400, 10**5000, "", "x", "\ud83d", "y" * 5000, (), [], {}, set(), object(), print,
    b"x", (1,), (True,), (1.5,), ("",), ("\ud83d",), ("x" * 500,), ("x",) * 17, (2**70,), (-1,),
    [[1]], tuple(range(200)) * 10, np.int64(5), np.float32(0.5), np.array([1, 2]), np.ones(3),
    np.ones((2, 2), dtype=np.int64),
)  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GenerateRequest)])
def test_what_an_engine_takes_fits_its_plan(field: str) -> None:
    taken = 0
    for value in VALUES:
        request = dataclasses.replace(GenerateRequest("a", (1, 2), seed=1), **{field: value})
        try:
            plan_of(request)
            taken += 1
        except RequestError as error:
            named = "prompt" if field == "prompt_token_ids" else field
            assert str(error.param).partition("[")[0] in (named, "max_tokens", "min_tokens")
            error.message.encode()
    assert taken, f"no value of {field} was taken: the table has none that is right"


def test_every_field_has_a_rule() -> None:
    fields = {f.name for f in dataclasses.fields(GenerateRequest)} - {"prompt_token_ids"}
    assert {field for field, _, _ in RULES} == fields


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("top_k", 10**20, f"'top_k' is {10**20}.*at most 2147483647"),
        ("top_k", 2.0, "'top_k' is 2.0.*whole number"),
        ("min_tokens", 129, "'min_tokens' is 129.*max_model_len, 128"),
        ("temperature", 101.0, "'temperature' is 101.0.*at most 100"),
        ("ignore_eos", 1, "'ignore_eos' is 1.*True or False"),
        ("stop", "abc", "'stop' is 'abc'.*tuple"),
        ("stop", ("a" * 129,), "at most as many characters as max_model_len, 128"),
        ("stop_token_ids", (1,) * 1025, "at most 1024 ids"),
        ("stop_token_ids", (1, "x"), r"'stop_token_ids\[1\]' is 'x'"),
        ("cache_salt", "\ud83d", "'cache_salt' is '.ud83d'"),
        pytest.param("seed", 10**5000, "'seed' is a int that is too long", id="digits"),
    ],
)
def test_a_bound_is_named_with_field_and_value(field: str, value: Any, words: str) -> None:
    request = dataclasses.replace(GenerateRequest("a", (1, 2)), **{field: value})
    with pytest.raises(InvalidRequest, match=words):
        check_sampling(request, SERVED)


def test_text_that_is_none_is_refused_whoever_calls(text: TextProcessor) -> None:
    turns = [{"role": "user", "content": "\ud83d"}]
    for prompt in (Text("\ud83d"), Conversation(messages_of(turns))):
        with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
            text.ids_of(prompt)


def test_neutral_fields_are_no_fields_of_ours() -> None:
    """A name in both tables would be dropped before it is read."""
    for model in (ChatCompletionRequest, CompletionRequest):
        assert not model.table.keys() & model.model_fields.keys()
    assert unsupported.CHAT.keys() >= {"n", "tools"}
