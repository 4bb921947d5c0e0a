"""How the surfaces reach engines.

`EngineClient` is the contract; `HandleEngineClient` fulfils it over a Serve handle. Unit tests
fulfil it with a scripted engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, Protocol

from actors.requests import GenerateRequest, RunOutput
from deploy.failures import root_cause


class ReplicaReport(NamedTuple):
    """What one engine replica says of itself. `reason` is empty when it is healthy."""

    replica: str
    reason: str
    stats: dict[str, Any]


class EngineClient(Protocol):
    """Engines, seen from in front of them."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        """Outputs of one request. Closing the generator aborts the request."""

    async def reports(self, timeout_s: float) -> Sequence[ReplicaReport]:
        """Health and statistics of every replica; one that does not answer is reported as such."""

    async def describe(self, timeout_s: float) -> dict[str, Any]:
        """Resolved facts of one replica."""


class HandleEngineClient:
    """Engines behind a Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = handle.options(method_name="generate", stream=True)
        self._names: set[str] = set()  # of the replicas last heard of

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        response = self._stream.remote(request)
        finished = False
        try:
            async for output in response:
                finished = output.finish_reason is not None or output.error is not None
                yield output
        finally:
            # Serve cancels its own children only when the caller's request is cancelled; a caller
            # that merely stops reading (stop, timeout, recovery) must say so.
            if not finished:
                response.cancel()

    async def reports(self, timeout_s: float) -> Sequence[ReplicaReport]:
        try:
            answers = await self._ask_all("report", timeout_s)
        except Exception as error:
            return [ReplicaReport("", f"engines cannot be reached: {root_cause(error)}", {})]
        answered = [ReplicaReport(*answer) for answer in answers if isinstance(answer, tuple)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        names = {report.replica for report in answered}
        missing = sorted(self._names - names)
        if len(missing) != len(failures):
            missing = [""] * len(failures)  # some have come or gone: no telling which is which
        self._names = names.union(filter(None, missing))
        lost = [_lost(name, why, timeout_s) for name, why in zip(missing, failures, strict=True)]
        return [*answered, *lost]

    async def describe(self, timeout_s: float) -> dict[str, Any]:
        # One replica's facts are all replicas'; the others may be slow.
        tasks = await self._tasks("describe", timeout_s)
        try:
            for done in asyncio.as_completed(tasks, timeout=timeout_s):
                with contextlib.suppress(Exception):
                    answer: dict[str, Any] = await done
                    return answer
        finally:
            for task in tasks:
                task.cancel()
        raise TimeoutError("no engine replica answered")

    async def _ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """Each replica's answer, or why it gave none. One that hangs costs its own answer only."""
        tasks = await self._tasks(method, timeout_s)
        return await asyncio.gather(
            *(asyncio.wait_for(task, timeout_s) for task in tasks), return_exceptions=True
        )

    async def _tasks(self, method: str, timeout_s: float) -> list[asyncio.Task[Any]]:
        # The public `results_async` has one timeout for all and then no answer at all.
        response = self._handle.broadcast(method)
        pending = response._fetch_replica_results_async()
        results = await asyncio.wait_for(pending, timeout_s)
        return [asyncio.ensure_future(result.get_async()) for result in results]


def _lost(name: str, why: BaseException, timeout_s: float) -> ReplicaReport:
    if isinstance(why, TimeoutError):
        return ReplicaReport(name, f"it did not answer in {timeout_s:g} s", {})
    return ReplicaReport(name, f"it was lost: {root_cause(why)}", {})
