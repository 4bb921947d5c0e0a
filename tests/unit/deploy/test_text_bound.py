"""The least number of tokens of a text is never above the number that it has."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deploy.text_bound import TextBound
from tests.tiny import byte_tokenizer

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
# Composed characters, marks, white space of all kinds, what a vocabulary may lack, added tokens.
PIECES = ("a", "b", " ", "    ", "\n", "\u1f82", "\u03b1\u0313\u0300\u0345", "e\u0301",
          "\ufdfa", "\x04", "\x1d", "\u2003", "\U0001f99c", "\uac00", "\u1100\u1161\u11a8",
          "<end>", "İ")  # fmt: skip


def _bpe(
    *, lacks: str = "", normalizer: Any = None, splitter: Any = None, **added: bool
) -> PreTrainedTokenizerFast:
    chars = [c for c in ALPHABET if c not in lacks]
    steps = [("\u0120", "\u0120"), ("\u0120" * 2, "\u0120" * 2), ("a", "b")]
    vocab = {t: i for i, t in enumerate([*chars, *(x + y for x, y in steps)])}
    backend = Tokenizer(models.BPE(vocab, merges=steps))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([splitter, byte_level] if splitter else
                                                    [byte_level])  # fmt: skip
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<end>", special=True, **added)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _with_byte_fallback() -> PreTrainedTokenizerFast:
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab"]
    vocab = {t: i for i, t in enumerate(entries)}
    backend = Tokenizer(
        models.BPE(vocab, merges=[("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BOUNDED = {
    "bytes": byte_tokenizer,
    "spaces": _bpe,
    # These stand for the bytes 4 and 29: control characters no vocabulary needs.
    "lacking": lambda: _bpe(lacks="\u0104\u011d"),
    "composing": lambda: _bpe(normalizer=normalizers.NFC()),
    "compatible": lambda: _bpe(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "shortening": lambda: _bpe(normalizer=normalizers.Replace("    ", "b")),
    "absorbing": lambda: _bpe(lstrip=True, rstrip=True),
    "stripping": lambda: _bpe(normalizer=normalizers.Strip()),
    "words": lambda: _bpe(splitter=pre_tokenizers.WhitespaceSplit()),
    "digits": lambda: _bpe(splitter=pre_tokenizers.Digits(individual_digits=True)),
    "fallback": _with_byte_fallback,
}


@cache
def _made(name: str) -> Any:
    return BOUNDED[name]()


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12),
       times=st.integers(1, 40))  # fmt: skip
def test_no_text_has_fewer_tokens_than_its_bound(name: str, parts: list[str], times: int) -> None:
    tokenizer = _made(name)
    bound = TextBound.of(tokenizer)
    assert bound is not None
    for text in ("".join(parts) * times, "".join(part * times for part in parts)):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert bound.least_tokens(text) <= num_tokens


def test_the_bound_is_worth_having() -> None:
    for name in BOUNDED:
        bound = TextBound.of(_made(name))
        assert bound is not None
        assert bound.least_tokens("word" * 1_000_000) >= 50_000


def _wordlevel() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "make",
    [
        _wordlevel,
        lambda: _bpe(normalizer=normalizers.StripAccents()),
        lambda: _bpe(normalizer=normalizers.Replace(Regex("a+"), "a")),
        lambda: _bpe(normalizer=normalizers.Replace("a", "")),
        lambda: _bpe(splitter=pre_tokenizers.Split("a", "removed")),
        lambda: _bpe(splitter=pre_tokenizers.CharDelimiterSplit("a")),
        lambda: _bpe(lacks="\u00a1"),  # a byte that continues characters
    ],
)
def test_where_texts_may_shrink_without_end_there_is_no_bound(make: Any) -> None:
    tokenizer = make()
    assert TextBound.of(tokenizer) is None
