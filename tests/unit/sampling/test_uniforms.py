"""Random numbers are a function of their counters, the same in numpy and in torch."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from actors.sampling.noise import gumbel, uniform
from actors.sampling.uniforms import Stream, row_key, row_keys, uniforms


def test_numpy_and_torch_draw_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    seeds = [int(s) for s in rng.integers(0, 2**63, 500)] + [0, 2**64 - 1, -1, 2**63]
    positions = [int(p) for p in rng.integers(0, 2**40, len(seeds))]
    steps = [int(s) for s in rng.integers(0, 3, len(seeds))]
    for stream in Stream:
        drawn = uniforms(seeds, positions, stream, steps)
        keys = torch.from_numpy(row_keys(seeds, positions, stream, steps))
        assert drawn.tolist() == uniform(keys, torch.zeros(1, dtype=torch.int64)).tolist()
        assert (drawn > 0).all() and (drawn < 1).all()


def test_the_verifier_draws_without_torch() -> None:
    code = "import actors.sampling.uniforms, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_values_are_pinned() -> None:
    """Seeded output must survive a release: these numbers are part of the contract."""
    assert row_key(123, 45) == PINNED_KEY
    values = uniform(row_key(123, 45), torch.tensor([0, 1, 49_151]))
    assert values.tolist() == pytest.approx(PINNED, abs=0)
    assert uniforms([123], [45], Stream.TARGET).tolist() == PINNED[:1]


PINNED_KEY = -7603237753756112494
PINNED = [0.2613531892941018, 0.9815950781301043, 0.9188817631961211]


def test_keys_differ_by_seed_position_stream_and_step_only() -> None:
    assert row_key(7, 3, Stream.TARGET, 0) == row_key(7, 3)
    keys = {
        row_key(seed, position, stream, step)
        for seed in range(12)
        for position in range(12)
        for stream in Stream
        for step in range(4)
    }
    assert len(keys) == 12 * 12 * 4 * 4
    ids = torch.arange(1000)
    assert torch.equal(uniform(row_key(1, 2), ids)[500:], uniform(row_key(1, 2), ids[500:]))


def test_numbers_are_uniform_and_positions_independent() -> None:
    everywhere = uniform(row_key(2**63 + 5, 10**6), torch.arange(200_000))
    assert float(everywhere.min()) > 0.0 and float(everywhere.max()) < 1.0
    assert abs(float(everywhere.mean()) - 0.5) < 5 / math.sqrt(12 * 200_000)
    ids = torch.arange(50_000)
    draws = [gumbel(row_key(7, 100), ids), gumbel(row_key(7, 101), ids)]
    draws.append(gumbel(row_key(7, 100, Stream.RESIDUAL), ids))
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(3)
    assert float(correlation.abs().max()) < 0.02
