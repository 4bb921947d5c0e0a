"""Rows of scores split by vocabulary over ranks, without moving scores. One rank is a case of many.

Shape suffixes: M rows, V this rank's part of the vocabulary. Every rank gets equal results: what
crosses is a few numbers a row (16 bytes for a maximum, 520 for a threshold; 2 KB in each of four
rounds for the rare threshold that lies behind the candidates), combined by the same arithmetic
everywhere. Ties go to the lowest id.

Results do not depend on how the vocabulary is split. Maxima and counts are exact by nature;
probability masses are summed as integers (`masses`), whose sum has no order. Which exchanges
happen follows only from values that every rank has, so the ranks cannot get out of step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actors.sampling.scores import MASS_UNIT, RADIX_BITS, LocalScores, masses, score_of_key
from parallel.groups import TPGroup

# Scores a rank sends where a threshold is asked for; user settings of top_k lie below.
NUM_CANDIDATES = 128
_NUM_BINS = 1 << RADIX_BITS


class Candidates(NamedTuple):
    """Scores known to every rank, float32 [M, C] descending: all above `floor_M` of the row."""

    scores_MC: Tensor
    floor_M: Tensor

    def rows(self, index: Tensor) -> Candidates:
        """These rows only."""
        return Candidates(self.scores_MC[index], self.floor_M[index])

    def without(self, lowest_M: Tensor) -> Candidates:
        """With everything below `lowest_M` excluded; a floor below it hides nothing."""
        scores = self.scores_MC.where(self.scores_MC >= lowest_M[:, None], float("-inf"))
        return Candidates(scores, self.floor_M.where(self.floor_M >= lowest_M, float("-inf")))


class ShardedScores:
    """This rank's scores of some rows, and the ranks that hold the rest.

    Args:
        local: Scores of this rank's columns.
        group: The ranks. Every rank calls the same methods in one order.
    """

    def __init__(self, local: LocalScores, group: TPGroup) -> None:
        self.local = local
        self.group = group

    def rows(self, index: Tensor, temperature: Tensor | None = None) -> ShardedScores:
        """The same shards, these rows only, with a temperature of their own if given."""
        return ShardedScores(self.local.rows(index, temperature), self.group)

    # --- one round, a few numbers a row -------------------------------------------------------

    def best(self) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit (float64 [M]), its id (int64 [M]), and this rank's best column.

        A NaN anywhere wins.
        """
        values, columns = self.local.best()
        return *self.best_of(values, columns), columns

    def draw(self, key_M: Tensor, lowest_M: Tensor, start_M: Tensor) -> tuple[Tensor, Tensor]:
        """Largest score + Gumbel noise of scores >= `lowest_M` (float64 [M]), and its id.

        `start_M`: this rank's best columns, from `best`.
        """
        return self.best_of(*self.local.draw(key_M, lowest_M, start_M))

    def best_of(self, values_M: Tensor, columns_M: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of the ranks' values (float64 [M]) and its id; equal ones: the lowest."""
        ids = self.local.vocab.ids_V[columns_M]
        pairs = self.group.all_gather(torch.stack([values_M.double(), ids.double()], -1))
        values, ids = pairs.unbind(-1)
        best = values.max(0).values
        is_best = (values == best) | values.isnan()
        return best, ids.where(is_best, float("inf")).min(0).values.long()

    def gather(self, ids_M: Tensor) -> Tensor:
        """The score of one token a row, float32 [M]; -inf where no column stands for it."""
        local = self.local
        column = local.vocab.columns(ids_M)
        found = local.logits[local.index, column.clamp_min(0)] / local.temperature
        return self.group.all_gather(found.where(column >= 0, float("-inf"))).max(0).values

    def total_mass(self, lowest_M: Tensor, top_M: Tensor) -> Tensor:
        """Mass of the scores >= `lowest_M` over the whole vocabulary, int64 [M]."""
        return self.group.all_gather(self.local.total_mass(lowest_M, top_M)).sum(0)

    def top_n(self, n: int) -> tuple[Tensor, Tensor]:
        """Scores (float32) and ids (int64) of the `n` largest, [M, n], largest first."""
        values, columns = self.local.top_n(n)
        ids = self.local.vocab.ids_V[columns]
        sent = self.group.all_gather(torch.stack([values.double(), ids.double()], -1))
        merged = sent.transpose(0, 1).flatten(1, 2)  # [M, size * n, 2]
        # By value, equal values by id: sort by the second key first.
        merged = merged.gather(1, merged[..., 1:].argsort(1).expand(-1, -1, 2))
        order = merged[..., 0].argsort(dim=1, descending=True, stable=True)[:, :n]
        chosen = merged.gather(1, order[..., None].expand(-1, -1, 2))
        return chosen[..., 0].float(), chosen[..., 1].long()

    # --- thresholds ---------------------------------------------------------------------------

    def candidates(self) -> Candidates:
        """The largest scores of every rank, on every rank: nearly always enough for a threshold."""
        sent = self.group.all_gather(self.local.top_n(NUM_CANDIDATES)[0])  # [size, M, candidates]
        merged = sent.transpose(0, 1).flatten(1).sort(-1, descending=True).values
        # A rank with fewer tokens sent padding: nothing of it is unknown.
        return Candidates(merged, sent[:, :, -1].max(0).values)

    def kth_largest(self, k_M: Tensor, known: Candidates) -> Tensor:
        """The k-th largest score of each row, float32 [M].

        Args:
            k_M: int64, from 1 to the vocabulary's size.
            known: Of these rows.
        """
        column = (k_M - 1).clamp_max(known.scores_MC.shape[1] - 1)
        found = known.scores_MC.gather(1, column[:, None])[:, 0]
        is_known = (k_M - 1 == column) & (found >= known.floor_M) & (found > float("-inf"))
        open_rows = (~is_known).nonzero()[:, 0]
        if len(open_rows):
            everything = torch.full_like(found[open_rows], float("-inf"))
            found[open_rows] = self.rows(open_rows)._threshold(k_M[open_rows], everything, None)
        return found

    def nucleus(
        self, top_p_M: Tensor, lowest_M: Tensor, top_M: Tensor, known: Candidates
    ) -> Tensor:
        """Smallest score of the likeliest tokens whose mass reaches `top_p_M`: float32 [M].

        Args:
            top_p_M: Share of the softmax over the scores >= `lowest_M`, float64.
            lowest_M: Scores below take no part.
            top_M: Largest score of each row over all ranks.
            known: Of these rows.
        """
        known = known.without(lowest_M)
        needed = mass_needed(self.total_mass(lowest_M, top_M), top_p_M)
        reached = masses(known.scores_MC, top_M[:, None]).cumsum(-1)
        column = (reached < needed[:, None]).sum(-1)
        last = known.scores_MC.shape[1] - 1
        found = known.scores_MC.gather(1, column.clamp_max(last)[:, None])[:, 0]
        open_rows = ((column > last) | (found < known.floor_M)).nonzero()[:, 0]
        if len(open_rows):
            found[open_rows] = self.rows(open_rows)._threshold(
                needed[open_rows], lowest_M[open_rows], top_M[open_rows]
            )
        return found

    def _threshold(self, needed_M: Tensor, lowest_M: Tensor, top_M: Tensor | None) -> Tensor:
        """Largest score t with weight(scores >= t) >= needed, found digit by digit.

        Weights: masses relative to `top_M` of the scores >= `lowest_M`, or 1 without `top_M`.
        """
        prefix = torch.zeros_like(needed_M)  # digits found so far
        for shift in range(32 - RADIX_BITS, -1, -RADIX_BITS):
            bins = self.local.histogram(lowest_M, top_M, shift, prefix)
            bins = self.group.all_gather(bins).sum(0)
            # Weight of this digit and all larger ones; never too little in digit 0, where the
            # rounds before have made sure that enough is left.
            reached = bins.flip(-1).cumsum(-1).flip(-1)
            chosen = (reached >= needed_M[:, None]).sum(-1).clamp_min(1) - 1
            larger = reached.gather(1, (chosen + 1).clamp_max(_NUM_BINS - 1)[:, None])[:, 0]
            needed_M = needed_M - larger.where(chosen + 1 < _NUM_BINS, 0)
            prefix = (prefix << RADIX_BITS) | chosen
        return score_of_key(prefix)


def mass_needed(total_M: Tensor, top_p_M: Tensor) -> Tensor:
    """Mass (in units, int64, at least 1) that a nucleus of `top_p_M` must reach."""
    return (total_M.double() * top_p_M).ceil().long().clamp(min=1).minimum(total_M)


def log_of(mass: Tensor) -> Tensor:
    """Natural logarithm of a mass over that of the likeliest token, float64."""
    return (mass.double() / MASS_UNIT).log()
