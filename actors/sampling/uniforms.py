"""Counter-based random numbers in numpy: a function of (seed, position, stream, step) only.

The same request seed and position give the same numbers in every process, batch, shard and
restart, so seeded output does not depend on speculation. Integers wrap modulo 2^64; the mix is the
finaliser of splitmix64 (Steele et al., 2014). `noise` continues from a row's key to the ids of a
vocabulary, in torch. This module knows no torch: the verifier draws with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """What a number is drawn for; draws for different purposes at one position are independent."""

    TARGET = 0  # the target's own sample, and drafts coupled to it
    DRAFT = 1  # drafts with a law of their own
    ACCEPT = 2  # whether a draft is accepted
    RESIDUAL = 3  # what replaces it


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _counters(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array([int(v) & _MASK for v in values], dtype=np.uint64)


def row_keys(
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: Stream = Stream.TARGET,
    steps: Sequence[int] | None = None,
) -> Int64Array:
    """Keys of rows' noise, int64 [N].

    Args:
        seeds: Of the requests, any integers.
        positions: Absolute positions of the tokens that the rows sample.
        stream: Purpose of the draw.
        steps: Numbers to tell apart draws at one position where an earlier one decided something
            although its token was discarded. 0 (and None) leaves the key as it is without.
    """
    key = _mix(_counters(seeds) + np.uint64(GOLDEN))
    purpose = np.uint64(stream * MIX_1 + 1 & _MASK)
    key = _mix(key ^ _mix(_counters(positions) * np.uint64(GOLDEN) + purpose))
    if steps is not None:
        step = _counters(steps)
        key = np.where(step == 0, key, _mix(key ^ _mix(step * np.uint64(GOLDEN))))
    return key.view(np.int64)


def row_key(seed: int, position: int, stream: Stream = Stream.TARGET, step: int = 0) -> int:
    """One row's key."""
    return int(row_keys([seed], [position], stream, [step])[0])


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: Stream,
    steps: Sequence[int] | None = None,
) -> npt.NDArray[np.float64]:
    """One number a row, float64 [N], strictly inside (0, 1): what `noise.uniform` has for id 0."""
    bits = _mix(row_keys(seeds, positions, stream, steps).view(np.uint64))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
