"""Requests of the OpenAI surface: fields, types, and what only this API asks of them.

What an engine asks of values is in `actors.checks`, for every surface. Unknown fields are refused
by name. Fields that the public API has and this server has not are in `deploy.openai.unsupported`.
Fields after "Beyond the public API" are ours or follow what other open servers call them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import Field, model_validator

from actors.errors import InvalidRequest
from deploy.openai import unsupported
from deploy.openai.fields import (
    ApiFault,
    Ids,
    Int,
    Objects,
    PromptForms,
    Strict,
    TextOrTexts,
)
from deploy.text import Conversation, Prompt, Text, messages_of


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Padding against traffic analysis; harmless to accept, nothing to do.
    include_obfuscation: bool = False


class SpeculationOptions(Strict):
    """Lowers, for one request, what the server allows."""

    enabled: bool = True
    num_speculative_tokens: Int | None = None


# Fields of `Rendering` that mean something for messages only, and what asks for nothing.
_OF_MESSAGES: Final[Mapping[str, Any]] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}


class Rendering(Strict):
    """How messages or a text become the ids of a prompt, on every route that does it."""

    # Beyond the public API. None: for a text, and not for messages, whose template writes them.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def of_messages(self, messages: Objects) -> Prompt:
        """The prompt of a conversation."""
        return Conversation(
            messages_of(messages),
            self.add_generation_prompt,
            self.continue_final_message,
            self.chat_template_kwargs,
            bool(self.add_special_tokens),
        )

    def of_text(self, prompt: str | list[int]) -> Prompt:
        """The prompt of a text, or of token ids as they are.

        Raises:
            InvalidRequest: A field asks for something that such a prompt has not.
        """
        for field, neutral in _OF_MESSAGES.items():
            if getattr(self, field) != neutral:
                raise InvalidRequest(
                    f"'{field}' is about messages; this request has a prompt without turns",
                    param=field,
                )
        if isinstance(prompt, str):
            return Text(prompt, self.add_special_tokens is not False)
        if self.add_special_tokens:
            raise InvalidRequest(
                "'add_special_tokens' is about text; token ids are taken as they are",
                param="add_special_tokens",
            )
        return prompt


class Sampling(Rendering, ABC):
    """What chat and plain completions share."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, le=2)
    top_p: float = 1.0
    seed: Int | None = None
    stop: TextOrTexts = Field(default_factory=list)
    # Beyond the public API
    top_k: Int = Field(default=0, ge=-1)
    min_p: float = 0.0
    min_tokens: Int = 0
    stop_token_ids: Ids = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str | None = None
    speculation: SpeculationOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ApiFault("stream_options", "only allowed with stream: true")
        return self

    @abstractmethod
    def to_prompt(self) -> Prompt:
        """What to go on from.

        Raises:
            InvalidRequest: A message or a field of the prompt is wrong.
        """

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


class ChatCompletionRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    table = unsupported.CHAT

    messages: Objects
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int = Field(default=0, ge=0)

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

    def to_prompt(self) -> Prompt:
        return self.of_messages(self.messages)

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

    prompt: PromptForms
    # 16 is the public API's default.
    max_tokens: Int = 16
    logprobs: Int | None = Field(default=None, ge=0)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def logprobs_field(self) -> str:
        return "logprobs"

    def to_prompt(self) -> Prompt:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return self.of_text(prompt)
        if len(prompt) == 1:
            return self.of_text(prompt[0])
        raise InvalidRequest(
            f"'prompt' holds {len(prompt)} prompts; this server takes one per request",
            param="prompt",
            code="unsupported_parameter" if prompt else None,
        )


class TokenizeRequest(Rendering):
    """Body of POST /tokenize: a prompt or messages."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]] = {}

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiFault("prompt", "give either 'prompt' or 'messages'")
        return self

    def to_prompt(self) -> Prompt:
        """What to tokenise.

        Raises:
            InvalidRequest: A message or a field of the prompt is wrong.
        """
        if self.messages is not None:
            return self.of_messages(self.messages)
        return self.of_text(self.prompt or "")


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    table: ClassVar[Mapping[str, tuple[unsupported.Neutral, str]]] = {}

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
