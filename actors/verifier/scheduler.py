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
from actors.verifier.goodput import Goodput
from actors.verifier.limits import EngineLimits
from actors.verifier.request import NO_DRAFTS, Request, RequestStatus

# While the batch is too large to speculate, a separate draft model runs in one of so many steps
# and takes all that came in between: a forward of some more rows costs it about the same. A later
# return to K > 0 then has at most as many tokens of each decoding request to catch up.
FEED_INTERVAL = 32


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part in a step, in the order of the plan's target entries.

    `end`: known tokens below this position are in the step. `num_known`: tokens known when it was
    planned. `num_drafts`: drafts asked, in the plan or pending. `draft_end`: the drafter has an
    entry for every position below it once the plan's draft entry has been fed; None: nothing is
    fed. `has_logits`: the rows reach the newest known token. `is_decoding`: they are the newest
    output token's alone, and its drafts'. `drafts`: those in the plan; kept
    here because the request may be ended while the step is in flight.
    """

    request: Request
    end: int
    num_known: int
    has_logits: bool
    is_decoding: bool
    num_drafts: int = 0
    draft_end: int | None = None
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)


@dataclass(slots=True)
class ScheduledStep:
    """A plan and what the verifier remembers of it until the result is in."""

    plan: StepPlan
    scheduled: list[ScheduledRequest]

    @property
    def has_decoding_only(self) -> bool:
        """No prompt, or part of one, is in it."""
        return all(part.is_decoding for part in self.scheduled)


@dataclass(slots=True)
class _Budget:
    """Input rows left in this step, for the target and for the drafter's own forward."""

    target: int
    draft: int


