"""Row statistics over logits that are split by vocabulary, without moving logits.

Shape suffixes: N rows, V this rank's part of the vocabulary. Every rank gets equal results: what
crosses is a few numbers a row (16 bytes for a maximum, 520 for a threshold; 2 KB in each of four
rounds for the rare threshold that lies behind the candidates), combined by the same arithmetic
everywhere. Ties go to the lowest id.

Results do not depend on how the vocabulary is split. Maxima and counts are exact by nature;
probability masses are summed as integers (`masses`), whose sum has no order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel.groups import TPGroup

# Scores a rank sends where a threshold is asked for; user settings of top_k lie below.
NUM_CANDIDATES = 128
_INT_MIN = -(1 << 31)
# Mass of the likeliest token. Times 2^18 tokens it still fits 63 bits.
MASS_UNIT = 1 << 44
_RADIX_BITS = 8
_NUM_BINS = 1 << _RADIX_BITS


def masses(scores: Tensor, top: Tensor) -> Tensor:
    """exp(scores - top) in units of 2^-44, int64; sums of them do not depend on order.

    Args:
        scores: float32 or float64 [..., V]; -inf has mass 0.
        top: Largest score of each row over all ranks, [..., 1].
    """
    return ((scores.double() - top.double()).exp() * MASS_UNIT).long()


def _ordered_keys(scores: Tensor) -> Tensor:
    """float32 as int64 in [0, 2^32), in the same order; -0 and 0 share a key."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(bits >= 0, bits, _INT_MIN - bits) - _INT_MIN


class Candidates(NamedTuple):
    """Scores known to every rank, float32 [N, C] descending: all above `floor_N` of the row."""

    scores_NC: Tensor
    floor_N: Tensor

    def rows(self, index: list[int]) -> Candidates:
        """These rows only."""
        return Candidates(self.scores_NC[index], self.floor_N[index])

    def without(self, lowest_N: Tensor) -> Candidates:
        """With everything below `lowest_N` excluded; a floor below it hides nothing."""
        scores = self.scores_NC.where(self.scores_NC >= lowest_N[:, None], float("-inf"))
        return Candidates(scores, self.floor_N.where(self.floor_N >= lowest_N, float("-inf")))


