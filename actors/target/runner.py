"""Run the target part of a step: one ragged forward, then a sample per logits row."""

from __future__ import annotations

import time

import numpy as np
import torch

from actors.acceptance.shard import VerifierShard
from actors.messages import DraftTokens, Int32Array, RowStats, StepPlan, token_array
from actors.model.inputs import EntryRows, SlotTables
from actors.model.paged_lm import PagedCausalLM
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig


class TargetRunner:
    """One target rank without Ray: load, `allocate`, `warm_up`, then `run` a plan a step.

    With a `group` of several ranks each does so at the same time, with the same plans.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, group: TPGroup | None = None
    ) -> None:
        self.config = config
        self.device = device
        self.model = PagedCausalLM(
            config.model,
            device=device,
            max_positions=config.max_model_len + config.num_lookahead_tokens + 1,
            compile_layers=config.runtime.compile_layers,
            batch_invariant=config.runtime.batch_invariant,
            group=group,
            expert_parallel=config.parallel.enable_expert_parallel,
        )
        self._verifier_shard = VerifierShard(
            self.model.group, self.model.vocab, config.model.vocab_size
        )
        self._tables = self._new_tables()

    def _new_tables(self) -> SlotTables:
        return SlotTables(
            self.config.scheduler.max_num_seqs,
            self.config.max_model_len,
            self.config.num_lookahead_tokens,
            self.config.cache.block_size,
        )

    def allocate(self, num_blocks: int) -> None:
        """Create the KV tensors, block 0 (padding) included."""
        self.model.allocate(num_blocks, self.config.cache.block_size)

    def warm_up(self) -> None:
        """Run decode and verify shapes once: compiles layers and prepares kernels."""
        self.model.warm_up(self._new_tables(), 1 + self.config.num_speculative_tokens)

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        """Execute the plan's target entries; `drafts` fills their pending rows.

        `num_rows` of the result counts logits rows an entry; a pending draft that did not come
        is a row less.
        """
        started = time.perf_counter()
        self._tables.apply(plan.admissions, plan.blocks)
        pending = _drafts_by_slot(plan, drafts)
        entries: list[EntryRows] = []
        num_rows = np.zeros(len(plan.target), dtype=np.int32)
        for i, entry in enumerate(plan.target):
            ids, missing = entry.token_ids, 0
            if entry.num_pending_drafts:
                arrived = pending.get(entry.slot, token_array([]))[: entry.num_pending_drafts]
                missing = entry.num_pending_drafts - len(arrived)
                ids = np.concatenate([ids, arrived])
            num_rows[i] = entry.num_logits - missing if entry.num_logits else 0
            entries.append(EntryRows(entry.slot, entry.start, ids, int(num_rows[i])))
        batch = self._tables.flatten(entries, self.device)
        logits = self.model.forward(batch)
        samples = self._verifier_shard.sample(logits, batch.rows)
        return RowStats(
            step=plan.step,
            sampled=samples.sampled,
            num_rows=num_rows,
            logprobs=samples.logprobs,
            top_ids=samples.top_ids,
            top_logprobs=samples.top_logprobs,
            forward_ms=(time.perf_counter() - started) * 1e3,
        )


def _drafts_by_slot(plan: StepPlan, drafts: DraftTokens | None) -> dict[int, Int32Array]:
    if drafts is None:
        return {}
    asked = [entry.slot for entry in plan.draft if entry.num_drafts > 0]
    ends = np.cumsum(drafts.counts)
    return {
        slot: drafts.token_ids[end - count : end]
        for slot, count, end in zip(asked, drafts.counts.tolist(), ends.tolist(), strict=True)
    }
