"""A server with the OpenAI API on loopback that says what a test wants, in the pieces it wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


def event(payload: dict[str, Any] | str) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


def chat_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}], "usage": None})


END = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
DONE = event("[DONE]")


def usage_event(num_tokens: int, **more: Any) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": num_tokens, **more}
    return event({"choices": [], "usage": usage})


@dataclass
class FakeServer:
    """Answers with `pieces`, each `pause_s` after the one before; remembers what was asked.

    `later`, if given: the pieces and pause of all answers after the first, which a benchmark asks
    for only to see what the server takes.
    """

    pieces: list[bytes] = field(default_factory=list)
    pause_s: float = 0.0
    later: tuple[list[bytes], float] | None = None
    refuses: tuple[str, ...] = ()
    metrics: str = ""
    wanted_key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _open: int = 0
    url: str = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    lines = head.decode().lower().split("\r\n")
                    sizes = [
                        ln.partition(":")[2] for ln in lines if ln.startswith("content-length")
                    ]
                    body = await reader.readexactly(int(sizes[0])) if sizes else b""
                    key = f"authorization: bearer {self.wanted_key}"
                    if self.wanted_key is not None and key not in lines:
                        await self._whole(writer, 401, {"error": {"message": "no key"}})
                    elif head.startswith(b"POST"):
                        await self._generate(writer, json.loads(body))
                    elif head.startswith(b"GET /v1/models"):
                        await self._whole(writer, 200, {"data": [{"id": "tiny"}, {"id": "other"}]})
                    elif head.startswith(b"GET /metrics") and self.metrics:
                        await self._whole(writer, 200, self.metrics)
                    else:
                        await self._whole(writer, 404, {"error": "not here"})
        finally:
            writer.close()

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        for name in self.refuses:
            if name in body:
                error = {"error": {"message": f"unknown field '{name}'"}}
                return await self._whole(writer, 400, error)
        self.bodies.append(body)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        pieces, pause_s = self.pieces, self.pause_s
        if self.later is not None and len(self.bodies) > 1:
            pieces, pause_s = self.later
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(pause_s)
        self._open -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    async def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
