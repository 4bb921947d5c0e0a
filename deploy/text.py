"""Between text and token ids: tokenizer, chat template, and the bytes of single tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from actors.startup.tokenizer import open_tokenizer
from deploy.openai.errors import ApiError, bad_request
from deploy.openai.protocol import Message


class TextProcessor:
    """One model's tokenizer, as the HTTP surface and the client need it. Thread safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = TokenBytes(tokenizer)

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> TextProcessor:
        return cls(open_tokenizer(source, revision))

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

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            ApiError: 400; the model has no template, the template refuses the conversation, or a
                message holds something that is not text.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise bad_request(
                "the served model has no chat template; use /v1/completions", param="messages"
            )
        turns = [_plain_turn(message, index) for index, message in enumerate(messages)]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **_checked_kwargs(template_kwargs),
            )
        except ApiError:
            raise
        except Exception as error:
            # Templates reject conversations (role order, unknown roles) by raising.
            raise bad_request(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)


_RESERVED = {"tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
             "conversation", "messages", "return_tensors", "return_dict", "padding", "truncation",
             "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}  # fmt: skip


def _checked_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    for name in given or {}:
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise bad_request(f"'{param}' is set by the server", param=param)
    return given or {}


def _plain_turn(message: Message, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.role == "tool":
        raise bad_request(
            f"'{where}.role': tool messages are not supported: tool calls are not implemented",
            param=f"{where}.role",
            code="unsupported_parameter",
        )
    # `developer` is the newer public name of `system`; chat templates know the latter.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _plain_content(message.content, where)}


def _plain_content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_request(f"'{where}.content' is required", param=f"{where}.content")
    texts = []
    for number, part in enumerate(content):
        field = f"{where}.content[{number}]"
        kind = part.get("type")
        if kind != "text":
            raise bad_request(
                f"'{field}' is a part of type {kind!r}; only parts of type 'text' are supported",
                param=field,
                code="unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"'{field}.text' must be a string", param=f"{field}.text")
        extra = set(part) - {"type", "text"}
        if extra:
            name = f"{field}.{sorted(extra)[0]}"
            raise bad_request(f"'{name}' is not supported", param=name, code="unknown_parameter")
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
