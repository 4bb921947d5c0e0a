"""Samples and statistics of rows: the law, its two implementations, and what is left untouched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.sampling import native
from actors.sampling.native import local_scores, vocabulary
from actors.sampling.processors import RowLaws
from actors.sampling.rows import LogitsRow
from actors.sampling.sampler import DRAFT_CHECKS, Sampler
from actors.sampling.scores import NUM_BINS, LocalScores, TorchScores, Vocabulary, ordered_keys
from actors.sampling.shards import ShardedScores
from actors.steps.messages import RowMasks, Stat
from parallel.groups import SingleRank
from tests.unit.sampling.oracle import LAWS, hard_logits, kept, law_rows, params, plain_sample

VOCAB = 12


@pytest.fixture(params=["kernel", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: Any) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None, "no C compiler: the kernel is untested"
    yield request.param


def sampler(vocab: int, **kw: Any) -> Sampler:
    return Sampler(SingleRank(), (0, vocab), vocab, **kw)


def sample(logits: Tensor, rows: Sequence[LogitsRow], **kw: Any) -> list[int]:
    found: list[int] = sampler(logits.shape[1]).sample(logits, rows, **kw)[Stat.SAMPLED].tolist()
    return found


# --- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [65, 3000])
def test_samples_equal_the_plain_law(implementation: str, vocab: int) -> None:
    """Row by row by sorting, against all rows at once by thresholds: also on rows of ties."""
    for seed in range(42 if vocab < 3000 else 12):
        rows = law_rows(len(LAWS), first_law=seed, first_position=4 + seed)
        logits = hard_logits(seed, len(rows), vocab)
        expected = [plain_sample(logits[i], row) for i, row in enumerate(rows)]
        assert sample(logits, rows) == expected, seed


def test_kernel_and_torch_find_the_same_numbers() -> None:
    for seed in range(60):
        vocab = [7, 64, 130, 3000][seed % 4]
        wide = hard_logits(seed, 6, vocab + 5).nan_to_num(0.0, posinf=50.0, neginf=float("-inf"))
        logits = wide[:, :vocab]  # rows that do not follow one another in memory
        ids = torch.randperm(2 * vocab)[:vocab] if seed % 2 else torch.arange(vocab)
        rng = np.random.default_rng(seed)
        temperature = rng.choice([1.0, 0.7, 3.0], 6).astype(np.float32)
        fast_vocab = vocabulary(ids)
        assert isinstance(fast_vocab, native.NativeVocabulary)
        fast = local_scores(logits, fast_vocab).rows(np.array([5, 0, 2, 3, 4, 1]), temperature)
        slow = TorchScores(logits, Vocabulary(ids), fast.index, fast.temperature)
        assert_same(fast, slow, rng)


def assert_same(fast: LocalScores, slow: LocalScores, rng: np.random.Generator) -> None:
    scores = slow.dense().numpy()
    top = scores.max(-1)
    lowest = np.where(rng.random(6) < 0.5, np.float32("-inf"), np.sort(scores)[:, 3])
    keys = rng.integers(-(2**63), 2**63, 6)
    for n in (1, 5, 128):
        np.testing.assert_array_equal(np.stack(fast.top_n(n)), np.stack(slow.top_n(n)))
    np.testing.assert_array_equal(np.stack(fast.best()), np.stack(slow.best()))
    np.testing.assert_array_equal(fast.weigh(scores, top), slow.weigh(scores, top))
    for is_mass in (True, False):
        bins = fast.by_distance(lowest, top, is_mass)
        np.testing.assert_array_equal(bins, slow.by_distance(lowest, top, is_mass))
        distance = bins[:, ::-1].argmax(-1).astype(np.int64)
        distance = NUM_BINS - 1 - distance  # the furthest that holds anything
        for width, shift in ((1 << 32, 22), (1 << 20, 10), (1 << 10, 0)):
            found = [
                s.by_key(top, is_mass, distance, ordered_keys(top), width, shift)
                for s in (fast, slow)
            ]
            np.testing.assert_array_equal(*found)
    drawn, column = fast.draw(keys, lowest, fast.best()[1])
    expected, its_column = slow.draw(keys, lowest, slow.best()[1])
    np.testing.assert_allclose(drawn, expected, rtol=1e-14)
    np.testing.assert_array_equal(column, its_column)


def probabilities(logits: Tensor, kw: dict[str, Any]) -> np.ndarray:
    """The distribution a request asks for."""
    p = params(**kw)
    x = (logits / p.temperature).double()
    law: np.ndarray = x.where(kept(logits, p), float("-inf")).softmax(-1).numpy()
    return law


@pytest.mark.parametrize(
    "kw",
    [
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_samples_follow_their_distribution(kw: dict[str, float]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    trials = 20_000
    rows = [LogitsRow(params(**kw), position) for position in range(trials)]
    counts = np.bincount(sample(logits.expand(trials, VOCAB), rows), minlength=VOCAB)
    assert 0.5 * np.abs(counts / trials - probabilities(logits, kw)).sum() < 0.012


def test_a_wide_nucleus_and_a_large_top_k_are_exact(implementation: str) -> None:
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(2)) * 0.3
    rows = [LogitsRow(params(temperature=1.0, **kw), 4) for kw in ({"top_p": 0.9}, {"top_k": 7000})]
    scores = ShardedScores(local_scores(logits, vocabulary(torch.arange(20_000))), SingleRank())
    lowest = RowLaws.of(rows).lowest(scores, logits.max(-1).values.numpy(), 20_000)
    for i, row in enumerate(rows):
        assert torch.equal(logits[i] >= float(lowest[i]), kept(logits[i], row.params))
    assert (logits[0] >= float(lowest[0])).sum() > 4096


def test_greedy_ties_go_to_the_lowest_id(implementation: str) -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [70, 40_000]] = 3.0
    logits[1, [49_999, 33_333]] = 3.0
    assert sample(logits, [LogitsRow(params(temperature=1e-6), 4)] * 2) == [70, 33_333]
    backwards = Sampler(SingleRank(), (0, 50_000), 50_000, id_map=torch.arange(50_000).flip(0))
    found = backwards.sample(logits, [LogitsRow(params(), 4)] * 2)[Stat.SAMPLED]
    assert found.tolist() == [9_999, 0]


# --- processors -----------------------------------------------------------------------------------


def test_logits_are_only_read() -> None:
    """Tensors of a forward under inference mode cannot be written to outside of it."""
    with torch.inference_mode():
        logits = torch.zeros(4, VOCAB)
        logits[:, 7] = 5.0
    rows = [
        LogitsRow(params(min_tokens=2, masked_ids=(7,), num_logprobs=0), 4 + i, 3) for i in range(4)
    ]
    before = logits.clone()
    everything = sampler(VOCAB, needs=DRAFT_CHECKS)
    assert everything.sample(logits, rows)[Stat.SAMPLED].tolist() == [0, 0, 7, 7]
    assert torch.equal(logits, before)


def test_a_grammar_allows_tokens_by_row() -> None:
    vocab = 100
    logits = torch.arange(vocab).float().expand(3, vocab)
    bits = np.zeros((2, 4), dtype=np.uint32)
    for row, tokens in enumerate(([3, 31, 64], [32, 95])):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    masks = RowMasks.unpack(RowMasks(np.array([2, 0], dtype=np.int32), bits).pack())
    rows = [LogitsRow(params(), 4), LogitsRow(params(), 5), LogitsRow(params(temperature=0.1), 6)]
    assert sample(logits, rows, masks=masks) == [95, 99, 64]


class NoRepeat:
    """A user's processor: no token twice."""

    needs_history = True

    def applies(self, row: LogitsRow) -> bool:
        return row.history is not None

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow], vocab: Vocabulary) -> None:
        for i, row in enumerate(rows):
            columns = vocab.columns(row.history)
            logits[i, columns[columns >= 0]] = float("-inf")


