import random
import time

import numpy as np
import pytest

from actors.draft.drafters.ngram import NgramDrafter, _WindowHashes
from actors.verifier.drafts import legal_prefix


def brute_force(tokens, min_n, max_n, k):
    """Longest suffix (at most max_n) that occurred before; its earliest occurrence."""
    num = len(tokens)
    for n in range(min(max_n, num - 1), min_n - 1, -1):
        suffix = tokens[num - n :]
        for start in range(num - n):
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


def propose(tokens, min_n, max_n, k):
    drafter = NgramDrafter(min_n, max_n)
    return list(drafter.propose(1, np.asarray(tokens, dtype=np.int32), k))


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "k", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 3, 3, 2, [9, 1]),  # earliest, not most recent
        ([5, 5, 5, 5], 1, 2, 3, [5, 5]),  # overlaps the suffix, short at the end
        ([1, 2, 3, 4], 1, 4, 3, []),
        ([1, 2], 3, 3, 5, []),  # fewer than min_n tokens
        ([1, 2, 3, 1, 2], 1, 5, 1, [3]),
        ([7], 1, 1, 3, []),
        ([7, 7], 1, 1, 3, [7]),
        ([9, 1, 2, 5, 1, 2, 8, 9, 1, 2], 1, 3, 2, [5, 1]),
    ],
)
def test_golden_values(tokens, min_n, max_n, k, expected):
    assert propose(tokens, min_n, max_n, k) == expected


def test_equals_brute_force_on_random_cases():
    rng = random.Random(7)
    hits = 0
    for _ in range(20_000):
        vocab = rng.randint(1, 5)
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 24))]
        min_n = rng.randint(1, 4)
        max_n = rng.randint(min_n, 6)
        k = rng.randint(1, 6)
        expected = brute_force(tokens, min_n, max_n, k)
        assert propose(tokens, min_n, max_n, k) == expected, (tokens, min_n, max_n, k)
        hits += bool(expected)
    assert 5_000 < hits < 20_000


def test_what_grows_step_by_step_equals_brute_force():
    rng = random.Random(8)
    for case in range(300):
        drafter = NgramDrafter(rng.randint(1, 3), 4)
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 9))]
        if case % 2:
            drafter.begin(case, np.asarray(tokens, dtype=np.int32), None)
        while len(tokens) < 60:
            tokens += [rng.randrange(4) for _ in range(rng.randint(1, 6))]
            got = list(drafter.propose(case, np.asarray(tokens, dtype=np.int32), 4))
            assert got == brute_force(tokens, drafter.min_n, 4, 4)


def test_a_text_of_one_token_over_and_over_is_no_trap():
    tokens = np.full(64 * 1024, 147, dtype=np.int32)
    drafter = NgramDrafter(5, 120)
    drafter.begin(1, tokens, None)
    assert list(drafter.propose(1, tokens, 3)) == [147] * 3


def test_wide_windows_equal_brute_force():
    rng = random.Random(9)
    hits = 0
    for _ in range(400):
        period = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        tokens = (period * 150)[: rng.randint(2, 150)]
        for _ in range(rng.randint(0, 3)):
            tokens[rng.randrange(len(tokens))] = rng.randrange(2)
        min_n = rng.randint(1, 20)
        max_n = rng.randint(min_n, 140)
        expected = brute_force(tokens, min_n, max_n, 4)
        assert propose(tokens, min_n, max_n, 4) == expected, (tokens, min_n, max_n)
        hits += bool(expected)
    assert hits > 200


@pytest.mark.parametrize("max_n", [5, 120, 1000])
def test_a_text_in_which_all_matches_are_nearly_the_longest_is_no_trap(monkeypatch, max_n):
    passes = []
    matching = _WindowHashes._matching
    monkeypatch.setattr(
        _WindowHashes, "_matching", lambda *args: passes.append(1) or matching(*args)
    )
    tokens = np.zeros(64 * 1024, dtype=np.int32)
    tokens[-max_n] = 1
    assert propose(tokens, 2, max_n, 3) == [0] * 3
    assert len(passes) <= max_n.bit_length() + 1  # over all places, whatever the window


def test_state_is_per_request_and_dropped_at_its_end():
    drafter = NgramDrafter(1, 3)
    repeated = np.asarray([1, 2, 3, 1, 2, 3, 1], dtype=np.int32)
    fresh = np.asarray([3, 1], dtype=np.int32)
    assert drafter.propose(1, repeated, 3)
    assert list(drafter.propose(2, fresh, 3)) == []
    drafter.finish(1, repeated)
    assert list(drafter.propose(1, fresh, 3)) == []
    for key in (1, 2, 3):
        drafter.finish(key, fresh)
    assert len(drafter) == 0


def level(tokens, min_n=1, max_n=3):
    drafter = NgramDrafter(min_n, max_n)
    drafter.begin(1, np.asarray(tokens[:1], dtype=np.int32), None)
    drafter.propose(1, np.asarray(tokens, dtype=np.int32), 1)
    found = drafter.confidence(1)
    assert 0 <= found < drafter.num_confidence_levels
    return found


def test_proposals_that_hold_differently_are_of_different_confidence():
    long = [*range(10, 30)]
    by_length = [level([9, *long[-n:], 8, 7, *long[-n:]]) for n in (2, 3, 4, 6, 10, 16)]
    assert len(set(by_length)) == 6, "as far as it matches, beyond max_n too"
    assert level([1, 2, 3, 4]) == level([5, 1, 2, 6, 7]), "nothing was found"
    once = [1, 2, 3, 4, 9, 1, 2, 3]
    alike = [1, 2, 3, 4, 9, 8, 1, 2, 3, 4, 7, 1, 2, 3]
    apart = [1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 7, 1, 2, 3]
    assert len({level(once), level(alike), level(apart)}) == 3


def test_illegal_windows_are_refused():
    for min_n, max_n in ((0, 1), (3, 2)):
        with pytest.raises(ValueError, match="min_n"):
            NgramDrafter(min_n, max_n)


def test_many_long_contexts_are_fast_once_indexed():
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 2000, 4096 + 8, dtype=np.int32) for _ in range(512)]
    drafter = NgramDrafter(4, 5)
    for key, context in enumerate(contexts):
        drafter.propose(key, context[:4096], 5)
    best = 1.0
    for end in range(4097, 4102):
        started = time.process_time()
        for key, context in enumerate(contexts):
            drafter.propose(key, context[:end], 5)
        best = min(best, time.process_time() - started)
    assert best < 0.05, f"{best * 1e3:.1f} ms for 512 requests"


def test_legal_prefix_ends_at_the_first_token_outside_the_vocabulary():
    assert legal_prefix([1, 2, -1, 3], 4, 10).tolist() == [1, 2]
    assert legal_prefix([1, 2, 10, 3], 4, 10).tolist() == [1, 2]
    assert legal_prefix([2**40], 4, 10).tolist() == []
    assert legal_prefix([1, 2, 3], 2, 10).tolist() == [1, 2]
    assert legal_prefix((), 2, 10).tolist() == []
