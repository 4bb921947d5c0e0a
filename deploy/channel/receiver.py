"""A front's end: engine replicas connect to it, and each request hears its own runs."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from actors.requests import RunOutput
from deploy.channel.messages import ChannelLost, ReplyTo, unpack_runs
from parallel.transport.frames import TransportError
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
from parallel.transport.tcp import TcpFrameListener

logger = logging.getLogger("ray.serve")

_ACCEPT_S: Final = 5.0


class Inbox:
    """Runs of one request on their way to the one who reads them. On the event loop."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[RunOutput | BaseException] = asyncio.Queue()
        self.connection: FrameSocket | None = None  # the one that runs came over

    def put(self, item: RunOutput | BaseException) -> None:
        """A run, or what ends the request without a last one."""
        self._items.put_nowait(item)

    async def next(self) -> RunOutput:
        """The next run.

        Raises:
            BaseException: what was put.
        """
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class Receiver:
    """All channels of a front, on one event loop, which opens with the first request.

    Args:
        node: This process's.
        host: An address of that node that other nodes reach.
    """

    def __init__(self, node: str, host: str) -> None:
        self._node = node
        self._host = host
        self._sockets: SocketDir | None = None
        self._listeners: tuple[FrameListener | TcpFrameListener, ...] = ()
        self._reply_to: ReplyTo | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._connections: set[FrameSocket] = set()
        self._welcomes: set[asyncio.Task[None]] = set()

    @property
    def reply_to(self) -> ReplyTo:
        """What engines are told with a request."""
        if self._reply_to is None:
            self._reply_to = self._listen()
        return self._reply_to

    def expect(self, request_id: str) -> Inbox:
        """Where the runs of a request will be, until it is forgotten."""
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def forget(self, request_id: str) -> None:
        """Nobody reads the runs of a request any more. Idempotent."""
        self._inboxes.pop(request_id, None)

    async def aclose(self) -> None:
        """End all. Idempotent."""
        listeners, self._listeners, self._reply_to = self._listeners, (), None
        loop = asyncio.get_running_loop()
        for listener in listeners:
            loop.remove_reader(listener.fileno())
        await asyncio.gather(*self._welcomes)
        for listener in listeners:
            listener.close()
        for connection in tuple(self._connections):
            self._lose(connection, "this side closed the channel")
        if self._sockets is not None:
            self._sockets.close()

    def _listen(self) -> ReplyTo:
        self._sockets = SocketDir()
        near = FrameListener(self._sockets.socket_path("runs"), None)
        far = TcpFrameListener(self._host, None)
        self._listeners = (near, far)
        for listener in self._listeners:
            self._watch(listener)
        return ReplyTo(self._node, near.path, far.address)

    def _watch(self, listener: FrameListener | TcpFrameListener) -> None:
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: FrameListener | TcpFrameListener) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        welcome = loop.create_task(self._welcome(listener))
        self._welcomes.add(welcome)
        welcome.add_done_callback(self._welcomes.discard)

    async def _welcome(self, listener: FrameListener | TcpFrameListener) -> None:
        """Take in who waits at the door; in a thread, as it has to say who it is first."""
        try:
            connection, _ = await asyncio.to_thread(listener.accept, _ACCEPT_S)
        except TransportError as error:
            logger.warning("an engine did not connect: %s", error)
        else:
            self._connections.add(connection)
            asyncio.get_running_loop().add_reader(connection.fileno(), self._read, connection)
        if listener in self._listeners:
            self._watch(listener)

    def _read(self, connection: FrameSocket) -> None:
        try:
            while (frame := connection.try_recv()) is not None:
                for run in unpack_runs(frame.body):
                    inbox = self._inboxes.get(run.request_id)
                    if inbox is not None:  # else its reader has left
                        inbox.connection = connection
                        inbox.put(run)
        except TransportError as error:
            self._lose(connection, str(error))

    def _lose(self, connection: FrameSocket, why: str) -> None:
        self._connections.discard(connection)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        for inbox in self._inboxes.values():
            if inbox.connection is connection:
                inbox.put(ChannelLost(f"the connection to the engine replica is lost: {why}"))