def test_a_processor_of_the_user_sees_the_history() -> None:
    own = sampler(VOCAB, processors=[NoRepeat()])
    assert own.needs_history and not sampler(VOCAB).needs_history
    logits = torch.arange(VOCAB).float().expand(2, VOCAB)
    history = np.array([11, 9, 10, 400], dtype=np.int32)
    rows = [LogitsRow(params(), 8), LogitsRow(params(), 8, history=history)]
    assert own.sample(logits, rows)[Stat.SAMPLED].tolist() == [11, 8]


def test_a_reduced_vocabulary_draws_as_the_whole_one(implementation: str) -> None:
    """Noise belongs to the target's id: columns elsewhere, in any order, draw the same token."""
    vocab, seeds = 400, 30
    for seed in range(seeds):
        chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:150]
        id_map = chosen.clone()
        id_map[:5] = -1  # columns without a token in the target
        whole = torch.full((len(LAWS), vocab), float("-inf"))
        part = torch.randn(len(LAWS), 150)
        part[:, :5] = 9.0
        whole[:, chosen[5:]] = part[:, 5:]
        rows = law_rows(len(LAWS), first_position=4 + seed)
        reduced = Sampler(SingleRank(), (0, 160), 150, id_map=id_map)
        padded = torch.nn.functional.pad(part, (0, 10), value=99.0)  # void, as a head may have
        found = reduced.sample(padded, rows)[Stat.SAMPLED].tolist()
        assert found == [plain_sample(whole[i], row) for i, row in enumerate(rows)]


# --- statistics -----------------------------------------------------------------------------------


