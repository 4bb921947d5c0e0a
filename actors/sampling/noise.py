"""Counter-based random numbers: a function of (seed, position, stream, id), nothing else.

The same request seed, position and token id give the same number in every process, batch, shard
and restart, so seeded output does not depend on speculation. Integer arithmetic wraps modulo 2^64
and is exact on every device; the mix is the finaliser of splitmix64 (Steele et al., 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Streams keep draws for different purposes at one position independent.
TARGET_STREAM = 0

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _as_int64(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def row_key(seed: int, position: int, stream: int = TARGET_STREAM) -> int:
    """Key of one row's noise (int64): hash of the request seed, absolute position and stream."""
    key = _mix_int(seed + 0x9E3779B97F4A7C15)
    key = _mix_int(key ^ _mix_int(position * 0x9E3779B97F4A7C15 + stream + 1))
    return _as_int64(key)


def uniform(key: int, ids: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, one per id (int64 tensor), strictly inside the interval."""
    bits = _mix_tensor(ids * _GOLDEN + key)
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(key: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, one per id."""
    return -torch.log(-torch.log(uniform(key, ids)))
