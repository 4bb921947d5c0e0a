import random

import numpy as np

from actors.acceptance.base import VerifyRows
from actors.acceptance.exact import ExactMatch
from actors.steps.messages import Stat, token_array


def brute_force(requests):
    """requests: (drafts, samples) with one sample more than drafts."""
    out = []
    for drafts, samples in requests:
        a = 0
        while a < len(drafts) and drafts[a] == samples[a]:
            a += 1
        out.append((a, samples[a]))
    return out


def random_batch(rng):
    """Few token values, so that prefixes of every length match."""
    out = []
    for _ in range(rng.randint(1, 6)):
        k = rng.randint(0, 5)
        drafts = [rng.randint(-1, 2) for _ in range(k)]
        out.append((drafts, [rng.randint(0, 2) for _ in range(k + 1)]))
    return out


def check(requests):
    verdict = ExactMatch()(
        VerifyRows(
            {Stat.SAMPLED: token_array([s for _, samples in requests for s in samples])},
            token_array([d for drafts, _ in requests for d in drafts]),
            token_array([len(drafts) for drafts, _ in requests]),
        )
    )
    got = list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True))
    assert got == brute_force(requests)
    assert verdict.num_accepted.dtype == verdict.next_token.dtype == np.int32


def test_equals_brute_force():
    rng = random.Random(0)
    for _ in range(5000):
        check(random_batch(rng))


def test_full_partial_and_no_acceptance_in_one_batch():
    verdict = ExactMatch()(
        VerifyRows(
            {Stat.SAMPLED: token_array([1, 2, 3, 4, 5, 6, 7, 8, 9])},
            token_array([1, 2, 4, 9, 7, 0]),
            token_array([2, 2, 2]),
        )
    )
    assert verdict.num_accepted.tolist() == [2, 1, 1]
    assert verdict.next_token.tolist() == [3, 5, 8]