class ShardedLogits:
    """Rows of scores, this rank's part of the vocabulary, and the ranks that hold the rest.

    Args:
        local_NV: float32 scores of ids [first_id, first_id + V).
        first_id: Id of the first column.
        group: The ranks, in vocabulary order. Every rank calls the same methods in one order.
    """

    def __init__(self, local_NV: Tensor, first_id: int, group: TPGroup) -> None:
        self.local_NV = local_NV
        self.first_id = first_id
        self.group = group

    @property
    def ids_V(self) -> Tensor:
        """Global ids of the columns, int64."""
        count = self.local_NV.shape[1]
        return torch.arange(self.first_id, self.first_id + count, device=self.local_NV.device)

    def rows(self, index: Tensor) -> ShardedLogits:
        """The same shards, these rows only."""
        return ShardedLogits(self.local_NV[index], self.first_id, self.group)

    # --- one round, a few numbers a row -------------------------------------------------------

    def argmax(self, scores_NV: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Largest value (float64 [N]) and its global id (int64 [N]); a NaN anywhere wins.

        Args:
            scores_NV: Instead of the logits, for example scores with noise added.
        """
        scores_NV = self.local_NV if scores_NV is None else scores_NV
        values, columns = scores_NV.max(-1)
        pairs = torch.stack([values.double(), (columns + self.first_id).double()], -1)
        return best_of(self.group.all_gather(pairs))

    def gather(self, ids_N: Tensor) -> Tensor:
        """The logit of one global id a row, float32 [N]; the rank that holds it tells the rest."""
        column = ids_N - self.first_id
        inside = (column >= 0) & (column < self.local_NV.shape[1])
        found = self.local_NV.gather(1, column.where(inside, 0)[:, None])[:, 0]
        return self.group.all_reduce(found.where(inside, 0.0))

    def logsumexp(self) -> Tensor:
        """log(sum(exp(logits))) over the whole vocabulary, float64 [N]."""
        top = self.local_NV.max(-1).values.double()
        parts = torch.stack([top, self._mass_below(top)], -1)
        tops, sums = self.group.all_gather(parts).unbind(-1)  # [size, N] each
        best = tops.max(0).values
        return best + (sums * (tops - best).exp()).sum(0).log()

    def top_n(self, n: int) -> tuple[Tensor, Tensor]:
        """Global ids (int64) and logits (float32) of the `n` largest, [N, n], largest first."""
        count = self.local_NV.shape[1]
        values, columns = self.local_NV.topk(min(n, count))
        pairs = torch.full((len(values), n, 2), float("-inf"), dtype=torch.float64)
        pairs = pairs.to(values.device)
        pairs[:, : values.shape[1], 0] = values.double()
        pairs[:, : values.shape[1], 1] = (columns + self.first_id).double()
        merged = self.group.all_gather(pairs).transpose(0, 1).flatten(1, 2)  # [N, size * n, 2]
        # By value, equal values by id: sort by the second key first.
        merged = merged.gather(1, merged[..., 1:].argsort(1).expand(-1, -1, 2))
        order = merged[..., 0].argsort(dim=1, descending=True, stable=True)[:, :n]
        chosen = merged.gather(1, order[..., None].expand(-1, -1, 2))
        return chosen[..., 1].long(), chosen[..., 0].float()

    def entropies(self, k: int) -> Tensor:
        """-sum(p ln p) over the `k` likeliest tokens, p of the whole softmax, float64 [N]."""
        total = self.logsumexp()
        logp = self.top_n(k)[1].double() - total[:, None]
        terms = logp.exp() * logp
        return -terms.where(logp > float("-inf"), 0.0).sum(-1)

    # --- a target law against a draft law -----------------------------------------------------

    def residual_mass(self, scale_N: Tensor, draft_NV: Tensor, total_N: Tensor) -> Tensor:
        """sum(max(scale * p - q, 0)) a row, float64 [N]: the block sums of block verification.

        Args:
            scale_N: Factor of the target's probabilities, float64.
            draft_NV: The draft's probabilities q of this rank's columns.
            total_N: The rows' `logsumexp`.
        """
        excess = self._excess(scale_N, draft_NV, total_N)
        return self.group.all_reduce(excess.sum(-1))

    def residual_argmax(
        self, scale_N: Tensor, draft_NV: Tensor, total_N: Tensor, noise_NV: Tensor
    ) -> Tensor:
        """One draw a row from max(scale * p - q, 0), normalised: int64 [N] global ids.

        `noise_NV` is Gumbel noise of this rank's columns.
        """
        excess = self._excess(scale_N, draft_NV, total_N)
        return self.argmax(excess.log() + noise_NV)[1]

    def _excess(self, scale_N: Tensor, draft_NV: Tensor, total_N: Tensor) -> Tensor:
        target = (self.local_NV.double() - total_N[:, None]).exp()
        return (scale_N[:, None] * target - draft_NV).clamp_min(0.0)

    # --- thresholds ---------------------------------------------------------------------------

    def candidates(self) -> Candidates:
        """The largest scores of every rank, on every rank: nearly always enough for a threshold."""
        count = self.local_NV.shape[1]
        values = self.local_NV.topk(min(NUM_CANDIDATES, count)).values
        missing = NUM_CANDIDATES - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        sent = self.group.all_gather(values)  # [size, N, candidates]
        merged = sent.transpose(0, 1).flatten(1).sort(-1, descending=True).values
        # A rank with fewer tokens sent padding: nothing of it is unknown.
        return Candidates(merged, sent[:, :, -1].max(0).values)

    def kth_largest(self, k_N: Tensor, known: Candidates) -> Tensor:
        """The k-th largest score of each row, float32 [N].

        Args:
            k_N: int64, from 1 to the vocabulary's size.
            known: Of these rows.
        """
        column = (k_N - 1).clamp_max(known.scores_NC.shape[1] - 1)
        found = known.scores_NC.gather(1, column[:, None])[:, 0]
        is_known = (k_N - 1 == column) & (found >= known.floor_N) & (found > float("-inf"))
        open_rows = (~is_known).nonzero()[:, 0]
        if len(open_rows):
            rows = self.rows(open_rows)
            ones = torch.ones_like(rows.local_NV, dtype=torch.int64)
            found[open_rows] = rows._threshold(ones, k_N[open_rows])
        return found

    def nucleus(self, top_p_N: Tensor, top_N: Tensor, known: Candidates) -> Tensor:
        """Smallest score of the likeliest tokens whose mass reaches `top_p_N`: float32 [N].

        Args:
            top_p_N: Share of the softmax over all scores (-inf takes no part), float64.
            top_N: Largest score of each row over all ranks.
            known: Of these rows; scores that were excluded since must be -inf in both.
        """
        mass = masses(self.local_NV, top_N[:, None])
        total = self.group.all_gather(mass.sum(-1)).sum(0)
        needed = mass_needed(total, top_p_N)
        reached = masses(known.scores_NC, top_N[:, None]).cumsum(-1)
        column = (reached < needed[:, None]).sum(-1)
        last = known.scores_NC.shape[1] - 1
        found = known.scores_NC.gather(1, column.clamp_max(last)[:, None])[:, 0]
        open_rows = ((column > last) | (found < known.floor_N)).nonzero()[:, 0]
        if len(open_rows):
            found[open_rows] = self.rows(open_rows)._threshold(mass[open_rows], needed[open_rows])
        return found

    def _threshold(self, weight_NV: Tensor, needed_N: Tensor) -> Tensor:
        """Largest score t with weight(scores >= t) >= needed, found digit by digit."""
        keys = _ordered_keys(self.local_NV)
        num_rows = keys.shape[0]
        prefix = keys.new_zeros(num_rows)  # digits found so far
        needed = needed_N.clone()
        for shift in range(32 - _RADIX_BITS, -1, -_RADIX_BITS):
            above = keys >> (shift + _RADIX_BITS)
            digit = (keys >> shift) & (_NUM_BINS - 1)
            bins = keys.new_zeros(num_rows, _NUM_BINS)
            bins.scatter_add_(1, digit, weight_NV.where(above == prefix[:, None], 0))
            bins = self.group.all_gather(bins).sum(0)
            # Weight of this digit and all larger ones; never too little in digit 0, where the
            # rounds before have made sure that enough is left.
            reached = bins.flip(-1).cumsum(-1).flip(-1)
            chosen = (reached >= needed[:, None]).sum(-1).clamp_min(1) - 1
            larger = reached.gather(1, (chosen + 1).clamp_max(_NUM_BINS - 1)[:, None])[:, 0]
            needed = needed - larger.where(chosen + 1 < _NUM_BINS, 0)
            prefix = (prefix << _RADIX_BITS) | chosen
        bits = prefix + _INT_MIN
        bits = torch.where(bits >= 0, bits, _INT_MIN - bits)
        return bits.to(torch.int32).view(torch.float32)

    def _mass_below(self, top_N: Tensor) -> Tensor:
        return (self.local_NV.double() - top_N[:, None]).exp().sum(-1)


def best_of(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value over ranks and its id, from float64 (value, id) pairs [size, N, 2].

    Equal values: the lowest id. NaN beats every number, as in `Tensor.max`.
    """
    values, ids = pairs.unbind(-1)
    best = values.max(0).values
    is_best = (values == best) | values.isnan()
    return best, ids.where(is_best, float("inf")).min(0).values.long()


def mass_needed(total_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Mass (in units, int64, at least 1) that a nucleus of `top_p_N` must reach."""
    return (total_N.double() * top_p_N).ceil().long().clamp(min=1).minimum(total_N)
