"""Which requests run in the next step, with how many tokens, drafts and KV blocks.

First come, first served. `running` is in order of arrival; the head of `waiting` arrived after
all of them, except for preempted requests, which are the youngest that ran and go back to its
front. So the youngest running request is always the last, and the oldest always progresses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from actors.kvcache.block_table import BlockTables
from actors.kvcache.prefix_index import extend_hashes
from actors.stats import EngineStats
from actors.steps.messages import (
    BlockDelta,
    DraftEntry,
    Int32Array,
    SlotParams,
    StepPlan,
    TargetEntry,
)
from actors.verifier.limits import EngineLimits
from actors.verifier.request import NO_DRAFTS, Request, RequestStatus


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part in a step, in the order of the plan's target entries.

    `end`: known tokens below this position are in the step. `num_drafts`: drafts asked, in the
    plan or pending. `draft_end`: draft KV is whole below it once the plan's draft entry has been
    fed; None without one. `has_logits`: the rows reach the newest known token. `drafts`: those
    in the plan; kept here because the request may be ended while the step is in flight.
    """

    request: Request
    end: int
    has_logits: bool
    num_drafts: int = 0
    draft_end: int | None = None
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)


@dataclass(slots=True)
class ScheduledStep:
    """A plan and what the verifier remembers of it until the result is in."""

    plan: StepPlan
    scheduled: list[ScheduledRequest]


@dataclass(slots=True)
class _Budget:
    """Input rows left in this step, for the target and for a separate draft model."""

    target: int
    draft: int


