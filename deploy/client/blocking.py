"""The client for code without asyncio: scripts, notebooks, threads."""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

from actors.requests import RunOutput
from deploy.client.asynchronous import AsyncClient, Turns
from deploy.client.routes import Route
from deploy.failures import RequestAborted

T = TypeVar("T")


class Client:
    """A client of one served model; see `AsyncClient` for targets, fields and errors.

    Safe to use from several threads, and inside a running event loop (a notebook has one).
    """

    def __init__(
        self, target: str = "paceline", *, api_key: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self._run_over(AsyncClient(target, api_key=api_key, timeout_s=timeout_s))
        # A wrong address or application is said here, not with the first request.
        self.describe()

    @classmethod
    def over(cls, opening: Callable[[], Awaitable[Route]]) -> Self:
        """A client of the way that `opening` opens."""
        client = cls.__new__(cls)
        client._run_over(AsyncClient.over(opening))
        return client

    def _run_over(self, client: AsyncClient) -> None:
        self._client = client
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="paceline-client", daemon=True
        )
        self._thread.start()

    def generate(self, prompt: str | Sequence[int], **fields: Any) -> RunOutput:
        """The whole answer to a prompt (text or token ids), as one run."""
        return self._wait(self._client.generate(prompt, **fields))

    def chat(self, messages: Turns, **fields: Any) -> RunOutput:
        """The whole answer to a conversation, as one run."""
        return self._wait(self._client.chat(messages, **fields))

    def stream(self, prompt: str | Sequence[int], **fields: Any) -> Stream:
        """The answer to a prompt, run by run."""
        fields.setdefault("request_id", _new_id())
        return self._stream(self._client.stream(prompt, **fields), fields["request_id"])

    def chat_stream(self, messages: Turns, **fields: Any) -> Stream:
        """The answer to a conversation, run by run."""
        fields.setdefault("request_id", _new_id())
        return self._stream(self._client.chat_stream(messages, **fields), fields["request_id"])

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], **fields: Any
    ) -> list[RunOutput]:
        """Answers to many prompts, in their order; see `AsyncClient.generate_batch`."""
        return self._wait(self._client.generate_batch(prompts, **fields))

    def cancel(self, request_id: str) -> bool:
        """End a request that another thread waits for; that one gets RequestAborted."""

        async def cancel() -> bool:
            return self._client.cancel(request_id)

        return self._wait(cancel())

    def describe(self) -> dict[str, Any]:
        """What the server says of itself: the resolved facts of one engine."""
        return self._wait(self._client.describe())

    def close(self) -> None:
        """Cut what is in progress, which ends with an error, and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._wait(_close(self._client))
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, runs: AsyncGenerator[RunOutput], request_id: str) -> Stream:
        self._check_open()
        return Stream(self, runs, request_id)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_open()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the request too
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")


class Stream(Iterator[RunOutput]):
    """One answer, run by run. Leaving a `with` block, or `cancel`, ends the request."""

    def __init__(self, client: Client, runs: AsyncGenerator[RunOutput], request_id: str) -> None:
        self.request_id = request_id
        self._client = client
        self._inbox: queue.Queue[RunOutput | BaseException | None] = queue.Queue()
        self._is_over = False
        self._pump = asyncio.run_coroutine_threadsafe(_pump(runs, self._inbox), client._loop)

    def __next__(self) -> RunOutput:
        if self._is_over:
            raise StopIteration
        item = self._inbox.get()
        if isinstance(item, RunOutput):
            return item
        self._is_over = True
        if item is None:
            raise StopIteration
        raise item

    def cancel(self) -> None:
        """End the request; what came before can still be read. Idempotent."""
        self._pump.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # `for` loops that are left early drop their stream without a word.
        if not self._client._is_closed:
            self.cancel()


async def _close(client: AsyncClient) -> None:
    """Close the client; whoever still waits on this loop gets an error."""
    await client.aclose()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _pump(
    runs: AsyncGenerator[RunOutput], inbox: queue.Queue[RunOutput | BaseException | None]
) -> None:
    try:
        async with aclosing(runs):
            async for run in runs:
                inbox.put(run)
        inbox.put(None)
    except asyncio.CancelledError:
        inbox.put(RequestAborted("the stream was cancelled"))
        raise
    except Exception as error:
        inbox.put(error)


def _new_id() -> str:
    return f"client-{uuid.uuid4().hex}"
