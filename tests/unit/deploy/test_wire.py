"""What common clients, browsers and proxies ask of the wire."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest

from actors.errors import QueueFull
from actors.requests import FinishReason, RunOutput, TokenLogprob
from deploy.app import Ingress
from deploy.openai.answers import Answer, ChatAnswer, TextAnswer
from deploy.openai.ingress import max_body_bytes
from deploy.openai.parsing import parse
from deploy.openai.protocol import CompletionRequest, TokenizeRequest
from deploy.openai.service import ServiceOptions
from deploy.openai.streaming import KEEPALIVE, Written, event, events, with_pauses
from deploy.text import TextProcessor
from specconfig.app_args import AppArgs
from specconfig.errors import ConfigError
from tests.tiny import write_tiny_config
from tests.unit.deploy.conftest import SERVED, Connect
from tests.unit.deploy.fakes import ScriptedEngine, ScriptedHandle, sse

T = TypeVar("T")
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 64}
PAGE = "https://app.example"
# Where `str.splitlines`, and so httpx, sees the end of a line.
LINE_ENDS = "a\nb\rc\x0bd\x0ce\x1cf\x1dg\x1eh\x85i\u2028j\u2029k"


def asked(connect: Connect, method: str, path: str, **kwargs: Any) -> httpx.Response:
    how = {k: kwargs.pop(k) for k in ("api_keys", "allowed_origins", "prefix") if k in kwargs}

    async def go() -> httpx.Response:
        async with connect(**how) as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(go())


def with_sdk(connect: Connect, use: Any) -> Any:
    """What `use` gets from the OpenAI client."""

    async def go() -> Any:
        async with connect() as http:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
            return await use(client)

    return asyncio.run(go())


# --- bodies --------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_not_read(connect: Connect) -> None:
    limit = max_body_bytes(SERVED.max_model_len)

    async def go() -> list[httpx.Response]:
        read = 0

        async def parts() -> AsyncGenerator[bytes]:
            nonlocal read
            for _ in range(200):
                read += 2**14
                yield b" " * 2**14

        async with connect() as client:
            said = await client.post(
                "/v1/completions", content=parts(), headers={"Content-Length": str(limit + 1)}
            )
            assert read <= 2**14, "the body was read although its length said enough"
            grown = await client.post("/v1/completions", content=parts())
            assert read <= limit + 2**15, "reading went on after the limit"
            odd = await client.post(
                "/v1/completions", content=parts(), headers={"Content-Length": "9" * 5000}
            )
        return [said, grown, odd]

    for answer in asyncio.run(go()):
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["code"] == "request_too_large" and str(limit) in error["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    connect: Connect, text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(text, "encode", encode)
    words = "word " * 40_000
    turns = [{"role": "user", "content": words}]
    for path, body in (
        ("/v1/completions", {**PLAIN, "prompt": words}),
        ("/v1/chat/completions", {**CHAT, "messages": turns}),
    ):
        answer = asked(connect, "POST", path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "at least 15" in error["message"] and "128" in error["message"]


def test_a_long_list_ends_at_its_first_fault(connect: Connect) -> None:
    ids = [7] * 20_000
    for path, field, value in (
        ("/v1/completions", "prompt", [*ids, "x"]),
        ("/v1/completions", "prompt", [[*ids, "x"]]),
        ("/v1/completions", "stop_token_ids", [*ids, 1.5]),
        ("/detokenize", "tokens", [*ids, None]),
    ):
        answer = asked(connect, "POST", path, json={"prompt": "hi", field: value})
        if path == "/detokenize":
            answer = asked(connect, "POST", path, json={field: value})
        place = "[0][20000]" if field == "prompt" and value[0] == [*ids, "x"] else "[20000]"
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field + place)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "\\ud83d"}', "prompt"),
        ("/v1/completions", b'{"prompt": ["a\\uDC00"]}', "prompt[0]"),
        ("/v1/completions", b'{"prompt": "a", "stop": ["b", "\\ud83d"]}', "stop[1]"),
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud83d"}', "model"),
        ("/v1/completions", b'{"prompt": "a", "\\ud83d": 1}', "\\ud83d"),
        ("/tokenize", b'{"prompt": "\\ud83d"}', "prompt"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
         "messages[0].content"),
        ("/v1/chat/completions",
         b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]}',
         "messages[0].content[0].text"),
        ("/v1/chat/completions", b'{"messages": [], "chat_template_kwargs": {"a": ["\\ud83d"]}}',
         "chat_template_kwargs.a[0]"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_by_name(
    connect: Connect, path: str, body: bytes, param: str
) -> None:
    answer = asked(connect, "POST", path, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"] and "surrogate" in error["message"]


def test_both_halves_are_a_character(connect: Connect) -> None:
    answer = asked(connect, "POST", "/tokenize", content=b'{"prompt": "\\ud83e\\udd9c"}')
    assert answer.json()["tokens"] == list("🦜".encode())


def test_odd_bytes_in_paths_and_headers(connect: Connect, engine: ScriptedEngine) -> None:
    for path in (
        "/v1/models/%ED%A0%BD",
        "/v1/models/%FF",
        "/v1/models/" + "x" * 5000,
        "/%ED%A0%BD",
    ):
        answer = asked(connect, "GET", path)
        assert answer.status_code == 404 and len(answer.json()["error"]["message"]) <= 2000
    engine.failures = {n: (0, RuntimeError("bug")) for n in range(9)}
    for given in (b"\xff\xed\xa0\xbd", b"a\tb", b"", b"y" * 5000):
        answer = asked(
            connect, "POST", "/v1/completions", json=PLAIN, headers={"X-Request-Id": given}
        )
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].isascii()
        assert len(answer.json()["error"]["message"]) < 300


# --- our own answers sent back -------------------------------------------------------------------


def test_an_answer_is_taken_back_as_the_sdk_dumps_it(
    connect: Connect, engine: ScriptedEngine
) -> None:
    async def two_turns(client: openai.AsyncOpenAI) -> None:
        turns: list[Any] = list(CHAT["messages"])
        for dump in (lambda m: m, lambda m: m.model_dump(), lambda m: m.to_dict()):
            made = await client.chat.completions.create(model="tiny", messages=turns)
            turns += [dump(made.choices[0].message), {"role": "user", "content": "go on"}]
            engine.prompt_len = None
        assert "accepted_prediction_tokens" not in made.to_json()

    with_sdk(connect, two_turns)
    assert len(engine.requests) == 3


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_what_is_null_or_empty_asks_for_nothing(connect: Connect, empty: object) -> None:
    names = ("annotations", "audio", "function_call", "tool_calls", "refusal", "reasoning_content",
             "reasoning", "name", "parsed", "provider_specific_fields")  # fmt: skip
    message = {**dict.fromkeys(names, empty), "role": "assistant", "content": "x"}
    part = {"type": "text", "text": "y", "annotations": empty}
    turns = [message, {"role": "user", "content": [part]}]
    answer = asked(connect, "POST", "/v1/chat/completions", json={**CHAT, "messages": turns})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tool_calls", [{"id": "1"}], "unsupported_parameter"),
        ("function_call", {"name": "f"}, "unsupported_parameter"),
        ("audio", {"id": "1"}, "unsupported_parameter"),
        ("refusal", "no", "unsupported_parameter"),
        ("reasoning_content", "because", "unsupported_parameter"),
        ("annotations", [{"type": "url_citation"}], "unsupported_parameter"),
        ("contents", "x", "unknown_parameter"),
    ],
)
def test_what_is_not_empty_is_refused_by_name(
    connect: Connect, field: str, value: object, code: str
) -> None:
    turns = [{"role": "assistant", "content": "x", field: value}]
    answer = asked(connect, "POST", "/v1/chat/completions", json={**CHAT, "messages": turns})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        f"messages[0].{field}",
        code,
    )


# --- events --------------------------------------------------------------------------------------


def test_an_event_is_one_line_for_every_client(connect: Connect, engine: ScriptedEngine) -> None:
    engine.script = list(LINE_ENDS.encode())
    assert len(event({"text": LINE_ENDS}).splitlines()) == 2
    assert event({"a": [None, "\u00e9"]}) == 'data: {"a":[null,"\u00e9"]}\n\n'
    assert json.loads(event({"text": LINE_ENDS})[6:]) == {"text": LINE_ENDS}

    async def lines() -> list[str]:
        async with (
            connect() as client,
            client.stream("POST", "/v1/completions", json={**PLAIN, "stream": True}) as answer,
        ):
            return [line async for line in answer.aiter_lines() if line]

    assert all(line.startswith("data: ") for line in asyncio.run(lines()))

    async def text(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    engine.prompt_len = None
    assert with_sdk(connect, text) == LINE_ENDS


@pytest.mark.parametrize("kind", [ChatAnswer, TextAnswer])
@pytest.mark.parametrize(
    ("options", "is_written_once"),
    [
        ({}, True),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"continuous_usage_stats": True, "include_usage": True}}, False),
        ({"return_token_ids": True}, False),
        ({"logprobs": 1}, False),
    ],
)
def test_an_event_written_around_its_text_is_the_chunk_to_the_byte(
    text: TextProcessor, kind: type[Answer], options: dict[str, Any], is_written_once: bool
) -> None:
    fields = {"prompt": "hi", "stream": True, **options}
    body = parse(json.dumps(fields).encode(), CompletionRequest)
    # Two, as one may remember what it has said: it knows where the text stands.
    answer, other = (kind('a"\u2028', 0, 'm\\"', body, text.token_bytes) for _ in range(2))
    written = Written(answer)
    runs = [_run(), *map(_run, ["x", '"\\\n\0', LINE_ENDS, "\U0001f99c\u00e9", "text"])]
    runs += [_run("y", finish_reason=FinishReason.STOP)]
    for run in runs:
        if "logprobs" in options:
            entries = tuple(TokenLogprob(i, -0.5, ((i, -0.5),)) for i in run.token_ids)
            run = dataclasses.replace(run, logprobs=entries)
        assert written(run) == "".join(map(event, other.chunks(run)))
    assert (written._around is not None) == is_written_once


async def _in_time(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, 5)


def _run(text: str = "", **fields: Any) -> RunOutput:
    ids = tuple(text.encode())
    return RunOutput("a", ids, text, (False,) * len(ids), None, 2, 0, len(ids), **fields)


@pytest.mark.parametrize("least_tokens", [1, 100])
def test_a_stream_that_waits_says_that_it_lives(text: TextProcessor, least_tokens: int) -> None:
    async def go() -> list[str]:
        queue: asyncio.Queue[RunOutput] = asyncio.Queue()

        async def rest() -> AsyncGenerator[RunOutput]:
            while (run := await queue.get()).finish_reason is None:
                yield run
            yield run

        body = parse(b'{"prompt": "hi", "stream": true}', CompletionRequest)
        answer = TextAnswer("a", 0, "tiny", body, text.token_bytes)
        stream = events(answer, _run(), rest(), "a", least_tokens=least_tokens, keepalive_s=0.001)
        made = [await _in_time(anext(stream)), await _in_time(anext(stream))]
        queue.put_nowait(_run("x"))
        while not made[-1].startswith("data"):
            made.append(await _in_time(anext(stream)))
        made.append(await _in_time(anext(stream)))
        queue.put_nowait(_run("y", finish_reason=FinishReason.STOP))
        return [*made, *[item async for item in stream]]

    made = asyncio.run(go())
    assert made[0] == made[1] == KEEPALIVE
    data = [item for item in made if item != KEEPALIVE]
    assert made.index(data[1]) > made.index(data[0]) + 1, "silence between tokens says so too"
    choices = [json.loads(e)["choices"][0] for e in sse("".join(data))[:-1]]
    assert [choice["text"] for choice in choices] == ["x", "y", ""]


def test_pauses_lose_nothing_and_close_what_they_wrap() -> None:
    closed = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            for number in range(5):
                await asyncio.sleep(0.004)
                yield number
        finally:
            closed.append(True)

    async def go() -> None:
        items = [item async for item in with_pauses(numbers(), 0.001)]
        assert [item for item in items if item is not None] == list(range(5)) and None in items
        assert [item async for item in with_pauses(numbers(), None)] == list(range(5))
        left = with_pauses(numbers(), 0.001)
        assert await anext(left) is None
        await left.aclose()
        assert len(closed) == 3

    asyncio.run(go())


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PLAIN),
                                            ("/v1/chat/completions", CHAT)])  # fmt: skip
def test_a_stream_begins_when_an_engine_has_taken_the_request(
    connect: Connect, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    sent: list[Any] = []

    async def go() -> None:
        engine.free_seat = asyncio.Event()
        coming = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]
        gone = asyncio.Event()

        async def receive() -> Any:
            if coming:
                return coming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if KEEPALIVE.encode() in message.get("body", b""):
                assert sent[0]["status"] == 200, "the headers went out before a token"
                engine.free_seat.set()

        async with connect(ServiceOptions(stream_keepalive_s=0.001)) as client:
            app = client._transport.app  # type: ignore[attr-defined]
            scope = {"type": "http", "method": "POST", "path": path, "headers": [],
                     "query_string": b""}  # fmt: skip
            await _in_time(app(scope, receive, send))

    asyncio.run(go())
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert sse(text.replace(KEEPALIVE, ""))[-1] == "[DONE]" and "Hel" in text
    assert KEEPALIVE in text


def test_a_refusal_stays_a_status_while_streams_have_comments(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.failures = {0: (0, QueueFull(1, 1, 3))}
    answer = asked(connect, "POST", "/v1/completions", json={**PLAIN, "stream": True})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"


# --- prefixes, browsers --------------------------------------------------------------------------


def test_probes_need_no_key_behind_a_prefix(connect: Connect) -> None:
    how = {"api_keys": ("one",), "prefix": "/llm"}
    for path in ("/health", "/metrics"):
        assert asked(connect, "GET", path, **how).status_code == 200
    assert asked(connect, "GET", "/v1/models", **how).status_code == 401
    key = {"Authorization": "Bearer one"}
    assert asked(connect, "GET", "/v1/models/tiny", headers=key, **how).status_code == 200
    answer = asked(connect, "POST", "/v1/completions", json=PLAIN, headers=key, **how)
    assert answer.status_code == 200
    answer = asked(connect, "GET", "/nothing", headers=key, **how)
    assert answer.status_code == 404 and "/llm/nothing" in answer.json()["error"]["message"]


def test_keys_are_bytes(connect: Connect) -> None:
    answer = asked(
        connect, "GET", "/v1/models", api_keys=("schlüssel",),
        headers={"Authorization": "Bearer schlüssel".encode()},
    )  # fmt: skip
    assert answer.status_code == 200


def test_a_page_asks_before_it_shows_its_key(connect: Connect) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    how = {"api_keys": ("one",), "allowed_origins": (PAGE,)}
    answer = asked(connect, "OPTIONS", "/v1/chat/completions", headers=preflight, **how)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    other = {**preflight, "Origin": "https://other.example"}
    answer = asked(connect, "OPTIONS", "/v1/chat/completions", headers=other, **how)
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
    # Off by default.
    answer = asked(connect, "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_a_page_may_read_every_answer(connect: Connect, engine: ScriptedEngine) -> None:
    how = {"api_keys": ("one",), "allowed_origins": (PAGE,)}
    known = {"Origin": PAGE, "Authorization": "Bearer one"}
    engine.failures = {0: (0, RuntimeError("bug")), 1: (0, QueueFull(1, 1, 3))}
    large = b" " * (max_body_bytes(SERVED.max_model_len) + 1)
    for status, headers, content in (
        (401, {"Origin": PAGE}, b""),
        (400, known, b"{"),
        (413, known, large),
        (500, known, json.dumps(PLAIN).encode()),
        (429, known, json.dumps(PLAIN).encode()),
        (200, known, json.dumps(PLAIN).encode()),
    ):
        answer = asked(connect, "POST", "/v1/completions", content=content, headers=headers, **how)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"]
        assert "X-Request-Id" in exposed and "Retry-After" in exposed


def test_settings_of_the_app_reach_the_wire(engine: ScriptedEngine, tmp_path: Path) -> None:
    args = AppArgs(
        model=str(write_tiny_config(tmp_path / "m")),
        served_model_name="tiny",
        max_model_len=128,
        allowed_origins=[PAGE],
        stream_keepalive_s=0.001,
    )
    app = Ingress(ScriptedHandle(engine), args).__serve_build_asgi_app__()
    engine.delay_s = 0.02

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(
                "/v1/completions", json={**PLAIN, "stream": True}, headers={"Origin": PAGE}
            )

    answer = asyncio.run(go())
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert KEEPALIVE in answer.text and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a.b/c", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        AppArgs(model="m", allowed_origins=[origin])
    AppArgs(model="m", allowed_origins=["*", "http://localhost:3000"])


# --- rendering -----------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/chat/completions", {"messages": TURNS, "add_generation_prompt": False}),
        ("/v1/chat/completions", {"messages": TURNS, "continue_final_message": True}),
        ("/v1/chat/completions", {"messages": TURNS, "add_special_tokens": True}),
        ("/v1/chat/completions", {"messages": TURNS, "chat_template_kwargs": {"x": 1}}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "add_special_tokens": False}),
    ],
)
def test_tokenize_gives_the_ids_that_generation_uses(
    connect: Connect, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    assert asked(connect, "POST", path, json=fields).status_code == 200
    rendering = {k: v for k, v in fields.items() if k != "max_tokens"}
    answer = asked(connect, "POST", "/tokenize", json=rendering)
    assert answer.json()["tokens"] == list(engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_text_has_no_turns_to_render(
    connect: Connect, path: str, field: str, value: object
) -> None:
    answer = asked(connect, "POST", path, json={"prompt": "hi", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    neutral = {"add_generation_prompt": True, "continue_final_message": False,
               "chat_template_kwargs": {}}  # fmt: skip
    assert asked(connect, "POST", path, json={"prompt": "hi", **neutral}).status_code == 200


def test_every_route_that_renders_has_the_same_fields() -> None:
    from deploy.openai.protocol import ChatCompletionRequest, Rendering

    for model in (ChatCompletionRequest, CompletionRequest, TokenizeRequest):
        assert issubclass(model, Rendering)
