"""One class of client over three ways: the same answers, the same errors."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actors.errors import EngineDead, EngineError, InvalidRequest, QueueFull, RequestError
from actors.requests import FinishReason, RunOutput
from deploy.client import AsyncClient, Client
from deploy.failures import RequestAborted, Unauthenticated, is_busy
from deploy.runs import merge
from tests.tiny import write_tiny_config
from tests.unit.deploy.fakes import ScriptedEngine
from tests.unit.deploy.ways import opening

WAYS = ("handle", "http", "grpc")
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_tiny_config(tmp_path_factory.mktemp("m"))
    template = folder / "chat_template.jinja"
    plain = template.read_text()
    # One that uses a turn's name.
    named = plain.replace(
        "+ message['content']", "+ message.name | default('') + message['content']"
    )
    assert named != plain
    template.write_text(named)
    return str(folder)


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, engine: ScriptedEngine, tokenizer: str) -> Iterator:
    engine.served["tokenizer"] = tokenizer
    with Client.over(opening(request.param, engine)) as made:
        yield made


def comparable(run: RunOutput) -> RunOutput:
    return dataclasses.replace(run, request_id="")


def test_every_way_gives_the_same_runs(engine: ScriptedEngine, tokenizer: str) -> None:
    engine.served["tokenizer"] = tokenizer
    engine.script = list("H\u00e9llo \u4e16\U0001f99c d".encode())
    seen = []
    for way in WAYS:
        engine.prompt_len = None
        with Client.over(opening(way, engine)) as client:
            runs = list(client.stream("hi", num_logprobs=2, temperature=0, max_tokens=14))
            assert comparable(client.generate("hi", num_logprobs=2, max_tokens=14)) == comparable(
                merge(runs)
            )
        seen.append((comparable(merge(runs)), [run.text for run in runs if run.token_ids]))
    assert seen[0] == seen[1] == seen[2] and len(seen[0][1]) > 3
    assert seen[0][0].speculation.num_accepted_tokens > 0


def test_every_field_reaches_the_engine_by_every_way(client: Client, engine: Any) -> None:
    fields = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 40, "top_p": 0.9,
        "min_p": 0.1, "seed": -3, "stop": ("a", "b"), "stop_token_ids": (5, 6),
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "num_logprobs": 3, "speculation_enabled": False, "num_speculative_tokens": 2,
        "cache_salt": "s",
    }  # fmt: skip
    client.generate([1, 2, 3], **fields)
    taken = dataclasses.asdict(engine.requests[-1])
    assert list(taken.pop("prompt_token_ids")) == [1, 2, 3]
    del taken["request_id"], taken["num_prior_output_tokens"]
    assert taken == fields


def test_a_prompt_is_text_token_ids_or_turns(client: Client, engine: ScriptedEngine) -> None:
    assert client.generate("hi").text == "Hello world"
    text = engine.requests[-1]
    engine.prompt_len = None
    client.generate(text.prompt_token_ids)
    assert list(engine.requests[-1].prompt_token_ids) == list(text.prompt_token_ids)
    # To the end of the context by every way, though HTTP's own default is 16.
    assert (engine.requests[-1].max_tokens or 126) == 126
    engine.prompt_len = None
    assert client.chat(HI).text == "Hello world"
    assert len(engine.requests[-1].prompt_token_ids) == 5
    engine.prompt_len = None
    client.chat([{"role": "user", "content": "hi", "name": "Ann"}])
    assert len(engine.requests[-1].prompt_token_ids) == 5 + len("Ann")
    engine.prompt_len = None
    runs = list(client.chat_stream(HI, add_generation_prompt=False))
    assert "".join(run.text for run in runs) == "Hello world"
    assert len(engine.requests[-1].prompt_token_ids) == 4


def test_leaving_a_stream_ends_the_request(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.02
    with client.stream("hi", max_tokens=11) as runs:
        assert next(runs).text == "Hel"
    assert engine.ended.wait(5)
    engine.ended.clear()
    for _ in client.stream("hi", max_tokens=11):
        break
    assert engine.ended.wait(5)


def test_cancel_ends_a_request_that_another_thread_waits_for(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.delay_s = 60
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            client.generate("hi", request_id="mine")
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert engine.began.wait(5)
    assert not client.cancel("another")
    assert client.cancel("mine")
    asking.join(10)
    assert isinstance(failures[0], RequestAborted) and "mine" in str(failures[0])
    assert engine.ended.wait(5)


def test_closing_the_client_cuts_its_streams(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 60
    runs = client.stream("hi")
    client.close()
    with pytest.raises(RequestAborted):
        list(runs)
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("hi")


def test_a_batch_keeps_its_order_and_its_width(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.001
    prompts = [[1, n, 3] for n in range(10)]
    runs = client.generate_batch(prompts, max_tokens=4, max_in_flight=3, progress=False)
    assert [run.text for run in runs] == ["Hell"] * 10
    assert engine.most_at_once == 3
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate_batch(prompts, temperature=-1, progress=False)
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        client.generate_batch(prompts, max_in_flight=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 5}, "max_token"),
        ({"temperature": -1}, "temperature.*-1"),
        ({"top_p": 0}, "top_p.*0"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"max_tokens": 500}, "max_tokens is 500.*128"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens.*9.*4"),
    ],
)
def test_a_wrong_field_is_named(client: Client, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.generate("hi", **fields)


def test_what_cannot_be_answered_is_an_error(client: Client, engine: ScriptedEngine) -> None:
    with pytest.raises(InvalidRequest, match="rolle"):
        client.chat([{"rolle": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="300 tokens"):
        client.generate([1] * 300)
    engine.failures = {0: (0, QueueFull(1, 1, 1))}
    with pytest.raises(EngineError, match="1 requests are waiting") as refused:
        client.generate("hi")
    assert is_busy(refused.value)
    engine.error = "its own trouble"
    with pytest.raises(RequestAborted, match="its own trouble"):
        client.generate("hi")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"messages": [5]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, r"content"),
        ({"prompt": "hi", "stop": ["\ud83d"]}, "stop"),
        ({"prompt": "hi", "top_k": 10**20}, "top_k"),
        ({"prompt": "hi", "seed": 2**80}, "seed"),
        ({"prompt": "hi", "cache_salt": 5}, "cache_salt"),
    ],
)
def test_what_no_engine_takes_is_named_by_every_way(
    client: Client, engine: ScriptedEngine, call: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        if "messages" in call:
            client.chat(**call)
        else:
            client.generate(**call)
    assert not engine.requests


def test_an_array_is_a_prompt(client: Client, engine: ScriptedEngine) -> None:
    client.generate(np.array([1, 2, 3]), max_tokens=2)
    assert list(engine.requests[0].prompt_token_ids) == [1, 2, 3]
    assert {type(token) for token in engine.requests[0].prompt_token_ids} == {int}


def test_what_cannot_be_reached_is_said_at_once() -> None:
    for target in ("http://127.0.0.1:9", "grpc://127.0.0.1:9"):
        with pytest.raises(EngineDead, match=r"127\.0\.0\.1:9|cannot be reached"):
            Client(target)
    with pytest.raises(ValueError, match="ftp://x"):
        Client("ftp://x")


def test_the_client_for_asyncio(engine: ScriptedEngine, tokenizer: str) -> None:
    engine.served["tokenizer"] = tokenizer
    engine.delay_s = 0.01

    async def go() -> None:
        async with AsyncClient.over(opening("handle", engine)) as client:
            assert (await client.generate("hi", max_tokens=5)).finish_reason == FinishReason.LENGTH
            engine.prompt_len = None
            several = await asyncio.gather(*(client.chat(HI, seed=n) for n in range(4)))
            assert [run.text for run in several] == ["Hello world"] * 4
            engine.prompt_len = None
            reading = client.stream("hi", request_id="r")
            assert (await anext(reading)).text == "Hel"
            with pytest.raises(InvalidRequest, match="in progress"):
                await client.generate("hi", request_id="r")
            assert client.cancel("r")  # between two runs
            with pytest.raises(RequestAborted):
                await anext(reading)
            assert not client.cancel("r")
            # The reader's own cancellation is the reader's.
            waiting = asyncio.ensure_future(client.generate("hi"))
            await asyncio.sleep(0.005)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(go())


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_key_is_asked_for_where_the_server_has_keys(
    way: str, engine: ScriptedEngine, tokenizer: str
) -> None:
    engine.served["tokenizer"] = tokenizer
    for key in (None, "wrong"):
        with (
            Client.over(opening(way, engine, ("one", "two"), key)) as client,
            pytest.raises(Unauthenticated, match="API key"),
        ):
            client.generate("hi")
    assert not engine.requests
    with Client.over(opening(way, engine, ("one", "two"), "two")) as client:
        assert client.generate("hi").text == "Hello world"
        assert client.describe()["lossless"] is True


def test_the_blocking_client_works_in_a_running_event_loop(client: Client) -> None:
    async def notebook() -> str:
        return client.generate("hi").text

    assert asyncio.run(notebook()) == "Hello world"
