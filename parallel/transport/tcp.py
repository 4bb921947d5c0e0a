"""The same frames over TCP, between nodes. Nothing is delayed, and strangers do not get in.

Both sides know a secret that travelled over a channel of the cluster (an actor call). The hello is
a challenge in both directions, so the secret itself never crosses the wire and a recorded hello
opens nothing. What follows is neither encrypted nor signed: a cluster's own network is assumed,
as it is for the collectives of the model.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import time
from collections import deque
from typing import NamedTuple

from parallel.transport.frames import (
    HEADER,
    MAGIC,
    ConnectionLost,
    Frame,
    TransportError,
    TransportTimeout,
)
from parallel.transport.socket import FrameSocket, Hello, Unsent

logger = logging.getLogger(__name__)

_HELLO_KIND = 0
_NONCE_BYTES = 16
_MAC_BYTES = 32
_HELLO = struct.Struct(f"<Ii16s{_NONCE_BYTES}s{_MAC_BYTES}s")
_MAX_HELLO_BYTES = 256
# A plan or a result is kilobytes; a length beyond this is a broken peer, not a message.
_MAX_BODY_BYTES = 1 << 28
# Someone who connects and says nothing holds the others up no longer than this.
_HANDSHAKE_S = 2.0
_CONNECT_PAUSE_S = 0.05
# A node that vanishes sends no end of file: seconds until the kernel gives its connections up.
_DEAD_PEER_S = 10


class TcpAddress(NamedTuple):
    """Where a listener can be reached, and what to prove. Repeated nowhere: it holds the secret."""

    host: str
    port: int
    secret: bytes


class TcpFrameSocket(FrameSocket):
    """One TCP connection with the interface of `FrameSocket`.

    A frame is one header and the whole body. Reads never go past the end of a frame, so that
    what waits in the kernel is all there is to wait for and `wait_any` is right.
    """

    def __init__(self, sock: socket.socket, generation: int | None) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 3),
            ("TCP_KEEPINTVL", 2),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", _DEAD_PEER_S * 1000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        super().__init__(sock, generation)
        self._buffer = bytearray()
        self._wanted = HEADER.size
        self._header: tuple[int, int, int, int] | None = None  # generation, step, kind, length
        self._max_body = _MAX_HELLO_BYTES

    @classmethod
    def dial(
        cls,
        address: TcpAddress,
        role: str,
        rank: int,
        generation: int,
        pid: int,
        timeout_s: float,
        *,
        waits: bool = True,
    ) -> TcpFrameSocket:
        """Connect, prove the secret and have it proven; `waits` for a listener that is not there
        yet.

        Raises:
            TransportTimeout: nobody listened in time.
            TransportError: the listener does not know the secret.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sock = socket.create_connection(
                    (address.host, address.port), max(deadline - time.monotonic(), 0.01)
                )
                break
            except OSError as error:
                if not waits or time.monotonic() >= deadline:
                    waited = f" after {timeout_s} s" if waits else ""
                    raise TransportTimeout(
                        f"{role} {rank}: nobody listens at {address.host}:{address.port}{waited} "
                        f"({error})"
                    ) from None
                time.sleep(_CONNECT_PAUSE_S)
        connection = cls(sock, None)  # the listener may not know yet whom it waits for
        try:
            challenge = connection.recv(max(deadline - time.monotonic(), 0.0)).body
            connection.generation = generation
            nonce = secrets.token_bytes(_NONCE_BYTES)
            name = role.encode().ljust(16, b"\0")
            proof = _mac(address.secret, b"dial", challenge, nonce, name, struct.pack("<i", rank))
            body = _HELLO.pack(pid, rank, name, nonce, proof)
            connection.send(_HELLO_KIND, 0, body, max(deadline - time.monotonic(), 0.0))
            answer = connection.recv(max(deadline - time.monotonic(), 0.0)).body
            if not hmac.compare_digest(answer, _mac(address.secret, b"listen", nonce, challenge)):
                raise TransportError(f"{address.host}:{address.port} does not know the secret")
        except BaseException:
            connection.close()
            raise
        connection._max_body = _MAX_BODY_BYTES
        return connection

    def _cut(self, kind: int, step: int, body: bytes) -> Unsent:
        header = HEADER.pack(MAGIC, self.generation or 0, step, kind, 0, len(body))
        return deque((header + body,))

    def try_recv(self) -> Frame | None:
        """The next frame if it is there whole; a part of one is kept."""
        sock = self._alive()
        while True:
            while len(self._buffer) < self._wanted:
                try:
                    chunk = sock.recv(self._wanted - len(self._buffer))
                except BlockingIOError:
                    return None
                except OSError as error:
                    raise ConnectionLost(f"receive: {error}") from None
                if not chunk:
                    raise ConnectionLost("the other side closed the connection")
                self._buffer += chunk
            if self._header is None:
                magic, generation, step, kind, _, length = HEADER.unpack(self._buffer)
                if magic != MAGIC:
                    raise TransportError(f"magic {magic:#x}: not a Paceline peer")
                if length > self._max_body:
                    raise TransportError(f"a body of {length} bytes, {self._max_body} at most")
                self._header = (generation, step, kind, length)
                self._buffer.clear()
                self._wanted = length
                continue
            generation, step, kind, _ = self._header
            body = bytes(self._buffer)
            self._header, self._wanted = None, HEADER.size
            self._buffer.clear()
            if self._is_current(generation):
                return Frame(kind, step, generation, body)


