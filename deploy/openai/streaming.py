"""Server-sent events: one per step, the first at once."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from actors.requests import RunOutput
from deploy.openai.answers import Answer
from deploy.openai.errors import from_exception
from deploy.runs import merge

DONE: Final = "data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def events(
    answer: Answer,
    first: RunOutput,
    rest: AsyncGenerator[RunOutput],
    request_id: str,
    *,
    least_tokens: int = 1,
) -> AsyncIterator[str]:
    """The event stream of an answer that begins with `first`.

    Every step's chunks leave as one write. An error after the first byte cannot become a status
    any more: it is sent as an error object and the stream ends without [DONE], so that a client
    never takes a broken answer for a whole one. `least_tokens` > 1 gathers runs after the first.
    """
    try:
        async with aclosing(rest):
            yield "".join(map(event, [*answer.opening(), *answer.chunks(first)]))
            held: list[RunOutput] = []
            async for run in rest:
                held.append(run)
                num_tokens = sum(len(r.token_ids) for r in held)
                if run.finish_reason is not None or num_tokens >= least_tokens:
                    yield "".join(map(event, answer.chunks(merge(held))))
                    held = []
        yield DONE
    except Exception as error:
        yield event(from_exception(error, request_id).body())
