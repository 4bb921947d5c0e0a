"""Python client of a deployed application, through its Serve handle: no HTTP in between.

    >>> client = Client("paceline")                       # inside `ray.init(address=...)`
    >>> client.generate("Once upon a time", max_tokens=20).text
    >>> for run in client.stream(messages=[{"role": "user", "content": "Hi"}]):
    ...     print(run.text, end="")

Fields are those of the HTTP surface (`max_tokens`, `temperature`, `stop`, `speculation`, ...) with
the same checks, and a stream survives the loss of an engine replica in the same way.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from actors.requests import RunOutput
from deploy.engine_client import EngineClient, HandleEngineClient
from deploy.facts import ServedModel
from deploy.openai.answers import merge
from deploy.openai.protocol import ChatCompletionRequest, CompletionRequest, Sampling, parse
from deploy.openai.sampling import to_generate_request
from deploy.openai.usage import usage_of
from deploy.recovery import generate_with_recovery
from deploy.text import TextProcessor

_DESCRIBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `usage` is the HTTP surface's usage object."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    finish_reason: str
    stop_reason: int | str | None
    usage: dict[str, Any]


class Client:
    """A client of the application `app_name` on the Ray cluster this process is connected to."""

    def __init__(self, app_name: str = "paceline", engine: EngineClient | None = None) -> None:
        if engine is None:
            from ray import serve

            engine = HandleEngineClient(serve.get_deployment_handle("Engine", app_name))
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="paceline-client", daemon=True).start()
        facts = asyncio.run_coroutine_threadsafe(
            engine.describe(_DESCRIBE_TIMEOUT_S), self._loop
        ).result()
        self._served = ServedModel(**facts["served"])
        self._text = TextProcessor.load(self._served.tokenizer, self._served.tokenizer_revision)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> Completion:
        """The whole answer to a prompt (text or token ids) or to a conversation.

        Raises:
            ApiError: A field is wrong; it says which.
            EngineError: The engine refused or failed.
        """
        run = merge(list(self.stream(prompt, messages=messages, **fields)))
        assert run.finish_reason is not None
        return Completion(
            text=run.text,
            token_ids=run.token_ids,
            accepted=run.accepted,
            finish_reason=run.finish_reason.value,
            stop_reason=run.stop_reason,
            usage=usage_of(run),
        )

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> Iterator[RunOutput]:
        """The answer run by run. Leaving the loop early aborts the request."""
        inbox: queue.Queue[RunOutput | BaseException | None] = queue.Queue()
        runs = self.astream(prompt, messages=messages, **fields)
        pump = asyncio.run_coroutine_threadsafe(_pump(runs, inbox), self._loop)
        try:
            while (item := inbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.cancel()

    async def astream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[RunOutput]:
        """As `stream`, for asyncio."""
        body, ids = self._prepare(prompt, messages, fields)
        request = to_generate_request(body, ids, f"handle-{uuid.uuid4().hex}", self._served)
        runs = generate_with_recovery(self._engine, request, self._text.token_bytes)
        async with aclosing(runs):
            async for run in runs:
                if run.error is not None:
                    raise RuntimeError(f"the request failed: {run.error}")
                yield run

    def close(self) -> None:
        """End the client's thread. Streams in progress are cut."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _prepare(
        self,
        prompt: str | Sequence[int] | None,
        messages: Sequence[dict[str, Any]] | None,
        fields: dict[str, Any],
    ) -> tuple[Sampling, list[int]]:
        if (prompt is None) == (messages is None):
            raise ValueError("give either a prompt or messages")
        if messages is not None:
            chat = parse(
                json.dumps({**fields, "messages": list(messages)}).encode(), ChatCompletionRequest
            )
            return chat, self._text.render_chat(chat.messages)
        given = prompt if isinstance(prompt, str) else [int(token) for token in prompt or ()]
        plain = parse(json.dumps({**fields, "prompt": given}).encode(), CompletionRequest)
        only = plain.single_prompt()
        return plain, self._text.encode(only) if isinstance(only, str) else only


async def _pump(
    runs: AsyncGenerator[RunOutput], inbox: queue.Queue[RunOutput | BaseException | None]
) -> None:
    try:
        async with aclosing(runs):
            async for run in runs:
                inbox.put(run)
        inbox.put(None)
    except Exception as error:
        inbox.put(error)
