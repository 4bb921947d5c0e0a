"""Prompt lookup: continue the tokens as they continued the last time these n tokens came up.

Of the suffixes with `min_n` to `max_n` tokens that occurred before, the longest wins; among its
occurrences the earliest. Drafts never run past the known tokens. Instead of rescanning T tokens a
step, each request keeps a map from n-gram to the end of its first occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.steps.messages import Int32Array
from specconfig.engine import EngineConfig

_ID_BYTES = 4


@dataclass(slots=True)
class _Index:
    """First occurrences of one request's n-grams."""

    raw: bytes = b""  # the indexed tokens, int32
    first_end: dict[int, dict[bytes, int]] = field(default_factory=dict)  # n -> n-gram -> end


class NgramDrafter:
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
        self._indexes: dict[int, _Index] = {}

    @classmethod
    def from_config(cls, config: EngineConfig) -> NgramDrafter:
        """The drafter that `config.speculative` describes."""
        options = config.speculative
        assert options is not None
        assert options.prompt_lookup_min is not None and options.prompt_lookup_max is not None
        return cls(options.prompt_lookup_min, options.prompt_lookup_max)

    def __len__(self) -> int:
        return len(self._indexes)

    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        num_tokens = len(token_ids)
        if max_drafts < 1 or num_tokens < self.min_n:
            return ()
        index = self._updated(key, token_ids)
        raw = index.raw
        for n in range(min(self.max_n, num_tokens - 1), self.min_n - 1, -1):
            end = index.first_end[n].get(raw[(num_tokens - n) * _ID_BYTES :])
            # The suffix itself is in the map too; a first occurrence there is no earlier one.
            if end is not None and end < num_tokens:
                drafts: list[int] = token_ids[end : end + max_drafts].tolist()
                return drafts
        return ()

    def forget(self, key: int) -> None:
        self._indexes.pop(key, None)

    def _updated(self, key: int, token_ids: Int32Array) -> _Index:
        raw = token_ids.tobytes()
        index = self._indexes.get(key)
        if index is None or not raw.startswith(index.raw):
            index = self._indexes[key] = _Index(
                first_end={n: {} for n in range(self.min_n, self.max_n + 1)}
            )
        old, new = len(index.raw) // _ID_BYTES, len(token_ids)
        index.raw = raw
        for n, first_end in index.first_end.items():
            width = n * _ID_BYTES
            ends = range(max(old + 1, n), new + 1)
            if first_end:
                for end in ends:
                    first_end.setdefault(raw[end * _ID_BYTES - width : end * _ID_BYTES], end)
            else:
                # Backwards, so that the earliest occurrence is the one that stays.
                first_end.update(
                    (raw[end * _ID_BYTES - width : end * _ID_BYTES], end) for end in reversed(ends)
                )
        return index
