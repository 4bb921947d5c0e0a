"""One rank's scores of some rows, and what is asked of them without talking to other ranks.

`TorchScores` is the definition, on any device; `actors.sampling.native` has the fast form for CPU.
Shape suffixes: M rows, V this rank's columns.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from actors.sampling.noise import gumbel, spots

# Mass of the likeliest token. Times 2^18 tokens it still fits 63 bits.
MASS_UNIT = 1 << 44
# Below this distance from the largest score a mass is 0.
_LEAST = -40.0
_TO_INT = 1.5 * 2.0**52  # added to a float64, leaves the nearest integer in its low bits
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EVEN = (1 / 40320, 1 / 720, 1 / 24, 0.5, 1.0)
_ODD = (1 / 362880, 1 / 5040, 1 / 120, 1 / 6, 1.0)
_INT_MIN = -(1 << 31)
RADIX_BITS = 8
_NUM_BINS = 1 << RADIX_BITS
_NO_ID = (1 << 31) - 1


def masses(scores: Tensor, top: Tensor) -> Tensor:
    """exp(scores - top) in units of 2^-44, int64; sums of them do not depend on order.

    Made of operations that every machine rounds alike: torch's own exp differs in its last bit
    between a vector and the rest of a row, so a token's mass would depend on where a shard begins.

    Args:
        scores: float32 [..., V], none above `top`; -inf has mass 0.
        top: Largest score of each row over all ranks, [..., 1].
    """
    d = (scores.double() - top.double()).clamp_min_(_LEAST)
    t = d * 1.4426950408889634 + _TO_INT
    n = t - _TO_INT
    r = d - n * _LN2_HIGH
    r -= n * _LN2_LOW
    rr = r * r
    even, odd = torch.full_like(r, _EVEN[0]), torch.full_like(r, _ODD[0])
    for even_term, odd_term in zip(_EVEN[1:], _ODD[1:], strict=True):
        even.mul_(rr).add_(even_term)
        odd.mul_(rr).add_(odd_term)
    scale = ((t.view(torch.int64) << 52) + ((1023 + 44) << 52)).view(torch.float64)
    total = odd.mul_(r).add_(even).mul_(scale).add_(2.0**52)
    return total.view(torch.int64) - 0x4330000000000000


def ordered_keys(scores: Tensor) -> Tensor:
    """float32 as int64 in [0, 2^32), in the same order; -0 and 0 share a key."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(bits >= 0, bits, _INT_MIN - bits) - _INT_MIN


def score_of_key(keys: Tensor) -> Tensor:
    """The inverse of `ordered_keys`, float32."""
    bits = keys + _INT_MIN
    bits = torch.where(bits >= 0, bits, _INT_MIN - bits)
    return bits.to(torch.int32).view(torch.float32)


