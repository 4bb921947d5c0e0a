"""Server-sent events: one per step, the first at once, a comment where nothing comes for long."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeVar

from actors.requests import RunOutput
from deploy.openai.answers import Answer
from deploy.openai.errors import from_exception
from deploy.runs import merge

T = TypeVar("T")
DONE: Final = "data: [DONE]\n\n"
# Clients skip comments; what stands between sees that the connection lives.
KEEPALIVE: Final = ": keep-alive\n\n"
# JSON escapes all other characters at which clients split lines.
_LINE_ENDS: Final = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK: Final = "\0text\0"


def event(payload: dict[str, Any]) -> str:
    """One server-sent event, one line of it whatever a client takes for a line's end."""
    return f"data: {_one_line(payload)}\n\n"


def _one_line(value: dict[str, Any] | str) -> str:
    text = _to_json(value)
    for char, escape in _LINE_ENDS:
        text = text.replace(char, escape)
    return text


class Written:
    """Chunks of an answer as events. Most differ in their text alone: what is around it is written
    once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._around: tuple[str, str] | None = None

    def __call__(self, run: RunOutput) -> str:
        """The events of a run's chunks."""
        if not self._answer.is_text_alone(run):
            return "".join(map(event, self._answer.chunks(run)))
        if self._around is None:
            (chunk,) = self._answer.chunks(dataclasses.replace(run, text=_MARK))
            before, _, after = event(chunk).partition(_to_json(_MARK))
            self._around = before, after
        before, after = self._around
        return f"{before}{_one_line(run.text)}{after}"


async def events(
    answer: Answer,
    first: RunOutput,
    rest: AsyncGenerator[RunOutput],
    request_id: str,
    *,
    least_tokens: int = 1,
    keepalive_s: float | None = None,
) -> AsyncIterator[str]:
    """The event stream of an answer that begins with `first`.

    `first` may be empty: the engine took the request and has nothing yet. Every step's chunks
    leave as one write. An error after the first byte cannot become a status any more: it is sent
    as an error object and the stream ends without [DONE], so that a client never takes a broken
    answer for a whole one. `least_tokens` > 1 gathers runs after the first with tokens. After
    `keepalive_s` seconds without a run a comment is sent; None: never.
    """
    try:
        async with aclosing(with_pauses(rest, keepalive_s)) as runs:
            written = Written(answer)
            if opening := "".join(map(event, answer.opening())) + written(first):
                yield opening
            has_begun = bool(first.token_ids)
            held: list[RunOutput] = []
            async for run in runs:
                if run is None:
                    yield KEEPALIVE
                    continue
                held.append(run)
                num_tokens = sum(len(r.token_ids) for r in held)
                if not has_begun or run.finish_reason is not None or num_tokens >= least_tokens:
                    yield written(merge(held))
                    has_begun, held = True, []
        yield DONE
    except Exception as error:
        yield event(from_exception(error, request_id).body())


async def with_pauses(items: AsyncGenerator[T], pause_s: float | None) -> AsyncGenerator[T | None]:
    """`items`, and None after each `pause_s` seconds without one. Closes `items`."""
    async with aclosing(items):
        if pause_s is None:
            async for item in items:
                yield item
            return
        arrived: asyncio.Queue[T | None] = asyncio.Queue()  # None: no more

        async def take() -> None:
            try:
                async for item in items:
                    arrived.put_nowait(item)
            finally:
                arrived.put_nowait(None)

        # A task: what waits inside `items` must go on waiting when a pause is over.
        taking = asyncio.ensure_future(take())
        try:
            while True:
                try:
                    async with asyncio.timeout(pause_s):
                        come = await arrived.get()
                except TimeoutError:
                    yield None
                    continue
                if come is None:
                    break
                yield come
            await taking
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
