"""How few tokens a text can have, known without tokenising it.

A prompt of megabytes for a context of 2,000 tokens is refused in microseconds instead of after
seconds of work. The bound holds for every text: a token covers at most as many characters as its
vocabulary entry has, times what the normalizer may have put together. Where a tokenizer drops
characters or makes one token of an unknown word of any length, there is no bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tokenizers.pre_tokenizers import ByteLevel

from deploy.token_bytes import BYTE_OF

# Characters that one character after the normalizer was made of, at most. Composed characters
# have canonical decompositions of up to four.
_SHRINKS: Final = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1,
                   "ByteLevel": 1, "Strip": 1}  # fmt: skip
_KEEPS_ALL: Final = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"}
_DROPS_SPACES: Final = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Strip"}
_BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class TextBound:
    """At most `chars_per_token` characters of a text become one token.

    Characters that may vanish are not counted: those of `dropped`, which the vocabulary does not
    have, and white space if `drops_spaces`.
    """

    chars_per_token: int
    dropped: str
    drops_spaces: bool

    def least_tokens(self, text: str) -> int:
        """No tokenisation of `text` has fewer tokens."""
        length = len("".join(text.split())) if self.drops_spaces else len(text)
        length -= sum(map(text.count, self.dropped))
        return math.ceil(max(0, length) / self.chars_per_token)

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """The bound of a fast tokenizer; None where texts of any length may have few tokens."""
        backend = tokenizer.backend_tokenizer
        normalizers = _parts(backend.normalizer, "normalizers")
        splitters = _parts(backend.pre_tokenizer, "pretokenizers")
        kinds = {str(part["type"]) for part in (*normalizers, *splitters)}
        vocab = tokenizer.get_vocab()
        dropped = _dropped(backend.model, vocab, kinds)
        shrinks = [_shrink_of(part) for part in normalizers]
        if dropped is None or None in shrinks or not all(map(_keeps_text, splitters)):
            return None
        longest = max(map(len, vocab))
        strips = any(t.lstrip or t.rstrip for t in tokenizer.added_tokens_decoder.values())
        return cls(
            longest * math.prod(s for s in shrinks if s is not None),
            dropped,
            strips or bool(kinds & _DROPS_SPACES),
        )


def _parts(component: Any, name: str) -> list[Mapping[str, Any]]:
    """The members of a normalizer or pre-tokenizer, sequences flattened."""
    if component is None:
        return []
    found, todo = [], [json.loads(component.__getstate__())]
    while todo:
        part = todo.pop(0)
        todo = [*part[name], *todo] if part["type"] == "Sequence" else todo
        found += [] if part["type"] == "Sequence" else [part]
    return found


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    kind = splitter["type"]
    known = kind in _KEEPS_ALL or kind in _DROPS_SPACES
    return known and splitter.get("behavior") != "Removed"


def _shrink_of(normalizer: Mapping[str, Any]) -> int | None:
    if normalizer["type"] != "Replace":
        return _SHRINKS.get(normalizer["type"])
    pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
    if pattern is None or not content:  # a regular expression may match any length
        return None
    return math.ceil(len(pattern) / len(content))


def _dropped(model: Any, vocab: Mapping[str, int], kinds: set[str]) -> str | None:
    """Characters without tokens; None where a run of them may become one unknown token."""
    if getattr(model, "byte_fallback", False):
        return "" if vocab.keys() >= _BYTE_TOKENS else None
    affixes = (
        getattr(model, "continuing_subword_prefix", None),
        getattr(model, "end_of_word_suffix", None),
    )
    if type(model).__name__ != "BPE" or any(affixes) or "ByteLevel" not in kinds:
        return None
    is_fused = bool(getattr(model, "unk_token", None))
    missing = [BYTE_OF[char] for char in ByteLevel.alphabet() if char not in vocab]
    # Other bytes than ASCII come with some that continue a character.
    continues_none = all(byte < 0x80 or byte >= 0xC0 for byte in missing)
    if missing and (is_fused or not continues_none):
        return None
    return "".join(chr(byte) for byte in missing if byte < 0x80)
