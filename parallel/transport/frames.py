"""The frame: a fixed header, then the body. Bodies above one packet go out in several.

Header, little-endian, 28 bytes: magic u32, generation u32, step u64, kind u16, flags u16, length
u64. `length` is that of the whole body; a packet with the CONTINUED flag carries the next part of
the body that the last packet without it began.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct("<IIQHHQ")
MAGIC = 0x50434C31  # "PCL1"
CONTINUED = 1
# Below the smallest usual socket buffer (net.core.wmem_max 212,992), with room for accounting.
MAX_BODY_BYTES = 64 * 1024


class Frame(NamedTuple):
    """One message as received. `kind` belongs to whoever speaks over the transport."""

    kind: int
    step: int
    generation: int
    body: bytes


class TransportError(Exception):
    """The other side does not speak this protocol, or speaks it out of turn."""


class ConnectionLost(TransportError):
    """The other side closed: its process ended or let go."""


class TransportTimeout(TransportError):
    """Nothing came, or nothing could be sent, before the deadline."""


def packets(kind: int, step: int, generation: int, body: bytes) -> list[bytes]:
    """`body` cut into packets, at least one."""
    length = len(body)
    if length <= MAX_BODY_BYTES:
        return [HEADER.pack(MAGIC, generation, step, kind, 0, length) + body]
    view = memoryview(body)
    out = []
    for first in range(0, length, MAX_BODY_BYTES):
        flags = CONTINUED if first else 0
        header = HEADER.pack(MAGIC, generation, step, kind, flags, length)
        out.append(header + view[first : first + MAX_BODY_BYTES])
    return out


class FrameAssembler:
    """Packets back to frames, for one direction of one connection."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._missing = 0

    def feed(self, packet: bytes) -> Frame | None:
        """The frame that `packet` completes, if it does.

        Raises:
            TransportError: not one of our packets, or out of order.
        """
        if len(packet) < HEADER.size:
            raise TransportError(f"a packet of {len(packet)} bytes is shorter than a header")
        magic, generation, step, kind, flags, length = HEADER.unpack_from(packet)
        if magic != MAGIC:
            raise TransportError(f"magic {magic:#x} instead of {MAGIC:#x}: not a Paceline peer")
        if bool(flags & CONTINUED) != bool(self._missing):
            raise TransportError(f"kind {kind}, step {step}: a part of a body is missing")
        body = packet[HEADER.size :]
        if not self._missing:
            self._parts, self._missing = [], length
        self._parts.append(body)
        self._missing -= len(body)
        if self._missing < 0:
            raise TransportError(f"kind {kind}, step {step}: more bytes than announced")
        if self._missing:
            return None
        return Frame(kind, step, generation, b"".join(self._parts))