class Scheduler:
    """Owns the queues, the slots and, through `tables`, the KV blocks."""

    def __init__(self, limits: EngineLimits, stats: EngineStats) -> None:
        self._limits = limits
        self._stats = stats
        self.tables = BlockTables(
            limits.num_blocks, limits.block_size, limits.max_model_len, limits.enable_prefix_caching
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._admission_blocked = False
        self.speculation_enabled = True
        self.max_speculative_tokens: int | None = None
        # Of the data-parallel ranks together: the largest batch of the next step; None when they
        # do not agree and all use the static K.
        self.group_batch: int | None = 0
        # False from the loss of a draft model until it is rebuilt.
        self.has_draft = limits.draft_has_own_kv
        self.draft_generation = 0

    # --- queues -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever its state, and free all it holds."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is not RequestStatus.FINISHED:
            self.waiting.remove(request)
        self._admission_blocked = False
        request.advance(RequestStatus.FINISHED)

    def preempt_youngest(self) -> Request:
        """Free the youngest running request's blocks; it runs again, as new, from its tokens."""
        request = self.running.pop()
        self._release(request)
        request.advance(RequestStatus.PREEMPTED)
        self.waiting.appendleft(request)
        self._stats.num_preemptions += 1
        return request

    def _release(self, request: Request) -> None:
        assert request.table is not None
        self.tables.free(request.table)
        request.table = None
        self._free_slots.append(request.slot)
        request.slot = -1

    # --- speculation ------------------------------------------------------------------------

    def lose_draft(self) -> None:
        """The draft model's KV is gone: no drafts from it until `restore_draft`."""
        self.has_draft = False
        for request in self.running:
            request.draft_len = 0

    def restore_draft(self, generation: int | None = None) -> None:
        """A new draft model is there. It knows no slot, no block table and has no KV: running
        requests start over from their tokens, and cached blocks, which lack its part, are
        forgotten. `generation`: what plans call it; None: one more than the last."""
        self.draft_generation = self.draft_generation + 1 if generation is None else generation
        while self.running:
            self.preempt_youngest()
        self.tables.forget_prefixes()
        self.has_draft = self._limits.draft_has_own_kv

    def num_drafts_allowed(self, request: Request, num_for_batch: int) -> int:
        """K of this request in a step whose batch allows `num_for_batch`.

        One less than what may still be emitted (the end of the context is part of that): the
        extra token is always there.
        """
        p = request.params
        if not (p.speculation_enabled and self.speculation_enabled):
            return 0
        k = min(num_for_batch, request.rules.max_tokens - request.num_output_tokens - 1)
        if p.num_speculative_tokens is not None:
            k = min(k, p.num_speculative_tokens)
        if self.max_speculative_tokens is not None:
            k = min(k, self.max_speculative_tokens)
        return max(k, 0)

    def next_batch(self) -> int:
        """As many requests as the next step will probably run."""
        num_reqs = len(self.running)
        if not self._admission_blocked:
            num_reqs += min(len(self.waiting), self._limits.max_num_seqs - num_reqs)
        return max(num_reqs, 1)

    def num_drafts_for_batch(self) -> int:
        """K of the next step: by its batch, or by a larger one of another data-parallel rank."""
        if self._limits.num_speculative_tokens == 0:
            return 0
        if self.group_batch is None:
            return self._limits.num_speculative_tokens
        batch = max(self.next_batch(), self.group_batch)
        return self._limits.num_speculative_tokens_for_batch(batch)

    # --- one step ---------------------------------------------------------------------------

    def schedule(self, generation: int = 0) -> ScheduledStep | None:
        """The next step, blocks reserved; None when nothing can run."""
        if not (self.running or self.waiting):
            return None
        budget = _Budget(self._limits.max_num_batched_tokens, self._limits.max_num_batched_tokens)
        num_for_batch = self.num_drafts_for_batch()
        scheduled: list[ScheduledRequest] = []
        num_preempted = 0
        i = 0
        while i < len(self.running) and budget.target > 0:
            request = self.running[i]
            # A row for each request that comes after this one, before anyone's drafts.
            spare = budget.target - (len(self.running) - i - 1)
            part = self._fit(request, spare, budget, num_for_batch)
            while part is None:
                num_preempted += 1
                if self.preempt_youngest() is request:
                    break
                part = self._fit(request, spare, budget, num_for_batch)
            if part is not None:
                scheduled.append(part)
                i += 1
        admissions: list[SlotParams] = []
        if num_preempted == 0:
            self._admit(scheduled, admissions, budget)
        if not scheduled:
            return None
        self._step += 1
        return ScheduledStep(self._plan(generation, scheduled, admissions), scheduled)

    def dummy_plan(self, generation: int = 0) -> StepPlan:
        """A step without requests that has the one target forward of every step.

        For a rank without work whose experts serve the others. It runs on the padding block in a
        free slot; the next admission to that slot replaces both.
        """
        slot = self._free_slots[-1]
        zero = np.zeros(1, dtype=np.int32)
        self._step += 1
        return StepPlan(
            generation,
            self._step,
            (SlotParams(slot=slot, prompt_len=1, seed=0),),
            (BlockDelta(slot, 0, zero),),
            (TargetEntry(slot, 0, zero, 0, 0, 1),),
            draft_generation=self.draft_generation,
        )

    def _fit(
        self, request: Request, spare: int, budget: _Budget, num_for_batch: int
    ) -> ScheduledRequest | None:
        """Reserve a running request's step, without drafts if need be; None: no blocks left."""
        assert request.table is not None
        start = request.num_computed_tokens
        num_new = min(request.num_pending_tokens, max(spare, 1))
        end = start + num_new
        part = ScheduledRequest(request, end, has_logits=end == request.num_tokens)
        own_kv = self.has_draft
        if num_new == request.num_pending_tokens == 1 and request.num_output_tokens > 0:
            extra = self._limits.max_num_new_slots_for_drafting
            k = min(self.num_drafts_allowed(request, num_for_batch), spare - 1 - extra)
            if own_kv:
                if k > 0 or self._keeps_draft_whole(request):
                    self._feed_draft(part, budget)
                if part.draft_end != request.num_tokens:
                    k = 0  # the draft KV still has to catch up
            else:
                k = min(k, len(request.drafts))
            part.num_drafts = max(k, 0)
        elif own_kv:
            self._feed_draft(part, budget)

        lookahead = self._limits.num_lookahead_tokens if part.num_drafts else 0
        if not self.tables.reserve(request.table, start, num_new + part.num_drafts, lookahead):
            part.num_drafts = 0
            if not self.tables.reserve(request.table, start, num_new, 0):
                return None
        budget.target -= num_new + part.num_drafts
        if part.num_drafts:
            budget.target -= self._limits.max_num_new_slots_for_drafting
        if part.draft_end is not None:
            budget.draft -= part.draft_end - request.draft_len
        return part

    def _keeps_draft_whole(self, request: Request) -> bool:
        """Feed the draft model in a step with K = 0? Yes if the step alone asked for K = 0. Where
        speculation is off for long, one batched catch-up later is cheaper than a draft forward
        a step."""
        return request.params.speculation_enabled and self.speculation_enabled

    def _feed_draft(self, part: ScheduledRequest, budget: _Budget) -> None:
        end = min(part.end, part.request.draft_len + budget.draft)
        if end > part.request.draft_len:
            part.draft_end = end

    def _admit(
        self, scheduled: list[ScheduledRequest], admissions: list[SlotParams], budget: _Budget
    ) -> None:
        limits, tables = self._limits, self.tables
        self._admission_blocked = False
        while self.waiting and len(self.running) < limits.max_num_seqs and budget.target > 0:
            request = self.waiting[0]
            hit = self._find_prefix(request)
            num_hit = len(hit) * limits.block_size
            pending = request.num_tokens - num_hit
            # Without chunking a prefill waits for a step with room for all of it. One that can
            # never fit is a resumed request that outgrew the budget: it has to be cut.
            if (
                not limits.enable_chunked_prefill
                and budget.target < pending <= limits.max_num_batched_tokens
            ):
                return
            # Room for the whole prefill, or the request would soon be preempted again. Found
            # blocks without an owner are counted as available but are about to be used.
            need = tables.num_blocks_for(request.num_tokens) - len(hit)
            num_cached = sum(1 for block in hit if tables.pool.is_cached(block))
            if need > tables.pool.num_available - num_cached:
                self._admission_blocked = True
                return
            self.waiting.popleft()
            request.table = tables.open()
            tables.attach(request.table, hit)
            request.num_computed_tokens = num_hit
            request.draft_len = num_hit if self.has_draft else 0
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_hit
                self._stats.num_prompt_tokens += request.prompt_len
                self._stats.num_cached_prompt_tokens += num_hit
            request.slot = self._free_slots.pop()
            request.advance(RequestStatus.RUNNING)
            self.running.append(request)
            admissions.append(request.slot_params())
            part = self._fit(request, budget.target, budget, 0)
            assert part is not None, f"{request!r}: blocks were available"
            scheduled.append(part)

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's known tokens; the last token is always recomputed, its
        logits are needed."""
        if not self._limits.enable_prefix_caching:
            return []
        extend_hashes(request.block_hashes, request.token_ids, self._limits.block_size)
        num_usable = (request.num_tokens - 1) // self._limits.block_size
        return self.tables.match(request.block_hashes[:num_usable])

    def _plan(
        self, generation: int, scheduled: list[ScheduledRequest], admissions: list[SlotParams]
    ) -> StepPlan:
        blocks: list[BlockDelta] = []
        target: list[TargetEntry] = []
        draft: list[DraftEntry] = []
        for part in scheduled:
            request, k = part.request, part.num_drafts
            assert request.table is not None
            delta = self.tables.take_delta(request.table, request.slot)
            if delta is not None:
                blocks.append(delta)
            tokens = request.token_ids
            start = request.num_computed_tokens
            rows = tokens[start : part.end]
            num_logits = 1 + k if part.has_logits else 0
            if self.has_draft:
                target.append(TargetEntry(request.slot, start, rows, 0, k, num_logits))
                if part.draft_end is not None:
                    feed = tokens[request.draft_len : part.draft_end]
                    draft.append(DraftEntry(
                            request.slot, request.draft_len, len(feed), request.draft_len, feed, k
                        ))
            else:
                if k:
                    part.drafts = request.drafts[:k]
                    rows = np.concatenate((rows, part.drafts))
                target.append(TargetEntry(request.slot, start, rows, k, 0, num_logits))
        return StepPlan(
            generation, self._step, tuple(admissions), tuple(blocks), tuple(target), tuple(draft),
            self.draft_generation,
        )  # fmt: skip

    # --- after the step ---------------------------------------------------------------------

    def commit(self, part: ScheduledRequest, num_accepted: int, num_real_drafts: int) -> None:
        """Take a step's result into the lengths. New tokens are appended already.

        Args:
            part: From `schedule`, of a request that did not leave in between.
            num_accepted: Drafts accepted, before a stop trimmed them.
            num_real_drafts: Drafts the step really had; a draft model may give fewer than asked.
        """
        request = part.request
        assert request.table is not None
        num_computed = part.end
        if part.has_logits:
            # The newest token never has KV, also when a stop cut accepted drafts away.
            num_computed = min(num_computed + num_accepted, request.num_tokens - 1)
        request.num_computed_tokens = num_computed
        if part.draft_end is not None and self.has_draft:
            drafted = part.draft_end + max(num_real_drafts - 1, 0)
            request.draft_len = min(drafted, request.num_computed_tokens)
        self.tables.commit(request.table, request.num_computed_tokens)
        if self._limits.enable_prefix_caching:
            valid = request.num_computed_tokens
            if self.has_draft:
                valid = min(valid, request.draft_len)
            if valid // self._limits.block_size > request.table.num_published:
                confirmed = request.token_ids[: request.num_computed_tokens]
                extend_hashes(request.block_hashes, confirmed, self._limits.block_size)
                self.tables.publish(request.table, request.block_hashes, valid)
        request.drop_drafts()

    def check_idle(self) -> None:
        """Assert that an idle replica holds nothing."""
        assert not self.running and not self.waiting and len(self.tables) == 0
        assert len(self._free_slots) == self._limits.max_num_seqs, "a slot was lost"
        self.tables.check_integrity()
        assert self.tables.pool.num_referenced == 0, "blocks without an owner"
