"""The HTTP application over a scripted engine: answers, streams and every error."""

from __future__ import annotations

import asyncio
import json

import pytest

from actors.errors import EngineDead, InvalidRequest, PromptTooLong, QueueFull
from deploy.engine_client import ReplicaReport
from deploy.openai.service import ServiceOptions
from deploy.requests import Seeds
from tests.unit.deploy.conftest import FAST, Connect
from tests.unit.deploy.fakes import ScriptedEngine, sse

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 64}


def run(coroutine):
    return asyncio.run(coroutine)


def post(connect: Connect, path: str, body: object, **kwargs):
    async def go():
        async with connect(**kwargs) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body)
            return await client.post(path, json=body)

    return run(go())


def get(connect: Connect, path: str, headers: dict[str, str] | None = None, **kwargs):
    async def go():
        async with connect(**kwargs) as client:
            return await client.get(path, headers=headers or {})

    return run(go())


def error_of(answer) -> dict:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# --- whole answers -----------------------------------------------------------------------------


def test_a_chat_answer_has_the_public_shape_and_counts(connect: Connect) -> None:
    answer = post(connect, "/v1/chat/completions", CHAT)
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    # <|bos|><|user|>hi<|assistant|> is 5 tokens; 11 letters in 4 runs of up to 3
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 11,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
        "speculation": {
            "num_steps": 4,
            "num_drafts": 4,
            "num_draft_tokens": 16,
            "num_accepted_tokens": 7,
            "acceptance_length": 2.75,
            "acceptance_rate": 0.4375,
            "num_accepted_tokens_per_pos": [4, 3, 0, 0],
        },
    }


def test_a_completion_ends_at_its_limit(connect: Connect) -> None:
    body = post(connect, "/v1/completions", {**PLAIN, "max_tokens": 5}).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5


def test_the_engine_gets_what_the_client_asked(connect: Connect, engine: ScriptedEngine) -> None:
    extra = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["a", "b"],
        "stop_token_ids": [9], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "min_tokens": 2, "max_tokens": 20, "cache_salt": "tenant-1",
        "speculation": {"enabled": False, "num_speculative_tokens": 2},
    }  # fmt: skip
    post(connect, "/v1/completions", {**PLAIN, **extra})
    request = engine.requests[0]
    assert list(request.prompt_token_ids) == list(b"hi")
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
    assert (request.min_p, request.seed, request.stop) == (0.1, 3, ("a", "b"))
    assert (request.stop_token_ids, request.ignore_eos) == ((9,), True)
    assert (request.include_stop_str_in_output, request.skip_special_tokens) == (True, False)
    assert (request.min_tokens, request.max_tokens) == (2, 20)
    assert request.cache_salt == "tenant-1"
    assert (request.speculation_enabled, request.num_speculative_tokens) == (False, 2)


def test_a_seed_is_always_set(connect: Connect, engine: ScriptedEngine) -> None:
    post(connect, "/v1/completions", PLAIN)
    assert engine.requests[0].seed is not None


def test_a_servers_seed_decides_those_of_its_requests() -> None:
    def drawn(base: int | None) -> list[int]:
        seeds = Seeds(base)
        return [seeds.draw() for _ in range(20)]

    assert drawn(7) == drawn(7) and len({*drawn(7), *drawn(8), *drawn(None)}) == 60


def test_token_ids_and_accepted_flags(connect: Connect) -> None:
    choice = post(
        connect, "/v1/completions", {**PLAIN, "max_tokens": 4, "return_token_ids": True}
    ).json()["choices"][0]
    assert choice["token_ids"] == list(b"Hell")
    assert choice["accepted"] == [True, True, False, False]
    assert choice["token_strs"] == ["H", "e", "l", "l"]


# --- streams ------------------------------------------------------------------------------------


def stream(connect: Connect, path: str, body: dict, **kwargs) -> list[str]:
    answer = post(connect, path, {**body, "stream": True}, **kwargs)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return sse(answer.text)


