"""Comparing tokenizers, needed only when vocabulary sizes differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specconfig.facts.source import FactsSource, expand
from specconfig.model import ModelConfig


def _local_vocab(model: str) -> dict[str, int] | None:
    path = Path(expand(model)) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    base = loaded.get("model", {}).get("vocab", {})
    if isinstance(base, list):
        vocab = {str(entry[0]): index for index, entry in enumerate(base)}
    else:
        vocab = {str(token): int(index) for token, index in base.items()}
    for added in loaded.get("added_tokens", []):
        vocab[str(added["content"])] = int(added["id"])
    return vocab


def _vocab(
    source: FactsSource | None, model: str, revision: str | None
) -> Mapping[str, Any] | None:
    provider = getattr(source, "tokenizer_vocab", None)
    if provider is not None:
        found: Mapping[str, Any] | None = provider(model, revision)
        return found
    return _local_vocab(model) if source is None else None


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
