"""Run the target part of a step: one ragged forward, then a sample per logits row."""

from __future__ import annotations

import time

import numpy as np
import torch

from actors.model.host import ModelHost, load_target
from actors.model.inputs import EntryRows
from actors.startup.preflight import build_acceptance
from actors.steps.messages import (
    DraftTokens,
    Int32Array,
    RowMasks,
    RowStats,
    Stat,
    StepPlan,
    token_array,
)
from actors.steps.protocols import Proposal, Verified
from parallel.groups import SingleRank, TPGroup
from specconfig.engine import EngineConfig


class TargetRunner:
    """One target rank without Ray: load, allocate and warm up its `host`, then `run` a plan a step.

    `replica` of `num_replicas`: among those over which experts are spread. With several,
    `host.model.join_replicas` comes before the warm-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        group: TPGroup | None = None,
        *,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self.host = ModelHost(
            config,
            load_target(
                config,
                device,
                group or SingleRank(),
                replica=replica,
                num_replicas=num_replicas,
            ),
            vocab_size=config.model.vocab_size,
            steady_rows=1 + config.num_speculative_tokens,
            # The verifier draws uniforms itself.
            needs=build_acceptance(config).needs - {Stat.UNIFORM},
        )

    def run(
        self, plan: StepPlan, proposal: Proposal | None, masks: RowMasks | None = None
    ) -> Verified:
        """Execute the plan's target entries; `proposal` fills their pending rows.

        `num_rows` of the result counts logits rows an entry; a pending draft that did not come
        is a row less.
        """
        started = time.perf_counter()
        self.host.take(plan)
        pending = _drafts_by_slot(plan, proposal.tokens if proposal is not None else None)
        entries: list[EntryRows] = []
        num_rows: list[int] = []
        for entry in plan.target:
            ids, missing = entry.token_ids, 0
            if entry.num_pending_drafts:
                arrived = pending.get(entry.slot, token_array([]))[: entry.num_pending_drafts]
                missing = entry.num_pending_drafts - len(arrived)
                ids = np.concatenate([ids, arrived])
            num_rows.append(entry.num_logits - missing if entry.num_logits else 0)
            entries.append(EntryRows(entry.slot, entry.start, ids, num_rows[-1]))
        found = self.host.run(
            entries,
            step=plan.step,
            masks=plan.masks if masks is None else masks,
            q=None if proposal is None else proposal.q,
        )
        return Verified(
            RowStats(
                step=plan.step,
                num_rows=token_array(num_rows),
                columns=found.columns,
                forward_ms=(time.perf_counter() - started) * 1e3,
                gap_ms=found.gap_ms,
            ),
            found.taps,
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
