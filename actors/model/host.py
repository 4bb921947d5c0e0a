"""A model in a compute process: what target and draft model share besides the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.errors import LoadError
from actors.kvcache.sizing import KVLayers
from actors.model.forward_clock import ForwardClock
from actors.model.inputs import EntryRows, SlotTables
from actors.model.paged_lm import PagedCausalLM
from actors.model.taps import Taps, TapSpec
from actors.sampling.rows import Columns
from actors.sampling.sampler import Sampler
from actors.steps.messages import RowMasks, SlotParams, Stat, StepPlan, token_array
from parallel.experts import ExpertShare
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig
from specconfig.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward gave: `columns` by `Stat`, an item a logits row, and its states.

    `gap_ms`: since the forward before, as `ForwardClock` has it.
    """

    columns: Columns
    taps: Taps | None
    gap_ms: float | None


def load_target(
    config: EngineConfig,
    device: torch.device,
    group: TPGroup,
    *,
    replica: int = 0,
    num_replicas: int = 1,
) -> PagedCausalLM:
    """The target, or this rank's shard of it, with the taps that the drafter reads.

    Args:
        replica, num_replicas: Among those over which whole experts are spread. With several,
            `join_replicas` comes before the first forward.
    """
    spread = config.parallel.enable_expert_parallel
    experts = ExpertShare.of(group, replica, num_replicas) if spread else None
    return _load(config, config.model, device, group, experts, TapSpec.of(config))


def load_draft(config: EngineConfig, device: torch.device, group: TPGroup) -> PagedCausalLM:
    """The separate draft model, or this rank's shard of it.

    Its experts are never spread over replicas: those make as many target forwards as each other,
    but not as many passes of a draft, and a replica would wait for rows that never come.

    Raises:
        LoadError: the configuration has no draft model.
    """
    model, parallel = config.draft_model, config.draft_parallel
    if model is None or parallel is None:
        raise LoadError("speculative_config has no draft model")
    experts = ExpertShare.of(group) if parallel.enable_expert_parallel else None
    return _load(config, model, device, group, experts, TapSpec())


def _load(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    group: TPGroup,
    experts: ExpertShare | None,
    taps: TapSpec,
) -> PagedCausalLM:
    return PagedCausalLM(
        model,
        device=device,
        max_positions=config.max_model_len + config.num_lookahead_tokens + 1,
        compile_layers=config.runtime.compile_layers,
        batch_invariant=config.runtime.batch_invariant,
        group=group,
        experts=experts,
        taps=taps,
    )


class ModelHost:
    """A model with slot tables and a sampler. `allocate`, `warm_up`, then `take` and `run`.

    Where the model is split over several ranks each does so at the same time, with the same plans.
    A drafter that lives with the target uses `model` (embedding, head) and `tables` (its KV lies
    in the target's block ids) of the target's host.

    Args:
        vocab_size: Ids that may be sampled; logits behind them are void.
        steady_rows: The most rows one request has in a step once its prompt is done.
        needs: Columns that the acceptance method reads, besides what requests ask for.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: PagedCausalLM,
        *,
        vocab_size: int,
        steady_rows: int,
        needs: frozenset[Stat] = frozenset(),
    ) -> None:
        self.config = config
        self.model = model
        self.device = model.device
        self.tables = self._new_tables()
        self._steady_rows = steady_rows
        self._sampler = Sampler(model.group, model.vocab, vocab_size, needs)
        self._clock = ForwardClock(model.device)

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

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the shapes of steady decoding once: compiles layers and prepares kernels."""
        self.model.warm_up(self._new_tables(), self._steady_rows)

    @torch.inference_mode()
    def activation_bytes(self) -> int:
        """What the largest step takes at its peak beside weights and KV, on a GPU. Before
        `allocate`, whose KV it has no need of; ranks of a group call it together."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run_largest_step()
        torch.cuda.synchronize(self.device)
        return max(0, torch.cuda.max_memory_allocated(self.device) - before)

    @torch.inference_mode()
    def run_largest_step(self) -> int:
        """All rows that a step may have, as many of them sampled as can be, each with what costs
        most; on KV of its own, of padding only. The number of rows."""
        limits, tables = self.config.scheduler, self._new_tables()
        self.model.kv.allocate(2, self.config.cache.block_size)
        num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        each = min(limits.max_num_batched_tokens // num_seqs, self.config.max_model_len)
        costly = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "num_logprobs": 1}
        tables.apply([SlotParams(slot, 1, slot, **costly) for slot in range(num_seqs)], [])  # type: ignore[arg-type]
        ids = token_array([0] * each)
        sampled = min(each, self._steady_rows)
        entries = [EntryRows(slot, 0, ids, sampled) for slot in range(num_seqs)]
        batch = tables.flatten(entries, self.device)
        self._sampler.sample(self.model.forward(batch).logits, batch.rows)
        return num_seqs * each

    def kv_layers(self, owner: str) -> KVLayers:
        """What this rank caches for the model of "target" or "draft"."""
        return KVLayers(owner, self.model.kv.shapes, self.model.dtype.itemsize)

    def take(self, plan: StepPlan) -> None:
        """Follow the plan's admissions and block tables."""
        self.tables.apply(plan.admissions, plan.blocks)

    @torch.inference_mode()
    def run(
        self,
        entries: list[EntryRows],
        *,
        step: int = 0,
        masks: RowMasks | None = None,
        q: Tensor | None = None,
    ) -> Forward:
        """One forward over `entries` (at least one row), statistics of each logits row.

        Args:
            step: The plan's, for noise that differs between steps.
            masks: Tokens that a grammar allows, for some of the logits rows.
            q: float32 [rows with a draft, this rank's columns]: laws that drafts came from.
        """
        batch = self.tables.flatten(entries, self.device, step)
        self._clock.begin()
        out = self.model.forward(batch)
        self._clock.end()
        found = self._sampler.sample(out.logits, batch.rows, masks=masks, q=q)
        return Forward(found, out.taps, self._clock.gap_ms())
