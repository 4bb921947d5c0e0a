from __future__ import annotations

import json

import pytest

from actors.errors import InvalidRequest
from deploy.openai.parsing import parse
from deploy.openai.protocol import ChatCompletionRequest, CompletionRequest
from deploy.text import Text

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatCompletionRequest:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def completion(**fields: object) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("store", True),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("prompt_logprobs", 1),
    ],
)
def test_a_field_we_do_not_have_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert caught.value.code == "unsupported_parameter"
    assert field in caught.value.message and "not supported" in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("best_of", 2), ("suffix", "x"), ("n", 3)]
)
def test_a_field_that_plain_completions_lack_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


def test_neutral_values_of_those_fields_are_accepted() -> None:
    body = chat(
        n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, logit_bias={},
        presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, store=False, user="u",
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, modalities=["text"],
        logprobs=None, stop=None, seed=None, max_tokens=None,
    )  # fmt: skip
    assert body.num_logprobs == -1
    completion(echo=False, best_of=1, suffix="", n=1)


def test_an_unknown_field_is_named_even_when_more_is_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"mesages": [], "temperature": 9}', ChatCompletionRequest)
    assert caught.value.param == "mesages"
    assert caught.value.code == "unknown_parameter"


def test_an_unknown_field_inside_speculation_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(speculation={"enable": False})
    assert caught.value.param == "speculation.enable"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 1}, "stop"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"temperature": True}, "temperature"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
    ],
)
def test_a_wrong_value_names_its_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw, ChatCompletionRequest)
    assert caught.value.code == "invalid_json"


def test_messages_are_required() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(b"{}", ChatCompletionRequest)
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_one_prompt_in_every_public_form(prompt: object, single: object) -> None:
    expected = Text(single) if isinstance(single, str) else single
    assert completion(prompt=prompt).to_prompt() == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], []])
def test_several_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt).to_prompt()
    assert caught.value.param == "prompt"


def test_logprobs_settings_of_both_endpoints() -> None:
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert chat(logprobs=False).num_logprobs == -1
    assert completion(logprobs=0).num_logprobs == 0
    assert completion().num_logprobs == -1
    assert completion().limit == 16 and chat().limit is None
