"""Which tokens end an answer as its tokenizer says: end of sequence, end of turn, with who says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specconfig.facts.gguf_header import read_header
from specconfig.facts.source import FactsSource, TokenizerFiles, expand
from specconfig.facts.tokenizer_facts import vocabulary

END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>",
    "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
"""Tokens that end a turn wherever a chat template writes them."""
# There an answer is several messages, each with this end.
_HARMONY, _MESSAGE_END = "<|channel|>", "<|end|>"
_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

Ends = dict[int, str]


def tokenizer_ends(source: FactsSource | None, location: str, revision: str | None) -> Ends:
    """Ids that the tokenizer at `location` ends with; none where its files cannot be read.

    Args:
        source: A facts source that is not the default one knows no tokenizer files.
    """
    if source is not None:
        return {}
    path = Path(expand(location))
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_ends(path)
    files = TokenizerFiles(location, revision)
    config = files.json("tokenizer_config.json")
    template = _template(config) or files.text("chat_template.jinja")
    if not template:
        template = _template(files.json("chat_template.json"))
    eos = _content(config.get("eos_token"))
    named = [eos] if eos else []
    wanted = named + _ends_of_turn(template)
    ids = _added(config.get("added_tokens_decoder"))
    if any(token not in ids for token in wanted):
        ids = vocabulary(files.json("tokenizer.json")) | ids
    found: Ends = {}
    if eos in ids:
        _add(found, [ids[eos]], f"tokenizer_config.json: eos_token {eos!r}")
    for token in wanted[len(named) :]:
        if token in ids:
            _add(found, [ids[token]], f"the chat template ends turns with {token!r}")
    return found


def _gguf_ends(path: Path) -> Ends:
    header = read_header(path, with_tokens=True)
    found: Ends = {}
    for key in _GGUF_KEYS:
        _add(found, _ids(header.values.get(f"tokenizer.ggml.{key}")), f"tokenizer.ggml.{key}")
    for token in _ends_of_turn(header.values.get("tokenizer.chat_template")):
        if token in header.tokens:
            _add(
                found, [header.tokens.index(token)], f"the chat template ends turns with {token!r}"
            )
    return found


def _ends_of_turn(template: str | None) -> list[str]:
    text = template or ""
    found = [token for token in END_OF_TURN if token in text]
    if _HARMONY in text and _MESSAGE_END in found:
        found.remove(_MESSAGE_END)
    return found


def _template(config: Mapping[str, Any]) -> str:
    """A chat template, or all of several as one text."""
    given = config.get("chat_template")
    if isinstance(given, list):
        return "\n".join(str(item.get("template")) for item in given if isinstance(item, Mapping))
    return given if isinstance(given, str) else ""


def _content(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added(decoder: object) -> dict[str, int]:
    if not isinstance(decoder, Mapping):
        return {}
    return {
        str(token["content"]): int(index)
        for index, token in decoder.items()
        if isinstance(token, Mapping) and "content" in token
    }


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [int(item) for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _add(ends: Ends, ids: Iterable[int], why: str) -> None:
    for index in ids:
        ends.setdefault(index, why)
