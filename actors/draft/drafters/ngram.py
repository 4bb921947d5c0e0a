"""Prompt lookup: continue the tokens as they continued the first time these n tokens came up.

Of the suffixes with `min_n` to `max_n` tokens that occurred before, the longest wins; among its
occurrences the earliest. Drafts never run past the known tokens.

Each request keeps running sums of its tokens, each times a power of its position, so the hash of
any window is a difference of two sums. Places where the shortest suffix occurred are found by
comparing hashes, all at once. The longest match among them is found by looking at the tokens before
each where they are few, else by bisection, since what matches n tokens matches fewer. So neither a
wide window nor a text that repeats itself makes a step slow, and a prompt is hashed once, outside
the step. Equal hashes are taken for equal tokens: were that ever wrong, a draft would be, and the
target checks drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from actors.steps.messages import Int32Array
from actors.steps.protocols import LookupDrafter
from specconfig.engine import EngineConfig

_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_Hashes = npt.NDArray[np.uint64]
_Ends = npt.NDArray[np.intp]


# Matches of fewer tokens than the first of these are told apart from longer ones, and so on.
_LENGTHS: Final = (3, 4, 6, 10, 16)
_NUM_COMPARED: Final = 16  # tokens of a match, and its occurrences
# Up to so many places the tokens before each are looked at.
_FEW_ENDS: Final = 8


class _Agreement(IntEnum):
    """How a match went on where it occurred before."""

    ONCE = 0  # one place only
    ALIKE = 1
    APART = 2


class NgramDrafter(LookupDrafter):
    """Lookup drafter over n-grams of the request's own prompt and output.

    Args:
        min_n: Shortest suffix looked up, in tokens.
        max_n: Longest suffix looked up, in tokens. A longer repeat ties with one of `max_n`.
    """

    num_confidence_levels = (len(_LENGTHS) + 1) * len(_Agreement)

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n}: needs 1 <= min_n <= max_n")
        self.min_n = min_n
        self.max_n = max_n
        self._hashes: dict[int, _WindowHashes] = {}

    @classmethod
    def from_config(cls, config: EngineConfig) -> NgramDrafter:
        """The drafter that `config.speculative` describes."""
        options = config.speculative
        assert options is not None
        assert options.prompt_lookup_min is not None and options.prompt_lookup_max is not None
        return cls(options.prompt_lookup_min, options.prompt_lookup_max)

    def __len__(self) -> int:
        return len(self._hashes)

    def begin(self, key: int, prompt_token_ids: Int32Array, scope: str | None) -> None:
        self._hashes[key] = _WindowHashes(self.min_n, prompt_token_ids)

    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        num_tokens = len(token_ids)
        hashes = self._hashes.get(key)
        if hashes is None:
            hashes = self._hashes[key] = _WindowHashes(self.min_n, token_ids)
        else:
            hashes.extend(token_ids)
        end = hashes.find(self.max_n)
        drafts: list[int] = token_ids[end : min(end + max_drafts, num_tokens)].tolist()
        return drafts if end else ()

    def confidence(self, key: int) -> int:
        """By how far back the match goes, and whether it went on alike wherever it occurred."""
        num_matching, agreement = self._hashes[key].evidence()
        return bisect_right(_LENGTHS, num_matching) * len(_Agreement) + agreement

    def finish(self, key: int, token_ids: Int32Array) -> None:
        self._hashes.pop(key, None)


@lru_cache(maxsize=32)
def _powers(num: int, factor: int) -> _Hashes:
    """Powers 0 to `num` of `factor`, modulo 2 ** 64."""
    factors = np.full(num + 1, factor, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


class _WindowHashes:
    """Hashes of the windows of one request's tokens; an `end` is the number of tokens up to it.

    `_sums[end]` is the sum of token times power over the tokens before `end`, `_shortest[end]` the
    hash of the `min_n` tokens before it.
    """

    def __init__(self, min_n: int, token_ids: Int32Array) -> None:
        self._min_n = min_n
        self._num_tokens = 0
        self._sums: _Hashes = np.zeros(1, dtype=np.uint64)
        self._shortest: _Hashes = np.zeros(1, dtype=np.uint64)
        self._ends: _Ends = np.zeros(0, dtype=np.intp)
        self._token_ids = token_ids
        self.extend(token_ids)

    def _grow(self, num_tokens: int) -> None:
        # A power of two: requests share the tables of powers.
        size = 1 << (num_tokens + 64).bit_length()
        more = np.zeros(size + 1 - len(self._sums), dtype=np.uint64)
        self._sums = np.concatenate((self._sums, more))
        self._shortest = np.concatenate((self._shortest, more))
        self._powers, self._inverses = _powers(size, _FACTOR), _powers(size, _INVERSE)

    def extend(self, token_ids: Int32Array) -> None:
        """Take in all of `token_ids`; those known already are not looked at again."""
        self._token_ids = token_ids
        old, new = self._num_tokens, len(token_ids)
        if new == old:
            return
        if new >= len(self._sums):
            self._grow(new)
        sums, width = self._sums, self._min_n
        terms = token_ids[old:].astype(np.uint64) * self._powers[old:new]
        terms[:1] += sums[old : old + 1]
        np.add.accumulate(terms, out=sums[old + 1 : new + 1])
        first = max(old + 1, width)
        if first <= new:
            window = sums[first : new + 1] - sums[first - width : new + 1 - width]
            self._shortest[first : new + 1] = window * self._inverses[first : new + 1]
        self._num_tokens = new

    def find(self, max_n: int) -> int:
        """First end, before the last, of the longest suffix that occurs there, of `min_n` to
        `max_n` tokens; 0: none does."""
        self._ends = self._best_ends(max_n)[:_NUM_COMPARED].copy()
        return int(self._ends[0]) if len(self._ends) else 0

    def evidence(self) -> tuple[int, _Agreement]:
        """How many tokens before the end that was found are the last ones too, as far as they are
        compared, and how the text went on at the first ends of that suffix."""
        if not len(self._ends):
            return 0, _Agreement.ONCE
        num_matching = self._num_matching(int(self._ends[0]))
        if len(self._ends) == 1:
            return num_matching, _Agreement.ONCE
        following = set(self._token_ids[self._ends].tolist())
        return num_matching, _Agreement.ALIKE if len(following) == 1 else _Agreement.APART

    def _num_matching(self, end: int) -> int:
        """How many tokens before `end` are the last ones too, as far as they are compared."""
        before = self._token_ids[max(end - _NUM_COMPARED, 0) : end].tolist()
        newest = self._token_ids[self._num_tokens - len(before) :].tolist()
        count = 0
        for there, here in zip(reversed(before), reversed(newest), strict=True):
            if there != here:
                break
            count += 1
        return count

    def _best_ends(self, max_n: int) -> _Ends:
        """All ends, ascending, of the longest suffix that occurs there."""
        last, width = self._num_tokens, self._min_n
        if last <= width:
            return np.zeros(0, dtype=np.intp)
        ends: _Ends = (self._shortest[width:last] == self._shortest[last]).nonzero()[0] + width
        if len(ends) < 2:
            return ends
        if len(ends) <= _FEW_ENDS and max_n <= _NUM_COMPARED:
            lengths = [min(self._num_matching(end), max_n) for end in ends.tolist()]
            longest = max(lengths)
            return ends[[length == longest for length in lengths]]
        longest, too_long = width, min(max_n, last - 1) + 1
        n = too_long - 1  # first: where a text repeats itself it is the answer
        while len(ends) and longest + 1 < too_long:
            found = self._matching(ends, n)
            if len(found):
                ends, longest = found, n
            else:
                too_long = n
            n = (longest + too_long) // 2
        return ends

    def _matching(self, ends: _Ends, n: int) -> _Ends:
        """Those of `ends`, ascending, before which the last `n` tokens stand."""
        ends = ends[np.searchsorted(ends, n) :]
        last = np.array([self._num_tokens])
        matching: _Ends = ends[self._hash(ends, n) == self._hash(last, n)]
        return matching

    def _hash(self, ends: _Ends, n: int) -> _Hashes:
        return (self._sums[ends] - self._sums[ends - n]) * self._inverses[ends]
