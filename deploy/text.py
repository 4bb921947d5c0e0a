"""Between text and token ids: prompts in every form, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.errors import InvalidRequest
from actors.startup.tokenizer import open_tokenizer
from deploy.failures import unsupported
from deploy.token_bytes import TokenBytes

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
