from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.errors import InvalidRequest, PromptTooLong, QueueFull
from deploy.client import Client
from deploy.failures import RequestAborted
from tests.tiny import write_tiny_config
from tests.unit.deploy.fakes import ScriptedEngine


@pytest.fixture
def client(engine: ScriptedEngine, tmp_path: Path) -> Client:
    engine.served["tokenizer"] = str(write_tiny_config(tmp_path / "m"))
    return Client(engine=engine)


def test_a_whole_answer_is_one_run(client: Client, engine: ScriptedEngine) -> None:
    made = client.generate("hi", max_tokens=5, temperature=0, stop=["x"])
    assert (made.text, made.finish_reason) == ("Hello", "length")
    assert bytes(made.token_ids) == b"Hello" and len(made.accepted) == 5
    assert made.num_output_tokens == 5 and made.speculation.num_drafts == 2
    assert engine.requests[0].stop == ("x",) and engine.requests[0].seed is not None


def test_prompts_are_text_token_ids_or_conversations(
    client: Client, engine: ScriptedEngine
) -> None:
    client.generate([1, 2, 3], max_tokens=2, stop="x")
    assert engine.requests[0].prompt_token_ids == [1, 2, 3]
    engine.prompt_len = None
    client.generate(messages=[{"role": "user", "content": "hi"}])
    assert len(engine.requests[1].prompt_token_ids) == 5


def test_an_array_is_a_prompt_that_another_engine_can_go_on_with(
    client: Client, engine: ScriptedEngine
) -> None:
    client.generate(np.array([1, 2, 3]), max_tokens=2)
    assert engine.requests[0].prompt_token_ids == [1, 2, 3]
    assert {type(token) for token in engine.requests[0].prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": np.ones((2, 2))}, "prompt[0]"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
        ({"prompt": "hi", "stop": 5}, "stop"),
        ({"prompt": "hi", "stop": ["\ud83d"]}, "stop"),
        ({"prompt": "hi", "top_k": 10**20}, "top_k"),
        ({"prompt": "hi", "cache_salt": 5}, "cache_salt"),
    ],
)
def test_what_no_engine_takes_is_named(
    client: Client, engine: ScriptedEngine, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(**given)
    assert caught.value.param == param and not engine.requests


def test_leaving_a_stream_ends_the_request(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.01
    runs = client.stream("hi", max_tokens=11)
    assert next(runs).text == "Hel"
    runs.close()
    assert engine.ended.wait(2)


def test_closing_the_client_cuts_its_streams(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.05
    runs = client.stream("hi")
    next(runs)
    client.close()
    with pytest.raises(ConnectionError, match="closed"):
        list(runs)
    assert engine.ended.is_set()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 5}, "max_token"),
        ({"temperature": "hot"}, "temperature.*hot"),
        ({"top_p": 0}, "top_p.*0"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"max_tokens": 500}, "max_tokens is 500.*128"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens.*9.*4"),
    ],
)
def test_a_wrong_field_is_named(client: Client, fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.generate("hi", **fields)


def test_what_cannot_be_answered_is_an_error(client: Client, engine: ScriptedEngine) -> None:
    with pytest.raises(ValueError, match="either"):
        client.generate()
    with pytest.raises(InvalidRequest, match="rolle"):
        client.generate(messages=[{"rolle": "user", "content": "hi"}])
    with pytest.raises(PromptTooLong):
        client.generate("x" * 300)
    engine.failures = {0: (0, QueueFull(1, 1, 1))}
    with pytest.raises(QueueFull):
        client.generate("hi")
    engine.error = "its own trouble"
    with pytest.raises(RequestAborted, match="its own trouble"):
        client.generate("hi")
