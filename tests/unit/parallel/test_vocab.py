"""Statistics over a split vocabulary: equal to the whole row's, equal on all ranks, few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.sampling.noise import gumbel, row_key
from actors.sampling.rows import LogitsRow, sample_rows
from actors.sampling.shard import VerifierShard
from actors.steps.messages import SlotParams
from parallel.groups import SingleRank, TPGroup
from parallel.topology import split_range
from parallel.vocab import ShardedLogits
from tests.unit.parallel.conftest import Ranks

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.1, "num_logprobs": 0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "num_logprobs": 4},
    {"temperature": 2.0, "top_p": 0.999, "num_logprobs": 2},
    {"min_tokens": 90, "masked_ids": (0, 7, 300), "num_logprobs": 3},
    {"temperature": 1.0, "top_k": 10_000},
]


def law_rows(count: int, first_position: int = 4) -> list[LogitsRow]:
    return [
        LogitsRow(SlotParams(slot=i, prompt_len=4, seed=11 + i, **LAWS[i % len(LAWS)]), position)
        for i, position in enumerate(range(first_position, first_position + count))
    ]


def near_ties(seed: int, num_rows: int, vocab: int) -> torch.Tensor:
    """Rows with ties and values one rounding apart, spread over the vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=rng)
    top = logits.max(-1).values
    ids = torch.randint(vocab, (num_rows, 6), generator=rng)
    for i in range(num_rows):
        value = top[i] + 0.5
        logits[i, ids[i]] = value
        logits[i, ids[i, 0]] = torch.nextafter(
            value, torch.tensor(float("inf" if i % 2 else "-inf"))
        )
    return logits


def step_logits(step: int, num_rows: int, vocab: int) -> torch.Tensor:
    logits = near_ties(step, num_rows, vocab)
    if step % 7 == 3:
        logits[step % num_rows, vocab - 1] = float("nan")
    return logits


def sample_steps(group: TPGroup, vocab: int, num_steps: int, num_rows: int) -> list[Any]:
    begin, end = split_range(vocab, group.rank, group.size)
    shard = VerifierShard(group, (begin, end), vocab)
    found = []
    for step in range(num_steps):
        logits = step_logits(step, num_rows, vocab)
        samples = shard.sample(logits[:, begin:end].clone(), law_rows(num_rows, 4 + step))
        found.append((samples.sampled, samples.top_ids, samples.logprobs, samples.top_logprobs))
    return [found, dict(group.num_calls), dict(group.bytes_sent)]


@pytest.mark.parametrize("size", [2, 4])
def test_samples_do_not_depend_on_the_split(ranks: Ranks, size: int) -> None:
    vocab, steps, rows = 1003, 12, len(LAWS)
    results = ranks.run(size, sample_steps, vocab, steps, rows)
    assert all(calls == results[0][1] for _, calls, _ in results)
    for step in range(steps):
        whole = sample_rows(step_logits(step, rows, vocab), law_rows(rows, 4 + step))
        for found, _, _ in results:
            sampled, top_ids, logprobs, top_logprobs = found[step]
            assert sampled.tolist() == whole.sampled.tolist(), step
            valid = whole.sampled >= 0
            np.testing.assert_allclose(logprobs[valid], whole.logprobs[valid], atol=2e-5)
            np.testing.assert_allclose(top_logprobs[valid], whole.top_logprobs[valid], atol=2e-5)
            assert top_ids.shape == whole.top_ids.shape


def test_a_thousand_steps_of_near_ties(ranks: Ranks) -> None:
    """Ranks never diverge, in what they say or in how often they talk."""
    results = ranks.run(4, sample_steps, 257, 1000, 2)
    calls = results[0][1]
    for found, other_calls, _ in results:
        assert other_calls == calls
        for step, samples in enumerate(found):
            expected = sample_rows(step_logits(step, 2, 257), law_rows(2, 4 + step)).sampled
            assert samples[0].tolist() == expected.tolist(), step


