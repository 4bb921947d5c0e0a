"""Frames over Unix SEQPACKET sockets, every wait with a deadline.

SEQPACKET keeps packet borders, so a reader never parses half a header, and a dead peer is seen
as end of file within milliseconds.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from parallel.owned_dir import OwnedDir, remove_ownerless
from parallel.transport.frames import (
    HEADER,
    MAX_BODY_BYTES,
    ConnectionLost,
    Frame,
    FrameAssembler,
    TransportError,
    TransportTimeout,
    packets,
)

# sun_path holds 108 bytes; stay clear of it.
MAX_PATH_BYTES = 100
_HELLO_KIND = 0
_HELLO = struct.Struct("<Ii16s")
_PACKET_BYTES = HEADER.size + MAX_BODY_BYTES
_CONNECT_PAUSE_S = 0.02
Unsent = deque[bytes | memoryview]

# For a worker that was just started to connect, and for who started it to wait.
CONNECT_TIMEOUT_S = 60.0


class Hello(NamedTuple):
    """Who connected: the first frame of each connection."""

    role: str
    rank: int
    generation: int
    pid: int


class SocketDir(OwnedDir):
    """A private directory for socket files, removed by `close`; a killed process's by the next.

    Not under TMPDIR, which may be too long for a socket's path.
    """

    PREFIX = "paceline-"
    PARENT = "/tmp"

    def __init__(self) -> None:
        self.remove_ownerless()
        super().__init__(self.PREFIX, self.PARENT)

    @classmethod
    def remove_ownerless(cls) -> None:
        """Remove the directories of processes that were killed."""
        remove_ownerless(cls.PREFIX, cls.PARENT)

    def socket_path(self, name: str) -> str:
        path = str(self.path / name)
        if len(path.encode()) >= MAX_PATH_BYTES:
            raise ValueError(f"socket path {path!r} is longer than {MAX_PATH_BYTES} bytes")
        return path


class FrameSocket:
    """One connection. Frames of a generation older than `generation` are dropped on receipt.

    `generation` None: that of the first frame that comes.
    """

    def __init__(self, sock: socket.socket, generation: int | None) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._assembler = FrameAssembler()
        self._unsent: Unsent = deque()
        self.generation = generation

    @classmethod
    def connect(
        cls,
        path: str,
        role: str,
        rank: int,
        generation: int,
        pid: int,
        timeout_s: float,
        *,
        waits: bool = True,
    ) -> FrameSocket:
        """Connect and say hello; `waits` until the deadline for a listener that is not there yet.

        Raises:
            TransportTimeout: nobody listens.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                sock.close()
                if not waits or time.monotonic() >= deadline:
                    waited = f" after {timeout_s} s" if waits else ""
                    raise TransportTimeout(
                        f"{role} {rank}: nobody listens at {path}{waited}"
                    ) from None
                time.sleep(_CONNECT_PAUSE_S)
            except BaseException:
                sock.close()
                raise
        connection = cls(sock, generation)
        try:
            body = _HELLO.pack(pid, rank, role.encode())
            connection.send(_HELLO_KIND, 0, body, max(deadline - time.monotonic(), 0.0))
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    def fileno(self) -> int:
        return self._fd

    def send(self, kind: int, step: int, body: bytes, timeout_s: float) -> None:
        """Send one frame whole. A frame cut by the deadline closes the connection.

        Raises:
            ConnectionLost, TransportTimeout.
        """
        left = self._cut(kind, step, body)
        size = _size(left)
        deadline: float | None = None
        while not self._push(left):
            if deadline is None:
                deadline = time.monotonic() + timeout_s
            try:
                self._wait(select.POLLOUT, deadline, "send")
            except TransportTimeout:
                if _size(left) < size:
                    self.close()  # half a frame is out: nothing sensible can follow
                raise

    def send_soon(self, kind: int, step: int, body: bytes) -> None:
        """Queue one frame behind those that are not out yet; `flush` sends. A connection has
        either `send` or these two."""
        self._unsent += self._cut(kind, step, body)

    def flush(self) -> bool:
        """Send what the kernel takes now of the frames queued. True: all of it is out.

        Raises:
            ConnectionLost.
        """
        return self._push(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        """What `flush` has left."""
        return _size(self._unsent)

    def recv(self, timeout_s: float) -> Frame:
        """The next frame of this generation.

        Raises:
            ConnectionLost, TransportTimeout, TransportError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self.try_recv()
            if frame is not None:
                return frame
            self._wait(select.POLLIN, deadline, "receive")

    def try_recv(self) -> Frame | None:
        """The next frame if it is there already."""
        sock = self._alive()
        while True:
            try:
                packet = sock.recv(_PACKET_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionLost(f"receive: {error}") from None
            if not packet:
                raise ConnectionLost("the other side closed the connection")
            frame = self._assembler.feed(packet)
            if frame is not None and self._is_current(frame.generation):
                return frame

    def close(self) -> None:
        """Idempotent. The other side sees the end of the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _cut(self, kind: int, step: int, body: bytes) -> Unsent:
        """A frame as what is sent at once."""
        return deque(packets(kind, step, self.generation or 0, body))

    def _push(self, left: Unsent) -> bool:
        """Send of `left` what the kernel takes now; what is out is removed. True: all of it."""
        sock = self._alive()
        try:
            while left:
                num_bytes = sock.send(left[0])
                if num_bytes < len(left[0]):
                    left[0] = memoryview(left[0])[num_bytes:]
                else:
                    left.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"send: {error}") from None
        return True

    def _alive(self) -> socket.socket:
        if self._sock is None:
            raise ConnectionLost("this side closed the connection")
        return self._sock

    def _is_current(self, generation: int) -> bool:
        """Whether a frame of `generation` is for this side; one from the future is an error."""
        if self.generation is None:
            self.generation = generation
        if generation > self.generation:
            raise TransportError(
                f"a frame of generation {generation} reached generation {self.generation}"
            )
        return generation == self.generation

    def _wait(self, event: int, deadline: float, what: str) -> None:
        remaining = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self._fd, event)
        if remaining <= 0 or not poller.poll(remaining * 1e3):
            raise TransportTimeout(f"cannot {what}: the deadline passed")


