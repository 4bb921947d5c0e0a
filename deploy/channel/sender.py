"""An engine replica's end: a channel to each front, and the runs of a step as one frame.

Runs are put and flushed by the step loop's thread, which never waits here: what a front's socket
does not take now goes out as it empties, on the event loop. Everything else belongs to the event
loop. What a front has not taken is bounded: by the requests that it has, each of which stays in
progress until its last run is out, and by `MAX_UNSENT_BYTES`, after which the front is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from actors.requests import RunOutput
from deploy.channel.messages import RUNS, ChannelLost, ReplyTo, pack_runs
from parallel.transport.frames import TransportError
from parallel.transport.socket import FrameSocket
from parallel.transport.tcp import TcpFrameSocket

ROLE: Final = "engine"
MAX_UNSENT_BYTES: Final = 64 << 20
_DIAL_S: Final = 10.0


class Delivery:
    """The way of one request's runs: an acknowledgment, then those that are `put`.

    Attributes:
        done: Done when the last run is out.
    """

    def __init__(self, channel: Channel, acknowledgment: RunOutput) -> None:
        self.done: asyncio.Future[None] = channel.loop.create_future()
        self._channel = channel
        self._acknowledgment: RunOutput | None = acknowledgment

    def acknowledge(self) -> None:
        """Say that the request was taken, unless a run has said so already."""
        self._channel.put(self._opening())
        self._channel.flush()

    def put(self, run: RunOutput) -> None:
        """Send `run` with the next flush. From any thread.

        Raises:
            ChannelLost.
        """
        self._channel.put([*self._opening(), run])

    def fail(self, error: Exception) -> None:
        """End without a last run. From any thread."""
        self._channel.call_soon(self.end, error)

    def end(self, error: Exception | None) -> None:
        """On the event loop. Idempotent."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _opening(self) -> Sequence[RunOutput]:
        acknowledgment, self._acknowledgment = self._acknowledgment, None
        return () if acknowledgment is None else (acknowledgment,)


class Channel:
    """The connection to one front.

    Args:
        connection: To the front.
        lose: Called once, when the connection is gone.
    """

    def __init__(self, connection: FrameSocket, lose: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._connection = connection
        self._lose = lose
        self._deliveries: dict[str, Delivery] = {}
        # Guards what is below: the step loop's thread and the event loop both send.
        self._lock = threading.Lock()
        self._runs: list[RunOutput] = []
        self._ending: list[str] = []  # requests whose last run is not out yet
        self._is_waiting = False  # for the socket to empty
        self._error: ChannelLost | None = None
        self.loop.add_reader(connection.fileno(), self._listen)

    @contextlib.contextmanager
    def delivery(self, acknowledgment: RunOutput) -> Iterator[Delivery]:
        """A new request's. Inside the block its runs are sent."""
        delivery = Delivery(self, acknowledgment)
        self._deliveries[acknowledgment.request_id] = delivery
        try:
            if self._error is not None:
                raise self._error
            yield delivery
        finally:
            del self._deliveries[acknowledgment.request_id]

    def put(self, runs: Sequence[RunOutput]) -> None:
        """Have `runs` in the next frame. From any thread.

        Raises:
            ChannelLost.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._runs += runs

    def flush(self) -> None:
        """Send what was put as one frame. From any thread; waits for nobody."""
        with self._lock:
            if not self._runs or self._error is not None:
                return
            runs, self._runs = self._runs, []
            self._connection.send_soon(RUNS, 0, pack_runs(runs))
            self._ending += [run.request_id for run in runs if run.finish_reason is not None]
            self._push()

    def close(self, why: str) -> None:
        """End it, and the requests that are on it. On the event loop. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            error = self._error = ChannelLost(why)
            self.loop.remove_reader(self._connection.fileno())
            self.loop.remove_writer(self._connection.fileno())
            self._connection.close()
        for delivery in self._deliveries.values():
            delivery.end(error)
        self._lose()

    def call_soon(self, work: Callable[..., object], *args: object) -> None:
        """Have `work` done on the event loop. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is everything else
            self.loop.call_soon_threadsafe(work, *args)

    def _push(self) -> None:
        """Send, with the lock held."""
        try:
            is_out = self._connection.flush()
        except TransportError as error:
            self.call_soon(self.close, f"a front is gone: {error}")
            return
        if is_out:
            ending, self._ending = self._ending, []
            if ending:
                self.call_soon(self._end, ending)
        elif (num_bytes := self._connection.num_unsent_bytes) > MAX_UNSENT_BYTES:
            self.call_soon(self.close, f"a front has left {num_bytes} bytes of runs untaken")
        elif not self._is_waiting:
            self._is_waiting = True
            self.call_soon(self._wait)

    def _wait(self) -> None:
        if self._error is None:
            self.loop.add_writer(self._connection.fileno(), self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            self._push()
            if not self._connection.num_unsent_bytes:
                self._is_waiting = False
                self.loop.remove_writer(self._connection.fileno())

    def _end(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._deliveries:
                self._deliveries[request_id].end(None)

    def _listen(self) -> None:
        """A front says nothing; when it ends, so do its requests."""
        try:
            while self._connection.try_recv() is not None:
                pass
        except TransportError as error:
            self.close(f"a front is gone: {error}")


class Channels:
    """All of an engine replica.

    Args:
        node: This process's.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._opening: dict[ReplyTo, asyncio.Task[Channel]] = {}
        self._open: tuple[Channel, ...] = ()  # replaced, never changed: two threads read it

    async def to(self, reply_to: ReplyTo) -> Channel:
        """The channel to a front, which is connected to on first use.

        Raises:
            ChannelLost: it cannot be reached.
        """
        opening = self._opening.get(reply_to)
        if opening is None:
            opening = asyncio.ensure_future(self._connect(reply_to))
            self._opening[reply_to] = opening
        # Others may wait for the same one: a request that is cancelled does not take it along.
        return await asyncio.shield(opening)

    def flush(self) -> None:
        """Send what was put into any. From any thread."""
        for channel in self._open:
            channel.flush()

    def close(self) -> None:
        """End all. On the event loop. Idempotent."""
        for channel in self._open:
            channel.close("the engine replica ends")

    async def _connect(self, reply_to: ReplyTo) -> Channel:
        try:
            connection = await asyncio.to_thread(_dial, reply_to, self._node)
        except TransportError as error:
            del self._opening[reply_to]
            raise ChannelLost(f"the front cannot be reached from this replica: {error}") from error

        def lose() -> None:
            del self._opening[reply_to]
            self._open = tuple(each for each in self._open if each is not channel)

        channel = Channel(connection, lose)
        self._open = (*self._open, channel)
        return channel


def _dial(reply_to: ReplyTo, node: str) -> FrameSocket:
    # A front listens before anyone hears of it: one that does not any more is gone.
    if reply_to.node == node:
        return FrameSocket.connect(reply_to.path, ROLE, 0, 0, os.getpid(), _DIAL_S, waits=False)
    return TcpFrameSocket.dial(reply_to.tcp, ROLE, 0, 0, os.getpid(), _DIAL_S, waits=False)
