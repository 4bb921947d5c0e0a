"""A causal language model over paged KV: what target and draft processes both run."""

from __future__ import annotations

import torch

from actors.model.compiled import LayerCompiler
from actors.model.inputs import EntryRows, FlatBatch, SlotTables
from actors.model.kv import PagedKV
from actors.model.self_test import rows_are_apart
from actors.model.taps import TapSpec
from actors.model.trunk import CompileSetting, Output, Trunk
from actors.steps.messages import SlotParams, token_array
from parallel.experts import ExpertShare
from parallel.groups import TPGroup
from specconfig.model import ModelConfig


class PagedCausalLM(Trunk):
    """A trunk with KV of its own. Construct, `allocate`, `warm_up`, then `forward`.

    Arguments as of `Trunk`. `batch_invariant` False lets long prompt chunks take a faster path
    whose bits depend on the chunk.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        max_positions: int,
        compile_layers: CompileSetting = "auto",
        batch_invariant: bool = True,
        group: TPGroup | None = None,
        experts: ExpertShare | None = None,
        taps: TapSpec | None = None,
    ) -> None:
        super().__init__(
            config,
            device=device,
            max_positions=max_positions,
            compile_layers=compile_layers,
            group=group,
            experts=experts,
            taps=taps,
        )
        self.kv = PagedKV(self.attention, self.dtype, device, exact=batch_invariant)
        self._batch_invariant = batch_invariant
        self._must_compile = compile_layers == "on"
        self._compiler: LayerCompiler | None = None
        self._rows_are_apart = True

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the KV tensors and, where asked, route the layers through compiled graphs."""
        self.kv.allocate(num_blocks, block_size)
        if self.compiles:
            self._compiler = LayerCompiler(
                self.layer_list, is_required=self._must_compile, exact=self._batch_invariant
            )

    @property
    def compiled(self) -> bool:
        """Whether layers run compiled. Known for sure once the first forward has tried."""
        return self.compiles and (self._compiler is None or self._compiler.is_active)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits do not depend on the batch: float32 on CPU with our kernels, unless
        `warm_up` found otherwise."""
        return self.kv.is_exact and not self.has_plain_experts and self._rows_are_apart

    def forward(self, batch: FlatBatch) -> Output:
        if self._compiler is not None:
            self._compiler.settle()
        return super().forward(batch.over(self.kv))

    def warm_up(self, tables: SlotTables, max_rows: int) -> None:
        """Run 1..max_rows rows on the padding block: compiles layers, prepares kernels. Then see
        whether rows are what they promise to be.

        `tables` must be fresh, and no request may have been served: every block id in them is 0,
        the block that no request owns, and what other blocks hold is overwritten.
        """

        def logits_of(entry: EntryRows) -> torch.Tensor:
            return self.forward(tables.flatten([entry], self.device)).logits

        tables.apply([SlotParams(slot=0, prompt_len=1, seed=0)], [])
        for num_rows in range(max_rows, 0, -1):
            logits_of(EntryRows(0, 0, token_array([0] * num_rows), num_rows))
        # Decided by what all ranks have in common, not by what this machine can do: they must run
        # the same number of forwards.
        if self._batch_invariant and self.device.type == "cpu" and self.dtype == torch.float32:
            self._rows_are_apart = rows_are_apart(
                logits_of,
                tables,
                num_blocks=self.kv.num_blocks,
                max_positions=self.max_positions,
                vocab_size=self.vocab_size,
            )
