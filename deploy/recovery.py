"""A request that outlives the engine replica it started on.

The journal of a request is (prompt ids, emitted ids, seed). The engine's noise depends only on
(seed, absolute position), so `prompt + emitted` with the same seed continues the same answer on any
replica. The cut is made where text and tokens agree: tokens whose text was still held back (half
of a character, the beginning of a possible stop string) are generated again and only their text
is passed on, so the client sees every token and every character once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from actors.errors import EngineDead, RequestLost
from actors.requests import FinishReason, GenerateRequest, RunOutput, SpeculationStats
from actors.verifier.detokenize import Detokenizer
from deploy.engine_client import EngineClient
from deploy.failures import RequestAborted, is_busy, is_intended, is_replica_loss, root_cause

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

# The decoder of what a request puts out.
DetokenizerOf = Callable[[GenerateRequest], Detokenizer]


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Bounds of recovery.

    Some request may be what ends engines, and it is not known which one. An engine's end is charged
    to each request that it had taken and given no new token: that one may have been at fault,
    unless the engine was ended on purpose. A charged request is a suspect until it gets a token.
    Suspects of one process go on one at a time, so that the guilty one next ends an engine alone;
    with `max_charges` in a row it is given up. The others were only near it: their turn clears
    them.

    `max_losses` bounds the engines that any request may outlive, and `patience_s` the wait for
    one that takes it.
    """

    max_charges: int = 2
    max_losses: int = 20
    patience_s: float = 600.0
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0


class Journal:
    """What the client has received so far, and how to go on from there."""

    def __init__(self, request: GenerateRequest, detokenizer_of: DetokenizerOf) -> None:
        self._request = request
        self._detokenizer_of = detokenizer_of
        self._emitted: list[int] = []
        self._text = ""
        self._first: RunOutput | None = None
        self._is_continued = False
        # Of finished attempts.
        self._past = SpeculationStats()
        self._current = SpeculationStats()
        # Of the current attempt: tokens and characters the client already has.
        self._skip_tokens = 0
        self._skip_chars = 0

    def record(self, output: RunOutput) -> RunOutput:
        """`output` in terms of the whole request, without what the client already has."""
        skip = min(self._skip_tokens, len(output.token_ids))
        self._skip_tokens -= skip
        token_ids = output.token_ids[skip:]
        chars = min(self._skip_chars, len(output.text))
        self._skip_chars -= chars
        text = output.text[chars:]
        self._emitted.extend(token_ids)
        self._text += text
        self._current = output.speculation
        if self._first is None:
            self._first = output
        if not self._is_continued:
            return output
        return dataclasses.replace(
            output,
            token_ids=token_ids,
            text=text,
            accepted=output.accepted[skip:],
            logprobs=None if output.logprobs is None else output.logprobs[skip:],
            num_prompt_tokens=self._first.num_prompt_tokens,
            num_cached_tokens=self._first.num_cached_tokens,
            num_output_tokens=len(self._emitted),
            speculation=_added(self._past, output.speculation),
        )

    def continuation(self, attempt: int) -> GenerateRequest | None:
        """The request that goes on where the client stands; None when nothing is left to do."""
        self._is_continued = True
        kept, chars = self._clean_cut()
        self._skip_tokens = len(self._emitted) - kept
        self._skip_chars = len(self._text) - chars
        self._past, self._current = _added(self._past, self._current), SpeculationStats()
        request = self._request
        limit = request.max_tokens
        if limit is not None and limit <= kept:
            return None
        return dataclasses.replace(
            request,
            request_id=f"{request.request_id}-r{attempt}",
            prompt_token_ids=[*request.prompt_token_ids, *self._emitted[:kept]],
            num_prior_output_tokens=request.num_prior_output_tokens + kept,
            max_tokens=None if limit is None else limit - kept,
            min_tokens=max(0, request.min_tokens - kept),
        )

    def ended_by_length(self) -> RunOutput:
        """The last output of a request whose every token was delivered before the loss."""
        first = self._first
        return RunOutput(
            request_id=self._request.request_id,
            token_ids=(),
            text="",
            accepted=(),
            logprobs=None,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=first.num_cached_tokens if first else 0,
            num_output_tokens=len(self._emitted),
            finish_reason=FinishReason.LENGTH,
            speculation=self._past,
        )

    def _clean_cut(self) -> tuple[int, int]:
        """Most tokens, and their characters, whose text the client has in full."""
        decoder = self._detokenizer_of(self._request)
        kept = kept_chars = num_chars = 0
        for index, token_id in enumerate(self._emitted):
            num_chars += len(decoder.push((token_id,)))
            if num_chars > len(self._text):
                break
            if not decoder.is_pending:
                kept, kept_chars = index + 1, num_chars
        return kept, kept_chars


