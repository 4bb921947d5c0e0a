"""What stands between raw logits and the law that a request samples from.

First come processors of logits (grammar masks, min_tokens, and a user's own), which write into a
copy; then temperature and the filters min_p, top_k and top_p, which are one threshold a row:
a token is kept iff its score reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.sampling.rows import LogitsRow
from actors.sampling.scores import Vocabulary
from actors.sampling.shards import ShardedScores
from actors.sampling.uniforms import Int64Array, Stream, row_keys
from actors.steps.messages import Float32Array, RowMasks

_NEG_INF = float("-inf")


class LogitsProcessor(Protocol):
    """Changes the logits of rows, before their temperature. Stateless: a row says all.

    `needs_history`: whether rows must carry the tokens before them (`LogitsRow.history`).
    """

    needs_history: bool

    def applies(self, row: LogitsRow) -> bool:
        """Whether the row's logits change at all; a step where none do costs nothing."""

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow], vocab: Vocabulary) -> None:
        """Change `logits` in place: float32 [M, V], this rank's columns of the rows that it
        applies to. `vocab.ids_V` says which tokens they are. What it writes for a token must
        follow from that token's logit and the row alone."""


class MinTokens:
    """Forbids a request's ending ids while its output is shorter than `min_tokens`."""

    needs_history = False

    def applies(self, row: LogitsRow) -> bool:
        return row.is_masked

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow], vocab: Vocabulary) -> None:
        for i, row in enumerate(rows):
            columns = vocab.columns(row.params.masked_ids)
            logits[i, columns[columns >= 0]] = _NEG_INF


def processed(
    logits: Tensor,
    rows: Sequence[LogitsRow],
    vocab: Vocabulary,
    masks: RowMasks | None,
    processors: Sequence[LogitsProcessor],
) -> Tensor:
    """`logits` after the grammar's masks and the processors, in this order.

    The tensor itself if nothing applies, else a copy: what was given is never written to (a
    forward under inference mode returns tensors that cannot be).
    """
    chosen = [[i for i, row in enumerate(rows) if p.applies(row)] for p in processors]
    has_masks = masks is not None and len(masks.rows) > 0
    if not has_masks and not any(chosen):
        return logits
    logits = logits.clone()
    if masks is not None and has_masks:
        index = torch.from_numpy(masks.rows.astype(np.int64)).to(logits.device)
        logits[index] = logits[index].where(allowed(masks, vocab), _NEG_INF)
    for processor, index_list in zip(processors, chosen, strict=True):
        if index_list:
            index = torch.tensor(index_list, device=logits.device)
            part = logits[index]
            processor.apply(part, [rows[i] for i in index_list], vocab)
            logits[index] = part
    return logits


def allowed(masks: RowMasks, vocab: Vocabulary) -> Tensor:
    """Which columns the masks allow, bool [masked rows, V]."""
    bits = torch.from_numpy(masks.bits.astype(np.int32)).to(vocab.ids_V.device)
    ids = vocab.ids_V.clamp_min(0)
    return (bits[:, ids >> 5] >> (ids & 31).int()) & 1 != 0


@dataclass(frozen=True)
class RowLaws:
    """Sampling parameters of N rows as arrays; greedy rows have temperature 1 and no filter."""

    is_greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: Int64Array
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[LogitsRow]) -> RowLaws:
        params = [row.params for row in rows]
        greedy = np.array([row.is_greedy for row in rows])
        table = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params])
        table[greedy] = (1.0, 0, 1.0, 0.0)
        temperature, top_k, top_p, min_p = table.T
        return cls(greedy, temperature.astype(np.float32), top_k.astype(np.int64), top_p, min_p)

    def lowest(self, scores: ShardedScores, top_N: Float32Array, vocab_size: int) -> Float32Array:
        """The least score that each row keeps: -inf where nothing is filtered.

        At least the likeliest token survives. Ties at the boundary are all kept.

        Args:
            scores: Of the rows, after temperature.
            top_N: Their largest.
            vocab_size: Columns over all ranks.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            lowest: Float32Array = top_N + np.log(self.min_p).astype(np.float32)
        is_limited = (self.top_k > 0) & (self.top_k < vocab_size)
        has_nucleus = self.top_p < 1.0
        rough = np.flatnonzero(is_limited | has_nucleus)
        if len(rough) == 0:
            return lowest
        known = scores.rows(rough).candidates()
        index = np.flatnonzero(is_limited)
        if len(index):
            lowest[index] = np.maximum(
                lowest[index],
                scores.rows(index).kth_largest(
                    self.top_k[index], top_N[index], known.rows(np.searchsorted(rough, index))
                ),
            )
        index = np.flatnonzero(has_nucleus)
        if len(index):
            lowest[index] = scores.rows(index).nucleus(
                self.top_p[index],
                lowest[index],
                top_N[index],
                known.rows(np.searchsorted(rough, index)),
            )
        return lowest


def keys_of(rows: Sequence[LogitsRow], stream: Stream) -> Int64Array:
    """Noise keys of rows. The target's own sample does not depend on the step."""
    steps = None if stream is Stream.TARGET else [row.step for row in rows]
    seeds = [row.params.seed for row in rows]
    return row_keys(seeds, [row.position for row in rows], stream, steps)
