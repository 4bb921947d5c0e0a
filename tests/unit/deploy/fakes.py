"""A scripted engine: says a fixed text, in runs of a given length, and fails where told; alone, or
in a replica behind a Serve handle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import aclosing
from typing import Any

from actors.requests import (
    FinishReason,
    GenerateRequest,
    RunOutput,
    SpeculationStats,
    TokenLogprob,
)
from deploy.channel.messages import ReplyTo
from deploy.channel.sender import Channels
from deploy.engine_client import ReplicaReport
from deploy.openai.logprobs import decode_whole


class ScriptedEngine:
    """Continues any prompt with `text`, one token a byte.

    A prompt that already ends with a beginning of `text` (a continuation after a loss) is
    continued there, as the counter-based noise of the real engine would.
    """

    def __init__(self, text: str = "", run_length: int = 3) -> None:
        self.script = list(text.encode())
        self.run_length = run_length
        self.requests: list[GenerateRequest] = []
        self.closed: list[str] = []
        self.began = threading.Event()
        self.ended = threading.Event()
        # attempt number -> (runs to deliver first, exception)
        self.failures: dict[int, tuple[int, Exception]] = {}
        self.error: str | None = None
        self.delay_s = 0.0
        self.most_at_once = 0
        # Set once requests that were taken may begin; None: at once.
        self.free_seat: asyncio.Event | None = None
        self.health: list[ReplicaReport] = [ReplicaReport("a", "", {})]
        self.prompt_len: int | None = None
        self.served: dict[str, Any] = {
            "name": "tiny", "tokenizer": "", "tokenizer_revision": None, "max_model_len": 128,
            "vocab_size": 261, "num_speculative_tokens": 4, "max_logprobs": 5,
        }  # fmt: skip

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        attempt = len(self.requests)
        self.requests.append(request)
        self.began.set()
        if self.prompt_len is None:
            self.prompt_len = len(request.prompt_token_ids)
        start = len(request.prompt_token_ids) - self.prompt_len
        script = self.script[start:]
        limit = request.max_tokens
        ids = script if limit is None else script[:limit]
        reason = FinishReason.STOP if len(ids) == len(script) else FinishReason.LENGTH
        num_runs, failure = self.failures.get(attempt, (-1, None))
        pending = b""
        drafts = accepted_total = 0
        self.most_at_once = max(self.most_at_once, len(self.requests) - len(self.closed))
        try:
            if num_runs != 0:  # else it refuses the request
                yield RunOutput.acknowledgment(request.request_id, len(request.prompt_token_ids))
            if self.free_seat is not None:
                await self.free_seat.wait()
            for run, at in enumerate(range(0, len(ids), self.run_length)):
                if failure is not None and run == num_runs:
                    raise failure
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                tokens = ids[at : at + self.run_length]
                last = at + self.run_length >= len(ids)
                text, pending = decode_whole(pending + bytes(tokens))
                if last:
                    text += pending.decode(errors="replace")
                accepted = [*([True] * (len(tokens) - 1)), False]
                drafts += 1
                accepted_total += len(tokens) - 1
                yield RunOutput(
                    request_id=request.request_id,
                    token_ids=tuple(tokens),
                    text=text,
                    accepted=tuple(accepted),
                    logprobs=self._logprobs(request, tokens),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=0,
                    num_output_tokens=at + len(tokens),
                    finish_reason=(FinishReason.ABORT if self.error else reason) if last else None,
                    error=self.error if last else None,
                    speculation=SpeculationStats(
                        num_steps=drafts,
                        num_drafts=drafts,
                        num_draft_tokens=4 * drafts,
                        num_accepted_tokens=accepted_total,
                        num_accepted_tokens_per_pos=(drafts, accepted_total - drafts, 0, 0),
                    ),
                )
            if failure is not None:
                raise failure
        finally:
            self.closed.append(request.request_id)
            self.ended.set()

    @staticmethod
    def _logprobs(
        request: GenerateRequest, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...] | None:
        if request.num_logprobs < 0:
            return None
        return tuple(
            TokenLogprob(t, -0.5, tuple((t + n, -0.5 - n) for n in range(request.num_logprobs)))
            for t in tokens
        )

    async def reports(self, timeout_s: float) -> Sequence[ReplicaReport]:
        return self.health

    async def describe(self, timeout_s: float) -> dict[str, Any]:
        return {"served": self.served, "lossless": True}

    async def aclose(self) -> None:
        pass


class Call:
    """What a Serve handle gives for a call."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.ensure_future(work)
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._task).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._task.cancel()


class ScriptedHandle:
    """A Serve handle to one replica of a scripted engine, with the channel that its runs take.

    `node`: the replica's; another one than the front's connects over TCP.
    """

    def __init__(self, engine: Any, node: str = "local") -> None:
        self.engine = engine
        self.channels = Channels(node)
        self.calls: list[Call] = []

    def options(self, **_: object) -> ScriptedHandle:
        return self

    def remote(self, request: GenerateRequest, reply_to: ReplyTo) -> Call:
        self.calls.append(Call(self._serve(request, reply_to)))
        return self.calls[-1]

    async def _serve(self, request: GenerateRequest, reply_to: ReplyTo) -> None:
        channel = await self.channels.to(reply_to)
        async with aclosing(self.engine.generate(request)) as runs:
            taken = await anext(runs)
            with channel.delivery(taken) as delivery:
                delivery.acknowledge()
                async for run in runs:
                    delivery.put(run)
                    channel.flush()
                await delivery.done


def sse(body: str) -> list[str]:
    """Payloads of an event stream."""
    events = body.split("\n\n")
    assert events[-1] == "", "the last event is terminated"
    assert all(event.startswith("data: ") for event in events[:-1])
    return [event[6:] for event in events[:-1]]