class TcpFrameListener:
    """Accepts connections of those who know the secret. Binds `host` only, on a free port.

    `generation`: of whom it waits for; None: of anyone.
    """

    def __init__(self, host: str, generation: int | None, secret: bytes | None = None) -> None:
        self.generation = generation
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._sock: socket.socket | None = socket.create_server((host, 0), backlog=64)
        self._host, self._port = host, int(self._sock.getsockname()[1])
        self.num_refused = 0

    @property
    def address(self) -> TcpAddress:
        return TcpAddress(self._host, self._port, self._secret)

    def accept(self, timeout_s: float) -> tuple[TcpFrameSocket, Hello]:
        """The next connection that proves the secret; others are dropped and counted.

        Raises:
            TransportTimeout: nobody came in time.
        """
        listener = self._sock
        where = f"{self._host}:{self._port}"
        if listener is None:
            raise ConnectionLost(f"the listener at {where} is closed")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                sock, peer = listener.accept()
            except TimeoutError:
                raise TransportTimeout(f"nobody connected to {where} in {timeout_s} s") from None
            except OSError as error:
                raise ConnectionLost(f"the listener at {where} is closed: {error}") from None
            connection = TcpFrameSocket(sock, None)
            try:
                return connection, self._shake_hands(connection)
            except TransportError as error:
                connection.close()
                self.num_refused += 1
                logger.warning("refused a connection from %s: %s", peer[0], error)

    def _shake_hands(self, connection: TcpFrameSocket) -> Hello:
        deadline = time.monotonic() + _HANDSHAKE_S
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.send(_HELLO_KIND, 0, challenge, _HANDSHAKE_S)
        frame = connection.recv(max(deadline - time.monotonic(), 0.0))
        if frame.kind != _HELLO_KIND or len(frame.body) != _HELLO.size:
            raise TransportError(f"frame kind {frame.kind} came before a hello")
        pid, rank, name, nonce, proof = _HELLO.unpack(frame.body)
        wanted = _mac(self._secret, b"dial", challenge, nonce, name, struct.pack("<i", rank))
        if not hmac.compare_digest(proof, wanted):
            raise TransportError("it does not know the secret")
        if self.generation is not None and frame.generation != self.generation:
            raise TransportError(f"generation {frame.generation} instead of {self.generation}")
        answer = _mac(self._secret, b"listen", nonce, challenge)
        connection.send(_HELLO_KIND, 0, answer, _HANDSHAKE_S)
        connection._max_body = _MAX_BODY_BYTES
        return Hello(name.rstrip(b"\0").decode(errors="replace"), rank, frame.generation, pid)

    def fileno(self) -> int:
        """Readable when somebody connects. The listener must be open."""
        assert self._sock is not None
        return self._sock.fileno()

    def close(self) -> None:
        """Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")