def test_a_chat_stream_chunk_by_chunk(connect: Connect) -> None:
    events = stream(
        connect, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
          "finish_reason": None}],
        *([{"index": 0, "delta": {"content": piece}, "logprobs": None, "finish_reason": None}]
          for piece in ("Hel", "lo ", "wor", "ld")),
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop",
          "stop_reason": None}],
        [],
    ]  # fmt: skip
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 11


def test_a_completion_stream_chunk_by_chunk(connect: Connect) -> None:
    events = stream(connect, "/v1/completions", {**PLAIN, "max_tokens": 5})
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_continuous_usage_is_monotone_and_ends_with_the_final_usage(connect: Connect) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(connect, "/v1/chat/completions", {**CHAT, "stream_options": options})
    chunks = [json.loads(event) for event in events[:-1]]
    counts = [c["usage"]["completion_tokens"] for c in chunks if c["usage"]]
    assert counts == sorted(counts) and counts[-1] == 11
    assert chunks[-2]["usage"] == chunks[-1]["usage"]


@pytest.mark.parametrize("run_length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("script", ["Grüße, 世界 🦜!", "é", "a" * 40, "🦜🦜🦜"])
def test_streamed_text_equals_whole_text(
    connect: Connect, engine: ScriptedEngine, run_length: int, script: str
) -> None:
    engine.script, engine.run_length = list(script.encode()), run_length
    whole = post(connect, "/v1/completions", PLAIN).json()["choices"][0]["text"]
    events = stream(connect, "/v1/completions", {**PLAIN, "return_token_ids": True})
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole == script
    tokens = [t for choice in choices for t in choice.get("token_ids", [])]
    assert tokens == list(script.encode())


def test_a_limit_inside_a_character_is_not_an_error(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.script = list("a🦜".encode())
    answer = post(connect, "/v1/completions", {**PLAIN, "max_tokens": 3})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].startswith("a")


def test_runs_are_gathered_when_the_server_says_so(connect: Connect) -> None:
    options = ServiceOptions(least_tokens_per_chunk=6, recovery=FAST)
    events = stream(connect, "/v1/completions", PLAIN, options=options)
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert texts == ["Hel", "lo wor", "ld", ""]  # the first at once


def test_an_error_in_a_stream_is_an_event_and_there_is_no_done(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.failures = {0: (2, RuntimeError("secret detail"))}
    events = stream(connect, "/v1/completions", PLAIN)
    error = json.loads(events[-1])["error"]
    assert error["code"] == "internal_error" and "secret" not in error["message"]
    assert "[DONE]" not in events


def test_a_client_that_leaves_ends_the_request(connect: Connect, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.01

    async def go() -> None:
        async with connect() as client:
            service_app = client._transport.app  # type: ignore[attr-defined]
            messages = [
                {
                    "type": "http.request",
                    "body": json.dumps({**PLAIN, "stream": True}).encode(),
                    "more_body": False,
                }
            ]
            gone = asyncio.Event()
            sent = []

            async def receive():
                if messages:
                    return messages.pop(0)
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)
                if message["type"] == "http.response.body" and message.get("body"):
                    gone.set()

            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
                "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
                "query_string": b"", "headers": [], "scheme": "http", "root_path": "",
                "server": ("test", 80), "client": ("c", 1),
            }  # fmt: skip
            await service_app(scope, receive, send)

    run(go())
    assert engine.closed == [engine.requests[0].request_id]


# --- logprobs -----------------------------------------------------------------------------------


def test_chat_logprobs_follow_the_public_schema(connect: Connect, engine: ScriptedEngine) -> None:
    engine.script = list("é!".encode())
    body = post(
        connect, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}
    ).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 3
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2]["token"] == "!" and content[2]["logprob"] == -0.5
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


def test_chat_logprobs_without_top_logprobs_list_none(connect: Connect) -> None:
    content = post(connect, "/v1/chat/completions", {**CHAT, "logprobs": True}).json()["choices"][
        0
    ]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


