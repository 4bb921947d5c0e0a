"""The step loop: schedule, send, deliver what the last step gave, receive, accept, commit, propose.

Between a step's result and the next plan stands only what that plan depends on. All else, counting
what step n gave, learning from it, decoding and delivering its output, is done while the workers
run step n + 1. What one request's data does wrong ends that request; only a failing step ends the
loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from actors.acceptance.base import AcceptanceMethod, Columns, VerifyRows
from actors.acceptance.exact import ExactMatch
from actors.errors import EngineDead
from actors.requests import FinishReason, RunOutput, TokenLogprob
from actors.sampling.uniforms import Stream, uniforms
from actors.stats import EngineStats
from actors.steps.messages import (
    INVALID_SAMPLE,
    Int32Array,
    RowStats,
    Stat,
    StepPlan,
    token_array,
)
from actors.steps.patience import StepPatience
from actors.steps.protocols import LookupDrafter, MaskSource, StepClient
from actors.verifier.calibration import Calibration
from actors.verifier.drafts import legal_prefix
from actors.verifier.finish import RunEnd, decode_run, end_run
from actors.verifier.goodput import Goodput
from actors.verifier.limits import EngineLimits
from actors.verifier.request import Request, RequestStatus
from actors.verifier.scheduler import ScheduledRequest, ScheduledStep, Scheduler
from parallel.gang.member import GangMember

# What K is chosen by is shown in the statistics every so many steps.
_REPORT_INTERVAL = 16


class _Verified(NamedTuple):
    """A request's part in a step, to be counted and learnt from.

    `run`: what came of it, before a stop trimmed it: `num_accepted` of `num_drafts` and one token.
    `drafts`: those that were at hand, `level` the confidence in them.
    """

    run: list[int]
    num_drafts: int
    num_accepted: int
    is_decoding: bool
    drafts: Int32Array
    level: int


class _Emission(NamedTuple):
    """A committed run on its way to the sink: `token_ids`, the first `num_accepted` drafts.

    `rows`: the step's statistics and the first of its rows that is the run's. `part` None: nothing
    is left to be counted.
    """

    request: Request
    token_ids: list[int]
    num_accepted: int
    end: RunEnd
    rows: tuple[RowStats, int] | None = None
    part: _Verified | None = None
    error: str | None = None


class _Timing(NamedTuple):
    """A step that ran, and its seconds: with planning, and from its plan on."""

    step: ScheduledStep
    result: RowStats
    with_planning_s: float
    seconds: float
    follows_step: bool


class StepLoop:
    """Drives one replica's steps. Not thread safe: one thread calls everything but `begin`.

    Args:
        limits: Of this replica.
        client: Carries steps to the workers.
        drafter: A drafter that runs here, or None.
        stats: Counted into.
        accept: Acceptance method.
        patience: How long each step may take.
        generation: Of the worker group; frames of older generations are void.
        gang: Data-parallel ranks to agree with on K, or None.
        mask_source: Gives the masks of every step's rows, once its drafts are known; None: no
            token is forbidden.
    """

    def __init__(
        self,
        limits: EngineLimits,
        client: StepClient,
        drafter: LookupDrafter | None = None,
        stats: EngineStats | None = None,
        accept: AcceptanceMethod | None = None,
        patience: StepPatience | None = None,
        generation: int = 0,
        gang: GangMember | None = None,
        mask_source: MaskSource | None = None,
    ) -> None:
        self._limits = limits
        self._client = client
        self._drafter = drafter
        self.stats = stats if stats is not None else EngineStats()
        self._goodput = _goodput(limits, drafter)
        self._calibration = None if self._goodput is None else Calibration(limits)
        self.scheduler = Scheduler(limits, self.stats, self._goodput)
        self._accept = accept if accept is not None else ExactMatch()
        self._mask_source = mask_source
        self._patience = patience if patience is not None else StepPatience()
        self._generation = generation
        self._gang = gang
        # What the last step gave, until the next one is under way.
        self._outbox: list[_Emission] = []
        self._timing: _Timing | None = None
        self.after_delivery: Callable[[], None] = lambda: None
        self.draft_lost: str | None = None
        # Whether the target's last forward was that of the step before: no idle time in between.
        self._follows_step = False
        self.last_step_s = time.monotonic()
        self.limit_s = self._patience.limit_s(1)  # of the step in flight, or of the last one

    def begin(self, request: Request) -> None:
        """Prepare for a request that `add` will queue. From any thread.

        Raises:
            Exception: the request cannot be planned.
        """
        self.scheduler.prepare(request)
        self._tell(lambda d: d.begin(request.number, request.token_ids, request.params.cache_salt))

    def forget(self, request: Request) -> None:
        """The lookup drafter will not hear of this request again. From any thread before `add`."""
        self._tell(lambda d: d.finish(request.number, request.token_ids))

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> bool:
        """Run one step. False when there was nothing to run; all output is delivered then.

        Raises:
            EngineDead: the step was lost. Requests in flight are the caller's to `fail_all`.
        """
        began = time.monotonic()
        is_counted_on = False  # by other ranks, for a forward of this one
        if self._gang is not None and self.scheduler.has_work:
            self._agree(self._gang)
            is_counted_on = self._gang.is_lockstep
        step = self.scheduler.schedule(self._generation)
        if step is None:
            if is_counted_on:
                self._run_lockstep_dummy()
            self._follows_step = False
            self.deliver()
            return False
        started = time.monotonic()
        if self._mask_source is not None:
            step.plan = replace(step.plan, awaits_masks=True)
        self._send(step.plan)
        self.deliver()
        result = self._client.recv(self.limit_s, self._mask_source)
        self._take(step, result)
        self.last_step_s = now = time.monotonic()
        self._patience.observe(step.plan.num_rows, now - started)
        self._timing = _Timing(step, result, now - began, now - started, self._follows_step)
        self._follows_step = True
        return True

    def calibrate(self) -> bool:
        """Run one step without requests to measure what a step costs, if that is still to be done.
        False: it is not. Only while no request is there: their slots and steps come first."""
        if self._calibration is None or self.scheduler.has_work:
            return False
        assert self._goodput is not None
        num_rows = self._calibration.next_rows()
        if num_rows is None:
            self._goodput.cost.seed(self._calibration.seconds)
            self._calibration = None
            self._goodput.report(self.stats)
            return False
        started = time.monotonic()
        self._run_dummy(num_rows, self._limits.num_speculative_tokens + 1)
        self._calibration.observe(num_rows, time.monotonic() - started)
        return True

    def abort(self, request: Request, error: str | None = None) -> None:
        """End a request now; its blocks are free when this returns."""
        if request.status is RequestStatus.FINISHED:
            return
        self._leave(request)
        self._count_end("abort" if error is None else "error")
        self._outbox.append(_closing(request, error))

    def fail_all(self, error: str) -> None:
        """End every request with `error`, and deliver."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request, error)
        self.deliver()

    def restore_draft(self, generation: int | None = None) -> None:
        """A rebuilt drafter, with empty KV, answers from the next step on."""
        self.draft_lost = None
        self.scheduler.restore_draft(generation)

    # --- data parallelism -------------------------------------------------------------------

    def _agree(self, gang: GangMember) -> None:
        """Have K follow the largest batch of the next step among the ranks."""
        started = time.monotonic()
        turn = gang.next_turn(self.scheduler.next_batch(), self._longest_s)
        while turn is not None and turn.is_dummy:
            # Decided before this rank had work: the others count on its forwards.
            self._run_lockstep_dummy()
            started = time.monotonic()
            turn = gang.next_turn(self.scheduler.next_batch(), self._longest_s)
        if turn is None:
            if gang.is_lockstep:
                raise EngineDead("a data-parallel rank is gone, and experts span the ranks")
            if self.scheduler.group_batch is not None:
                self.stats.num_dp_fallbacks += 1
            self.scheduler.group_batch = None
            return
        self.stats.dp_wait_s.observe(time.monotonic() - started)
        self.stats.num_dp_unanswered = gang.num_unanswered
        self.scheduler.group_batch = turn.batch

    def stand_by(self, timeout_s: float) -> None:
        """Lockstep without work: run the dummy step that the other ranks need, if one comes."""
        assert self._gang is not None
        if self._gang.wait_idle(timeout_s) is not None:
            self._run_lockstep_dummy()

    def _run_lockstep_dummy(self) -> None:
        self._run_dummy()
        self.stats.num_dp_dummy_steps += 1

    def _run_dummy(self, num_rows: int = 1, most_rows: int = 1) -> None:
        self._send(self.scheduler.dummy_plan(self._generation, num_rows, most_rows))
        self._client.recv(self.limit_s)
        self._follows_step = False

    @property
    def _is_lockstep(self) -> bool:
        return self._gang is not None and self._gang.is_lockstep

    @property
    def _longest_s(self) -> float:
        """What the largest legal step may take."""
        return self._patience.limit_s(self._limits.max_num_batched_tokens)

    def _send(self, plan: StepPlan) -> None:
        # In lockstep a step takes as long as the largest of all ranks.
        limit_s = self._longest_s if self._is_lockstep else self._patience.limit_s(plan.num_rows)
        self.limit_s = limit_s
        self._client.send(replace(plan, limit_s=limit_s))

    # --- result of a step -------------------------------------------------------------------

    def _take(self, step: ScheduledStep, result: RowStats) -> None:
        if result.step != step.plan.step:
            raise EngineDead(f"step {step.plan.step} was answered with step {result.step}")
        if result.draft_lost is not None and self.scheduler.has_drafter:
            self.draft_lost = result.draft_lost
            self.stats.num_draft_losses += 1
            self.scheduler.lose_draft()
        num_drafts, draft_ids = self._collect_drafts(step, result)
        verifying = [i for i, part in enumerate(step.scheduled) if part.has_logits]
        counts = token_array([num_drafts[i] for i in verifying])
        num_rows = int(counts.sum()) + len(verifying)
        if num_rows != len(result.sampled):
            raise EngineDead(
                f"step {step.plan.step}: {len(result.sampled)} rows came back, {num_rows} expected"
            )
        accepted: list[int] = []
        next_token: list[int] = []
        if verifying:
            rows = VerifyRows(self._columns(step, result, verifying, counts), draft_ids, counts)
            verdict = self._accept(rows)
            accepted = verdict.num_accepted.tolist()
            next_token = verdict.next_token.tolist()
        drafts = draft_ids.tolist()
        num_for_batch = self.scheduler.num_drafts_for_batch()

        verified = 0  # requests with logits so far, and their rows and drafts
        row = 0
        first_draft = 0
        for part, k in zip(step.scheduled, num_drafts, strict=True):
            run: list[int] = []
            num_accepted = 0
            first_row = row
            if part.has_logits:
                num_accepted = accepted[verified]
                run = drafts[first_draft : first_draft + num_accepted]
                run.append(next_token[verified])
                verified += 1
                row += k + 1
                first_draft += k
            request = part.request
            if request.status is not RequestStatus.RUNNING:
                continue  # its sink failed while the step was in flight
            try:
                self._commit(part, run, k, num_accepted, result, first_row)
            except Exception as error:
                self.abort(request, f"request {request.params.request_id}: {error!r}")
                continue
            if run and request.status is RequestStatus.RUNNING:
                self._propose(request, num_for_batch)

    def _columns(
        self, step: ScheduledStep, result: RowStats, verifying: list[int], counts: Int32Array
    ) -> Columns:
        """The step's row statistics, with a uniform per row where the method draws."""
        if Stat.UNIFORM not in self._accept.needs:
            return result.columns
        seeds: list[int] = []
        positions: list[int] = []
        for i, num_drafts in zip(verifying, counts.tolist(), strict=True):
            part = step.scheduled[i]
            seeds += [part.request.seed] * (num_drafts + 1)
            # Row i of a request stands for the token at position num_known + i.
            positions += range(part.num_known, part.num_known + num_drafts + 1)
        drawn = uniforms(seeds, positions, Stream.ACCEPT, [step.plan.step] * len(seeds))
        return {**result.columns, Stat.UNIFORM: drawn}

    def _collect_drafts(
        self, step: ScheduledStep, result: RowStats
    ) -> tuple[list[int], Int32Array]:
        """Drafts that were verified: their number per scheduled request, and all ids."""
        if not step.plan.draft:
            ids = [part.drafts for part in step.scheduled]
            counts = [part.num_drafts for part in step.scheduled]
            return counts, np.concatenate(ids) if ids else token_array([])
        if result.drafts is None:
            return [0] * len(step.scheduled), token_array([])
        given = iter(result.drafts.counts.tolist())
        counts = [next(given, 0) if part.num_drafts else 0 for part in step.scheduled]
        return counts, result.drafts.token_ids

    def _commit(
        self,
        part: ScheduledRequest,
        run: list[int],
        num_drafts: int,
        num_accepted: int,
        result: RowStats,
        first_row: int,
    ) -> None:
        request = part.request
        if not run:
            self.scheduler.commit(part, 0, 0)
            return
        if run[-1] == INVALID_SAMPLE:
            raise ArithmeticError(
                f"the model's logits after {request.num_tokens} tokens are not numbers"
            )
        end = end_run(request.rules, request.num_output_tokens, run, request.text)
        kept = run[: end.num_tokens]
        request.append(kept)
        if self._drafter is not None:
            self._tell(lambda d: d.observe(request.number, request.token_ids, len(kept)))
        verified = _Verified(
            run, num_drafts, num_accepted, part.is_decoding, request.drafts, request.rates.level
        )
        self.scheduler.commit(part, num_accepted, num_drafts)
        if end.finish_reason is not None:
            self._leave(request)
            self._count_end(end.finish_reason.value)
        self._outbox.append(
            _Emission(
                request, kept, min(num_accepted, len(kept)), end, (result, first_row), verified
            )
        )

    def _propose(self, request: Request, num_for_batch: int) -> None:
        """Ask the lookup drafter for the next step's drafts. Its failure costs speed only."""
        if self._drafter is None:
            return
        k = self.scheduler.num_drafts_allowed(request, num_for_batch)
        if k == 0:
            return
        try:
            drafts = self._drafter.propose(request.number, request.token_ids, k)
            request.drafts = legal_prefix(drafts, k, self._limits.vocab_size)
            if len(request.drafts) < min(len(drafts), k):
                self.stats.num_drafter_failures += 1
            if self._goodput is not None:
                level = self._drafter.confidence(request.number)
                request.rates.level = min(max(level, 0), self._drafter.num_confidence_levels - 1)
        except Exception:
            self.stats.num_drafter_failures += 1
            request.drop_drafts()

    def _tell(self, what: Callable[[LookupDrafter], object]) -> None:
        if self._drafter is None:
            return
        try:
            what(self._drafter)
        except Exception:
            self.stats.num_drafter_failures += 1

    def _leave(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.forget(request)

    def _count_end(self, reason: str) -> None:
        self.stats.num_requests[reason] += 1

    # --- delivery ---------------------------------------------------------------------------

    def deliver(self) -> None:
        """Count what is committed and learn from it; then decode it and hand it to the sinks."""
        for emission in self._outbox:
            if emission.part is not None:
                self._count(emission, emission.part)
        if self._timing is not None:
            self._count_step(self._timing)
            self._timing = None
        if self._outbox:
            while self._outbox:
                self._hand_out()
            self.after_delivery()

    def _hand_out(self) -> None:
        outbox, self._outbox = self._outbox, []
        now = time.monotonic()
        for emission in outbox:
            request = emission.request
            try:
                self._observe_latency(request, emission, now)
                request.sink(_output(emission))
            except Exception as error:
                # A sink or a decoder that fails is that request's own trouble. If it still runs
                # it ends here; its closing output is the last attempt to reach the sink.
                if emission.error is None:
                    message = f"request {request.params.request_id}: {error!r}"
                    if request.status is not RequestStatus.FINISHED:
                        self.abort(request, message)
                    elif emission.end.finish_reason is not None:
                        self._outbox.append(_closing(request, message))

    def _count(self, emission: _Emission, part: _Verified) -> None:
        request, stats = emission.request, self.stats
        request.counts.observe(part.num_drafts, emission.num_accepted)
        stats.num_output_tokens += len(emission.token_ids)
        stats.observe_drafts(part.num_drafts, emission.num_accepted)
        if not part.is_decoding:
            return
        stats.observe_k(part.num_drafts)
        if self._goodput is not None:
            stats.num_unsent_draft_tokens += max(len(part.drafts) - part.num_drafts, 0)
            self._goodput.observe_run(
                request.rates, part.drafts, part.num_drafts, part.num_accepted, part.run, part.level
            )

    def _count_step(self, timing: _Timing) -> None:
        step, result, stats = timing.step, timing.result, self.stats
        stats.num_steps += 1
        stats.step_time_s.observe(timing.seconds)
        stats.forward_time_s.observe(result.forward_ms / 1e3)
        if timing.follows_step and result.gap_ms is not None:
            stats.forward_gap_s.observe(result.gap_ms / 1e3)
        if step.plan.draft:
            stats.draft_time_s.observe(result.draft_ms / 1e3)
        if self._goodput is None:
            return
        if step.has_decoding_only:
            longest = max(part.num_drafts for part in step.scheduled)
            self._goodput.observe_step(
                step.plan.num_target_rows,
                timing.with_planning_s,
                longest,
                result.draft_ms / 1e3,
            )
        self._goodput.prepare()
        if stats.num_steps % _REPORT_INTERVAL == 0:
            self._goodput.report(stats)

    def _observe_latency(self, request: Request, emission: _Emission, now: float) -> None:
        num_tokens = len(emission.token_ids)
        if num_tokens:
            if request.first_token_s is None:
                request.first_token_s = now
                self.stats.time_to_first_token_s.observe(now - request.arrival_s)
            else:
                gap = now - request.last_token_s
                self.stats.inter_token_latency_s.observe(gap / num_tokens, num_tokens)
            request.last_token_s = now
        if emission.end.finish_reason is not None:
            self.stats.request_latency_s.observe(now - request.arrival_s)


def _goodput(limits: EngineLimits, drafter: LookupDrafter | None) -> Goodput | None:
    if not limits.follows_goodput:
        return None
    return Goodput(
        limits.num_speculative_tokens,
        1 if drafter is None else drafter.num_confidence_levels,
        drafts_in_step=limits.law.arrives_in_step,
        always_feeds=limits.law.reads_target_states,
    )


def _closing(request: Request, error: str | None) -> _Emission:
    end = RunEnd(0, FinishReason.ABORT, text="")
    return _Emission(request, [], 0, end, error=error)


def _logprobs(emission: _Emission) -> tuple[TokenLogprob, ...] | None:
    """Of the run's tokens; None: the request asks for none."""
    num_top = emission.request.params.num_logprobs
    if num_top < 0:
        return None
    if emission.rows is None:
        return ()
    items = []
    result, first_row = emission.rows
    columns = result.columns
    for row, token_id in enumerate(emission.token_ids, first_row):
        top: tuple[tuple[int, float], ...] = ()
        if num_top > 0:
            ids = columns[Stat.TOP_IDS][row, :num_top].tolist()
            top = tuple(zip(ids, columns[Stat.TOP_LOGPROBS][row, :num_top].tolist(), strict=True))
        items.append(TokenLogprob(token_id, float(columns[Stat.LOGPROB][row]), top))
    return tuple(items)


def _output(emission: _Emission) -> RunOutput:
    request, end, token_ids = emission.request, emission.end, tuple(emission.token_ids)
    text = end.text
    if text is None:
        text = ""
        if request.text is not None:
            text = decode_run(request.rules, token_ids, end.finish_reason, request.text)
    num_accepted = emission.num_accepted
    return RunOutput(
        request_id=request.params.request_id,
        token_ids=token_ids,
        text=text,
        accepted=(True,) * num_accepted + (False,) * (len(token_ids) - num_accepted),
        logprobs=_logprobs(emission),
        num_prompt_tokens=request.prompt_len,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_output_tokens=request.num_output_tokens,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        speculation=request.counts.snapshot(),
        error=emission.error,
    )
