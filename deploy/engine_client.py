"""How the surfaces reach engines.

`EngineClient` is the contract; `HandleEngineClient` fulfils it over a Serve handle. Unit tests
fulfil it with a scripted engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import ray
from ray.serve.exceptions import DeploymentUnavailableError

from actors.errors import EngineDead
from actors.requests import GenerateRequest, RunOutput
from deploy.channel.messages import ChannelLost
from deploy.channel.receiver import Inbox, Receiver
from deploy.failures import root_cause
from deploy.outlook import Outlook, ask_serve

# For Ray to know why a replica is gone, whose connection has ended already.
_VERDICT_S: Final = 10.0


class Node(NamedTuple):
    """A node of the cluster: its id, and an address that other nodes reach."""

    id: str
    host: str


def this_node() -> Node:
    """The node of this process."""
    if not ray.is_initialized():  # tests and offline use
        return Node("local", "127.0.0.1")
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


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

    async def aclose(self) -> None:
        """End the connections to engines, if there are any. Idempotent."""


class HandleEngineClient:
    """Engines behind a Serve deployment handle: calls go through it, runs come over channels."""

    def __init__(self, handle: Any, outlook: Outlook | None = None) -> None:
        self._handle = handle
        self._submit = handle.options(method_name="generate")
        self._receiver = Receiver(*this_node())
        self._calls: set[asyncio.Task[None]] = set()
        self._names: set[str] = set()  # of the replicas last heard of
        self._outlook = outlook or Outlook(
            lambda: ask_serve(handle.app_name, handle.deployment_name)
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        """As the contract says.

        Raises:
            NoReplicaComing: nobody takes the request, and nobody will.
        """
        inbox = self._receiver.expect(request.request_id)
        response = self._submit.remote(request, self._receiver.reply_to)
        call = self._watch(response, inbox)
        has_begun = finished = False
        try:
            run = await self._first(inbox)
            while True:
                finished = run.finish_reason is not None or run.error is not None
                has_begun = has_begun or bool(run.token_ids)
                yield run
                if finished:
                    return
                run = await inbox.next()
        except DeploymentUnavailableError:
            await self._outlook.check()
            raise
        except ChannelLost:
            # The fastest sign that a replica is gone. Whoever had a token of it goes on at once;
            # of the others one may be why, unless Ray knows that the replica was ended on purpose.
            if not has_begun and (await asyncio.wait({call}, timeout=_VERDICT_S))[0]:
                call.result()
            raise
        finally:
            self._receiver.forget(request.request_id)
            # Serve cancels its own children only when the caller's request is cancelled; a caller
            # that merely stops reading (stop, timeout, recovery) must say so.
            if not finished:
                response.cancel()
                call.cancel()

    def _watch(self, response: Awaitable[None], inbox: Inbox) -> asyncio.Task[None]:
        """Have `inbox` hear of a call that fails. One that succeeds has sent its last run."""

        async def wait() -> None:
            await response

        def tell(call: asyncio.Task[None]) -> None:
            self._calls.discard(call)
            if call.cancelled():  # by whoever has left, or by Ray
                inbox.put(EngineDead("the call to the engine was cancelled"))
            elif (error := call.exception()) is not None:
                inbox.put(error)

        call = asyncio.ensure_future(wait())
        self._calls.add(call)
        call.add_done_callback(tell)
        return call

    async def _first(self, inbox: Inbox) -> RunOutput:
        """The first run. Without a replica the call waits in Serve's router, so that now and then
        Serve is asked whether one is coming."""
        while True:
            limit = asyncio.timeout(self._outlook.look_s)
            try:
                async with limit:
                    return await inbox.next()
            except TimeoutError:
                if not limit.expired():
                    raise
            await self._outlook.check()

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

    async def aclose(self) -> None:
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._receiver.aclose()

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
