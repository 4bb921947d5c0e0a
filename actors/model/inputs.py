"""From a plan's entries to the flat tensors of one forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.model.attention_torch import HostBatch
from actors.model.kv import AttentionBatch, PagedKV
from actors.sampling.rows import LogitsRow
from actors.steps.messages import BlockDelta, Int32Array, SlotParams


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of one request: `token_ids` from position `start`; the last `num_logits` are sampled."""

    slot: int
    start: int
    token_ids: Int32Array
    num_logits: int


@dataclass(frozen=True, slots=True)
class Span:
    """One request's rows in a batch: `count` from row `first` on, at positions from `start` on."""

    start: int
    first: int
    count: int


@dataclass(frozen=True)
class FlatBatch:
    """A ragged batch flattened to T rows (padding rows at the end included).

    input_ids, positions int64 [T]; logits_indices int64 [N] into the T rows; `rows` describes the
    N logits rows, `spans` by slot where a request's rows lie.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: AttentionBatch
    rows: list[LogitsRow]
    spans: dict[int, Span]

    @property
    def num_rows(self) -> int:
        """Rows without the padding."""
        return sum(span.count for span in self.spans.values())

    def over(self, kv: PagedKV) -> FlatBatch:
        """The batch as the layers of `kv` need it."""
        attention = kv.prepare(self.attention)
        return self if attention is self.attention else replace(self, attention=attention)


def padded_rows(num_rows: int) -> int:
    """Rows to run for `num_rows`: kernels are prepared once per count, so large counts are rounded
    up to a multiple of 16. Small ones, the decode steps, run as they are."""
    return num_rows if num_rows <= 32 else -(-num_rows // 16) * 16


class SlotTables:
    """Per-slot state of a worker: sampling parameters and KV block table. Set by plans only.

    A drafter that lives with the target uses the target's: its KV lies in the same blocks.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, lookahead: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self.max_blocks = -(-(max_model_len + lookahead) // block_size)
        self._table = np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32)
        self._params: dict[int, SlotParams] = {}
        # Tokens by position, for slots whose processors read what came before a row.
        self._tokens: dict[int, Int32Array] = {}

    def apply(self, admissions: Iterable[SlotParams], blocks: Iterable[BlockDelta]) -> None:
        """Take over what a plan says before its entries use it."""
        for params in admissions:
            self._params[params.slot] = params
            self._tokens.pop(params.slot, None)
            if params.history is not None:
                tokens = np.zeros(self.max_blocks * self.block_size, dtype=np.int32)
                tokens[: len(params.history)] = params.history
                self._tokens[params.slot] = tokens
        for delta in blocks:
            self._table[delta.slot, delta.first : delta.first + len(delta.block_ids)] = (
                delta.block_ids
            )

    def params(self, slot: int) -> SlotParams:
        return self._params[slot]

    def flatten(self, entries: list[EntryRows], device: torch.device, step: int = 0) -> FlatBatch:
        """Tensors for `entries` (at least one row in total, one entry a slot) of step `step`."""
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
        spans: dict[int, Span] = {}
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
            spans[entry.slot] = Span(entry.start, first, count)
            logits_indices += range(first + count - entry.num_logits, first + count)
            rows += self._logits_rows(entry, step)
        table = self._table[[e.slot for e in entries]]
        seq_lens = np.array([e.start + len(e.token_ids) for e in entries], dtype=np.int32)
        return FlatBatch(
            torch.from_numpy(input_ids).to(device),
            torch.from_numpy(positions).to(device),
            torch.tensor(logits_indices, dtype=torch.int64, device=device),
            AttentionBatch.from_host(HostBatch(query_start, seq_lens, table, slots), device),
            rows,
            spans,
        )

    def _logits_rows(self, entry: EntryRows, step: int) -> list[LogitsRow]:
        """What the sampler must know of the entry's last rows.

        A row checks the token that comes after it in the entry; the last one checks none.
        """
        params, end = self._params[entry.slot], entry.start + len(entry.token_ids)
        tokens = self._tokens.get(entry.slot)
        if tokens is not None:
            # Drafts that were rejected meanwhile are overwritten by what came in their place.
            tokens[entry.start : end] = entry.token_ids
        begin = end - entry.num_logits + 1
        checked = [*entry.token_ids[begin - entry.start :].tolist(), -1]
        return [
            LogitsRow(
                params,
                position,
                draft_id,
                position - begin,
                step,
                None if tokens is None else tokens[:position],
            )
            for position, draft_id in zip(range(begin, end + 1), checked, strict=False)
        ]