@pytest.mark.parametrize("run_length", [1, 2, 3, 7])
def test_completion_text_offsets_are_right_in_streams(
    connect: Connect, engine: ScriptedEngine, run_length: int
) -> None:
    script = "aé世b"
    engine.script, engine.run_length = list(script.encode()), run_length
    expected = [0, 1, 1, 2, 2, 2, 3]
    whole = post(connect, "/v1/completions", {**PLAIN, "logprobs": 1}).json()["choices"][0]
    assert whole["logprobs"]["text_offset"] == expected
    assert whole["logprobs"]["tokens"][0] == "a"
    assert whole["logprobs"]["tokens"][1] == "bytes:\\xc3"
    assert list(whole["logprobs"]["top_logprobs"][0]) == ["a"]
    events = stream(connect, "/v1/completions", {**PLAIN, "logprobs": 1})
    parts = [json.loads(e)["choices"][0]["logprobs"] for e in events[:-1]]
    assert [o for part in parts if part for o in part["text_offset"]] == expected
    assert [t for part in parts if part for t in part["tokens"]] == whole["logprobs"]["tokens"]


# --- errors -------------------------------------------------------------------------------------


def test_unknown_route_and_wrong_method(connect: Connect) -> None:
    answer = get(connect, "/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "route_not_found"
    answer = get(connect, "/v1/chat/completions")
    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"
    assert "POST" in answer.headers["allow"]


def test_wrong_json_and_wrong_field(connect: Connect) -> None:
    answer = post(connect, "/v1/completions", b"{oops")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    answer = post(connect, "/v1/completions", {**PLAIN, "frobnicate": 1})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "frobnicate"


def test_unknown_model_is_404(connect: Connect) -> None:
    answer = post(connect, "/v1/completions", {**PLAIN, "model": "gpt-x"})
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_a_long_prompt_is_400_with_both_numbers(connect: Connect) -> None:
    answer = post(connect, "/v1/completions", {**PLAIN, "prompt": "x" * 200})
    error = error_of(answer)
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "200" in error["message"] and "128" in error["message"]
    answer = post(connect, "/v1/completions", {**PLAIN, "max_tokens": 500})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, "max_tokens")
    assert "500" in error["message"] and "128" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"cache_salt": "s" * 2000}, "cache_salt"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"max_completion_tokens": 500}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"speculation": {"num_speculative_tokens": 9}}, "speculation.num_speculative_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_an_engine_would_refuse_is_400_under_the_name_the_client_wrote(
    connect: Connect, engine: ScriptedEngine, fields: dict, param: str
) -> None:
    answer = post(connect, "/v1/chat/completions", {**CHAT, **fields})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"{param}" in error["message"]
    assert not engine.requests


def test_token_ids_outside_the_vocabulary(connect: Connect) -> None:
    answer = post(connect, "/v1/completions", {**PLAIN, "prompt": [1, 100000]})
    assert error_of(answer)["param"] == "prompt" and "100000" in answer.text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_429_with_retry_after(
    connect: Connect, engine: ScriptedEngine, streamed: bool
) -> None:
    engine.failures = {0: (0, QueueFull(8, 8, 7))}
    answer = post(connect, "/v1/completions", {**PLAIN, "stream": streamed})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert error_of(answer)["code"] == "rate_limit_exceeded"


def test_engine_refusals_keep_their_field(connect: Connect, engine: ScriptedEngine) -> None:
    engine.failures = {0: (0, InvalidRequest("no", param="min_p")), 1: (0, PromptTooLong(9, 8))}
    answer = post(connect, "/v1/completions", PLAIN)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "min_p")
    answer = post(connect, "/v1/completions", PLAIN)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")


