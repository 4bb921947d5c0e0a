"""Sampling over a split vocabulary: equal to one rank's, equal on all ranks, few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.sampling.rows import Columns, LogitsRow
from actors.sampling.sampler import DRAFT_CHECKS, Sampler
from actors.sampling.shards import NUM_CANDIDATES
from actors.steps.messages import RowMasks
from parallel.groups import SingleRank, TPGroup
from parallel.topology import split_range
from tests.unit.parallel.conftest import Ranks
from tests.unit.sampling.oracle import LAWS, hard_logits, law_rows, params


def sample_steps(
    group: TPGroup, vocab: int, num_steps: int, num_rows: int
) -> tuple[list[Columns], dict[str, int]]:
    """Steps of rows that are hard, with every column, drafts with and without a law, and masks."""
    begin, end = split_range(vocab, group.rank, group.size)
    sampler = Sampler(group, (begin, end), vocab, needs=DRAFT_CHECKS)
    found = []
    for step in range(num_steps):
        rows = [
            LogitsRow(row.params, row.position, draft_id=(31 * step) % vocab if i % 4 else -1)
            for i, row in enumerate(law_rows(num_rows, step, 4 + step))
        ]
        q = hard_logits(6 * step + 1, sum(row.draft_id >= 0 for row in rows), vocab)
        q = q.nan_to_num(0.0, posinf=1.0)
        rng = np.random.default_rng(step)
        bits = rng.integers(0, 2**32, (1, -(-vocab // 32)), dtype=np.uint32)
        masks = RowMasks(np.array([step % num_rows], dtype=np.int32), bits)
        logits = hard_logits(step, num_rows, vocab)
        found.append(
            sampler.sample(
                logits[:, begin:end],
                rows,
                masks=masks if step % 3 == 0 else None,
                q=q[:, begin:end] if step % 2 else None,
            )
        )
    return found, dict(group.num_calls)


@pytest.mark.parametrize("size", [2, 4])
def test_every_column_has_the_same_bits_for_any_split(ranks: Ranks, size: int) -> None:
    """Ranks never diverge either, in what they say or in how often they talk."""
    for vocab, steps, num_rows in ((1003, 21, len(LAWS)), (257, 30, 2)):
        expected, _ = sample_steps(SingleRank(), vocab, steps, num_rows)
        results = ranks.run(size, sample_steps, vocab, steps, num_rows)
        for found, num_calls in results:
            assert num_calls == results[0][1]
            for step in range(steps):
                assert found[step].keys() == expected[step].keys()
                for name, column in expected[step].items():
                    np.testing.assert_array_equal(found[step][name], column, f"{name} {step}")


def one_step(group: TPGroup, vocab: int, law: dict[str, Any], num_rows: int) -> int:
    begin, end = split_range(vocab, group.rank, group.size)
    rows = [LogitsRow(params(slot=i, seed=i, **law), 5) for i in range(num_rows)]
    rng = torch.Generator().manual_seed(group.rank)
    logits = torch.randn(num_rows, end - begin, generator=rng) * 3
    Sampler(group, (begin, end), vocab).sample(logits, rows)
    return sum(group.bytes_sent.values())


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_a_verify_step(ranks: Ranks, size: int) -> None:
    """Eight requests with four drafts each. Numbers are per rank and verify step."""
    vocab, num_rows = 49_152, 8 * 5
    gathering = num_rows * vocab // size * 4 * (size - 1)  # each rank's logits to the others
    greedy = ranks.run(size, one_step, vocab, {}, num_rows)[0]
    seeded = ranks.run(size, one_step, vocab, {"temperature": 1.0}, num_rows)[0]
    filtered = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    all_filters = ranks.run(size, one_step, vocab, filtered, num_rows)[0]
    wide = ranks.run(size, one_step, vocab, {"temperature": 1.0, "top_p": 0.95}, num_rows)[0]
    assert greedy == num_rows * 16 * (size - 1)
    assert seeded == 2 * greedy
    # The candidates and a total.
    assert all_filters == seeded + num_rows * (size - 1) * (NUM_CANDIDATES * 4 + 8)
    assert all_filters < gathering / 40
    # A threshold behind the candidates: three rounds of a histogram at most.
    assert all_filters < wide <= all_filters + num_rows * (size - 1) * 3 * 8192
