"""Logprobs in the two public schemas, whole or run by run."""

from __future__ import annotations

import math
from typing import Any

from actors.requests import RunOutput, TokenLogprob
from deploy.token_bytes import TokenBytes

# JSON has no infinity; this is what the public API shows for "impossible".
_FLOOR = -9999.0


def finite(logprob: float) -> float:
    """`logprob`, or the floor where JSON has no number for it."""
    return logprob if math.isfinite(logprob) else _FLOOR


def chat_logprobs(output: RunOutput, token_bytes: TokenBytes) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat completion for one run; None when none were asked."""
    if output.logprobs is None:
        return None
    return {
        "content": [
            {
                **_entry(entry.token_id, entry.logprob, token_bytes),
                "top_logprobs": [_entry(i, lp, token_bytes) for i, lp in entry.top],
            }
            for entry in output.logprobs
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of plain completions, which needs to know where the text stands.

    The offset of a token is the number of characters in front of it; a token that continues a
    character has the offset of that character's end of whole text, so offsets never decrease.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._partial = b""

    def run(self, output: RunOutput) -> dict[str, Any] | None:
        """The entries of one run; None when none were asked."""
        if output.logprobs is None:
            return None
        offsets = [self._advance(entry.token_id) for entry in output.logprobs]
        return {
            "tokens": [self._name(entry.token_id) for entry in output.logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in output.logprobs],
            "top_logprobs": [self._top(entry) for entry in output.logprobs],
            "text_offset": offsets,
        }

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if self._skip_special and self._token_bytes.is_special(token_id):
            return offset
        raw = self._partial + self._token_bytes(token_id)
        text, self._partial = decode_whole(raw)
        self._offset += len(text)
        return offset

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The sampled token is always there, as in the public API.
        best = {self._name(i): finite(lp) for i, lp in entry.top}
        best.setdefault(self._name(entry.token_id), finite(entry.logprob))
        return best

    def _name(self, token_id: int) -> str:
        raw = self._token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # Two different halves of characters must not share a key.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def decode_whole(raw: bytes) -> tuple[str, bytes]:
    """Text of `raw` without a character that has only begun at its end, and that beginning."""
    try:
        return raw.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return raw[: error.start].decode(errors="replace"), raw[error.start :]
        return raw.decode(errors="replace"), b""
