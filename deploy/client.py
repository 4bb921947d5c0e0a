"""Python client of a deployed application, through its Serve handle: no HTTP in between.

    >>> client = Client("paceline")                       # inside `ray.init(address=...)`
    >>> client.generate("Once upon a time", max_tokens=20).text
    >>> for run in client.stream(messages=[{"role": "user", "content": "Hi"}]):
    ...     print(run.text, end="")

Fields are those of `actors.requests.GenerateRequest` (`max_tokens`, `temperature`, `stop`,
`num_speculative_tokens`, ...) with the same checks as on HTTP, and a stream survives the loss of an
engine replica in the same way.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from actors.errors import InvalidRequest
from actors.requests import GenerateRequest, RunOutput
from deploy.engine_client import EngineClient, HandleEngineClient
from deploy.facts import ServedModel
from deploy.recovery import generate_with_recovery
from deploy.requests import Seeds, complete_request
from deploy.runs import merge
from deploy.text import Conversation, Prompt, Text, TextProcessor, messages_of

_DESCRIBE_TIMEOUT_S = 30.0


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
        self._seeds = Seeds(self._served.seed)
        self._text = TextProcessor.load(self._served.tokenizer, self._served.tokenizer_revision)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> RunOutput:
        """The whole answer to a prompt (text or token ids) or to a conversation, as one run.

        Raises:
            InvalidRequest: A field is wrong; it says which.
            RequestAborted: The engine gave the request up.
            EngineError: The engine refused or failed.
        """
        return merge(list(self.stream(prompt, messages=messages, **fields)))

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
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
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[RunOutput]:
        """As `stream`, for asyncio."""
        request = complete_request(
            _request(fields), _prompt(prompt, messages), self._text, self._served, self._seeds
        )
        runs = generate_with_recovery(self._engine, request, self._text.token_bytes)
        async with aclosing(runs):
            async for run in runs:
                if not run.is_acknowledgment:
                    yield run

    def close(self) -> None:
        """Cut the streams in progress, which end with an error, and end the client's thread."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


def _request(fields: dict[str, Any]) -> GenerateRequest:
    stop = fields.get("stop")
    if isinstance(stop, str | list):
        fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    try:
        return GenerateRequest(f"handle-{uuid.uuid4().hex}", (), **fields)
    except TypeError as error:  # a field that there is not
        raise InvalidRequest(str(error).partition(" ")[2]) from None


def _prompt(
    prompt: str | Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None
) -> Prompt:
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    if messages is not None:
        return Conversation(messages_of(messages))
    assert prompt is not None
    return Text(prompt) if isinstance(prompt, str) else prompt


async def _pump(
    runs: AsyncGenerator[RunOutput], inbox: queue.Queue[RunOutput | BaseException | None]
) -> None:
    try:
        async with aclosing(runs):
            async for run in runs:
                inbox.put(run)
        inbox.put(None)
    except asyncio.CancelledError:
        inbox.put(ConnectionError("the client was closed"))
        raise
    except Exception as error:
        inbox.put(error)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
