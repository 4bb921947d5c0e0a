"""Token ids to text, a run at a time, and stop strings in that text.

Both work token by token inside, so the text does not depend on how tokens are grouped into runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from actors.requests import GenerateRequest

_REPLACEMENT = "\ufffd"
# A character spans at most 4 byte tokens. A longer undecodable tail is invalid bytes, not the
# head of a character: let it out, or it would grow (and be decoded again) without bound.
_MAX_PENDING_TOKENS = 8


class _Backend(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def _backend_of(tokenizer: object) -> _Backend:
    """The Rust tokenizer of a Hugging Face fast tokenizer, or the object itself."""
    return cast(_Backend, getattr(tokenizer, "backend_tokenizer", tokenizer))


def _special_ids(backend: object) -> frozenset[int]:
    added = getattr(backend, "get_added_tokens_decoder", None)
    if added is None:
        return frozenset()
    return frozenset(i for i, token in added().items() if token.special)


class Detokenizer:
    """Incremental decoder of one request's output.

    The text of tokens so far is always a prefix of the text of all tokens; a trailing incomplete
    character is held back until it is complete or `flush` is called.

    Args:
        tokenizer: A `transformers` fast tokenizer or a `tokenizers.Tokenizer`.
        skip_special_tokens: Leave special tokens out of the text.
        context: Tokens of the same text that come before, whose own text is out already.
    """

    def __init__(
        self, tokenizer: object, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._backend = _backend_of(tokenizer)
        self._skip = skip_special_tokens
        self._skipped_ids = _special_ids(self._backend) if skip_special_tokens else frozenset()
        # Tokens whose text is out already but which the decoder needs as left context (spaces
        # between words belong to pairs of tokens), then those still to come out.
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""
        # As many as are looked back at below.
        self.push([i for i in context if i not in self._skipped_ids][-_MAX_PENDING_TOKENS:])
        self.flush()

    @property
    def is_pending(self) -> bool:
        """Whether an incomplete character is held back."""
        return len(self._ids) > self._num_context

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these tokens."""
        if len(token_ids) == 1:
            return self._push_one(token_ids[0])
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        ids = self._ids
        ids.append(token_id)
        text = self._backend.decode(ids, skip_special_tokens=self._skip)
        if text.endswith(_REPLACEMENT) and len(ids) - self._num_context <= _MAX_PENDING_TOKENS:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """What is still held back, an incomplete character as U+FFFD: no more tokens come."""
        if not self.is_pending:
            return ""
        return self._release(self._backend.decode(self._ids, skip_special_tokens=self._skip))

    def _release(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._ids = self._ids[self._num_context :]
        elif len(self._ids) > 2 * _MAX_PENDING_TOKENS:
            # Tokens without text of their own; keep the context short all the same.
            self._ids = self._ids[-_MAX_PENDING_TOKENS:]
        else:
            self._num_context = len(self._ids)
            return new
        self._num_context = len(self._ids)
        self._context_text = self._backend.decode(self._ids, skip_special_tokens=self._skip)
        return new


def detokenizer_of(tokenizer: object, request: GenerateRequest) -> Detokenizer:
    """The decoder of a request's output, which may go on from output that is in its prompt."""
    num_prior = request.num_prior_output_tokens
    prompt = request.prompt_token_ids
    prior = prompt[len(prompt) - num_prior :]
    return Detokenizer(tokenizer, request.skip_special_tokens, prior)


class StopMatch(NamedTuple):
    """Text up to the stop (with it, if included) that was not out yet, and which stop it was."""

    text: str
    stop: str


class StopStrings:
    """Finds stop strings in a text that arrives in pieces.

    Text that could still become a stop string is held back. A stop string that was complete
    while `enabled` was False is passed over for good.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._seen = ""  # last `longest - 1` characters, held ones included

    def push(self, text: str, enabled: bool = True) -> str | StopMatch:
        """Text that may go out, or the match that `text` completed (the earliest to start)."""
        if not text:
            return ""
        window = self._seen + text
        if enabled:
            match = self._find(window, len(self._seen))
            if match is not None:
                start, stop = match
                end = start + len(stop) if self._include else start
                first_held = len(self._seen) - len(self._held)
                return StopMatch(window[first_held:end], stop)
        out = self._held + text
        num_held = self._num_possible(window)
        self._held = out[len(out) - num_held :]
        self._seen = window[max(0, len(window) - self._longest + 1) :]
        return out[: len(out) - num_held]

    def flush(self) -> str:
        """What is still held back: no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str, num_seen: int) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # Only occurrences that end in the new text.
            at = window.find(stop, max(0, num_seen - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        return best

    def _num_possible(self, window: str) -> int:
        """Length of the longest end of `window` that begins a stop string."""
        for n in range(min(self._longest - 1, len(window)), 0, -1):
            if any(len(s) > n and s.startswith(window[-n:]) for s in self._stops):
                return n
        return 0


class TextStream:
    """A request's output text: decoding, stop strings and what is held back by either."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that may go out after these tokens. Only for requests without stop strings."""
        assert self._stops is None, "stop strings need push_one"
        return self._detokenizer.push(token_ids)

    def push_one(self, token_id: int, stop_enabled: bool) -> str | StopMatch:
        """Text that may go out after this token, or the stop string that it completed."""
        text = self._detokenizer.push((token_id,))
        return text if self._stops is None else self._stops.push(text, stop_enabled)

    def flush(self) -> str:
        """The rest, at the end of a request that no stop string ended."""
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail
        # An incomplete character ends no stop string; it only releases what was held.
        out = self._stops.push(tail, enabled=False)
        assert isinstance(out, str)
        return out + self._stops.flush()
