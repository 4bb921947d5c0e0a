"""Named prompts. `spec_bench` is used where its file is at hand, else our own prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OWN = Path(__file__).parents[1] / "tests" / "data" / "prompts.jsonl"


def by_category(spec_bench: Path | None, per_category: int) -> dict[str, list[str]]:
    """First turns by category, in file order, `per_category` of each (0: all)."""
    found: dict[str, list[str]] = {}
    for category, text in _records(spec_bench or OWN):
        texts = found.setdefault(category, [])
        if not per_category or len(texts) < per_category:
            texts.append(text)
    return found


def _records(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        yield record["category"], record.get("prompt") or record["turns"][0]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user turn with the assistant's header."""
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return ids
