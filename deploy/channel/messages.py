"""What crosses a channel: where it leads, and runs, many in a frame."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgpack

from actors.errors import EngineDead
from actors.requests import FinishReason, RunOutput, SpeculationStats, TokenLogprob
from parallel.transport.tcp import TcpAddress

RUNS: Final = 1  # the kind of frame


class ReplyTo(NamedTuple):
    """Where a front takes runs: at `path` from processes of its node, else at `tcp`, which holds
    a secret. It travels with each request, over Serve's handle."""

    node: str
    path: str
    tcp: TcpAddress


class ChannelLost(EngineDead):
    """The connection between a front and an engine replica ended with a request on it."""


def pack_runs(runs: Iterable[RunOutput]) -> bytes:
    """Runs of any requests as the body of a frame."""
    body: bytes = msgpack.packb(list(map(_fields, runs)), unicode_errors="surrogatepass")
    return body


def unpack_runs(body: bytes) -> list[RunOutput]:
    """The runs of `pack_runs`."""
    rows = msgpack.unpackb(body, use_list=False, unicode_errors="surrogatepass")
    return [_run(*row) for row in rows]


def _fields(run: RunOutput) -> tuple[Any, ...]:
    logprobs, spec = run.logprobs, run.speculation
    return (
        run.request_id,
        run.token_ids,
        run.text,
        run.accepted,
        None if logprobs is None else [(e.token_id, e.logprob, e.top) for e in logprobs],
        run.num_prompt_tokens,
        run.num_cached_tokens,
        run.num_output_tokens,
        run.finish_reason,
        run.stop_reason,
        (
            spec.num_steps,
            spec.num_drafts,
            spec.num_draft_tokens,
            spec.num_accepted_tokens,
            spec.num_accepted_tokens_per_pos,
        ),
        run.error,
    )


def _run(
    request_id: str,
    token_ids: tuple[int, ...],
    text: str,
    accepted: tuple[bool, ...],
    logprobs: tuple[Any, ...] | None,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    finish_reason: str | None,
    stop_reason: int | str | None,
    speculation: tuple[Any, ...],
    error: str | None,
) -> RunOutput:
    return RunOutput(
        request_id,
        token_ids,
        text,
        accepted,
        None if logprobs is None else tuple(TokenLogprob(*entry) for entry in logprobs),
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
        None if finish_reason is None else FinishReason(finish_reason),
        stop_reason,
        SpeculationStats(*speculation),
        error,
    )
