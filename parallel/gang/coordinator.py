"""The coordinator: two threads in rank 0's process that serve the rounds to all ranks."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time

from parallel.gang.rounds import BATCH, MAX_DELAY_S, SEND_S, Decision, Kind, Rounds
from parallel.transport.frames import TransportError, TransportTimeout
from parallel.transport.socket import FrameSocket
from parallel.transport.tcp import TcpAddress, TcpFrameListener

logger = logging.getLogger(__name__)

_ACCEPT_S = 1.0


class Coordinator:
    """Serves `Rounds` to the ranks of one gang, in threads of its own.

    Args:
        host: Address to listen at; the other ranks' nodes must reach it.
        size: Number of ranks.
        digest: Of the configuration; a rank with another one is refused.
        max_delay_s: Longest wait for a busy rank.
        lockstep: Dummy steps for ranks without work, and no deadline.
    """

    def __init__(
        self,
        host: str,
        size: int,
        digest: str,
        max_delay_s: float = MAX_DELAY_S,
        *,
        lockstep: bool = False,
    ) -> None:
        self._size = size
        self._digest = digest
        self._listener = TcpFrameListener(host, generation=0)
        self._rounds = Rounds(max_delay_s, lockstep=lockstep)
        self._connections: dict[int, FrameSocket] = {}
        self._reports: dict[int, int] = {}  # rank -> the frame step to answer
        self._arrivals: list[tuple[int, FrameSocket]] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._is_stopping = False
        self._shared: bytes | None = None
        self.num_late = 0
        self.fallback: str | None = None
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._accept, "paceline-dp-accept"), (self._serve, "paceline-dp"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> TcpAddress:
        return self._listener.address

    def close(self) -> None:
        """End the threads and all connections. Idempotent."""
        self._is_stopping = True
        self._listener.close()
        self._wake()
        for thread in self._threads:
            thread.join(2 * _ACCEPT_S)
        for connection in self._connections.values():
            connection.close()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            logger.debug("the coordinator's thread has ended")

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, hello = self._listener.accept(_ACCEPT_S)
            except TransportTimeout:
                continue
            except TransportError:
                return  # the listener is closed
            try:
                frame = connection.recv(_ACCEPT_S)
            except TransportError:
                connection.close()
                continue
            theirs = frame.body.decode(errors="replace")
            refusal = self._refusal(hello.rank, frame.kind, theirs)
            if refusal:
                logger.error("data-parallel rank %d was refused: %s", hello.rank, refusal)
                self._send(connection, Kind.FALLBACK, 0, refusal.encode())
                connection.close()
                continue
            self._send(connection, Kind.DIGEST, 0, self._digest.encode())
            with self._lock:
                self._arrivals.append((hello.rank, connection))
            self._wake()

    def _refusal(self, rank: int, kind: int, digest: str) -> str:
        if not 0 <= rank < self._size:
            return f"rank {rank} in a gang of {self._size}"
        if kind != Kind.DIGEST or digest != self._digest:
            return f"its configuration {digest[:12]} is not the gang's {self._digest[:12]}"
        return ""

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._wait()
                self._seat_arrivals()
                for rank, connection in list(self._connections.items()):
                    self._hear(rank, connection)
                decision = self._rounds.decide(time.monotonic())
                if decision is not None:
                    self._announce(decision)
        except Exception:
            logger.exception("the data-parallel coordinator failed")
            self._fall_back("the coordinator failed")
        finally:
            self._wake_read.close()
            self._wake_write.close()

    def _wait(self) -> None:
        deadline = self._rounds.deadline
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for connection in self._connections.values():
            poller.register(connection.fileno(), select.POLLIN)
        timeout_s = 1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
        poller.poll(timeout_s * 1e3)
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            return

    def _seat_arrivals(self) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        for rank, connection in arrivals:
            if rank in self._connections:
                self._lose(rank, "it joined twice")
            self._connections[rank] = connection
            self._rounds.join(rank)
            if self._shared is not None:
                self._send(connection, Kind.SHARE, 0, self._shared)
            if self.fallback is not None:
                self._send(connection, Kind.FALLBACK, 0, self.fallback.encode())

    def _hear(self, rank: int, connection: FrameSocket) -> None:
        try:
            while (frame := connection.try_recv()) is not None:
                if frame.kind == Kind.REPORT:
                    self._reports[rank] = frame.step
                    self._rounds.report(rank, BATCH.unpack(frame.body)[0], time.monotonic())
                elif frame.kind == Kind.IDLE:
                    self._rounds.idle(rank)
                elif frame.kind == Kind.SHARE and rank == 0:
                    self._shared = frame.body
                    for other in [r for r in self._connections if r != 0]:
                        self._tell(other, Kind.SHARE, 0, self._shared)
                else:
                    raise TransportError(f"frame kind {frame.kind}")
        except TransportError as error:
            self._lose(rank, str(error))

    def _announce(self, decision: Decision) -> None:
        self.num_late += len(decision.late)
        body = BATCH.pack(decision.batch)
        for rank in decision.reporters:
            self._tell(rank, Kind.ANSWER, self._reports[rank], body)
        for rank in decision.dummies:
            self._tell(rank, Kind.DUMMY, decision.round, body)

    def _tell(self, rank: int, kind: Kind, step: int, body: bytes) -> None:
        connection = self._connections.get(rank)
        if connection is not None and not self._send(connection, kind, step, body):
            self._lose(rank, "it takes no messages")

    def _lose(self, rank: int, why: str) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()
        self._rounds.leave(rank)
        if not self._is_stopping:
            self._fall_back(f"data-parallel rank {rank} is gone: {why}")

    def _fall_back(self, reason: str) -> None:
        if self.fallback is None:
            logger.warning("dynamic K is off for the gang: %s", reason)
            self.fallback = reason
        for connection in self._connections.values():
            self._send(connection, Kind.FALLBACK, 0, reason.encode())

    @staticmethod
    def _send(connection: FrameSocket, kind: Kind, step: int, body: bytes) -> bool:
        try:
            connection.send(kind, step, body, SEND_S)
        except TransportError:
            return False  # its end of file is seen by the reader
        return True
