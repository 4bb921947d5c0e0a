"""The client for asyncio; the blocking one runs it in a thread."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Self, TypeVar

import numpy as np
from tqdm.auto import tqdm

from actors.checks import check_ids
from actors.errors import InvalidRequest
from actors.requests import GenerateRequest, RunOutput
from deploy.client.routes import Route, open_route
from deploy.failures import RequestAborted
from deploy.runs import merge
from deploy.text import Conversation, Prompt, Text, check_text, messages_of

T = TypeVar("T")

# One turn as a mapping: role and content.
Turns = Sequence[Mapping[str, Any]]
# Requests of a batch in flight at once: enough to fill an engine, few enough for its queue.
_BATCH_WIDTH: Final = 32
# The server knows how many ids there are; more than this no server has.
_NO_VOCABULARY: Final = 2**31


class AsyncClient:
    """A client of one served model, for asyncio.

    Fields of a call are those of `actors.requests.GenerateRequest` (`max_tokens`, `temperature`,
    `stop`, `seed`, `num_speculative_tokens`, ...), with the same checks on every way. A
    `request_id` of the caller's own names the request for `cancel`.

    Args:
        target: `http://...`, `https://...`, `grpc://...`, or the name of an application on the
            Ray cluster that this process is connected to.
        api_key: For a server that asks for one.
        timeout_s: To connect, and to be told about the server.
    """

    def __init__(
        self, target: str = "paceline", *, api_key: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self._open: Callable[[], Awaitable[Route]] = lambda: open_route(target, api_key, timeout_s)
        self._route: Route | None = None
        self._opening = asyncio.Lock()
        self._active: dict[str, _Running] = {}

    @classmethod
    def over(cls, opening: Callable[[], Awaitable[Route]]) -> Self:
        """A client of the way that `opening` opens at the first call."""
        client = cls()
        client._open = opening
        return client

    async def generate(self, prompt: str | Sequence[int], **fields: Any) -> RunOutput:
        """The whole answer to a prompt, as one run.

        Raises:
            InvalidRequest: a field is wrong; it says which.
            RequestAborted: the request was cancelled, or the engine gave it up.
            EngineError: the engine refused or failed.
        """
        return await _whole(self.stream(prompt, **fields))

    async def chat(self, messages: Turns, **fields: Any) -> RunOutput:
        """The whole answer to a conversation, as one run."""
        return await _whole(self.chat_stream(messages, **fields))

    def stream(self, prompt: str | Sequence[int], **fields: Any) -> AsyncGenerator[RunOutput]:
        """The answer to a prompt, run by run. Closing the generator ends the request."""
        return self._runs(prompt_of(prompt), fields)

    def chat_stream(self, messages: Turns, **fields: Any) -> AsyncGenerator[RunOutput]:
        """The answer to a conversation, run by run."""
        return self._runs(conversation_of(messages, fields), fields)

    async def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_in_flight: int = _BATCH_WIDTH,
        progress: bool = True,
        **fields: Any,
    ) -> list[RunOutput]:
        """Answers to many prompts, in their order, `max_in_flight` at a time.

        The first failure ends the others and is raised. `progress` shows a bar.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}, must be at least 1")
        if "request_id" in fields:
            raise InvalidRequest("'request_id' names one request", param="request_id")
        seats = asyncio.Semaphore(max_in_flight)
        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:

            async def answer(prompt: str | Sequence[int]) -> RunOutput:
                async with seats:
                    run = await self.generate(prompt, **fields)
                bar.update()
                return run

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(answer(prompt)) for prompt in prompts]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def cancel(self, request_id: str) -> bool:
        """End a request of this client; its caller gets RequestAborted. False: there is none."""
        running = self._active.get(request_id)
        if running is None:
            return False
        running.cancel()
        return True

    async def describe(self) -> dict[str, Any]:
        """What the server says of itself: the resolved facts of one engine."""
        return await (await self._opened()).describe()

    async def aclose(self) -> None:
        """Cut the streams in progress, which end with an error, and close the connection."""
        for running in list(self._active.values()):
            running.cancel()
        if self._route is not None:
            await self._route.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _opened(self) -> Route:
        async with self._opening:
            if self._route is None:
                self._route = await self._open()
        return self._route

    async def _runs(self, prompt: Prompt, fields: dict[str, Any]) -> AsyncGenerator[RunOutput]:
        request = request_of(fields)
        if request.request_id in self._active:
            raise InvalidRequest(
                f"'request_id' is {request.request_id!r}, the name of a request in progress",
                param="request_id",
            )
        running = self._active[request.request_id] = _Running(request.request_id)
        try:
            route = await running.next(self._opened())
            runs = await running.next(route.start(request, prompt))
            async with aclosing(runs):
                while (run := await running.next(anext(runs, None))) is not None:
                    if not run.is_acknowledgment:
                        yield run
        finally:
            del self._active[request.request_id]


