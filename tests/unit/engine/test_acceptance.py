import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.acceptance.base import VerifyRows
from actors.acceptance.exact import accept_exact
from actors.messages import token_array


def brute_force(requests):
    """requests: (drafts, samples) with one sample more than drafts."""
    out = []
    for drafts, samples in requests:
        a = 0
        while a < len(drafts) and drafts[a] == samples[a]:
            a += 1
        out.append((a, samples[a]))
    return out


@st.composite
def batches(draw):
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        k = draw(st.integers(0, 5))
        token = st.integers(0, 2)
        drafts = draw(st.lists(st.one_of(token, st.just(-1)), min_size=k, max_size=k))
        samples = draw(st.lists(token, min_size=k + 1, max_size=k + 1))
        requests.append((drafts, samples))
    return requests


@settings(max_examples=500, deadline=None)
@given(batches())
def test_equals_brute_force(requests):
    verdict = accept_exact(
        VerifyRows(
            token_array([s for _, samples in requests for s in samples]),
            token_array([d for drafts, _ in requests for d in drafts]),
            token_array([len(drafts) for drafts, _ in requests]),
        )
    )
    got = list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True))
    assert got == brute_force(requests)
    assert verdict.num_accepted.dtype == verdict.next_token.dtype == np.int32


def test_full_partial_and_no_acceptance_in_one_batch():
    verdict = accept_exact(
        VerifyRows(
            token_array([1, 2, 3, 4, 5, 6, 7, 8, 9]),
            token_array([1, 2, 4, 9, 7, 0]),
            token_array([2, 2, 2]),
        )
    )
    assert verdict.num_accepted.tolist() == [2, 1, 1]
    assert verdict.next_token.tolist() == [3, 5, 8]
