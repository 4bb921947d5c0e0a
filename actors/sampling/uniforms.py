"""Uniforms for the verifier, without torch: those of `actors.sampling.noise`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ACCEPT_STREAM = 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, stream: int, step: int
) -> npt.NDArray[np.float64]:
    """Uniforms in (0, 1), one per row: by request seed, position of its token, stream and step."""
    seed = np.asarray(seeds, dtype=np.int64).astype(np.uint64)
    position = np.asarray(positions, dtype=np.int64).astype(np.uint64)
    key = _mix(seed + _GOLDEN)
    key = _mix(key ^ _mix(position * _GOLDEN + np.uint64(stream + 1)))
    key = _mix(key ^ _mix(np.asarray([step], dtype=np.uint64) * _GOLDEN))
    drawn: npt.NDArray[np.float64]
    drawn = ((_mix(key) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return drawn