def test_a_dead_engine_is_503(connect: Connect, engine: ScriptedEngine) -> None:
    engine.failures = {n: (0, EngineDead("WorkerLost: rank 0")) for n in range(100)}
    answer = post(connect, "/v1/completions", PLAIN)
    assert answer.status_code == 503
    error = error_of(answer)
    assert error["code"] == "engine_unavailable" and "rank 0" in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_bug_is_500_with_the_request_id_and_no_traceback(
    connect: Connect, engine: ScriptedEngine, streamed: bool
) -> None:
    engine.failures = {0: (0, RuntimeError("secret detail"))}

    async def go():
        async with connect() as client:
            return await client.post(
                "/v1/completions",
                json={**PLAIN, "stream": streamed},
                headers={"x-request-id": "req-7"},
            )

    answer = run(go())
    assert answer.status_code == 500
    error = error_of(answer)
    assert "req-7" in error["message"]
    assert "secret" not in answer.text and "Traceback" not in answer.text


def test_a_request_the_engine_gives_up_is_500(connect: Connect, engine: ScriptedEngine) -> None:
    engine.error = "request x: decoder failed"
    answer = post(connect, "/v1/completions", PLAIN)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "request_aborted")


def test_a_request_that_takes_too_long_is_408(connect: Connect, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.2
    options = ServiceOptions(request_timeout_s=0.05, recovery=FAST)
    answer = post(connect, "/v1/completions", PLAIN, options=options)
    assert (answer.status_code, error_of(answer)["code"]) == (408, "timeout")
    assert engine.closed


# --- keys ---------------------------------------------------------------------------------------


def test_only_known_api_keys_get_in_and_probes_need_none(connect: Connect) -> None:
    keys = {"api_keys": ("one", "two")}
    for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"},
                    {"Authorization": "Bearer "}):  # fmt: skip
        answer = get(connect, "/v1/models", headers=headers, **keys)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert error_of(answer)["code"] == "invalid_api_key"
    for key in ("one", "two"):
        answer = get(connect, "/v1/models", headers={"Authorization": f"Bearer {key}"}, **keys)
        assert answer.status_code == 200
    assert get(connect, "/server_info", **keys).status_code == 401
    assert get(connect, "/health", **keys).status_code == 200
    assert get(connect, "/metrics", **keys).status_code == 200


# --- the other routes ---------------------------------------------------------------------------


def test_the_served_model_is_listed_and_found_by_name(connect: Connect) -> None:
    async def go() -> list[dict]:
        # One server: `created` is when it started.
        async with connect() as client:
            return [(await client.get(path)).json() for path in ("/v1/models", "/v1/models/tiny")]

    body, one = run(go())
    assert body["object"] == "list" and body["data"][0]["id"] == "tiny"
    assert one == body["data"][0]
    assert error_of(get(connect, "/v1/models/org/other"))["code"] == "model_not_found"


def test_text_is_tokenized_and_back(connect: Connect) -> None:
    body = post(connect, "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert body["tokens"] == list("hé".encode()) and body["count"] == 3
    assert body["max_model_len"] == 128 and len(body["token_strs"]) == 3
    assert post(connect, "/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "hé"}
    chat = post(connect, "/tokenize", {"messages": CHAT["messages"]}).json()
    assert chat["count"] == 5
    assert error_of(post(connect, "/tokenize", {}))["param"] == "prompt"
    assert error_of(post(connect, "/detokenize", {"tokens": [9999]}))["param"] == "tokens"


def test_health_needs_one_healthy_replica(connect: Connect, engine: ScriptedEngine) -> None:
    assert get(connect, "/health").status_code == 200
    engine.health = [ReplicaReport("a", "", {}), ReplicaReport("b", "WorkerLost", {})]
    answer = get(connect, "/health")
    assert answer.status_code == 200 and answer.json()["healthy_replicas"] == 1
    engine.health = [ReplicaReport("b", "WorkerLost: rank 0", {})]
    answer = get(connect, "/health")
    assert answer.status_code == 503 and answer.json()["reason"] == "WorkerLost: rank 0"
    engine.health = []
    answer = get(connect, "/health")
    assert answer.status_code == 503 and "no engine" in answer.json()["reason"]


def test_server_info_shows_one_engine_s_facts(connect: Connect) -> None:
    body = get(connect, "/server_info").json()
    assert body["lossless"] is True and body["served"]["name"] == "tiny"
