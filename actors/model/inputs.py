"""From a plan's entries to the flat tensors of one forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from actors.model.attention_torch import HostBatch
from actors.model.kv import AttentionBatch, PagedKV
from actors.sampling.rows import LogitsRow
from actors.steps.messages import BlockDelta, Int32Array, SlotParams


class EntryRows(NamedTuple):
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
    N logits rows, `entries` whose rows they are.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: AttentionBatch
    rows: list[LogitsRow]
    entries: list[EntryRows]

    @property
    def num_rows(self) -> int:
        """Rows without the padding."""
        return sum(len(entry.token_ids) for entry in self.entries)

    @property
    def spans(self) -> dict[int, Span]:
        """By slot, where a request's rows lie."""
        found: dict[int, Span] = {}
        first = 0
        for entry in self.entries:
            count = len(entry.token_ids)
            found[entry.slot] = Span(entry.start, first, count)
            first += count
        return found

    def over(self, kv: PagedKV) -> FlatBatch:
        """The batch as the layers of `kv` need it."""
        attention = kv.prepare(self.attention)
        return self if attention is self.attention else replace(self, attention=attention)


def padded_rows(num_rows: int) -> int:
    """Rows to run for `num_rows`: kernels are prepared once per count, so large counts are rounded
    up to a multiple of 16. Small ones, the decode steps, run as they are."""
    return num_rows if num_rows <= 32 else -(-num_rows // 16) * 16


class _Layout(NamedTuple):
    """How entries lie in a batch, apart from what their tokens and positions are.

    An item an entry: slot int64 [R], counts int32 [R], query_start int32 [R + 1]. An item a row:
    owner int64 [T], its entry, and place int64 [T], where it stands in that. logits_indices int64.
    Only read: batches share them.
    """

    slot: npt.NDArray[np.int64]
    counts: Int32Array
    query_start: Int32Array
    owner: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    logits_indices: npt.NDArray[np.int64]

    @classmethod
    def of(cls, shape: list[tuple[int, int, int]]) -> _Layout:
        """`shape`: of each entry its slot, its rows, and how many of the last ones are sampled."""
        slot, counts, num_logits = np.array(shape, dtype=np.int64).T
        ends = counts.cumsum()
        owner = np.arange(len(shape)).repeat(counts)
        place = np.arange(len(owner)) - (ends - counts)[owner]
        query_start = np.concatenate(([0], ends)).astype(np.int32)
        is_sampled = place >= (counts - num_logits)[owner]
        indices = np.flatnonzero(is_sampled)
        return cls(slot, counts.astype(np.int32), query_start, owner, place, indices)


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
        self._shape: list[tuple[int, int, int]] = []
        self._layout = _Layout.of([(0, 0, 0)])

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
        layout = self._layout_of([(e.slot, len(e.token_ids), e.num_logits) for e in entries])
        num_rows, owner = len(layout.owner), layout.owner
        total = padded_rows(num_rows)
        start = np.array([e.start for e in entries])
        where = layout.place + start[owner]
        table = self._table[layout.slot]
        block, offset = np.divmod(where, self.block_size)
        input_ids, positions, slots = np.zeros((3, total), dtype=np.int64)
        np.concatenate([e.token_ids for e in entries], out=input_ids[:num_rows])
        positions[:num_rows] = where
        slots[:num_rows] = table[owner, block] * np.int64(self.block_size) + offset
        slots[num_rows:] = -1
        seq_lens = (start + layout.counts).astype(np.int32)
        host = HostBatch(layout.query_start, seq_lens, table, slots)
        rows: list[LogitsRow] = []
        for entry in entries:
            rows += self._logits_rows(entry, step)
        return FlatBatch(
            torch.from_numpy(input_ids).to(device),
            torch.from_numpy(positions).to(device),
            torch.from_numpy(layout.logits_indices).to(device),
            AttentionBatch.from_host(host, device),
            rows,
            entries,
        )

    def _layout_of(self, shape: list[tuple[int, int, int]]) -> _Layout:
        """Of entries of this shape. Most steps have that of the step before."""
        if shape != self._shape:
            self._shape, self._layout = shape, _Layout.of(shape)
        return self._layout

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
        checked = [-1]
        if entry.num_logits > 1:
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
