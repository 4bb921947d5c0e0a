"""Chat completions on a terminal: streamed, with accepted draft tokens marked."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from deploy.errors import UserError

_ACCEPTED = ("\x1b[32;1m", "\x1b[0m")
_PLAIN_ACCEPTED = ("[", "]")


@dataclass(slots=True)
class Streamed:
    """One streamed answer."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first, over the time after the first."""
        # The prompt's time is left out: speculation does not change it.
        tokens = int(self.usage.get("completion_tokens", 0)) - 1
        return tokens / self.decode_s if tokens > 0 and self.decode_s > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean output tokens of a step with drafts."""
        return float(self.usage.get("speculation", {}).get("acceptance_length", 1.0))


class Marker:
    """Writes text with accepted draft tokens in colour, or in brackets where there is none."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        colour = out.isatty() and "NO_COLOR" not in os.environ
        self._begin, self._end = _ACCEPTED if colour else _PLAIN_ACCEPTED
        self._brackets = not colour

    @property
    def legend(self) -> str:
        """How accepted tokens look."""
        how = "brackets" if self._brackets else "colour"
        return f"{self._begin}accepted draft tokens{self._end} are marked with {how}"

    def write(self, choice: dict[str, Any]) -> None:
        """Write one chunk's text."""
        text = choice["delta"].get("content") or ""
        for piece, accepted in self._pieces(text, choice):
            self._out.write(f"{self._begin}{piece}{self._end}" if accepted else piece)
        self._out.flush()

    @staticmethod
    def _pieces(text: str, choice: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        tokens, flags = choice.get("token_strs") or [], choice.get("accepted") or []
        if "".join(tokens) != text:
            # A character spans runs, or a stop string trimmed the text: mark it as a whole.
            yield text, bool(flags) and all(flags)
            return
        run, marked = "", False
        for token, flag in zip(tokens, flags, strict=False):
            if run and flag != marked:
                yield run, marked
                run = ""
            run, marked = run + token, flag
        if run:
            yield run, marked


class ChatClient:
    """A small client of one server, for the terminal."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(600.0))

    def model(self) -> str:
        """Name of the served model."""
        with _reachable(self._http):
            answer = self._http.get("/v1/models")
        _check(answer)
        return str(answer.json()["data"][0]["id"])

    def stream(
        self,
        messages: list[dict[str, str]],
        *,
        marker: Marker | None = None,
        **fields: Any,
    ) -> Streamed:
        """Send one conversation; write the answer as it comes."""
        body = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **fields,
        }
        made = Streamed()
        start = time.monotonic()
        first = last = 0.0
        with (
            _reachable(self._http),
            self._http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
            _check(answer)
            for payload in _events(answer):
                if "error" in payload:
                    raise UserError(f"the server ended the answer: {payload['error']['message']}")
                if payload.get("usage"):
                    made.usage = payload["usage"]
                for choice in payload["choices"]:
                    if choice.get("token_ids"):
                        last = time.monotonic()
                        first = first or last
                    made.text += choice["delta"].get("content") or ""
                    if marker is not None:
                        marker.write(choice)
        made.first_token_s, made.decode_s = first - start, last - first
        return made


@contextmanager
def _reachable(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError:
        raise UserError(
            f"no server at {http.base_url}; start one with 'paceline serve' or give --url"
        ) from None
    except httpx.HTTPError as error:
        raise UserError(f"the connection to {http.base_url} broke: {error}") from None


def _check(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.text[:200]
        raise UserError(f"the server refused ({answer.status_code}): {message}")


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def chat_loop(client: ChatClient, **fields: Any) -> None:
    """Read turns from the terminal until its end."""
    marker = Marker(sys.stdout)
    print(f"Talking to {client.model()}; {marker.legend}. Ctrl-D ends.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("\n> ")
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer = client.stream(messages, marker=marker, **fields)
        messages.append({"role": "assistant", "content": answer.text})
        print(
            f"\n({answer.tokens_per_second:.1f} tokens/s, "
            f"acceptance length {answer.acceptance_length:.2f})"
        )