def test_logprobs_are_raw_and_only_where_asked(implementation: str) -> None:
    logits = torch.randn(3, VOCAB)
    asked = params(temperature=0.7, top_k=2, num_logprobs=3, min_tokens=9, masked_ids=(0, 1))
    rows = [LogitsRow(params(), 4), LogitsRow(asked, 5), LogitsRow(params(num_logprobs=0), 6)]
    raw = logits.log_softmax(-1).numpy()
    result = sampler(VOCAB).sample(logits, rows)
    assert np.isnan(result[Stat.LOGPROB][0])
    for i in (1, 2):
        assert result[Stat.LOGPROB][i] == pytest.approx(raw[i, result[Stat.SAMPLED][i]], abs=1e-6)
    assert result[Stat.TOP_IDS][1].tolist() == np.argsort(-raw[1])[:3].tolist()
    np.testing.assert_allclose(result[Stat.TOP_LOGPROBS][1], np.sort(raw[1])[::-1][:3], atol=1e-6)
    assert list(sampler(VOCAB).sample(logits, [LogitsRow(params(), 4)] * 3)) == [Stat.SAMPLED]
    assert sampler(VOCAB).sample(logits[:0], [])[Stat.SAMPLED].shape == (0,)


@pytest.mark.parametrize("has_q", [True, False])
def test_draft_statistics_equal_their_definitions(implementation: str, has_q: bool) -> None:
    vocab = 300
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(len(LAWS) + 1, vocab, generator=rng) * 2
    drafts = [int(d) for d in logits.argmax(-1)]
    drafts[1::3] = [17] * len(drafts[1::3])
    rows = [
        LogitsRow(row.params, row.position, draft)
        for row, draft in zip(law_rows(len(LAWS)), drafts, strict=False)
    ]
    rows.append(LogitsRow(params(temperature=1.0), 9))  # the bonus
    q = torch.randn(len(LAWS), vocab, generator=rng) * 2
    q[:, 3] = float("-inf")
    found = sampler(vocab, needs=DRAFT_CHECKS).sample(logits, rows, q=q if has_q else None)
    for i, row in enumerate(rows[:-1]):
        p = np.zeros(vocab)
        processed = logits[i].clone()
        if row.is_masked:
            processed[list(row.params.masked_ids)] = float("-inf")
        if row.is_greedy:
            p[int(processed.argmax())] = 1.0
        else:
            p = probabilities(processed, LAWS[i])
        law_q = q[i].double().softmax(-1).numpy() if has_q else np.eye(vocab)[row.draft_id]
        excess = (p - law_q).clip(0)
        assert found[Stat.TARGET_PROB][i] == pytest.approx(p[row.draft_id], abs=1e-9)
        assert found[Stat.DRAFT_PROB][i] == pytest.approx(law_q[row.draft_id], abs=1e-9)
        assert found[Stat.RESIDUAL_MASS][i] == pytest.approx(excess.sum(), abs=1e-9)
        drawn_from = excess if excess.sum() > 1e-9 else p
        assert drawn_from[found[Stat.RESIDUAL_ID][i]] > 0
        doubt = processed.double().softmax(-1).numpy() if row.is_greedy else p
        likely = np.sort(doubt)[::-1][:3]
        likely = likely[likely > 0]
        assert found[Stat.ENTROPY][i] == pytest.approx(-(likely * np.log(likely)).sum(), abs=1e-9)
    for stat in DRAFT_CHECKS:
        assert found[stat][-1] == -1 if stat is Stat.RESIDUAL_ID else np.isnan(found[stat][-1])


def test_residual_draws_follow_their_law() -> None:
    rng = torch.Generator().manual_seed(4)
    logits, q = torch.randn(6, generator=rng), torch.randn(6, generator=rng)
    trials = 10_000
    rows = [LogitsRow(params(temperature=1.0), position, 2) for position in range(trials)]
    needs = frozenset({Stat.RESIDUAL_ID})
    both = (logits.expand(trials, 6), rows)
    found = sampler(6, needs=needs).sample(*both, q=q.expand(trials, 6))
    law = (logits.double().softmax(-1) - q.double().softmax(-1)).clamp_min(0).numpy()
    counts = np.bincount(found[Stat.RESIDUAL_ID], minlength=6)
    assert 0.5 * np.abs(counts / trials - law / law.sum()).sum() < 0.02
    # Where nothing is left of p - q, p itself; at another step another draw.
    same = sampler(6, needs=needs).sample(*both, q=logits.expand(trials, 6))[Stat.RESIDUAL_ID]
    counts = np.bincount(same, minlength=6)
    assert 0.5 * np.abs(counts / trials - logits.softmax(-1).numpy()).sum() < 0.02
    later = [LogitsRow(row.params, row.position, 2, step=1) for row in rows]
    other = sampler(6, needs=needs).sample(logits.expand(trials, 6), later, q=q.expand(trials, 6))
    assert (other[Stat.RESIDUAL_ID] != found[Stat.RESIDUAL_ID]).any()
    assert other[Stat.SAMPLED].tolist() == found[Stat.SAMPLED].tolist()


def test_a_column_that_is_not_about_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uniform.*ask for any of.*target_prob"):
        sampler(VOCAB, needs=frozenset({Stat.UNIFORM}))
