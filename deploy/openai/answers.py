"""Answers of both completion endpoints, whole or in chunks.

`ChatAnswer` and `TextAnswer` differ in names and shapes only; `Answer` holds what they share.
Both build plain dicts: a pydantic model per chunk would cost more than the chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from actors.requests import RunOutput
from deploy.openai.logprobs import CompletionLogprobs, chat_logprobs, finite
from deploy.openai.protocol import Sampling
from deploy.openai.usage import usage_of
from deploy.runs import merge
from deploy.token_bytes import TokenBytes

Json = dict[str, Any]


class Answer(ABC):
    """One answer in the making."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, answer_id: str, created: int, model: str, body: Sampling, token_bytes: TokenBytes
    ) -> None:
        self._head = {"id": answer_id, "created": created, "model": model}
        self._return_token_ids = body.return_token_ids
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._token_bytes = token_bytes
        self._skip_special = body.skip_special_tokens

    # What differs between the endpoints -----------------------------------------------------

    def opening(self) -> list[Json]:
        """Chunks before the first run."""
        return []

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _end_delta(self) -> Json: ...

    @abstractmethod
    def _message(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs(self, output: RunOutput) -> Json | None: ...

    # What is the same -----------------------------------------------------------------------

    def chunks(self, output: RunOutput) -> list[Json]:
        """Chunks of one run: its tokens, and the end if it is the last."""
        made = []
        logprobs = self._logprobs(output)
        shows_tokens = bool(output.token_ids) and (self._return_token_ids or logprobs is not None)
        if output.text or shows_tokens:
            choice = {"index": 0, **self._delta(output.text), "logprobs": logprobs}
            if self._return_token_ids:
                choice |= self._tokens(output)
            made.append(self._chunk([{**choice, "finish_reason": None}], output))
        if output.finish_reason is not None:
            end = {"index": 0, **self._end_delta(), "logprobs": None, **_finish(output)}
            made.append(self._chunk([end], output))
            if self._include_usage:
                made.append(
                    {**self._head, "object": self.chunk_object, "choices": [],
                     "usage": usage_of(output)}
                )  # fmt: skip
        return made

    def is_text_alone(self, output: RunOutput) -> bool:
        """Whether a run makes one chunk, of which its text is all that is its own."""
        shows_more = self._return_token_ids or self._continuous_usage
        is_plain = output.logprobs is None and output.finish_reason is None
        return bool(output.text) and is_plain and not shows_more

    def whole(self, outputs: Sequence[RunOutput]) -> Json:
        """The answer of all runs at once."""
        merged = merge(outputs)
        choice = {"index": 0, **self._message(merged.text), "logprobs": self._logprobs(merged)}
        if self._return_token_ids:
            choice |= self._tokens(merged)
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [{**choice, **_finish(merged)}],
            "usage": usage_of(merged),
        }

    def _tokens(self, output: RunOutput) -> Json:
        """What `return_token_ids` adds; a special token that text leaves out is an empty string."""
        hidden = self._token_bytes.is_special if self._skip_special else _never
        tokens: Json = {
            "token_ids": list(output.token_ids),
            "accepted": list(output.accepted),
            "token_strs": [
                "" if hidden(i) else self._token_bytes(i).decode(errors="replace")
                for i in output.token_ids
            ],
        }
        if output.logprobs is not None:
            # Two tokens can have the same text: `top_logprobs` alone does not tell them apart.
            tokens["top_token_ids"] = [
                [[i, finite(logprob)] for i, logprob in entry.top] for entry in output.logprobs
            ]
        return tokens

    def _chunk(self, choices: list[Json], output: RunOutput | None = None) -> Json:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._continuous_usage and output is not None:
            chunk["usage"] = usage_of(output)
        elif self._include_usage or self._continuous_usage:
            chunk["usage"] = None
        return chunk


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [self._chunk([choice])]

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def _end_delta(self) -> Json:
        return {"delta": {}}

    def _message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, output: RunOutput) -> Json | None:
        return chat_logprobs(output, self._token_bytes)


class TextAnswer(Answer):
    """Answer of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, answer_id: str, created: int, model: str, body: Sampling, token_bytes: TokenBytes
    ) -> None:
        super().__init__(answer_id, created, model, body, token_bytes)
        self._running = CompletionLogprobs(token_bytes, skip_special_tokens=self._skip_special)

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _end_delta(self) -> Json:
        return {"text": ""}

    def _message(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, output: RunOutput) -> Json | None:
        return self._running.run(output)


def _never(_: int) -> bool:
    return False


def _finish(output: RunOutput) -> Json:
    reason = output.finish_reason
    return {
        "finish_reason": reason.value if reason is not None else None,
        # Beyond the public API: the stop string or token id that ended the answer.
        "stop_reason": output.stop_reason,
    }