class Scheduler:
    """Owns the queues, the slots and, through `tables`, the KV blocks.

    `goodput`: chooses K of each request, within what batch and server allow; None: they decide.
    """

    def __init__(
        self, limits: EngineLimits, stats: EngineStats, goodput: Goodput | None = None
    ) -> None:
        self._goodput = goodput
        self._most_wanted = limits.num_speculative_tokens
        self._limits = limits
        self._law = limits.law
        self._stats = stats
        self.tables = BlockTables(
            limits.num_blocks,
            limits.block_size,
            limits.max_model_len,
            limits.enable_prefix_caching,
            is_linked=self._law.drops_tail_block,
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
        # Whether a drafter computes in the steps. False from its loss until it is rebuilt.
        self.has_drafter = self._law.arrives_in_step
        self.draft_generation = 0
        self._num_unfed_steps = 0  # since the drafter last ran

    # --- queues -----------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """All that depends on a caller's values, before the request is queued. From any thread.

        Raises:
            Exception: whatever is wrong with them. Later, in the step's thread, it would end the
                requests of everybody.
        """
        if self._limits.enable_prefix_caching:
            self._hash_blocks(request)
        StepPlan(0, 0, admissions=(request.slot_params(),)).pack()

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
        """The drafter and its KV are gone: no drafts from it until `restore_draft`."""
        self.has_drafter = False
        for request in self.running:
            request.draft_len = 0

    def restore_draft(self, generation: int | None = None) -> None:
        """A new drafter is there. It knows no slot, no block table and has no KV: running requests
        start over from their tokens, and cached blocks, which lack its part, are forgotten.
        `generation`: what plans call it; None: one more than the last."""
        self.draft_generation = self.draft_generation + 1 if generation is None else generation
        while self.running:
            self.preempt_youngest()
        if self._law.keeps_kv:
            self.tables.forget_prefixes()
        self.has_drafter = self._law.arrives_in_step

    def num_drafts_allowed(self, request: Request, num_for_batch: int) -> int:
        """K of this request in a step whose batch allows `num_for_batch`.

        One less than what may still be emitted (the end of the context is part of that): the
        extra token is always there.
        """
        if not (self._law.proposes and self._server_speculates and request.speculates):
            return 0
        p = request.params
        k = min(num_for_batch, request.rules.max_tokens - request.num_output_tokens - 1)
        if p.num_speculative_tokens is not None:
            k = min(k, p.num_speculative_tokens)
        if self.max_speculative_tokens is not None:
            k = min(k, self.max_speculative_tokens)
        return max(k, 0)

    @property
    def _server_speculates(self) -> bool:
        return self.speculation_enabled and self.max_speculative_tokens != 0

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

    def _choose_drafts(self, num_for_batch: int) -> int:
        """Choose K of each request that decodes next; the most that any of them gets."""
        if self._goodput is None:
            return num_for_batch
        decoding: list[Request] = []
        caps: list[int] = []
        num_rows = 0
        for request in self.running:
            num_rows += request.num_pending_tokens
            if request.is_decoding:
                decoding.append(request)
                caps.append(self._num_possible(request, num_for_batch))
        num_rows = min(num_rows, self._limits.max_num_batched_tokens)
        chosen = self._goodput.choose([request.rates for request in decoding], caps, num_rows)
        for request, k in zip(decoding, chosen, strict=True):
            request.num_wanted_drafts = k
        if any(caps):
            self._most_wanted = max(chosen)
        # Before the first decides, its prompt is fed to the drafter if drafts paid of late.
        return min(self._most_wanted, num_for_batch)

    def _num_possible(self, request: Request, num_for_batch: int) -> int:
        """The most drafts that a request could have in the next step."""
        if not self._law.arrives_in_step:
            return min(self.num_drafts_allowed(request, num_for_batch), len(request.drafts))
        return self.num_drafts_allowed(request, num_for_batch) if self.has_drafter else 0

    def _num_wanted(self, request: Request, num_for_batch: int) -> int:
        """Drafts of a decoding request, if there is room for them."""
        if self._goodput is not None:
            return request.num_wanted_drafts
        return self._num_possible(request, num_for_batch)

    # --- one step ---------------------------------------------------------------------------

    def schedule(self, generation: int = 0) -> ScheduledStep | None:
        """The next step, blocks reserved; None when nothing can run."""
        if not (self.running or self.waiting):
            return None
        num_for_batch = self.num_drafts_for_batch()
        num_draft_rows = self._num_draft_rows(self._choose_drafts(num_for_batch))
        budget = _Budget(self._limits.max_num_batched_tokens, num_draft_rows)
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
        plan = self._plan(generation, scheduled, admissions)
        self._num_unfed_steps = 0 if plan.draft else self._num_unfed_steps + 1
        return ScheduledStep(plan, scheduled)

    def dummy_plan(self, generation: int = 0, num_rows: int = 1, most_rows: int = 1) -> StepPlan:
        """A step without requests that has the one target forward of every step.

        For a rank without work whose experts serve the others, and to measure what `num_rows` of
        drafting requests cost, of `most_rows` each. It runs on the padding block in free slots;
        the next admission to such a slot replaces both.
        """
        sizes = [most_rows] * (num_rows // most_rows)
        if num_rows % most_rows:
            sizes.append(num_rows % most_rows)
        entries: list[TargetEntry] = []
        blocks: list[BlockDelta] = []
        for slot, size in zip(reversed(self._free_slots), sizes, strict=False):
            rows = np.zeros(size, dtype=np.int32)
            entries.append(TargetEntry(slot, 0, rows, size - 1, 0, size))
            num_blocks = -(-size // self._limits.block_size)
            blocks.append(BlockDelta(slot, 0, np.zeros(num_blocks, dtype=np.int32)))
        self._step += 1
        return StepPlan(
            generation,
            self._step,
            tuple(SlotParams(slot=entry.slot, prompt_len=1, seed=0) for entry in entries),
            tuple(blocks),
            tuple(entries),
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
        part = ScheduledRequest(
            request,
            end,
            request.num_tokens,
            has_logits=end == request.num_tokens,
            is_decoding=request.is_decoding,
        )
        k = 0
        if part.is_decoding:
            k = min(self._num_wanted(request, num_for_batch), spare - 1)
        if self.has_drafter and self._law.keeps_kv:
            k = self._feed_drafter(part, k, budget)
        part.num_drafts = max(k, 0)

        lookahead = max(self._law.num_lookahead_tokens - 1 - part.num_drafts, 0)
        if not part.num_drafts or not self.tables.reserve(
            request.table, start, num_new + part.num_drafts, lookahead
        ):
            part.num_drafts = 0
            if not self.tables.reserve(request.table, start, num_new, 0):
                return None
        budget.target -= num_new + part.num_drafts
        if part.draft_end is not None:
            budget.draft -= part.draft_end - request.draft_len
        if part.num_drafts:
            budget.draft -= self._law.num_extra_rows
        return part

    def _feed_drafter(self, part: ScheduledRequest, k: int, budget: _Budget) -> int:
        """Decide what is fed to a drafter with KV of its own; K drafts that are possible then.

        A drafter that reads the target's states gets them all: they pass by only once, in the
        step that computes them. Others may lag behind and catch up, but draft only once they have;
        nothing is fed for a request that never drafts.
        """
        request, law = part.request, self._law
        wanted = law.feed_end(part.num_known)
        if law.reads_target_states:
            end = min(part.end, wanted)
        elif request.speculates:
            end = min(part.end, wanted, request.draft_len + max(budget.draft, 0))
        else:
            end = request.draft_len
        if end > request.draft_len:
            part.draft_end = end
        num_rows = max(end - request.draft_len, 0) + law.num_extra_rows
        return k if end >= wanted and num_rows <= budget.draft else 0

    def _num_draft_rows(self, num_for_batch: int) -> int:
        """Rows that a drafter which may lag behind can be fed in the next step.

        None while the server has speculation off: a catch-up once it is on again costs less than
        a forward a step. Where only the batch is too large, it may soon be small enough again, so
        the drafter stays near, in a forward every `FEED_INTERVAL` steps.
        """
        if not self._server_speculates:
            return 0
        if num_for_batch == 0 and self._num_unfed_steps + 1 < FEED_INTERVAL:
            return 0
        return self._limits.max_num_batched_tokens

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
            # The drafter may have less of a hit than the target: it catches up.
            num_whole = request.table.num_whole if self._keeps_drafter_kv else 0
            request.draft_len = num_whole * limits.block_size
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

    @property
    def _keeps_drafter_kv(self) -> bool:
        return self._law.keeps_kv and self.has_drafter

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's known tokens; the last token is always recomputed, its
        logits are needed."""
        if not self._limits.enable_prefix_caching:
            return []
        block_size = self._limits.block_size
        self._hash_blocks(request)
        num_usable = (request.num_tokens - 1) // block_size
        hit = self.tables.match(request.block_hashes[:num_usable])
        if hit and self._law.drops_tail_block:
            # What the drafter kept at the end depends on tokens that may differ here.
            num_dropped = -(-self._law.num_next_tokens // block_size)
            del hit[max(len(hit) - num_dropped, 0) :]
        return hit

    def _hash_blocks(self, request: Request) -> None:
        extend_hashes(
            request.block_hashes,
            request.token_ids,
            self._limits.block_size,
            self._law.num_hash_lookahead_tokens,
            request.params.cache_salt,
        )

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
            start = request.num_computed_tokens
            rows = request.token_ids[start : part.end]
            num_logits = 1 + k if part.has_logits else 0
            if self.has_drafter:
                target.append(TargetEntry(request.slot, start, rows, 0, k, num_logits))
                if k or part.draft_end is not None:
                    draft.append(self._draft_entry(part))
            else:
                if k:
                    part.drafts = request.drafts[:k]
                    rows = np.concatenate((rows, part.drafts))
                target.append(TargetEntry(request.slot, start, rows, k, 0, num_logits))
        return StepPlan(
            generation,
            self._step,
            tuple(admissions),
            tuple(blocks),
            tuple(target),
            tuple(draft),
            self.draft_generation,
        )

    def _draft_entry(self, part: ScheduledRequest) -> DraftEntry:
        request, law = part.request, self._law
        newest = part.num_known - 1
        start = request.draft_len if law.keeps_kv else newest
        end = part.draft_end if part.draft_end is not None else start
        first = min(start + min(law.num_next_tokens, 1), newest)
        last = part.num_known if part.num_drafts else end + law.num_next_tokens
        return DraftEntry(
            request.slot, start, end - start, first, request.token_ids[first:last], part.num_drafts
        )

    # --- after the step ---------------------------------------------------------------------

    def commit(self, part: ScheduledRequest, num_accepted: int, num_real_drafts: int) -> None:
        """Take a step's result into the lengths. New tokens are appended already.

        Args:
            part: From `schedule`, of a request that did not leave in between.
            num_accepted: Drafts accepted, before a stop trimmed them.
            num_real_drafts: Drafts the step really had; a drafter may give fewer than asked.
        """
        request, law = part.request, self._law
        assert request.table is not None
        num_computed = part.end
        if part.has_logits:
            # The newest token never has KV, also when a stop cut accepted drafts away.
            num_computed = min(num_computed + num_accepted, request.num_tokens - 1)
        request.num_computed_tokens = num_computed
        valid = num_computed
        if self._keeps_drafter_kv:
            if part.draft_end is not None:
                # What depends on tokens that were not known yet is fed again.
                whole = min(part.draft_end, law.final_end(part.num_known))
                if law.kv_survives_drafting:
                    whole += max(num_real_drafts - 1, 0)
                request.draft_len = max(request.draft_len, min(whole, num_computed))
            if law.reads_target_states:
                # The states have passed by: it could never catch up on a hit.
                valid = min(num_computed, request.draft_len)
        self.tables.commit(request.table, num_computed)
        block_size = self._limits.block_size
        if self._limits.enable_prefix_caching and valid // block_size > request.table.num_published:
            self._hash_blocks(request)
            valid = min(valid, len(request.block_hashes) * block_size)
            self.tables.publish(request.table, request.block_hashes, valid)
        if self._keeps_drafter_kv:
            self.tables.mark_whole(request.table, request.draft_len)
        request.drop_drafts()

    def check_idle(self) -> None:
        """Assert that an idle replica holds nothing."""
        assert not self.running and not self.waiting and len(self.tables) == 0
        assert len(self._free_slots) == self._limits.max_num_seqs, "a slot was lost"
        self.tables.check_integrity()
        assert self.tables.pool.num_referenced == 0, "blocks without an owner"
