"""Comparing tokenizers, needed only when vocabulary sizes differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specconfig.errors import ConfigError
from specconfig.facts.gguf_header import read_header
from specconfig.facts.source import FactsSource, TokenizerFiles, expand
from specconfig.model import ModelConfig


def vocabulary(loaded: Mapping[str, Any]) -> dict[str, int]:
    """Ids of all tokens of a tokenizer.json, the added ones included."""
    base = loaded.get("model", {}).get("vocab", {})
    if isinstance(base, list):
        vocab = {str(entry[0]): index for index, entry in enumerate(base)}
    else:
        vocab = {str(token): int(index) for token, index in base.items()}
    for added in loaded.get("added_tokens", []):
        vocab[str(added["content"])] = int(added["id"])
    return vocab


def _read_vocab(model: str, revision: str | None) -> dict[str, int] | None:
    path = Path(expand(model))
    try:
        if path.suffix == ".gguf" and path.is_file():
            tokens = read_header(path, with_tokens=True).tokens
            return {token: index for index, token in enumerate(tokens)} or None
        return vocabulary(TokenizerFiles(model, revision).json("tokenizer.json")) or None
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of a form that nobody knows


def _vocab(
    source: FactsSource | None, model: str, revision: str | None
) -> Mapping[str, Any] | None:
    provider = getattr(source, "tokenizer_vocab", None)
    if provider is not None:
        found: Mapping[str, Any] | None = provider(model, revision)
        return found
    return _read_vocab(model, revision) if source is None else None


def same_tokenizer(
    source: FactsSource | None, target: ModelConfig, draft: ModelConfig
) -> int | None:
    """Number of token ids when both models' tokenizers are equal; None when not or unknown.

    A facts source may offer ``tokenizer_vocab(model, revision) -> {token: id}``.
    """
    first = _vocab(source, target.tokenizer, target.tokenizer_revision)
    second = _vocab(source, draft.model, draft.revision)
    if not first or first != second:
        return None
    return max(int(index) for index in first.values()) + 1
