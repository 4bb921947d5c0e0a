"""Token ids to text, a run at a time, and stop strings in that text.

Both work token by token inside, so the text does not depend on how tokens are grouped into runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from actors.requests import GenerateRequest

_REPLACEMENT = "\ufffd"
# A character spans at most 4 byte tokens. A longer undecodable tail is invalid bytes, not the
# head of a character: let it out, or it would grow (and be decoded again) without bound.
_MAX_PENDING_TOKENS = 8


class _Backend(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TokenText:
    """What an engine's requests share of its tokenizer, read once: a tokenizer may have thousands
    of added tokens.

    Args:
        tokenizer: A `transformers` fast tokenizer or a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: object) -> None:
        # A Hugging Face fast tokenizer is a shell around a Rust one.
        self.backend = cast(_Backend, getattr(tokenizer, "backend_tokenizer", tokenizer))
        added = getattr(self.backend, "get_added_tokens_decoder", None)
        tokens = {} if added is None else added()
        self.special_ids = frozenset(i for i, token in tokens.items() if token.special)

    def decoder_of(self, request: GenerateRequest) -> Detokenizer:
        """The decoder of a request's output, which may go on from output that is in its prompt."""
        prompt, num_prior = request.prompt_token_ids, request.num_prior_output_tokens
        prior = prompt[len(prompt) - num_prior :]
        return Detokenizer(self, request.skip_special_tokens, prior)


class Detokenizer:
    """Incremental decoder of one request's output.

    The text of tokens so far is always a prefix of the text of all tokens; a trailing incomplete
    character is held back until it is complete or `flush` is called.

    Args:
        tokens: The engine's.
        skip_special_tokens: Leave special tokens out of the text.
        context: Tokens of the same text that come before, whose own text is out already.
    """

    def __init__(
        self, tokens: TokenText, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._backend = tokens.backend
        self._skip = skip_special_tokens
        self._skipped_ids = tokens.special_ids if skip_special_tokens else frozenset()
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


class StopMatch(NamedTuple):
    """Text up to the stop (with it, if included) that was not out yet, and which stop it was."""

    text: str
    stop: str


class _Stop:
    """How much of one stop string the text so far ends with (Knuth, Morris, Pratt).

    `matched` is the longest proper beginning of `stop` that the text ends with, in characters.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # Of each beginning of `stop`, its longest proper end that is a beginning too. Worked out
        # as far as the text has ever matched, so a long stop string costs nothing by itself.
        self._borders = [0, 0]

    def advance(self, text: str) -> int:
        """Take `text` in. Number of its characters up to the first end of `stop`; 0: none."""
        stop, borders, matched, found = self.stop, self._borders, self.matched, 0
        at = 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            elif text[at] != stop[matched]:
                matched = borders[matched]
                continue
            at += 1
            matched += 1
            if matched == len(borders):
                borders.append(self._border_after(matched - 1))
            if matched == len(stop):
                found = found or at
                matched = borders[matched]
        self.matched = matched
        return found

    def _border_after(self, length: int) -> int:
        """Border of the beginning of `length + 1` characters; those up to `length` are known."""
        stop, border = self.stop, self._borders[length]
        while border and stop[border] != stop[length]:
            border = self._borders[border]
        return border + (stop[border] == stop[length])


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, in time linear in the text.

    Text that could still become a stop string is held back. A stop string that was complete
    while `enabled` was False is passed over for good.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = tuple(map(_Stop, stops))
        self._include = include_in_output
        self._held: deque[str] = deque()
        self._num_held = 0  # characters

    def push(self, text: str, enabled: bool = True) -> str | StopMatch:
        """Text that may go out, or the match that `text` completed (the earliest to start)."""
        if not text:
            return ""
        match: tuple[int, int, str] | None = None  # start and end, in characters of `text`
        num_possible = 0
        for stop in self._stops:
            end = stop.advance(text)
            num_possible = max(num_possible, stop.matched)
            start = end - len(stop.stop)
            if end and enabled and (match is None or start < match[0]):
                match = (start, end, stop.stop)
        num_held = self._num_held
        self._held.append(text)
        self._num_held += len(text)
        if match is not None:
            start, end, found = match
            return StopMatch(self._release(num_held + (end if self._include else start)), found)
        return self._release(self._num_held - num_possible)

    def flush(self) -> str:
        """What is still held back: no stop string was completed."""
        return self._release(self._num_held)

    def _release(self, num_characters: int) -> str:
        out: list[str] = []
        self._num_held -= num_characters
        while num_characters:
            piece = self._held.popleft()
            if len(piece) > num_characters:
                self._held.appendleft(piece[num_characters:])
                piece = piece[:num_characters]
            out.append(piece)
            num_characters -= len(piece)
        return "".join(out)


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
