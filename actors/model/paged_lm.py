"""A causal language model over paged KV: what target and draft processes both run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from actors.errors import LoadError
from actors.model.attention import PagedCache, native_kernels
from actors.model.compiled import LayerCompiler, can_compile, fuse_projections
from actors.model.experts import pack_experts
from actors.model.inputs import EntryRows, FlatBatch, SlotTables
from actors.model.linear import pack_linears
from actors.model.loader import LoadedModel, decoder_of, load_causal_lm, torch_dtype
from actors.model.rotary import RotaryTable
from actors.steps.messages import BlockDelta, SlotParams, token_array
from parallel.experts import ExpertExchange, ExpertShare
from parallel.groups import SingleRank, TPGroup
from parallel.topology import split_range

if TYPE_CHECKING:
    from specconfig.model import ModelConfig

logger = logging.getLogger(__name__)

# Compiling takes seconds; below this many parameters a model is fast enough without.
_COMPILE_MIN_PARAMETERS = 30_000_000
# More than a step runs as it is, so that a filled-up chunk is among what is compared.
_CHECKED_ROWS = 40


class PagedCausalLM:
    """Weights, KV tensors and the forward. Construct, `allocate`, `warm_up`, then `forward`.

    With `experts` each rank keeps that share of whole experts; where it is a share among several
    replicas, `join_replicas` comes before the first forward.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        max_positions: int,
        compile_layers: Literal["auto", "on", "off"] = "auto",
        batch_invariant: bool = True,
        group: TPGroup | None = None,
        experts: ExpertShare | None = None,
    ) -> None:
        started = time.perf_counter()
        self.device = device
        self.group: TPGroup = group or SingleRank()
        self.dtype = torch_dtype(config.dtype, device, config.checkpoint_dtype)
        self._exchange: ExpertExchange | None = None
        if experts is not None and experts.count > self.group.size:
            self._exchange = ExpertExchange()
        loaded = load_causal_lm(
            config.model,
            dtype=self.dtype,
            device=device,
            revision=config.revision,
            hf_overrides=config.hf_overrides,
            group=self.group,
            experts=experts,
            exchange=self._exchange,
        )
        self._loaded: LoadedModel = loaded
        self._model = loaded.model
        self.num_parameters = sum(p.numel() for p in self._model.parameters())
        self._vocab_size = config.vocab_size
        self._batch_invariant = batch_invariant
        self._compiles = self._decide_compile(compile_layers)
        self._must_compile = compile_layers == "on"
        self._compiler: LayerCompiler | None = None
        self._install_rotary(max_positions)
        if self._compiles:
            fuse_projections(loaded.layers)
        packed, plain = pack_linears(self._model)
        num_experts_packed = pack_experts(self._model)
        # Weights stacked in three dimensions are experts of a kind that was not packed.
        self._has_plain_experts = any(p.dim() == 3 for p in self._model.parameters())
        self._max_positions = max_positions
        self._rows_are_apart = True
        self.caches: list[PagedCache] = []
        logger.info(
            "loaded %s: %.0fM parameters, %s on %s, %d linears packed, %d plain, %d expert layers "
            "packed, layers %s, %.1f s",
            config.model, self.num_parameters / 1e6, self.dtype, device, packed, plain,
            num_experts_packed, "compiled" if self._compiles else "eager",
            time.perf_counter() - started,
        )  # fmt: skip

    def _decide_compile(self, setting: Literal["auto", "on", "off"]) -> bool:
        if setting == "off" or (
            setting == "auto" and self.num_parameters < _COMPILE_MIN_PARAMETERS
        ):
            return False
        if self.group.size > 1 or self._exchange is not None:
            if setting == "on":
                raise LoadError("compile_layers: on is for one rank; use auto or off")
            logger.info("layers run eagerly: they wait for other ranks inside")
            return False
        if self.device.type != "cpu":
            if setting == "on":
                raise LoadError("compile_layers: on is for CPU; on CUDA use auto or off")
            return False
        reason = can_compile()
        if reason is None:
            return True
        if setting == "on":
            raise LoadError(f"compile_layers: on cannot be had, {reason}; use auto or off")
        logger.warning("layers run eagerly: %s", reason)
        return False

    def _install_rotary(self, max_positions: int) -> None:
        decoder = decoder_of(self._model)
        assert decoder is not None
        for name, module in list(decoder.named_children()):
            if "rotary" in name and not isinstance(module, nn.ModuleList):
                setattr(decoder, name, RotaryTable(module, max_positions))

    @property
    def vocab(self) -> tuple[int, int]:
        """[begin, end) of the ids whose logits `forward` returns: all of them on a single rank."""
        return split_range(self._vocab_size, self.group.rank, self.group.size)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(number of layers, KV heads, head_dim) for each shape of what this rank caches."""
        counts = Counter((g.num_kv_heads, g.head_dim) for g in self._loaded.kv)
        return tuple((n, heads, dim) for (heads, dim), n in sorted(counts.items()))

    def join_replicas(self, group: TPGroup) -> None:
        """The group of this rank and the same rank of the replicas that share its experts."""
        assert self._exchange is not None
        self._exchange.group = group

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the KV tensors and, where asked, route the layers through compiled graphs."""
        self.caches = []
        for geometry in self._loaded.kv:
            cache = PagedCache(
                num_blocks,
                geometry.num_kv_heads,
                geometry.head_dim,
                block_size,
                self.dtype,
                self.device,
                exact=self._batch_invariant,
                window=geometry.window,
            )
            geometry.module.paged_cache = cache
            self.caches.append(cache)
        if self._compiles:
            self._compiler = LayerCompiler(self._loaded.layers, is_required=self._must_compile)

    @property
    def compiled(self) -> bool:
        """Whether layers run compiled. Known for sure once the first forward has tried."""
        return self._compiles and (self._compiler is None or self._compiler.is_active)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits do not depend on the batch: float32 on CPU with our kernels, unless
        `warm_up` found otherwise."""
        return (
            self._batch_invariant
            and not self._has_plain_experts
            and self._rows_are_apart
            and native_kernels(self.caches[0].keys) is not None
        )

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """Logits [N, V] float32 of the batch's logits rows; writes the KV of all rows.

        V is this rank's part of the vocabulary (`vocab`).

        With no logits rows the KV is still written and an empty tensor returned.
        """
        if self._exchange is not None:
            self._exchange.begin(len(batch.input_ids), self.device)
        wanted = batch.logits_indices
        # The head needs at least one row; it is dropped again when none was asked for.
        keep = wanted if len(wanted) else torch.zeros(1, dtype=torch.int64, device=self.device)
        out = self._model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            query_start=batch.attention.query_start,
            seq_lens=batch.attention.seq_lens,
            block_table=batch.attention.block_table,
            slots=batch.attention.slots,
        )
        logits: Tensor = out.logits[0].float()
        return logits[: len(wanted)]

    def warm_up(self, tables: SlotTables, max_rows: int) -> None:
        """Run 1..max_rows rows on the padding block: compiles layers, prepares kernels. Then see
        whether rows are what they promise to be.

        `tables` must be fresh, and no request may have been served: every block id in them is 0,
        the block that no request owns, and what other blocks hold is overwritten.
        """
        tables.apply([SlotParams(slot=0, prompt_len=1, seed=0)], [])
        for num_rows in range(max_rows, 0, -1):
            entry = EntryRows(0, 0, token_array([0] * num_rows), num_rows)
            self.forward(tables.flatten([entry], self.device))
        # Decided by what all ranks have in common, not by what this machine can do: they must run
        # the same number of forwards.
        if self._batch_invariant and self.device.type == "cpu" and self.dtype == torch.float32:
            self._rows_are_apart = self._check_rows(tables)

    def _check_rows(self, tables: SlotTables) -> bool:
        """Whether a prompt's logits have the same bits as one chunk, in parts, and one by one."""
        cache = self.caches[0].keys
        num_blocks, block_size = cache.shape[0], cache.shape[3]
        num_rows = min(_CHECKED_ROWS, (num_blocks - 1) * block_size, self._max_positions - 1)
        tables.apply([], [BlockDelta(0, 0, token_array(range(1, 1 + -(-num_rows // block_size))))])
        ids = token_array([7 * i % self._vocab_size for i in range(num_rows)])

        def logits(sizes: Sequence[int]) -> Tensor:
            parts, start = [], 0
            for size in sizes:
                entry = EntryRows(0, start, ids[start : start + size], size)
                parts.append(self.forward(tables.flatten([entry], self.device)))
                start += size
            return torch.cat(parts)

        whole = logits([num_rows])
        cuts = [c for c in ([1, 1, 1], [5, 1, 2], [17, 1, 3]) if sum(c) <= num_rows]
        # All of them, whatever the first shows: other ranks take part in each forward.
        parts = [logits(sizes) for sizes in cuts]
        return all(torch.equal(part, whole[: len(part)]) for part in parts)
