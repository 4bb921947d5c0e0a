"""The verifier as its users see it: requests in, runs of tokens out, from any thread."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from actors.acceptance.base import AcceptanceMethod
from actors.errors import EngineDead, EngineStopped, InvalidRequest, QueueFull, RequestLost
from actors.requests import GenerateRequest, RunOutput
from actors.stats import EngineStats, Snapshot
from actors.steps.patience import StepPatience
from actors.steps.protocols import LookupDrafter, MaskSource, StepClient
from actors.threads import ComputeThread
from actors.verifier.admission import admit
from actors.verifier.detokenize import TokenText
from actors.verifier.limits import EngineLimits
from actors.verifier.loop import StepLoop
from actors.verifier.request import Request, Sink
from parallel.gang.member import GangMember

logger = logging.getLogger(__name__)

_Command = Callable[[], None]
_IDLE_WAIT_S = 1.0
# Lockstep: an idle rank listens to the other ranks, and looks for requests this often.
_STAND_BY_S = 0.005


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of a replica at one moment. `seconds_since_step` counts only while work is there;
    `step_limit_s` is what the step in flight may take."""

    is_healthy: bool
    error: str | None
    draft_lost: str | None
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    seconds_since_step: float
    step_limit_s: float
    stats: Snapshot


class VerifierEngine:
    """Runs a `StepLoop` in its own thread.

    Args:
        limits: Of this replica.
        client: Carries steps to the workers; closed by `stop`.
        tokenizer: A fast tokenizer, for output text and stop strings; None: ids only.
        drafter: A drafter that runs in the verifier, or None.
        accept: Acceptance method; None: exact match.
        patience: How long a step may take; one that takes longer ends the replica.
        generation: Of the worker group.
        gang: Data-parallel ranks to agree with on K, or None; closed by `stop`.
        mask_source: Gives the masks of a step's rows once its drafts are known, or None.
        thread: Where steps run, to the end of it; that of the workers where `client` calls them
            directly. None: one of its own.
    """

    def __init__(
        self,
        limits: EngineLimits,
        client: StepClient,
        tokenizer: object | None = None,
        drafter: LookupDrafter | None = None,
        accept: AcceptanceMethod | None = None,
        patience: StepPatience | None = None,
        generation: int = 0,
        gang: GangMember | None = None,
        mask_source: MaskSource | None = None,
        thread: ComputeThread | None = None,
    ) -> None:
        self.limits = limits
        self.stats = EngineStats()
        self._client = client
        self._tokens = None if tokenizer is None else TokenText(tokenizer)
        self._gang = gang
        self._loop = StepLoop(
            limits,
            client,
            drafter,
            self.stats,
            accept,
            patience,
            generation,
            gang,
            mask_source,
        )
        self._wake = threading.Condition()
        # Guarded by `_wake`: what other threads ask of the loop, and the requests known.
        self._inbox: list[_Command] = []
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._num_unseated = 0  # in the inbox, not in the scheduler's queue yet
        self._is_stopping = False
        self._error: str | None = None
        self._is_busy = False
        self._busy_since = time.monotonic()
        self._thread = thread or ComputeThread("paceline-verifier")
        self._thread.start(self._run)
        self._thread.end()

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, params: GenerateRequest, sink: Sink) -> None:
        """Queue a request. `sink` gets its runs, in order, on the loop's thread.

        The last run has a `finish_reason`; exactly one does.

        Raises:
            InvalidRequest: a field is outside what this server allows.
            PromptTooLong: no room for an output token.
            QueueFull: too many wait already.
            EngineDead: the replica failed or was stopped.
        """
        arrival_s = time.monotonic()
        rules, text = admit(params, self.limits, self._tokens)
        with self._wake:
            self._check_open(params)
            self._num_arrivals += 1
            number = self._num_arrivals
        sink = self._closing_sink(params, sink)
        request = Request(number, params, rules, text, sink, arrival_s, self.limits.seed)
        # Outside the lock and the step's thread: it may take as long as the prompt is.
        self._loop.begin(request)
        with self._wake:
            try:
                self._check_open(params)
            except Exception:
                self._loop.forget(request)
                raise
            self._requests[params.request_id] = request
            self._num_unseated += 1
            self._post(lambda: self._take_in(request))

    def _check_open(self, params: GenerateRequest) -> None:
        """Raise if this request cannot be queued now."""
        if self._error is not None or self._is_stopping:
            raise EngineDead(self._error or "the engine was stopped")
        if params.request_id in self._requests:
            raise InvalidRequest(
                f"request_id {params.request_id!r} is in use by a request in flight",
                param="request_id",
            )
        self._check_queue()

    def after_delivery(self, what: Callable[[], None]) -> None:
        """Have `what` called, on the loop's thread, each time the sinks have the runs of a step.
        For who gathers them: it must not wait, nor raise."""
        self._loop.after_delivery = what

    def ended_with(self, out: RunOutput) -> EngineDead | None:
        """How the engine ended, if that, and nothing of its own, is why a request did with `out`.
        For a sink."""
        if out.error is None or not self._is_stopping:
            return None
        return (EngineStopped if self._error is None else RequestLost)(out.error)

    def abort(self, request_id: str) -> None:
        """End a request, if it is still there; its KV is free within a step."""
        with self._wake:
            request = self._requests.get(request_id)
            if request is not None:
                self._post(lambda: self._loop.abort(request))

    async def generate(self, params: GenerateRequest) -> AsyncGenerator[RunOutput]:
        """Runs of one request, from any asyncio loop, after an acknowledgment that it is queued.
        Leaving early aborts the request.

        Raises:
            RequestLost: the replica failed.
            EngineStopped: the replica was stopped; the request is not at fault.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RunOutput] = asyncio.Queue()
        self.add_request(params, lambda out: _hand_over(loop, queue, out))
        finished = False
        try:
            yield RunOutput.acknowledgment(params.request_id, len(params.prompt_token_ids))
            while not finished:
                out = await queue.get()
                finished = out.finish_reason is not None
                if (end := self.ended_with(out)) is not None:
                    raise end
                yield out
        finally:
            if not finished:
                self.abort(params.request_id)

    def _check_queue(self) -> None:
        limit = self.limits.max_num_queued_requests
        if limit is None:
            return
        scheduler = self._loop.scheduler
        num_waiting = len(scheduler.waiting) + self._num_unseated
        num_seats = max(0, self.limits.max_num_seqs - len(scheduler.running))
        if num_waiting >= limit + num_seats:
            latency_s = self.stats.request_latency_s.mean
            retry_after_s = math.ceil(latency_s * num_waiting / self.limits.max_num_seqs)
            raise QueueFull(num_waiting, limit, min(max(retry_after_s, 1), 60))

    def _closing_sink(self, params: GenerateRequest, sink: Sink) -> Sink:
        def deliver(out: RunOutput) -> None:
            if out.finish_reason is not None:
                with self._wake:
                    self._requests.pop(params.request_id, None)
            sink(out)

        return deliver

    def _take_in(self, request: Request) -> None:
        with self._wake:
            self._num_unseated -= 1
        self._loop.add(request)

    # --- control ----------------------------------------------------------------------------

    def set_speculation(self, enabled: bool, max_tokens: int | None = None) -> None:
        """Turn drafting on or off, or cap K, from the next step on. Output does not change."""

        def apply() -> None:
            self._loop.scheduler.speculation_enabled = enabled
            self._loop.scheduler.max_speculative_tokens = max_tokens

        with self._wake:
            self._post(apply)

    def restore_draft(
        self, connect: Callable[[], None] = lambda: None, generation: int | None = None
    ) -> Future[None]:
        """Use a rebuilt drafter, whose KV is empty, from the next step on.

        `connect` runs first, between two steps: it points the client at the new one. If it fails,
        the drafter stays lost, and the result says why. `generation`: what plans call the new
        drafter; None: one more than the last.
        """
        applied: Future[None] = Future()

        def apply() -> None:
            try:
                connect()
            except Exception as error:
                logger.exception("a rebuilt drafter could not be connected")
                applied.set_exception(error)
                return
            self._loop.restore_draft(generation)
            applied.set_result(None)

        with self._wake:
            self._post(apply)
        return applied

    def draft_lost(self) -> str | None:
        """Why the drafter is lost; None while it is there, or none is meant to be."""
        return self._loop.draft_lost

    def is_running(self) -> bool:
        """Whether the step loop runs."""
        return self._thread.is_alive and not self._is_stopping

    def status(self) -> EngineStatus:
        scheduler = self._loop.scheduler
        pool = scheduler.tables.pool
        since = max(self._loop.last_step_s, self._busy_since)
        return EngineStatus(
            is_healthy=self._error is None and self._thread.is_alive,
            error=self._error,
            draft_lost=self._loop.draft_lost,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._num_unseated,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_referenced_blocks=pool.num_referenced,
            seconds_since_step=time.monotonic() - since if self._is_busy else 0.0,
            step_limit_s=self._loop.limit_s,
            stats=self.stats.snapshot(),
        )

    def stop(self, timeout_s: float = 10.0) -> None:
        """End every request, the thread and the client. Idempotent.

        Raises:
            TimeoutError: the step in flight did not end in time.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        self._client.close()
        if self._thread.is_alive:
            raise TimeoutError(f"the verifier's thread did not end within {timeout_s} s")

    # --- the loop's thread ------------------------------------------------------------------

    def _post(self, command: _Command) -> None:
        self._inbox.append(command)
        self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                if self._loop.step() or self._loop.calibrate():
                    continue
                self._go_idle()
            self._close("the engine was stopped")
        except Exception as error:
            logger.exception("the step loop ended")
            self._close(f"{type(error).__name__}: {error}")

    def _obey(self) -> bool:
        """Carry out what other threads asked. False: stop."""
        if self._inbox:
            with self._wake:
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
        return not self._is_stopping

    def _go_idle(self) -> None:
        """Wait for a command. The state in between is checked: an idle replica holds nothing."""
        if __debug__ and not self._loop.scheduler.has_work:
            self._loop.scheduler.check_idle()
        if self._gang is not None:
            self._gang.idle()
        with self._wake:
            self._is_busy = False
            while not self._inbox and not self._is_stopping:
                if self._gang is not None and self._gang.is_lockstep:
                    self._wake.release()
                    try:
                        self._loop.stand_by(_STAND_BY_S)
                    finally:
                        self._wake.acquire()
                else:
                    self._wake.wait(_IDLE_WAIT_S)
            self._busy_since = time.monotonic()
            self._is_busy = True

    def _close(self, reason: str) -> None:
        if self._gang is not None:
            self._gang.close()
        with self._wake:
            if not self._is_stopping:
                self._error = reason
            self._is_stopping = True
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        self._loop.fail_all(reason)


def _hand_over(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[RunOutput], out: RunOutput
) -> None:
    # Raises when the consumer's loop is closed: the step loop then ends the request.
    loop.call_soon_threadsafe(queue.put_nowait, out)
