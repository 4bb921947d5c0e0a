"""Requests of the OpenAI surface: fields, types, and what only this API asks of them.

What an engine asks of values is in `actors.checks`, for every surface. Unknown fields are refused
by name. Fields that the public API has and this server has not are in `deploy.openai.unsupported`.
Fields after "Beyond the public API" are ours or follow what other open servers call them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actors.errors import InvalidRequest
from deploy.openai import unsupported

TokenId = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Base of every request part: no field we did not declare."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Padding against traffic analysis; harmless to accept, nothing to do.
    include_obfuscation: bool = False


class SpeculationOptions(Strict):
    """Lowers, for one request, what the server allows."""

    enabled: bool = True
    num_speculative_tokens: int | None = None


class Message(Strict):
    """One turn, a `deploy.text.Turn`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None


class Sampling(Strict, ABC):
    """What chat and plain completions share."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, le=2)
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    # Beyond the public API
    top_k: int = Field(default=0, ge=-1)
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str | None = None
    speculation: SpeculationOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, values: Any) -> Any:
        # Client libraries send null for "not set".
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ApiFault("stream_options", "only allowed with stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """Largest number of output tokens; None up to the context's end."""

    @property
    def limit_field(self) -> str:
        """The field `limit` came from, for error messages."""
        return "max_tokens"

    @property
    @abstractmethod
    def num_logprobs(self) -> int:
        """-1 none, 0 the sampled token's only, n > 0 the n most likely too."""

    @property
    @abstractmethod
    def logprobs_field(self) -> str:
        """The field that asks for the most likely tokens, for error messages."""


class ApiFault(ValueError):
    """A cross-field mistake, found inside a validator; `param` is the field to name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class ChatCompletionRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    table = unsupported.CHAT

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)
    # Beyond the public API
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiFault("top_logprobs", "only allowed with logprobs: true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ApiFault(
                "max_tokens", f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ"
            )
        return self

    @property
    def limit(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int:
        return self.top_logprobs if self.logprobs else -1

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs"


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    table = unsupported.COMPLETIONS

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    # 16 is the public API's default.
    max_tokens: int = 16
    logprobs: int | None = Field(default=None, ge=0)
    # Beyond the public API
    add_special_tokens: bool = True

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def logprobs_field(self) -> str:
        return "logprobs"

    def single_prompt(self) -> str | list[int]:
        """The one prompt of the request.

        Raises:
            InvalidRequest: Several prompts, or none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if prompt and isinstance(prompt[0], int):
            return [int(token) for token in prompt]
        if len(prompt) == 1:
            only = prompt[0]
            return only if isinstance(only, str) else list(only)  # type: ignore[arg-type]
        raise InvalidRequest(
            f"'prompt' holds {len(prompt)} prompts; this server takes one per request",
            param="prompt",
            code="unsupported_parameter" if prompt else None,
        )


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt or messages."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]] = {}

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiFault("prompt", "give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]] = {}

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(raw: bytes, model: type[Body]) -> Body:
    """The request in `raw`.

    Raises:
        InvalidRequest: It names the first field at fault.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(unsupported.drop_neutral(body, model.table))
    except ValidationError as error:
        raise _first_fault(error, model) from None


def _first_fault(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    faults = error.errors(include_url=False)
    # An unknown field explains the others (a misspelt `messages` is also a missing `messages`).
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    # A union reports each member's complaint under the member's name: keep names and indices that
    # the client wrote.
    path = _path(fault["loc"], model)
    if fault["type"] == "extra_forbidden":
        return InvalidRequest(
            f"'{path}' is not supported: no such field is known here",
            param=path,
            code="unknown_parameter",
        )
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ApiFault):
        return InvalidRequest(f"'{cause.param}': {cause.message}", param=cause.param)
    if fault["type"] == "missing":
        return InvalidRequest(
            f"'{path}' is required", param=path, code="missing_required_parameter"
        )
    return InvalidRequest(f"'{path}': {_message(fault)}", param=path)


def _message(fault: Mapping[str, Any]) -> str:
    text = str(fault["msg"])
    text = text[0].lower() + text[1:]
    given = fault.get("input")
    if isinstance(given, int | float | bool) or (isinstance(given, str) and len(given) <= 40):
        return f"{text}, got {given!r}"
    return text


def _path(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    top = str(location[0]) if location else "body"
    parts = [top]
    union_like = top in model.model_fields and _is_union(model.model_fields[top].annotation)
    for index, part in enumerate(location[1:]):
        if union_like and index == 0:
            continue
        if isinstance(part, int):
            parts[-1] += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            parts.append(part)
    return ".".join(parts)


# How pydantic names the members of this module's unions in error locations.
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "dict", "list"})


def _is_union(annotation: Any) -> bool:
    # `X | None` with one real member adds no location part.
    members = [arg for arg in getattr(annotation, "__args__", ()) if arg is not type(None)]
    origin = getattr(annotation, "__origin__", None)
    return origin is None and len(members) > 1
