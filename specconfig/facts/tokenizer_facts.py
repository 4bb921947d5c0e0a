"""Comparing the tokenizers of target and draft: a draft reads and writes the target's ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


def _same_files(target: ModelConfig, draft: ModelConfig) -> bool:
    """Whether both have the same file: then one of them is enough to parse."""
    files = (
        TokenizerFiles(target.tokenizer, target.tokenizer_revision),
        TokenizerFiles(draft.model, draft.revision),
    )
    first, second = (each.text("tokenizer.json") for each in files)
    return bool(first) and first == second


def same_tokenizer(
    source: FactsSource | None, target: ModelConfig, draft: ModelConfig
) -> int | None:
    """Number of token ids when both models' tokenizers are equal; None when not or unknown."""
    found = compare_tokenizers(source, target, draft)
    return found.num_ids if found is not None and not found.differing else None


@dataclass(frozen=True)
class Comparison:
    """`num_ids`: of the larger tokenizer; `differing`: (id, the target's token, the draft's), None
    where one has no such id."""

    num_ids: int
    differing: tuple[tuple[int, str | None, str | None], ...]

    @property
    def share(self) -> float:
        """Part of the ids that mean something else, in [0, 1]."""
        return len(self.differing) / max(1, self.num_ids)

    @property
    def examples(self) -> str:
        """The first few that differ, in words."""
        return ", ".join(f"{i} is {t!r} and {d!r}" for i, t, d in self.differing[:3])


def compare_tokenizers(
    source: FactsSource | None, target: ModelConfig, draft: ModelConfig
) -> Comparison | None:
    """How the ids of both models' tokenizers differ; None where one of them cannot be read.

    A facts source may offer ``tokenizer_vocab(model, revision) -> {token: id}``.
    """
    first = _vocab(source, target.tokenizer, target.tokenizer_revision)
    second = first
    if source is not None or not _same_files(target, draft):
        second = _vocab(source, draft.model, draft.revision)
    if not first or not second:
        return None
    num_ids = max(*map(int, first.values()), *map(int, second.values())) + 1
    if first == second:
        return Comparison(num_ids, ())
    ours = {int(index): token for token, index in first.items()}
    theirs = {int(index): token for token, index in second.items()}
    differing = [
        (index, ours.get(index), theirs.get(index))
        for index in sorted(ours.keys() | theirs.keys())
        if ours.get(index) != theirs.get(index)
    ]
    return Comparison(num_ids, tuple(differing))
