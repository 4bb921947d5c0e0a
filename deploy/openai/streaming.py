"""Server-sent events: one per step, the first at once."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from actors.requests import RunOutput
from deploy.openai.answers import Answer, merge
from deploy.openai.errors import from_exception

DONE: Final = "data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def events(
    answer: Answer, runs: AsyncGenerator[RunOutput], request_id: str, *, least_tokens: int = 1
) -> AsyncIterator[str]:
    """The event stream of an answer.

    Every step's chunks leave as one write. An error after the first byte cannot become a status
    any more: it is sent as an error object and the stream ends without [DONE], so that a client
    never takes a broken answer for a whole one. `least_tokens` > 1 gathers runs after the first.
    """
    try:
        async with aclosing(runs):
            held: list[RunOutput] = []
            lead: str | None = "".join(map(event, answer.opening()))
            async for run in runs:
                held.append(run)
                num_tokens = sum(len(r.token_ids) for r in held)
                if lead is None and run.finish_reason is None and num_tokens < least_tokens:
                    continue
                yield (lead or "") + "".join(map(event, answer.chunks(merge(held))))
                lead, held = None, []
        yield DONE
    except Exception as error:
        yield event(from_exception(error, request_id).body())
