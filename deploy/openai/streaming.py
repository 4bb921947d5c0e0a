"""Server-sent events: one per step, the first at once, a comment where nothing comes for long."""

from __future__ import annotations

import asyncio
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


def event(payload: dict[str, Any]) -> str:
    """One server-sent event, one line of it whatever a client takes for a line's end."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    for char, escape in _LINE_ENDS:
        text = text.replace(char, escape)
    return f"data: {text}\n\n"


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
            if opening := [*answer.opening(), *answer.chunks(first)]:
                yield "".join(map(event, opening))
            has_begun = bool(first.token_ids)
            held: list[RunOutput] = []
            async for run in runs:
                if run is None:
                    yield KEEPALIVE
                    continue
                held.append(run)
                num_tokens = sum(len(r.token_ids) for r in held)
                if not has_begun or run.finish_reason is not None or num_tokens >= least_tokens:
                    yield "".join(map(event, answer.chunks(merge(held))))
                    has_begun, held = True, []
        yield DONE
    except Exception as error:
        yield event(from_exception(error, request_id).body())


async def with_pauses(items: AsyncGenerator[T], pause_s: float | None) -> AsyncGenerator[T | None]:
    """`items`, and None after each `pause_s` seconds without one. Closes `items`."""
    async with aclosing(items):
        while True:
            # A task: what waits inside `items` must go on waiting when the pause is over.
            coming = asyncio.ensure_future(anext(items, _END))
            try:
                while not (await asyncio.wait({coming}, timeout=pause_s))[0]:
                    yield None
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            item = coming.result()
            if item is _END:
                return
            yield item  # type: ignore[misc]


_END: Final = object()
