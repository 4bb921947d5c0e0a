"""Prompts of a benchmark: our own two sets, or a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.errors import UserError

_FOLDER: Final = Path(__file__).parent / "prompts"
# chat: free-form questions. rewrite: answers that repeat most of the prompt.
BUILT_IN: Final = ("chat", "rewrite")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One conversation up to the answer; `category` groups figures."""

    messages: tuple[dict[str, Any], ...]
    category: str

    @property
    def text(self) -> str:
        """What /v1/completions is asked: the turns without a template."""
        return "\n\n".join(str(message["content"]) for message in self.messages)


def read_prompts(name: str) -> tuple[BenchPrompt, ...]:
    """The built-in set of that name, or the prompts of a JSONL file.

    A line is an object with one of `prompt` (a text), `turns` (texts, the first is asked) and
    `messages` (role and content), and perhaps a `category`.

    Raises:
        UserError: There is no such set or file, or a line is wrong; the message has its number.
    """
    path = _FOLDER / f"{name}.jsonl" if name in BUILT_IN else Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = " and ".join(BUILT_IN)
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read the prompts {name!r}: {reason}; built-in sets are {known}"
        ) from None
    found = tuple(
        _prompt(line, f"{name}:{number}", path.stem)
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not found:
        raise UserError(f"{name} holds no prompts")
    return found


def of_categories(prompts: Sequence[BenchPrompt], wanted: str | None) -> tuple[BenchPrompt, ...]:
    """Prompts of the comma-separated categories; None: all.

    Raises:
        UserError: A category has no prompts.
    """
    if wanted is None:
        return tuple(prompts)
    names = wanted.split(",")
    known = sorted({prompt.category for prompt in prompts})
    for name in names:
        if name not in known:
            raise UserError(f"no prompts of category {name!r}; there are {', '.join(known)}")
    return tuple(prompt for prompt in prompts if prompt.category in names)


def _prompt(line: str, where: str, default_category: str) -> BenchPrompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a line is an object, this is {type(record).__name__}")
    given = [key for key in ("prompt", "turns", "messages") if key in record]
    if len(given) != 1:
        raise UserError(
            f"{where}: give one of 'prompt', 'turns' and 'messages'; "
            f"this line has {' and '.join(given) or 'none'}"
        )
    value = record[given[0]]
    category = record.get("category", default_category)
    if not isinstance(category, str):
        raise UserError(f"{where}: 'category' must be a text, it is {category!r}")
    if given[0] == "messages":
        return BenchPrompt(_messages(value, where), category)
    text = value[0] if given[0] == "turns" and isinstance(value, list) and value else value
    if not isinstance(text, str) or not text:
        shape = "a text" if given[0] == "prompt" else "a list of texts"
        raise UserError(f"{where}: {given[0]!r} must be {shape} and not empty")
    return BenchPrompt(({"role": "user", "content": text},), category)


def _messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    fine = isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
    if not fine or not value:
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    return tuple(value)
