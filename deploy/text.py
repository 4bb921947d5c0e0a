"""Between text and token ids: prompts in every form, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from actors.checks import encodable, is_encodable, shown
from actors.errors import InvalidRequest, PromptTooLong
from actors.requests import GenerateRequest
from actors.startup.tokenizer import open_tokenizer
from actors.verifier.detokenize import Detokenizer, TokenText
from deploy.failures import unsupported
from deploy.text_bound import TextBound
from deploy.token_bytes import TokenBytes

ROLES = ("system", "developer", "user", "assistant", "tool")


# Non-empty fields of a message that this server has nothing for.
_NO_FIELDS: Final[Mapping[str, str]] = {
    "refusal": "refusals are not implemented",
    "annotations": "annotations are not implemented",
    "audio": "only text is understood",
    "tool_calls": "tool calls are not implemented",
    "tool_call_id": "tool calls are not implemented",
    "function_call": "function calls are not implemented",
    "reasoning": "reasoning is not passed on to the model",
    "reasoning_content": "reasoning is not passed on to the model",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `content` is text or a list of text parts."""

    role: str
    content: str | Sequence[Mapping[str, Any]] | None = None
    name: str | None = None


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as clients write them, or as they got them in an answer and send them back.

    Null and empty fields ask for nothing, whatever they are called.

    Raises:
        InvalidRequest: a field that is not known, or that this server has nothing for.
    """
    if not isinstance(given, list | tuple):
        raise InvalidRequest(f"'messages' is {shown(given)}, must be a list", param="messages")
    return [_message_of(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message_of(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"'{where}' is {shown(given)}, must be an object", param=where)
    asked = {name: value for name, value in given.items() if not _asks_for_nothing(value)}
    for name in asked:
        if name not in ("role", "content", "name"):
            _refuse(f"{where}.{name}", _NO_FIELDS.get(name))
    # An empty content is one; a message without any is not.
    return Message(given.get("role", ""), given.get("content"), asked.get("name"))


def _asks_for_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def _refuse(place: str, why: str | None) -> NoReturn:
    place = encodable(place)
    if why is not None:
        raise unsupported(place, why)
    raise InvalidRequest(
        f"'{place}' is not supported: no such field is known here",
        param=place,
        code="unknown_parameter",
    )


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt as turns, for the model's chat template."""

    turns: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Chat templates write the special tokens themselves.
    add_special_tokens: bool = False


# What to go on from: text, turns, or token ids as they are.
Prompt = Text | Conversation | Sequence[int]


class TextProcessor:
    """One model's tokenizer, as the HTTP surface and the client need it. Thread safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bound = TextBound.of(tokenizer)
        self.token_bytes = TokenBytes(tokenizer)
        self._token_text = TokenText(tokenizer)

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> TextProcessor:
        return cls(open_tokenizer(source, revision))

    def ids_of(self, prompt: Prompt, max_model_len: int | None = None) -> Sequence[int]:
        """Token ids of a prompt in whatever form.

        Args:
            prompt: The form it came in.
            max_model_len: A text that surely has as many tokens is refused before the work.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation, or a
                message holds something that is not text.
            PromptTooLong: the text cannot fit.
        """
        if isinstance(prompt, Conversation):
            text, adds, param = self._render(prompt), prompt.add_special_tokens, "messages"
        elif isinstance(prompt, Text):
            text, adds, param = prompt.text, prompt.add_special_tokens, "prompt"
        else:
            # Arrays and tensors, for callers that have them.
            listed: Sequence[int] = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            return listed
        check_text(text, param)
        least = self._bound.least_tokens(text) if self._bound and max_model_len else 0
        if max_model_len is not None and least >= max_model_len:
            raise PromptTooLong(least, max_model_len, is_least=True)
        return self.encode(text, add_special_tokens=adds)

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

    def detokenizer_of(self, request: GenerateRequest) -> Detokenizer:
        """The decoder of a request's output, as engines have it."""
        return self._token_text.decoder_of(request)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Vocabulary entries of `ids`."""
        strings: list[str] = self._tokenizer.convert_ids_to_tokens(list(ids))
        return strings

    def _render(self, chat: Conversation) -> str:
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
                f"the model's chat template refuses these messages: {encodable(str(error))}",
                param="messages",
            ) from None
        return text


_RESERVED = {"tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
             "conversation", "messages", "return_tensors", "return_dict", "padding", "truncation",
             "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}  # fmt: skip


def _checked_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in given:
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"'{param}' is set by the server", param=param)
    return given


def _plain_turn(turn: Message, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if turn.role not in ROLES:
        raise InvalidRequest(
            f"'{where}.role' is {shown(turn.role)}, must be one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    if turn.role == "tool":
        raise unsupported(f"{where}.role", "tool calls, and so tool messages, are not implemented")
    # `developer` is the newer public name of `system`; chat templates know the latter.
    role = "system" if turn.role == "developer" else turn.role
    plain = {"role": role, "content": _plain_content(turn.content, where)}
    if turn.name is not None:
        check_text(turn.name, f"{where}.name")
        plain["name"] = turn.name
    return plain


def _plain_content(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    place = f"{where}.content"
    if content is None:
        raise InvalidRequest(f"'{place}' is required", param=place)
    if isinstance(content, list | tuple):
        return "".join(_part_text(part, f"{place}[{n}]") for n, part in enumerate(content))
    check_text(content, place)
    return str(content)


def _part_text(part: Any, place: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"'{place}' is {shown(part)}, must be an object", param=place)
    kind = part.get("type")
    if kind != "text":
        raise unsupported(place, f"a part of type {shown(kind)}; only parts of type 'text' are")
    text = part.get("text")
    check_text(text, f"{place}.text")
    for name, value in part.items():
        if name not in ("type", "text") and not _asks_for_nothing(value):
            _refuse(f"{place}.{name}", None)
    return str(text)


def check_text(text: Any, place: str) -> None:
    """Raise InvalidRequest, which names `place`, unless `text` is text."""
    if not isinstance(text, str):
        raise InvalidRequest(f"'{place}' is {shown(text)}, must be a string", param=place)
    if not is_encodable(text):
        raise InvalidRequest(
            f"'{place}' holds half of a surrogate pair, which is no character", param=place
        )
