"""Between text and token ids: tokenizer, chat template, and the bytes of single tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.errors import InvalidRequest
from actors.startup.tokenizer import open_tokenizer
from deploy.failures import unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")


class Turn(Protocol):
    """One turn of a conversation. `content` is text or a list of text parts."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str | Sequence[Mapping[str, Any]] | None: ...


@dataclass(frozen=True, slots=True)
class Message:
    """A turn, for callers that have no type of their own."""

    role: str
    content: str | Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt as turns, for the model's chat template."""

    turns: Sequence[Turn]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


# What to go on from: text, turns, or token ids as they are.
Prompt = Text | Conversation | Sequence[int]


class TextProcessor:
    """One model's tokenizer, as the HTTP surface and the client need it. Thread safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = TokenBytes(tokenizer)

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> TextProcessor:
        return cls(open_tokenizer(source, revision))

    def ids_of(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt in whatever form.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation, or a
                message holds something that is not text.
        """
        if isinstance(prompt, Text):
            return self.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        return self._render(prompt) if isinstance(prompt, Conversation) else prompt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`, exactly: no clean-up of spaces."""
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Vocabulary entries of `ids`."""
        strings: list[str] = self._tokenizer.convert_ids_to_tokens(list(ids))
        return strings

    def _render(self, chat: Conversation) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequest(
                "the served model has no chat template; use /v1/completions", param="messages"
            )
        if not chat.turns:
            raise InvalidRequest("'messages' is empty, at least 1 is needed", param="messages")
        turns = [_plain_turn(turn, index) for index, turn in enumerate(chat.turns)]
        kwargs = _checked_kwargs(chat.template_kwargs)
        continues = chat.continue_final_message
        if continues and turns[-1]["role"] != "assistant":
            raise InvalidRequest(
                "'continue_final_message': the last message is not an assistant's",
                param="continue_final_message",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt and not continues,
                continue_final_message=continues,
                **kwargs,
            )
        except Exception as error:
            # Templates reject conversations (role order, unknown roles) by raising.
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)


_RESERVED = {"tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
             "conversation", "messages", "return_tensors", "return_dict", "padding", "truncation",
             "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}  # fmt: skip


def _checked_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in given:
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"'{param}' is set by the server", param=param)
    return given


def _plain_turn(turn: Turn, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if turn.role not in ROLES:
        raise InvalidRequest(
            f"'{where}.role' is {turn.role!r}, must be one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    if turn.role == "tool":
        raise unsupported(f"{where}.role", "tool calls, and so tool messages, are not implemented")
    # `developer` is the newer public name of `system`; chat templates know the latter.
    role = "system" if turn.role == "developer" else turn.role
    return {"role": role, "content": _plain_content(turn.content, where)}


def _plain_content(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"'{where}.content' is required", param=f"{where}.content")
    texts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = part.get("type")
        if kind != "text":
            raise unsupported(place, f"a part of type {kind!r}; only parts of type 'text' are")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"'{place}.text' must be a string", param=f"{place}.text")
        for name in sorted(part.keys() - {"type", "text"}):
            raise unsupported(f"{place}.{name}", "no such field is known here")
        texts.append(part["text"])
    return "".join(texts)


class TokenBytes:
    """The bytes a token adds to the text.

    Logprobs need them: one character can span tokens, and one token's bytes need not be text.
    Byte-level vocabularies write bytes as printable characters, SentencePiece ones write spaces
    as a marker and odd bytes as <0xNN>; everything else is decoded token by token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(
            json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"), ensure_ascii=False
        )
        self._byte_level = '"ByteLevel"' in decoder
        self._byte_fallback = '"ByteFallback"' in decoder
        self._sentencepiece = '"Metaspace"' in decoder or "\u2581" in decoder
        self._added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(
            int(i)
            for i, t in tokenizer.added_tokens_decoder.items()
            if getattr(t, "special", False)
        ) | frozenset(tokenizer.all_special_ids)
        self._size = len(tokenizer)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` drops this token from the text."""
        return token_id in self._special

    def __call__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        # Ids past the vocabulary exist when the embedding is padded; they have no text.
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._size else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:
                return str(token).encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            return bytes([int(token[3:5], 16)])
        if self._sentencepiece:
            return str(token).replace("\u2581", " ").encode()
        decoded: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return decoded.encode()


def _bytes_as_characters() -> dict[str, int]:
    """Printable character of each byte in byte-level vocabularies, inverted.

    Bytes that are printable in Latin-1 stand for themselves, the others are moved to 256 and up
    in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + n): byte for n, byte in enumerate(moved)})
    return table


_BYTE_OF = _bytes_as_characters()
