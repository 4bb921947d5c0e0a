"""One rank's scores of some rows, and what is asked of them without talking to other ranks.

`TorchScores` is the definition, on any device; `actors.sampling.native` has the fast form for CPU.
Logits are tensors; the few numbers a row that are asked of them come back in numpy, where small
arithmetic costs a fraction of what it costs in torch. Shape suffixes: M rows, V this rank's
columns.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.sampling.noise import gumbel, spots
from actors.sampling.uniforms import Int64Array
from actors.steps.messages import Float32Array

Float64Array = npt.NDArray[np.float64]

# Mass of the likeliest token. Times 2^18 tokens it still fits 63 bits.
MASS_UNIT = 1 << 44
# Below this distance from the largest score a mass is 0.
_LEAST = -40.0
_TO_INT = 1.5 * 2.0**52  # added to a float64, leaves the nearest integer in its low bits
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EVEN = (1 / 40320, 1 / 720, 1 / 24, 0.5, 1.0)
_ODD = (1 / 362880, 1 / 5040, 1 / 120, 1 / 6, 1.0)
# Bins of a histogram, by distance from the largest score or by a digit of the keys.
NUM_BINS = 1024
_NO_ID = (1 << 31) - 1
_NEG_INF = float("-inf")


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


def kept_masses(scores_MV: Tensor, lowest_M: Tensor, top_M: Tensor) -> Tensor:
    """`masses` [M, V] with 0 for scores below `lowest_M`."""
    return masses(scores_MV, top_M[:, None]).where(scores_MV >= lowest_M[:, None], 0)


def distances(scores: Tensor, top: Tensor) -> Tensor:
    """Distance from `top` in 1/32, below NUM_BINS, int64: grows as scores fall."""
    steps = (top - scores) * 32.0
    return steps.where(steps < NUM_BINS - 1.0, NUM_BINS - 1.0).long()


def ordered_keys(scores: Float32Array) -> Int64Array:
    """float32 as int64 in [0, 2^32), in the same order; -0 and 0 share a key."""
    bits = (scores + np.float32(0.0)).view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits + (1 << 31), -bits)


def score_of_key(keys: Int64Array) -> Float32Array:
    """The inverse of `ordered_keys`."""
    bits = np.where(keys >= 1 << 31, keys - (1 << 31), -keys)
    return bits.astype(np.int32).view(np.float32)


class Vocabulary:
    """Which token ids a rank's columns stand for.

    Args:
        ids_V: int64; -1 where a column has no token (it is never drawn). Columns need not be in
            order of ids.
    """

    def __init__(self, ids_V: Tensor) -> None:
        self.ids_V = ids_V
        self.ids = ids_V.cpu().numpy()
        self.spots_V = spots(ids_V)
        self.void_V = ids_V < 0 if bool((ids_V < 0).any()) else None
        self.is_ascending = bool((ids_V[1:] > ids_V[:-1]).all())
        self._column_of = np.full(int(self.ids.max()) + 2, -1)
        self._column_of[self.ids] = np.arange(len(self.ids))
        self._column_of[-1] = -1  # where unknown ids and void columns point

    def columns(self, ids: npt.ArrayLike) -> Int64Array:
        """Columns of token ids; -1 where this rank has none."""
        last = len(self._column_of) - 1
        wanted = np.asarray(ids, dtype=np.int64)
        return self._column_of[np.where((wanted >= 0) & (wanted < last), wanted, last)]


class LocalScores(Protocol):
    """Scores `logits[index] / temperature` of this rank's columns.

    `index` int64 [M] are rows of `logits` [N, V], `temperature` float32 [M]. The logits are only
    read. Rows with NaN give NaN as their best and anything elsewhere.
    """

    vocab: Vocabulary
    logits: Tensor
    index: Int64Array
    temperature: Float32Array

    def rows(self, index: Int64Array, temperature: Float32Array | None = None) -> Self:
        """These of the rows only, with a temperature of their own if given."""

    def dense(self) -> Tensor:
        """All scores, float32 [M, V]."""

    def best(self) -> tuple[Float32Array, Int64Array]:
        """Largest logit [M] and its column; equal ones: the lowest id."""

    def top_n(self, n: int) -> tuple[Float32Array, Int64Array]:
        """The n largest scores and their columns [M, n], largest first, equal logits by id.

        -inf and column 0 where a row has fewer finite ones.
        """

    def weigh(self, scores_MC: Float32Array, top_M: Float32Array) -> Int64Array:
        """`masses` of any scores of these rows, [M, C]."""

    def by_distance(self, lowest_M: Float32Array, top_M: Float32Array, is_mass: bool) -> Int64Array:
        """Weights of the scores >= `lowest_M` by their `distances`, [M, NUM_BINS].

        Weights are masses, or 1 each.
        """

    def by_key(
        self,
        top_M: Float32Array,
        is_mass: bool,
        distance_M: Int64Array,
        last_M: Int64Array,
        width: int,
        shift: int,
    ) -> Int64Array:
        """Weights by `(last_M - key) >> shift` of the scores at one distance, [M, NUM_BINS].

        Of those with keys in (last - width, last], width at most NUM_BINS << shift.
        """

    def draw(
        self, key_M: Int64Array, lowest_M: Float32Array, start_M: Int64Array
    ) -> tuple[Float64Array, Int64Array]:
        """Largest score + noise among the scores >= `lowest_M`, and its column, [M] each.

        `key_M` are the rows' noise keys, `start_M` the columns of their bests. Equal ones: the
        lowest id. -inf and column 0 where no score is left.
        """


class TorchScores:
    """`LocalScores` in torch."""

    def __init__(
        self, logits: Tensor, vocab: Vocabulary, index: Int64Array, temperature: Float32Array
    ) -> None:
        self.logits = logits
        self.vocab = vocab
        self.index = index
        self.temperature = temperature

    def rows(self, index: Int64Array, temperature: Float32Array | None = None) -> Self:
        if temperature is None:
            temperature = self.temperature[index]
        return type(self)(self.logits, self.vocab, self.index[index], temperature)

    def on_device(self, array: npt.NDArray[Any]) -> Tensor:
        """A small array beside the logits."""
        return torch.from_numpy(array).to(self.logits.device)

    def dense(self) -> Tensor:
        return self.logits[self.on_device(self.index)] / self.on_device(self.temperature)[:, None]

    def best(self) -> tuple[Float32Array, Int64Array]:
        return self._first(self.logits[self.on_device(self.index)])

    def top_n(self, n: int) -> tuple[Float32Array, Int64Array]:
        logits = self.logits[self.on_device(self.index)]
        # Logit and id as one number: no two are equal, so that topk has no choice.
        keys = (_keys(logits) << 31) + (_NO_ID - self.vocab.ids_V)
        columns = keys.topk(min(n, keys.shape[1])).indices
        values = logits.gather(1, columns) / self.on_device(self.temperature)[:, None]
        columns = columns.where(values > _NEG_INF, 0)
        missing = (0, n - values.shape[1])
        values = torch.nn.functional.pad(values, missing, value=_NEG_INF)
        columns = torch.nn.functional.pad(columns, missing)
        return values.cpu().numpy(), columns.cpu().numpy()

    def weigh(self, scores_MC: Float32Array, top_M: Float32Array) -> Int64Array:
        return masses(torch.from_numpy(scores_MC), torch.from_numpy(top_M)[:, None]).numpy()

    def by_distance(self, lowest_M: Float32Array, top_M: Float32Array, is_mass: bool) -> Int64Array:
        scores, top = self.dense(), self.on_device(top_M)[:, None]
        is_kept = scores >= self.on_device(lowest_M)[:, None]
        return self._binned(scores, top, is_mass, distances(scores, top), is_kept)

    def by_key(
        self,
        top_M: Float32Array,
        is_mass: bool,
        distance_M: Int64Array,
        last_M: Int64Array,
        width: int,
        shift: int,
    ) -> Int64Array:
        scores, top = self.dense(), self.on_device(top_M)[:, None]
        place = self.on_device(last_M)[:, None] - _keys(scores)
        is_wanted = (place >= 0) & (place < width)
        is_wanted &= distances(scores, top) == self.on_device(distance_M)[:, None]
        return self._binned(scores, top, is_mass, place >> shift, is_wanted)

    def draw(
        self, key_M: Int64Array, lowest_M: Float32Array, start_M: Int64Array
    ) -> tuple[Float64Array, Int64Array]:
        scores = self.dense()
        noisy = scores.double() + gumbel(self.on_device(key_M)[:, None], self.vocab.ids_V)
        is_kept = scores >= self.on_device(lowest_M)[:, None]
        values, columns = self._first(noisy.where(is_kept, _NEG_INF))
        return values, np.where(values > _NEG_INF, columns, 0)

    def _first(self, values_MV: Tensor) -> tuple[npt.NDArray[Any], Int64Array]:
        """Largest value of each row, and of its columns the one with the lowest id."""
        best, columns = values_MV.max(-1)
        if not self.vocab.is_ascending:
            ids = self.vocab.ids_V.where(values_MV == best[:, None], _NO_ID)
            columns = ids.argmin(-1)
        return best.cpu().numpy(), columns.cpu().numpy()

    @staticmethod
    def _binned(
        scores: Tensor, top: Tensor, is_mass: bool, bins: Tensor, is_wanted: Tensor
    ) -> Int64Array:
        weight = masses(scores, top) if is_mass else torch.ones_like(bins)
        total = bins.new_zeros(len(bins), NUM_BINS)
        total.scatter_add_(1, bins.where(is_wanted, 0), weight.where(is_wanted, 0))
        return total.cpu().numpy()


def _keys(scores: Tensor) -> Tensor:
    """`ordered_keys` on the scores' device."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(bits >= 0, bits + (1 << 31), -bits)