class FrameListener:
    """Accepts connections at a socket path, each with its hello.

    `generation`: of whom it waits for; None: of anyone. It may be raised between two calls: what
    an older generation left in the queue is dropped.
    """

    def __init__(self, path: str, generation: int | None) -> None:
        self.path = path
        self.generation = generation
        self._sock: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.bind(path)
            self._sock.listen(64)
        except BaseException:
            self._sock.close()
            raise

    def accept(self, timeout_s: float) -> tuple[FrameSocket, Hello]:
        """The next connection of this generation.

        Raises:
            TransportTimeout: nobody connected in time.
        """
        if self._sock is None:
            raise ConnectionLost(f"the listener at {self.path} is closed")
        deadline = time.monotonic() + timeout_s
        while True:
            self._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                raise TransportTimeout(
                    f"nobody connected to {self.path} in {timeout_s} s"
                ) from None
            connection = FrameSocket(sock, None)
            try:
                frame = connection.recv(max(deadline - time.monotonic(), 1e-3))
                if frame.kind != _HELLO_KIND:
                    raise TransportError(f"frame kind {frame.kind} came before a hello")
                if self.generation is not None:
                    connection.generation = self.generation
                    if not connection._is_current(frame.generation):
                        connection.close()
                        continue
            except ConnectionLost:
                connection.close()
                continue  # gone before it said who it was
            except BaseException:
                connection.close()
                raise
            pid, rank, role = _HELLO.unpack(frame.body)
            return connection, Hello(role.rstrip(b"\0").decode(), rank, frame.generation, pid)

    def fileno(self) -> int:
        """Readable when somebody connects. The listener must be open."""
        assert self._sock is not None
        return self._sock.fileno()

    def close(self) -> None:
        """Idempotent; removes the socket file."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            Path(self.path).unlink(missing_ok=True)


def wait_any(connections: list[FrameSocket], timeout_s: float) -> list[FrameSocket]:
    """Those of `connections` with something to receive, an end of file included."""
    poller = select.poll()
    by_fd = {}
    for connection in connections:
        by_fd[connection.fileno()] = connection
        poller.register(connection.fileno(), select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(max(timeout_s, 0.0) * 1e3)]


def _size(left: Unsent) -> int:
    return sum(map(len, left))