class Vocabulary:
    """Which token ids a rank's columns stand for.

    Args:
        ids_V: int64; -1 where a column has no token (it is never drawn). Columns need not be in
            order of ids.
    """

    def __init__(self, ids_V: Tensor) -> None:
        self.ids_V = ids_V
        self.spots_V = spots(ids_V)
        self.void_V: Tensor | None = ids_V < 0
        if not self.void_V.any():
            self.void_V = None
        self.is_ascending = bool((ids_V[1:] > ids_V[:-1]).all())
        self._column_of = torch.full((int(ids_V.max()) + 2,), -1, device=ids_V.device)
        self._column_of[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
        self._column_of[-1] = -1  # where unknown ids and void columns point

    def columns(self, ids: Tensor) -> Tensor:
        """Columns of token ids, int64; -1 where this rank has none."""
        last = len(self._column_of) - 1
        return self._column_of[ids.where((ids >= 0) & (ids < last), last)]


class LocalScores(Protocol):
    """Scores `logits[index] / temperature` of this rank's columns.

    `index` int64 [M] are rows of `logits` [N, V], `temperature` float32 [M]. The logits are only
    read. Rows with NaN give NaN as their best and anything elsewhere.
    """

    vocab: Vocabulary
    logits: Tensor
    index: Tensor
    temperature: Tensor

    def rows(self, index: Tensor, temperature: Tensor | None = None) -> LocalScores:
        """These of the rows only, with a temperature of their own if given."""

    def dense(self) -> Tensor:
        """All scores, float32 [M, V]."""

    def best(self) -> tuple[Tensor, Tensor]:
        """Largest logit (float32 [M]) and its column (int64 [M]); equal ones: the lowest id."""

    def top_n(self, n: int) -> tuple[Tensor, Tensor]:
        """The n largest scores and their columns [M, n], largest first, equal ones by id.

        -inf and column 0 where a row has fewer finite ones.
        """

    def total_mass(self, lowest_M: Tensor, top_M: Tensor) -> Tensor:
        """Sum of `masses` of the scores >= `lowest_M`, int64 [M]."""

    def histogram(
        self, lowest_M: Tensor, top_M: Tensor | None, shift: int, prefix_M: Tensor
    ) -> Tensor:
        """Weights of scores >= `lowest_M` by the digit at `shift` of their `ordered_keys`.

        Of keys whose higher digits are `prefix_M`; int64 [M, 256]. The weight is the mass
        relative to `top_M`, or 1 without one.
        """

    def draw(self, key_M: Tensor, lowest_M: Tensor, start_M: Tensor) -> tuple[Tensor, Tensor]:
        """Largest score + noise among scores >= `lowest_M` (float64 [M]), and its column.

        `start_M`: the column of each row's best. Equal ones: the lowest id. -inf and column 0
        where no score is left.
        """


class TorchScores:
    """`LocalScores` in torch."""

    def __init__(
        self, logits: Tensor, vocab: Vocabulary, index: Tensor, temperature: Tensor
    ) -> None:
        self.logits = logits
        self.vocab = vocab
        self.index = index
        self.temperature = temperature

    def rows(self, index: Tensor, temperature: Tensor | None = None) -> TorchScores:
        if temperature is None:
            temperature = self.temperature[index]
        return type(self)(self.logits, self.vocab, self.index[index], temperature)

    def dense(self) -> Tensor:
        return self.logits[self.index] / self.temperature[:, None]

    def best(self) -> tuple[Tensor, Tensor]:
        return self._first(self.logits[self.index])

    def top_n(self, n: int) -> tuple[Tensor, Tensor]:
        scores = self.dense()
        # Score and id as one number: no two are equal, so that topk has no choice.
        keys = (ordered_keys(scores) << 31) + (_NO_ID - self.vocab.ids_V)
        columns = keys.topk(min(n, keys.shape[1])).indices
        values = scores.gather(1, columns)
        columns = columns.where(values > float("-inf"), 0)
        missing = (0, n - values.shape[1])
        pad = torch.nn.functional.pad
        return pad(values, missing, value=float("-inf")), pad(columns, missing)

    def total_mass(self, lowest_M: Tensor, top_M: Tensor) -> Tensor:
        return kept_masses(self.dense(), lowest_M, top_M).sum(-1)

    def histogram(
        self, lowest_M: Tensor, top_M: Tensor | None, shift: int, prefix_M: Tensor
    ) -> Tensor:
        scores = self.dense()
        keys = ordered_keys(scores)
        is_wanted = (keys >> (shift + RADIX_BITS) == prefix_M[:, None]) & (
            scores >= lowest_M[:, None]
        )
        weight = torch.ones_like(keys) if top_M is None else masses(scores, top_M[:, None])
        bins = keys.new_zeros(len(keys), _NUM_BINS)
        digit = (keys >> shift) & (_NUM_BINS - 1)
        return bins.scatter_add_(1, digit, weight.where(is_wanted, 0))

    def draw(self, key_M: Tensor, lowest_M: Tensor, start_M: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.dense()
        noisy = scores.double() + gumbel(key_M[:, None], self.vocab.ids_V)
        values, columns = self._first(noisy.where(scores >= lowest_M[:, None], float("-inf")))
        return values, columns.where(values > float("-inf"), 0)

    def _first(self, values_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Largest value of each row, and of its columns the one with the lowest id."""
        best, columns = values_MV.max(-1)
        if not self.vocab.is_ascending:
            ids = self.vocab.ids_V.where(values_MV == best[:, None], _NO_ID)
            columns = ids.argmin(-1)
        return best, columns


def kept_masses(scores: Tensor, lowest_M: Tensor, top_M: Tensor) -> Tensor:
    """`masses` [M, V] with 0 for scores below `lowest_M`."""
    return masses(scores, top_M[:, None]).where(scores >= lowest_M[:, None], 0)