class _Running:
    """A request in progress, which another task may cancel."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._is_cancelled = False
        self._step: asyncio.Future[Any] | None = None

    def cancel(self) -> None:
        """End it at what it waits for, or waits for next."""
        self._is_cancelled = True
        if self._step is not None:
            self._step.cancel()

    async def next(self, work: Awaitable[T]) -> T:
        """`work`, as a task of its own: cancelling it does not cancel whoever reads.

        Raises:
            RequestAborted: the request was cancelled.
        """
        self._step = step = asyncio.ensure_future(work)
        try:
            if self._is_cancelled:
                step.cancel()
            return await step
        except asyncio.CancelledError:
            if self._is_cancelled:
                raise RequestAborted(f"request {self._request_id} was cancelled") from None
            raise
        finally:
            self._step = None
            step.cancel()


async def _whole(runs: AsyncGenerator[RunOutput]) -> RunOutput:
    async with aclosing(runs):
        return merge([run async for run in runs])


def request_of(fields: dict[str, Any]) -> GenerateRequest:
    """The engine's request, without its prompt. Values are checked by whoever takes it.

    Raises:
        InvalidRequest: a field that there is not.
    """
    fields = dict(fields)
    for name in ("stop", "stop_token_ids"):
        value = fields.get(name)
        if isinstance(value, str | list):
            fields[name] = (value,) if isinstance(value, str) else tuple(value)
        for text in fields.get(name) or ():
            _check_carried(text, name)
    _check_carried(fields.get("cache_salt"), "cache_salt")
    request_id = fields.pop("request_id", None) or f"client-{uuid.uuid4().hex}"
    try:
        return GenerateRequest(request_id, (), **fields)
    except TypeError as error:
        raise InvalidRequest(str(error).partition(" ")[2]) from None


def prompt_of(prompt: str | Sequence[int]) -> Prompt:
    """A prompt of text or token ids.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        return Text(prompt)
    given: Any = prompt
    check_ids("prompt", given, _NO_VOCABULARY)
    ids: list[int] = given.tolist() if isinstance(given, np.ndarray) else list(given)
    return ids


def conversation_of(messages: Turns, fields: dict[str, Any]) -> Conversation:
    """A conversation, with what its template takes out of `fields`.

    Raises:
        InvalidRequest: a message that is not one.
    """
    template = {
        name: fields.pop(name)
        for name in ("add_generation_prompt", "continue_final_message")
        if name in fields
    }
    kwargs = fields.pop("chat_template_kwargs", {})
    turns = messages_of(messages)
    for index, turn in enumerate(turns):
        _check_carried(turn.content, f"messages[{index}].content")
        _check_carried(turn.name, f"messages[{index}].name")
    return Conversation(turns, template_kwargs=kwargs, **template)


def _check_carried(value: Any, place: str) -> None:
    """Refuse half a character, which no way carries. Everything else is the server's to check."""
    if isinstance(value, str):
        check_text(value, place)
