"""A row's noise over the ids of a vocabulary: from the key of `uniforms` on, in torch.

Integer arithmetic wraps modulo 2^64 and is exact on every device. Noise belongs to a token id, not
to a column: however a vocabulary is split, reduced or reordered, an id keeps its number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.sampling.uniforms import GOLDEN, MIX_1, MIX_2


def _as_int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def spots(ids: Tensor) -> Tensor:
    """An id's place in the noise of any row, int64: what is hashed together with the key."""
    return ids * _as_int64(GOLDEN)


def uniform(key: int | Tensor, ids: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, strictly inside the interval.

    Args:
        key: Of a row, or int64 [N, 1] of several.
        ids: int64 [V].
    """
    x = spots(ids) + key
    x = (x ^ _shift_right(x, 30)) * _as_int64(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _as_int64(MIX_2)
    x = x ^ _shift_right(x, 31)
    return (_shift_right(x, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(key: int | Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, one per id (and row)."""
    return -torch.log(-torch.log(uniform(key, ids)))
