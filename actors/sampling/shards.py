"""Rows of scores split by vocabulary over ranks, without moving scores. One rank is a case of many.

Shape suffixes: M rows, V this rank's part of the vocabulary. Every rank gets equal results: what
crosses is a few numbers a row (16 bytes for a maximum, 520 for a threshold; 8 KB in each of about
three rounds for the rare threshold that lies behind the candidates), combined by the same
arithmetic everywhere. Ties go to the lowest id.

Results do not depend on how the vocabulary is split. Maxima and counts are exact by nature;
probability masses are summed as integers (`masses`), whose sum has no order. Which exchanges
happen follows only from values that every rank has, so the ranks cannot get out of step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from actors.sampling.scores import (
    MASS_UNIT,
    NUM_BINS,
    Float64Array,
    LocalScores,
    ordered_keys,
    score_of_key,
)
from actors.sampling.uniforms import Int64Array
from actors.steps.messages import Float32Array
from parallel.groups import TPGroup

# Scores a rank sends where a threshold is asked for; user settings of top_k lie below.
NUM_CANDIDATES = 128
_RADIX_BITS = 10
_NEG_INF = np.float32("-inf")


class Candidates(NamedTuple):
    """Scores known to every rank, float32 [M, C] descending: all above `floor_M` of the row."""

    scores_MC: Float32Array
    floor_M: Float32Array

    def rows(self, index: Int64Array) -> Candidates:
        """These rows only."""
        return Candidates(self.scores_MC[index], self.floor_M[index])

    def without(self, lowest_M: Float32Array) -> Candidates:
        """With everything below `lowest_M` excluded; a floor below it hides nothing."""
        scores = np.where(self.scores_MC >= lowest_M[:, None], self.scores_MC, _NEG_INF)
        return Candidates(scores, np.where(self.floor_M >= lowest_M, self.floor_M, _NEG_INF))


class ShardedScores:
    """This rank's scores of some rows, and the ranks that hold the rest.

    Args:
        local: Scores of this rank's columns.
        group: The ranks. Every rank calls the same methods in one order.
    """

    def __init__(self, local: LocalScores, group: TPGroup) -> None:
        self.local = local
        self.group = group

    def rows(self, index: Int64Array, temperature: Float32Array | None = None) -> ShardedScores:
        """The same shards, these rows only, with a temperature of their own if given."""
        return ShardedScores(self.local.rows(index, temperature), self.group)

    def from_all(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What each rank has, [size, ...]."""
        if self.group.size == 1:
            return array[None]
        sent = torch.from_numpy(np.ascontiguousarray(array)).to(self.local.logits.device)
        found: npt.NDArray[Any] = self.group.all_gather(sent).cpu().numpy()
        return found

    # --- one round, a few numbers a row -------------------------------------------------------

    def best(self) -> tuple[Float32Array, Int64Array, Int64Array]:
        """Largest logit, its id, and this rank's best column, [M] each. A NaN anywhere wins."""
        values, columns = self.local.best()
        best, ids = self.best_of(values, columns)
        return best.astype(np.float32), ids, columns

    def draw(self, key_M: Int64Array, lowest_M: Float32Array, start_M: Int64Array) -> Int64Array:
        """Ids of the largest score + Gumbel noise among scores >= `lowest_M`.

        `key_M`: the rows' noise keys. `start_M`: this rank's best columns, from `best`.
        """
        return self.best_of(*self.local.draw(key_M, lowest_M, start_M))[1]

    def best_of(
        self, values_M: npt.NDArray[Any], columns_M: Int64Array
    ) -> tuple[Float64Array, Int64Array]:
        """The largest of the ranks' values and its id; equal ones: the lowest."""
        if self.group.size == 1:
            return values_M.astype(np.float64), self.local.vocab.ids[columns_M]
        pairs = np.stack([values_M, self.local.vocab.ids[columns_M]], -1, dtype=np.float64)
        pairs = self.from_all(pairs)
        values, ids = pairs[..., 0], pairs[..., 1]
        best = values.max(0)
        is_best = (values == best) | np.isnan(values)
        return best, np.where(is_best, ids, np.inf).min(0).astype(np.int64)

    def gather(self, ids_M: Int64Array) -> Float32Array:
        """The score of one token a row; -inf where no column stands for it."""
        local = self.local
        column = local.vocab.columns(ids_M)
        device = local.logits.device
        index = torch.from_numpy(local.index).to(device)
        found = local.logits[index, torch.from_numpy(column.clip(0)).to(device)].cpu().numpy()
        scores = self.from_all(np.where(column >= 0, found / local.temperature, _NEG_INF))
        best: Float32Array = scores.max(0)
        return best

    def total_mass(self, lowest_M: Float32Array, top_M: Float32Array) -> Int64Array:
        """Mass of the scores >= `lowest_M` over the whole vocabulary."""
        bins = self.local.by_distance(lowest_M, top_M, True)
        total: Int64Array = self.from_all(bins.sum(-1)).sum(0)
        return total

    def top_n(self, n: int) -> tuple[Float32Array, Int64Array]:
        """Scores and ids of the `n` largest, [M, n], largest first."""
        values, columns = self.local.top_n(n)
        # What fills up a row is the same token for any split.
        ids = np.where(values > _NEG_INF, self.local.vocab.ids[columns], 0)
        sent = self.from_all(np.stack([values, ids], -1, dtype=np.float64))
        merged = sent.transpose(1, 0, 2, 3).reshape(len(values), -1, 2)
        # By value, equal values by id.
        order = np.lexsort((merged[..., 1], -merged[..., 0]), axis=-1)[:, :n]
        chosen = np.take_along_axis(merged, order[..., None], 1)
        return chosen[..., 0].astype(np.float32), chosen[..., 1].astype(np.int64)

    # --- thresholds ---------------------------------------------------------------------------

    def candidates(self) -> Candidates:
        """The largest scores of every rank, on every rank: nearly always enough for a threshold."""
        sent = self.from_all(self.local.top_n(NUM_CANDIDATES)[0])  # [size, M, candidates]
        merged = sent[0]
        if len(sent) > 1:
            merged = -np.sort(-sent.transpose(1, 0, 2).reshape(sent.shape[1], -1), -1)
        # A rank with fewer tokens sent padding: nothing of it is unknown.
        return Candidates(merged, sent[:, :, -1].max(0))

    def kth_largest(self, k_M: Int64Array, top_M: Float32Array, known: Candidates) -> Float32Array:
        """The k-th largest score of each row.

        Args:
            k_M: From 1 to the vocabulary's size.
            top_M: Largest score of each row over all ranks.
            known: Of these rows.
        """
        column = (k_M - 1).clip(max=known.scores_MC.shape[1] - 1)
        found: Float32Array = known.scores_MC[np.arange(len(column)), column]
        is_known = (k_M - 1 == column) & (found >= known.floor_M) & (found > _NEG_INF)
        rest = np.flatnonzero(~is_known)
        if len(rest):
            shard, top = self.rows(rest), top_M[rest]
            lowest = np.full_like(top, _NEG_INF)
            bins = shard.local.by_distance(lowest, top, False)
            found[rest] = shard._threshold(bins, k_M[rest], lowest, top, is_mass=False)
        return found

    def nucleus(
        self, top_p_M: Float64Array, lowest_M: Float32Array, top_M: Float32Array, known: Candidates
    ) -> Float32Array:
        """Smallest score of the likeliest tokens whose mass reaches `top_p_M`.

        Args:
            top_p_M: Share of the softmax over the scores >= `lowest_M`.
            lowest_M: Scores below take no part.
            top_M: Largest score of each row over all ranks.
            known: Of these rows.
        """
        if (lowest_M > _NEG_INF).any():
            known = known.without(lowest_M)
        bins = self.local.by_distance(lowest_M, top_M, True)
        total = self.from_all(bins.sum(-1)).sum(0)
        needed = np.ceil(total * top_p_M).astype(np.int64).clip(1, total)
        reached = self.local.weigh(known.scores_MC, top_M).cumsum(-1)
        column = (reached < needed[:, None]).sum(-1)
        last = known.scores_MC.shape[1] - 1
        found: Float32Array = known.scores_MC[np.arange(len(column)), column.clip(max=last)]
        rest = np.flatnonzero((column > last) | (found < known.floor_M))
        if len(rest):
            found[rest] = self.rows(rest)._threshold(
                bins[rest], needed[rest], lowest_M[rest], top_M[rest], is_mass=True
            )
        return found

    def _threshold(
        self,
        bins_MB: Int64Array,
        needed_M: Int64Array,
        lowest_M: Float32Array,
        top_M: Float32Array,
        *,
        is_mass: bool,
    ) -> Float32Array:
        """Largest score t with weight(scores >= t) >= needed, not below `lowest_M`.

        First its distance from the top, from this rank's histogram `bins_MB`; then, among the
        scores at that distance, digit by digit of its key.
        """
        distance, needed_M = self._reach(bins_MB, needed_M)
        # Keys of all scores at that distance, and a few more: distances were rounded.
        least = (top_M - (distance + 1) * 0.03125001).astype(np.float32)
        least = np.where(distance < NUM_BINS - 1, np.nextafter(least, _NEG_INF), _NEG_INF)
        most = np.nextafter((top_M - distance * 0.03124999).astype(np.float32), -_NEG_INF)
        last = ordered_keys(np.minimum(most, top_M))
        width = max(int((last - ordered_keys(np.maximum(least, lowest_M))).max()), 0) + 1
        shift = max(width.bit_length() - _RADIX_BITS, 0)
        while True:
            bins = self.local.by_key(top_M, is_mass, distance, last, width, shift)
            digit, needed_M = self._reach(bins, needed_M)
            last = last - (digit << shift)
            if shift == 0:
                return score_of_key(last)
            width, shift = 1 << shift, max(shift - _RADIX_BITS, 0)

    def _reach(self, bins_MB: Int64Array, needed_M: Int64Array) -> tuple[Int64Array, Int64Array]:
        """In which bin over all ranks the needed weight is reached, and what is left for it.

        Bins are in order of falling scores. `bins_MB`: this rank's.
        """
        reached = self.from_all(bins_MB).sum(0).cumsum(-1)
        found = (reached >= needed_M[:, None]).argmax(-1)
        before = reached[np.arange(len(found)), found - 1]
        return found, needed_M - np.where(found > 0, before, 0)


def log_of(mass: Int64Array) -> Float64Array:
    """Natural logarithm of a mass over that of the likeliest token."""
    logs: Float64Array = np.log(mass / MASS_UNIT)
    return logs
