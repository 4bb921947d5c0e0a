"""One streamed answer: bytes in, times and usage out.

The generator shares its cores with what it measures, so an event is decoded only where its content
matters: up to the first text, and where it carries usage or an error. In all others the bytes
suffice, because JSON escapes the quotes of a text: `"usage":` in an event is always a key.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_ERROR: Final = re.compile(rb'"error"\s*:\s*[{"]')
# The event that only says why an answer ended.
_NO_TEXT: Final = re.compile(rb'"delta"\s*:\s*\{\}|"text"\s*:\s*""')


class EventLines:
    """Cuts a byte stream into the payloads of its `data:` lines, however it arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads that `chunk` completes; comments and other fields are left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


@dataclass(slots=True)
class Received:
    """What has come of one answer. Times are those of `time.perf_counter`."""

    first_text_at: float | None = None
    last_at: float | None = None
    num_events: int = 0
    gaps_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    is_whole: bool = False

    def take(self, payload: bytes, now: float) -> None:
        """One event that came at `now`.

        An event before the first text is no event of the answer (it names the role), the end
        without text is none either. Several events of one read came together: between them there
        is no gap.

        Raises:
            ValueError: It is no JSON.
        """
        if payload == _DONE:
            self.is_whole = True
            return
        if self.first_text_at is None or _USAGE.search(payload) or _ERROR.search(payload):
            event = json.loads(payload)
            if error := event.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                self.error = str(message)
                return
            self.usage = event.get("usage") or self.usage
            choices = event.get("choices")
            if not choices:
                return
            if self.first_text_at is None:
                if not _has_begun(choices[0]):
                    return
                self.first_text_at = now
        self.num_events += _NO_TEXT.search(payload) is None
        if self.last_at is not None and now > self.last_at:
            self.gaps_s.append(now - self.last_at)
        self.last_at = now


def _has_begun(choice: dict[str, Any]) -> bool:
    """Whether a token came: text, or the end of an answer whose tokens have no text."""
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or choice.get("finish_reason")
    )
