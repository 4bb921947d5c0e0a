"""A model in a compute process: what target runner and draft model share besides the weights."""

from __future__ import annotations

import torch

from actors.kvcache.sizing import KVLayers
from actors.model.inputs import EntryRows, SlotTables
from actors.model.paged_lm import PagedCausalLM
from actors.sampling.rows import Columns
from actors.sampling.sampler import Sampler
from actors.steps.messages import StepPlan
from parallel.experts import ExpertShare
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig
from specconfig.model import ModelConfig


class ModelHost:
    """Weights, KV and slot tables of one model. `allocate`, `warm_up`, then `take` and `sample`.

    With a `group` of several ranks each does so at the same time, with the same plans.
    `steady_rows`: the most rows one request has in a step once its prompt is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        vocab_size: int,
        device: torch.device,
        group: TPGroup | None,
        *,
        experts: ExpertShare | None,
        steady_rows: int,
    ) -> None:
        self.config = config
        self._steady_rows = steady_rows
        self.device = device
        self.model = PagedCausalLM(
            model,
            device=device,
            max_positions=config.max_model_len + config.num_lookahead_tokens + 1,
            compile_layers=config.runtime.compile_layers,
            batch_invariant=config.runtime.batch_invariant,
            group=group,
            experts=experts,
        )
        self._sampler = Sampler(self.model.group, self.model.vocab, vocab_size)
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
        """Run the shapes of steady decoding once: compiles layers and prepares kernels."""
        self.model.warm_up(self._new_tables(), self._steady_rows)

    def kv_layers(self, owner: str) -> KVLayers:
        """What this rank caches for the model of "target" or "draft"."""
        return KVLayers(owner, self.model.kv_shapes, self.model.dtype.itemsize)

    def take(self, plan: StepPlan) -> None:
        """Follow the plan's admissions and block tables."""
        self._tables.apply(plan.admissions, plan.blocks)

    def sample(self, entries: list[EntryRows]) -> Columns:
        """One forward over `entries` (at least one row), a sample per logits row."""
        batch = self._tables.flatten(entries, self.device)
        return self._sampler.sample(self.model.forward(batch), batch.rows)
