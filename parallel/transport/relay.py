"""One process per remote node that carries frames between the verifier and that node's workers.

A step's plan crosses the network once per node, over TCP, and is handed to each worker over a Unix
socket; answers go the other way. What ends, ends everything that hangs on it: a worker that dies
closes the uplink, which the verifier sees as it would see the worker's own end of file.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from parallel.transport.frames import TransportError, TransportTimeout
from parallel.transport.socket import (
    CONNECT_TIMEOUT_S,
    FrameListener,
    FrameSocket,
    Hello,
    SocketDir,
    wait_any,
)
from parallel.transport.tcp import TcpAddress, TcpFrameListener, TcpFrameSocket

logger = logging.getLogger(__name__)

_DIAL_S = 10.0
# As long as any step: whether a worker that takes nothing hangs is for the verifier to say.
_SEND_S = 3600.0
_LOOK_S = 1.0


class Relay:
    """Of one node. Knows sockets only; `actors.startup.launch` makes an actor of it.

    Args:
        host: Address of this node that other nodes reach.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._sockets = SocketDir()
        self._num_paths = 0
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, role: str, count: int, verifier: TcpAddress, generation: int) -> str:
        """Carry frames for `count` workers of `role`; returns the path they connect to.

        When all have connected, one connection in their name goes to the verifier, with the
        lowest of their ranks.
        """
        listener = FrameListener(self._new_path(role), generation)

        def run() -> None:
            workers: list[FrameSocket] = []
            ranks: list[int] = []
            try:
                for _ in range(count):
                    worker, hello = listener.accept(CONNECT_TIMEOUT_S)
                    workers.append(worker)
                    ranks.append(hello.rank)
                listener.close()
                uplink = TcpFrameSocket.dial(
                    TcpAddress(*verifier), role, min(ranks), generation, os.getpid(),
                    CONNECT_TIMEOUT_S,
                )  # fmt: skip
                self._pump(uplink, workers)
            finally:
                listener.close()
                for worker in workers:
                    worker.close()

        self._start(run, f"{role} of ranks on this node")
        return listener.path

    def export(self, path: str) -> TcpAddress:
        """Make the Unix listener at `path` reachable from other nodes, again and again, for
        whatever generation it waits for then."""
        listener = TcpFrameListener(self._host, None)

        def meet() -> tuple[FrameSocket, FrameSocket]:
            far, hello = listener.accept(_LOOK_S)
            return far, self._near(far, path, hello)

        self._start(lambda: self._bridge(meet, listener.close), f"export of {path}")
        return listener.address

    def reach(self, address: TcpAddress) -> str:
        """The other end of `export`: a path on this node that leads to `address`."""
        listener = FrameListener(self._new_path("far"), None)

        def meet() -> tuple[FrameSocket, FrameSocket]:
            near, hello = listener.accept(_LOOK_S)
            try:
                far = TcpFrameSocket.dial(
                    TcpAddress(*address), hello.role, hello.rank, hello.generation, os.getpid(),
                    _DIAL_S,
                )  # fmt: skip
            except TransportError:
                near.close()
                raise
            return near, far

        self._start(lambda: self._bridge(meet, listener.close), f"way to {address[0]}")
        return listener.path

    def socket_path(self, name: str) -> str:
        """A path on this node for a worker that listens itself."""
        return self._sockets.socket_path(name)

    def close(self) -> None:
        """End everything. Idempotent."""
        self._is_closing.set()
        for thread in self._threads:
            thread.join(2 * _LOOK_S)
        self._sockets.close()

    def _new_path(self, name: str) -> str:
        self._num_paths += 1
        return self._sockets.socket_path(f"{name}-{self._num_paths}")

    def _start(self, run: Callable[[], None], what: str) -> None:
        def logged() -> None:
            try:
                run()
            except TransportError as error:
                logger.warning("relay, %s: %s", what, error)

        thread = threading.Thread(target=logged, name="paceline-relay", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _near(self, far: FrameSocket, path: str, hello: Hello) -> FrameSocket:
        try:
            return FrameSocket.connect(
                path, hello.role, hello.rank, hello.generation, os.getpid(), _DIAL_S
            )
        except TransportError:
            far.close()
            raise

    def _bridge(
        self, meet: Callable[[], tuple[FrameSocket, FrameSocket]], close: Callable[[], None]
    ) -> None:
        try:
            while not self._is_closing.is_set():
                try:
                    one, other = meet()
                except TransportTimeout:
                    continue
                self._start(lambda a=one, b=other: self._pump(a, [b]), "bridge")  # type: ignore[misc]
        finally:
            close()

    def _pump(self, uplink: FrameSocket, workers: Sequence[FrameSocket]) -> None:
        """Carry frames until any side ends; then all do."""
        everyone = [uplink, *workers]
        try:
            while not self._is_closing.is_set():
                for source in wait_any(everyone, _LOOK_S):
                    targets = workers if source is uplink else (uplink,)
                    while (frame := source.try_recv()) is not None:
                        for target in targets:
                            target.send(frame.kind, frame.step, frame.body, _SEND_S)
        except TransportError as error:
            logger.info("relay: a side ended (%s); closing the others", error)
        finally:
            for connection in everyone:
                connection.close()
