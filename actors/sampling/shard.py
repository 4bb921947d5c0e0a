"""VerifierShard: a rank's part of the logits to the samples of all rows, over the group.

The same law as `actors.sampling.rows`, row for row, with the vocabulary split over ranks: what one
rank finds by looking at a whole row, the ranks find by exchanging a few numbers a row. Which
exchanges happen depends only on the requests' parameters and on values that every rank has, so the
ranks cannot get out of step. Results do not depend on how many ranks there are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from actors.sampling.noise import gumbel, row_key
from actors.sampling.rows import Columns, LogitsRow, columns, sample_rows
from actors.steps.messages import INVALID_SAMPLE
from parallel.groups import TPGroup
from parallel.vocab import ShardedLogits

_NEG_INF = float("-inf")


class VerifierShard:
    """Samples rows whose logits are split by vocabulary.

    Args:
        group: Ranks in vocabulary order; with one rank the local path serves.
        vocab: [begin, end) of this rank's ids.
        vocab_size: Ids that may be sampled; logits behind them are void.
    """

    def __init__(self, group: TPGroup, vocab: tuple[int, int], vocab_size: int) -> None:
        self._group = group
        self._begin, self._end = vocab
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: list[LogitsRow]) -> Columns:
        """Sample every row of `logits` [N, this rank's ids] (float32, overwritten).

        Every rank must call with rows of the same requests and positions; every rank gets the
        result.
        """
        if self._group.size == 1:
            return sample_rows(logits[:, : self._vocab_size], rows)
        if not rows:
            return sample_rows(logits[:, :1], rows)
        if self._end > self._vocab_size:
            logits[:, max(self._vocab_size - self._begin, 0) :] = _NEG_INF
        raw = _RawRows(ShardedLogits(logits, self._begin, self._group), rows)
        for i, row in enumerate(rows):
            if row.is_masked:
                self._mask(logits[i], row.params.masked_ids)
        shard = ShardedLogits(logits, self._begin, self._group)
        best, sampled = shard.argmax()
        sampled = sampled.where(torch.isfinite(best), INVALID_SAMPLE)
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        if drawn:
            self._draw(shard, rows, drawn, best, sampled)
        return raw.samples(sampled)

    def _mask(self, logits: Tensor, ids: tuple[int, ...]) -> None:
        local = [i - self._begin for i in ids if self._begin <= i < self._end]
        logits[local] = _NEG_INF

    def _draw(
        self,
        shard: ShardedLogits,
        rows: list[LogitsRow],
        drawn: list[int],
        best: Tensor,
        sampled: Tensor,
    ) -> None:
        """Replace the greedy sample of rows `drawn` by one with the position's noise."""
        scores = torch.stack([shard.local_NV[i] / rows[i].params.temperature for i in drawn])
        tops = [best[i : i + 1].float() / rows[i].params.temperature for i in drawn]
        scores = self._filtered(scores, torch.cat(tops), [rows[i] for i in drawn])
        ids = shard.ids_V
        noise = [gumbel(row_key(rows[i].params.seed, rows[i].position), ids) for i in drawn]
        _, chosen = shard.argmax(scores.double() + torch.stack(noise))
        index = torch.tensor(drawn, device=sampled.device)
        sampled[index] = chosen.where(sampled[index] != INVALID_SAMPLE, INVALID_SAMPLE)

    def _filtered(self, scores: Tensor, tops: Tensor, rows: list[LogitsRow]) -> Tensor:
        """`scores` with -inf for tokens that min_p, top_k or top_p exclude, in that order."""
        params = [row.params for row in rows]
        lowest = torch.full_like(tops, _NEG_INF)
        for j, p in enumerate(params):
            if p.min_p > 0.0:
                lowest[j] = tops[j] + math.log(p.min_p)
        limited = [j for j, p in enumerate(params) if 0 < p.top_k < self._vocab_size]
        nucleus = [j for j, p in enumerate(params) if p.top_p < 1.0]
        rough = sorted({*limited, *nucleus})
        shard = ShardedLogits(scores, self._begin, self._group)
        if rough:
            known = shard.rows(torch.tensor(rough, device=scores.device)).candidates()
            place = {j: n for n, j in enumerate(rough)}
        if limited:
            index = torch.tensor(limited, device=scores.device)
            counts = torch.tensor([params[j].top_k for j in limited], device=scores.device)
            kth = shard.rows(index).kth_largest(counts, known.rows([place[j] for j in limited]))
            lowest[index] = lowest[index].maximum(kth)
        scores = scores.where(scores >= lowest[:, None], _NEG_INF)
        if nucleus:
            index = torch.tensor(nucleus, device=scores.device)
            reach = torch.tensor([params[j].top_p for j in nucleus], dtype=torch.float64)
            kept = ShardedLogits(scores[index], self._begin, self._group)
            left = known.rows([place[j] for j in nucleus]).without(lowest[index])
            floor = kept.nucleus(reach.to(scores.device), tops[index], left)
            scores[index] = kept.local_NV.where(kept.local_NV >= floor[:, None], _NEG_INF)
        return scores


class _RawRows:
    """Log-probabilities before masks and temperature, for the rows that ask."""

    def __init__(self, shard: ShardedLogits, rows: list[LogitsRow]) -> None:
        wants = [row.params.num_logprobs for row in rows]
        self._num_rows = len(rows)
        self._index = [i for i, want in enumerate(wants) if want >= 0]
        self._num_top = max([w for w in wants if w > 0], default=0)
        self._has_top = [want > 0 for want in wants]
        if not self._index:
            return
        self._raw = shard.rows(torch.tensor(self._index, device=shard.local_NV.device))
        self._total = self._raw.logsumexp()
        if self._num_top:
            self._top = self._raw.top_n(self._num_top)

    def samples(self, sampled: Tensor) -> Columns:
        logprobs = np.full(self._num_rows, np.nan, dtype=np.float32)
        top_ids = np.zeros((self._num_rows, self._num_top), dtype=np.int32)
        top_logprobs = np.zeros((self._num_rows, self._num_top), dtype=np.float32)
        if self._index:
            ids = sampled[torch.tensor(self._index, device=sampled.device)]
            found = self._raw.gather(ids.clamp_min(0)).double() - self._total
            valid = (ids >= 0).cpu().numpy()
            logprobs[self._index] = np.where(valid, found.float().cpu().numpy(), np.nan)
            if self._num_top:
                tops = (self._top[1].double() - self._total[:, None]).float()
                for j, i in enumerate(self._index):
                    if self._has_top[i]:
                        top_ids[i] = self._top[0][j].cpu().numpy()
                        top_logprobs[i] = tops[j].cpu().numpy()
        return columns(sampled.to(torch.int32).cpu().numpy(), logprobs, top_ids, top_logprobs)
