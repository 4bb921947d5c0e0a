"""Streams as servers send them: what counts as the first token, an event, the end."""

from __future__ import annotations

import json

import pytest

from deploy.bench.stream import EventLines, Received

OURS = b"""\
data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}

: keep-alive

data: {"id":"c","choices":[{"index":0,"delta":{"content":"One"}}],"usage":null}

data: {"id":"c","choices":[{"index":0,"delta":{"content":" two three"}}],"usage":null}

data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}

data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}

data: [DONE]

"""
# As another server writes it: spaces, line ends of two bytes, text in the last event.
THEIRS = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
    b'data: {"choices": [{"index": 0, "delta": {"content": "One"}}]}\r\n\r\n'
    b'data: {"choices": [{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}]}\r\n\r\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\r\n\r\n'
    b"data: [DONE]\r\n\r\n"
)


def read(stream: bytes) -> Received:
    """Each event a second after the one before, the first at 1."""
    received = Received()
    for second, payload in enumerate(EventLines().feed(stream), 1):
        received.take(payload, float(second))
    return received


def test_a_role_is_no_token_and_the_end_is_no_event_of_text() -> None:
    received = read(OURS)
    assert (received.first_text_at, received.last_at) == (2.0, 4.0)
    assert (received.num_events, received.gaps_s) == (2, [1.0, 1.0])
    assert received.usage == {"prompt_tokens": 9, "completion_tokens": 4}
    assert received.is_whole and received.error is None


def test_text_in_the_last_event_counts() -> None:
    received = read(THEIRS)
    assert (received.first_text_at, received.last_at, received.num_events) == (2.0, 3.0, 2)
    assert received.usage is not None and received.usage["completion_tokens"] == 2
    assert received.is_whole


@pytest.mark.parametrize("stream", [OURS, THEIRS], ids=["ours", "theirs"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_events_are_the_same_however_the_bytes_arrive(stream: bytes, size: int) -> None:
    lines = EventLines()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [p for piece in pieces for p in lines.feed(piece)] == EventLines().feed(stream)


def test_events_of_one_read_have_no_gap() -> None:
    received = Received()
    payloads = EventLines().feed(OURS)
    for payload in payloads[:3]:
        received.take(payload, 1.0)
    assert (received.num_events, received.gaps_s) == (2, [])


def test_a_text_about_usage_and_errors_is_only_text() -> None:
    said = 'He wrote "usage": {"completion_tokens": 99} and "error": {"message": "x"}'
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": said}}]}).encode()
    received = Received()
    for second in (1.0, 2.0):
        received.take(event, second)
    assert received.num_events == 2 and received.usage is None and received.error is None


@pytest.mark.parametrize("error", ['{"message": "out of memory"}', '"out of memory"'])
def test_an_error_in_the_stream_is_the_answers_error(error: str) -> None:
    begun = read(OURS[: OURS.index(b"data", 200)])
    begun.take(f'{{"error": {error}}}'.encode(), 9.0)
    assert begun.error == "out of memory"


def test_completions_have_their_text_elsewhere() -> None:
    received = read(
        b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
        b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    )
    assert (received.first_text_at, received.last_at, received.num_events) == (1.0, 2.0, 1)


def test_an_answer_without_text_begins_where_it_ends() -> None:
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    assert read(end).first_text_at == 1.0
