"""From a plan's entries to the flat tensors of one forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from actors.model.attention import AttentionBatch
from actors.sampling.rows import LogitsRow
from actors.steps.messages import BlockDelta, Int32Array, SlotParams


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of one request: `token_ids` from position `start`; the last `num_logits` are sampled."""

    slot: int
    start: int
    token_ids: Int32Array
    num_logits: int


@dataclass(frozen=True)
class FlatBatch:
    """A ragged batch flattened to T rows (padding rows at the end included).

    input_ids, positions int64 [T]; logits_indices int64 [N] into the T rows; `rows` describes the
    N logits rows.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: AttentionBatch
    rows: list[LogitsRow]


def padded_rows(num_rows: int) -> int:
    """Rows to run for `num_rows`: kernels are prepared once per count, so large counts are rounded
    up to a multiple of 16. Small ones, the decode steps, run as they are."""
    return num_rows if num_rows <= 32 else -(-num_rows // 16) * 16


class SlotTables:
    """Per-slot state of a worker: sampling parameters and KV block table. Set by plans only."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, lookahead: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self.max_blocks = -(-(max_model_len + lookahead) // block_size)
        self._table = np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32)
        self._params: dict[int, SlotParams] = {}

    def apply(self, admissions: Iterable[SlotParams], blocks: Iterable[BlockDelta]) -> None:
        """Take over what a plan says before its entries use it."""
        for params in admissions:
            self._params[params.slot] = params
        for delta in blocks:
            self._table[delta.slot, delta.first : delta.first + len(delta.block_ids)] = (
                delta.block_ids
            )

    def params(self, slot: int) -> SlotParams:
        return self._params[slot]

    def flatten(self, entries: list[EntryRows], device: torch.device) -> FlatBatch:
        """Tensors for `entries` (at least one row in total)."""
        counts = np.array([len(e.token_ids) for e in entries], dtype=np.int64)
        num_rows = int(counts.sum())
        total = padded_rows(num_rows)
        query_start = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        input_ids = np.zeros(total, dtype=np.int64)
        positions = np.zeros(total, dtype=np.int64)
        slots = np.full(total, -1, dtype=np.int64)
        logits_indices: list[int] = []
        rows: list[LogitsRow] = []
        for entry, first, count in zip(
            entries, query_start[:-1].tolist(), counts.tolist(), strict=True
        ):
            where = np.arange(entry.start, entry.start + count)
            input_ids[first : first + count] = entry.token_ids
            positions[first : first + count] = where
            blocks = self._table[entry.slot, where // self.block_size]
            slots[first : first + count] = (
                blocks.astype(np.int64) * self.block_size + where % self.block_size
            )
            params = self._params[entry.slot]
            for i in range(count - entry.num_logits, count):
                logits_indices.append(first + i)
                rows.append(LogitsRow(params, entry.start + i + 1))
        table = self._table[[e.slot for e in entries]]
        seq_lens = np.array([e.start + len(e.token_ids) for e in entries], dtype=np.int32)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return FlatBatch(
            on_device(input_ids),
            on_device(positions),
            torch.tensor(logits_indices, dtype=torch.int64, device=device),
            AttentionBatch(
                on_device(query_start), on_device(seq_lens), on_device(table), on_device(slots)
            ),
            rows,
        )
