"""Prompt lookup: continue the tokens as they continued the first time these n tokens came up.

Of the suffixes with `min_n` to `max_n` tokens that occurred before, the longest wins; among its
occurrences the earliest. Drafts never run past the known tokens.

Each request keeps a hash of the `min_n` tokens before every position. Places where the shortest
suffix occurred are found by comparing hashes, all at once, and narrowed down to the longest match
token by token: no map of n-grams, so the cost does not grow with the window in memory, and a
prompt is hashed once, outside the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.steps.messages import Int32Array
from actors.steps.protocols import LookupDrafter
from specconfig.engine import EngineConfig

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_PART = 1024


class NgramDrafter(LookupDrafter):
    """Lookup drafter over n-grams of the request's own prompt and output.

    Args:
        min_n: Shortest suffix looked up, in tokens.
        max_n: Longest suffix looked up, in tokens. A longer repeat ties with one of `max_n`.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n}: needs 1 <= min_n <= max_n")
        self.min_n = min_n
        self.max_n = max_n
        self._hashes: dict[int, _SuffixHashes] = {}

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
        self._hashes[key] = _SuffixHashes(self.min_n, prompt_token_ids)

    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        num_tokens = len(token_ids)
        hashes = self._hashes.get(key)
        if hashes is None:
            hashes = self._hashes[key] = _SuffixHashes(self.min_n, token_ids)
        else:
            hashes.extend(token_ids)
        end = _best_end(token_ids, hashes.earlier_ends(), self.min_n, self.max_n)
        drafts: list[int] = token_ids[end : min(end + max_drafts, num_tokens)].tolist()
        return drafts if end else ()

    def finish(self, key: int, token_ids: Int32Array) -> None:
        self._hashes.pop(key, None)


class _SuffixHashes:
    """Hash of the `width` tokens that end at each position of one request."""

    def __init__(self, width: int, token_ids: Int32Array) -> None:
        self._width = width
        self._num_tokens = 0
        self._buffer = np.empty(2 * len(token_ids) + 64, dtype=np.uint64)
        self.extend(token_ids)

    def extend(self, token_ids: Int32Array) -> None:
        """Take in all of `token_ids`; those known already are not looked at again."""
        old, new = self._num_tokens, len(token_ids)
        if new > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * new)
        first = max(old - self._width + 1, 0)
        tokens = token_ids[first:].astype(np.uint64) + np.uint64(1)
        # Of the first places, with fewer tokens before them, nothing is asked.
        mixed = np.zeros(len(tokens), dtype=np.uint64)
        for back in range(self._width):
            mixed *= _FACTOR
            mixed[back:] += tokens[: len(tokens) - back]
        self._buffer[old:new] = mixed[old - first :]
        self._num_tokens = new

    def earlier_ends(self) -> npt.NDArray[np.intp]:
        """Places, ascending, up to which tokens hash as the last `width` do; the end left out."""
        last = self._num_tokens - 1
        if last < self._width:
            return np.empty(0, dtype=np.intp)
        same = self._buffer[self._width - 1 : last] == self._buffer[last]
        return np.flatnonzero(same) + self._width


def _best_end(token_ids: Int32Array, ends: npt.NDArray[np.intp], min_n: int, max_n: int) -> int:
    """First of `ends` before which the longest suffix stands, of `min_n` to `max_n` tokens; 0:
    none does."""
    best = 0
    longest = min_n - 1
    limit = min(max_n, len(token_ids) - 1)
    # In parts: where a text repeats itself, one of the first places is as good as any can be.
    for first in range(0, len(ends), _PART):
        part = ends[first : first + _PART]
        for back in range(1, limit + 1):
            part = part[part >= back]
            part = part[token_ids[part - back] == token_ids[-back]]
            if len(part) == 0:
                break
            if back > longest:
                longest, best = back, int(part[0])
        if longest == limit:
            break
    return best
