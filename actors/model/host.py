"""A model in a compute process: what target and draft model share besides the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.kvcache.sizing import KVLayers
from actors.model.inputs import EntryRows, SlotTables
from actors.model.paged_lm import PagedCausalLM
from actors.model.taps import Taps, TapSpec
from actors.sampling.rows import Columns
from actors.sampling.sampler import Sampler
from actors.steps.messages import RowMasks, Stat, StepPlan
from parallel.experts import ExpertShare
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig
from specconfig.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward gave: `columns` by `Stat`, an item a logits row, and its states."""

    columns: Columns
    taps: Taps | None


def load_model(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    group: TPGroup | None,
    *,
    experts: ExpertShare | None,
    taps: TapSpec | None = None,
) -> PagedCausalLM:
    """`model` (target or draft) as the engine's settings say, or this rank's shard of it."""
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
        out = self.model.forward(batch)
        found = self._sampler.sample(out.logits, batch.rows, masks=masks, q=q)
        return Forward(found, out.taps)