def one_step(group: TPGroup, vocab: int, laws: list[dict[str, Any]]) -> int:
    begin, end = split_range(vocab, group.rank, group.size)
    rows = [LogitsRow(SlotParams(i, 4, i, **law), 5) for i, law in enumerate(laws)]
    logits = torch.randn(
        len(laws), end - begin, generator=torch.Generator().manual_seed(group.rank)
    )
    VerifierShard(group, (begin, end), vocab).sample(logits, rows)
    return sum(group.bytes_sent.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab", [49_152, 262_144])
def test_bytes_of_a_verify_step(ranks: Ranks, size: int, vocab: int) -> None:
    """Eight requests with four drafts each. Numbers are per rank and verify step."""
    num_rows = 8 * 5
    gathering = num_rows * vocab // size * 4 * (size - 1)  # each rank's logits to the others
    greedy = ranks.run(size, one_step, vocab, [{}] * num_rows)[0]
    seeded = ranks.run(size, one_step, vocab, [{"temperature": 1.0}] * num_rows)[0]
    filtered = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    all_filters = ranks.run(size, one_step, vocab, [filtered] * num_rows)[0]
    print(f"TP {size}, V {vocab}: {greedy=} {seeded=} {all_filters=} {gathering=}")
    assert greedy == num_rows * 16 * (size - 1)
    assert seeded == 2 * greedy
    # 128 candidates and a total.
    assert all_filters == seeded + num_rows * (size - 1) * (128 * 4 + 8)
    assert all_filters < gathering / 40
    assert greedy < gathering / 1000


def law_statistics(group: TPGroup, vocab: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(5, vocab, generator=rng) * 2
    draft = (torch.randn(5, vocab, generator=rng) * 2).double().softmax(-1)
    scale = torch.tensor([1.0, 0.3, 0.0, 0.9, 1.0], dtype=torch.float64)
    begin, end = split_range(vocab, group.rank, group.size)
    shard = ShardedLogits(logits[:, begin:end].contiguous(), begin, group)
    noise = torch.stack([gumbel(row_key(i, 9), shard.ids_V) for i in range(5)])
    total = shard.logsumexp()
    part = draft[:, begin:end]
    return {
        "logsumexp": total,
        "token": shard.gather(torch.tensor([0, vocab - 1, 17, vocab // 2, 3])),
        "top_ids": shard.top_n(7)[0],
        "top": shard.top_n(7)[1],
        "kth": shard.kth_largest(torch.tensor([1, 5, 100, vocab, 17]), shard.candidates()),
        "entropy": shard.entropies(3),
        "residual_mass": shard.residual_mass(scale, part, total),
        "residual": shard.residual_argmax(scale, part, total, noise)[[0, 1, 3, 4]],
    }


@pytest.mark.parametrize("size", [2, 4])
def test_statistics_against_definitions(ranks: Ranks, size: int) -> None:
    vocab = 501
    single = law_statistics(SingleRank(), vocab)
    for found in ranks.run(size, law_statistics, vocab):
        for name, value in single.items():
            torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-12, msg=name)
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(5, vocab, generator=rng) * 2
    draft = (torch.randn(5, vocab, generator=rng) * 2).double().softmax(-1)
    p = logits.double().softmax(-1)
    torch.testing.assert_close(single["logsumexp"], logits.double().logsumexp(-1))
    torch.testing.assert_close(single["top"], logits.topk(7).values)
    assert torch.equal(single["top_ids"], logits.topk(7).indices)
    ranked = logits.sort(-1, descending=True).values
    for i, k in enumerate([1, 5, 100, vocab, 17]):
        assert single["kth"][i] == ranked[i, k - 1]
    top = p.topk(3).values
    torch.testing.assert_close(single["entropy"], -(top * top.log()).sum(-1))
    scale = torch.tensor([1.0, 0.3, 0.0, 0.9, 1.0], dtype=torch.float64)
    excess = (scale[:, None] * p - draft).clamp_min(0)
    torch.testing.assert_close(single["residual_mass"], excess.sum(-1))
    for row, token in zip([0, 1, 3, 4], single["residual"].tolist(), strict=True):
        assert excess[row, token] > 0


def test_residual_draws_follow_their_law() -> None:
    rng = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 6, generator=rng)
    draft = torch.randn(1, 6, generator=rng).double().softmax(-1)
    shard = ShardedLogits(logits, 0, SingleRank())
    total, one = shard.logsumexp(), torch.ones(1, dtype=torch.float64)
    counts = np.zeros(6)
    trials = 4000
    for position in range(trials):
        noise = gumbel(row_key(1, position), shard.ids_V)[None]
        counts[int(shard.residual_argmax(one, draft, total, noise))] += 1
    law = (logits.double().softmax(-1) - draft).clamp_min(0)[0]
    assert 0.5 * np.abs(counts / trials - (law / law.sum()).numpy()).sum() < 0.03