def _added(a: SpeculationStats, b: SpeculationStats) -> SpeculationStats:
    per_pos_a, per_pos_b = a.num_accepted_tokens_per_pos, b.num_accepted_tokens_per_pos
    width = max(len(per_pos_a), len(per_pos_b))
    padded = [(*p, *([0] * (width - len(p)))) for p in (per_pos_a, per_pos_b)]
    return SpeculationStats(
        num_steps=a.num_steps + b.num_steps,
        num_drafts=a.num_drafts + b.num_drafts,
        num_draft_tokens=a.num_draft_tokens + b.num_draft_tokens,
        num_accepted_tokens=a.num_accepted_tokens + b.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(x + y for x, y in zip(*padded, strict=True)),
    )


async def generate_with_recovery(
    client: EngineClient,
    request: GenerateRequest,
    detokenizer_of: DetokenizerOf,
    policy: RecoveryPolicy | None = None,
    timeout_s: float | None = None,
) -> AsyncGenerator[RunOutput]:
    """Outputs of `request`, whatever happens to the replicas that produce them.

    `request.seed` must be set, or a continuation would draw another answer. `timeout_s` bounds
    the whole request; None: no bound.

    Raises:
        EngineDead: No replica could finish it within the policy.
        RequestAborted: The engine gave it up.
        TimeoutError: It took longer than `timeout_s`.
    """
    assert request.seed is not None
    policy = policy or RecoveryPolicy()
    in_time = _Deadline(timeout_s)
    journal = Journal(request, detokenizer_of)
    attempt = charges = losses = 0
    delay = policy.first_delay_s
    current: GenerateRequest | None = request
    is_acknowledged = False
    waiting_since = time.monotonic()
    while current is not None:
        was_taken = progressed = False
        turn = _Turn(charges > 0)
        try:
            await in_time(turn.wait(policy.patience_s))
            async with aclosing(client.generate(current)) as outputs:
                while (output := await in_time(anext(outputs, None))) is not None:
                    if output.error is not None or output.finish_reason is FinishReason.ABORT:
                        raise RequestAborted(
                            f"the request failed: {output.error or 'the server aborted it'}"
                        )
                    was_taken = True
                    if output.is_acknowledgment:
                        if not is_acknowledged:
                            is_acknowledged = True
                            yield output
                        continue
                    recorded = journal.record(output)
                    if recorded.token_ids or recorded.text or recorded.finish_reason:
                        progressed, charges = True, 0
                        turn.end()
                        waiting_since, delay = time.monotonic(), policy.first_delay_s
                        yield recorded
                    if output.finish_reason is not None:
                        return
                raise EngineDead("the engine ended the stream before the request was finished")
        except Exception as error:
            # The client already has half an answer: a full queue elsewhere is waited out.
            if not (is_replica_loss(error) or (attempt > 0 and is_busy(error))):
                raise
            cause = root_cause(error)
            was_taken = was_taken or isinstance(cause, RequestLost)
            losses += was_taken
            charges += was_taken and not progressed and not is_intended(cause)
            if charges >= policy.max_charges:
                raise RequestAborted(
                    f"request {request.request_id} was given up: the last {charges} engines that "
                    f"took it ended before its next token: {_first_line(cause)}"
                ) from error
            waited = time.monotonic() - waiting_since
            if losses > policy.max_losses or waited + delay > policy.patience_s:
                raise EngineDead(
                    f"gave up after {losses} lost engines and {waited:.0f} s of waiting: "
                    f"{_first_line(cause)}"
                ) from error
            logger.warning(
                "request %s lost its engine (%s); continuing elsewhere",
                request.request_id,
                _first_line(cause),
            )
        finally:
            turn.end()
        await in_time(asyncio.sleep(delay))
        delay = min(policy.max_delay_s, delay * 2)
        attempt += 1
        # In a thread: it decodes all that was said so far.
        current = await in_time(asyncio.to_thread(journal.continuation, attempt))
    yield journal.ended_by_length()


_SUSPECTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class _Turn:
    """A suspect's turn among the suspects of this event loop."""

    def __init__(self, is_suspect: bool) -> None:
        self._lock: asyncio.Lock | None = None
        if is_suspect:
            self._lock = _SUSPECTS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        self._is_held = False

    async def wait(self, patience_s: float) -> None:
        """Return at once for a request that nothing is held against.

        Raises:
            EngineDead: the others took too long.
        """
        if self._lock is None:
            return
        try:
            await asyncio.wait_for(self._lock.acquire(), patience_s)
        except TimeoutError:
            raise EngineDead("requests before it still wait for an engine") from None
        self._is_held = True

    def end(self) -> None:
        """Let the next suspect go on. Idempotent."""
        if self._is_held and self._lock is not None:
            self._is_held = False
            self._lock.release()


class _Deadline:
    """Awaits within what is left of a request's time."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    async def __call__(self, work: Awaitable[T]) -> T:
        if self._at is None:
            return await work
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"the request took longer than this server allows, {self._timeout_s:g} s"
            ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
