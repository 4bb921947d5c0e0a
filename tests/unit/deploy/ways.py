"""The three ways from a client to a server, over a scripted engine: no Ray, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import uvicorn

from deploy.api_keys import ApiKeys
from deploy.client.over_grpc import GrpcRoute
from deploy.client.over_handle import front_over
from deploy.client.over_http import HttpRoute
from deploy.client.routes import Route
from deploy.grpc import add_to_server
from deploy.grpc.rpcs import Rpcs
from deploy.grpc.service import CallFailed, GrpcService
from deploy.openai.ingress import create_app
from deploy.openai.service import OpenAIService
from tests.unit.deploy.fakes import ScriptedEngine

Opening = Callable[[], Awaitable[Route]]


class ServedRpcs:
    """The RPCs on a server of their own: an exception ends a call with the context's status, as
    Serve has it."""

    def __init__(self, service: GrpcService) -> None:
        self._rpcs = Rpcs()
        self._rpcs._grpc = service

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._rpcs, name)

        async def whole(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except CallFailed:
                await context.abort(context.code(), context.details())

        async def streamed(request: Any, context: Any) -> Any:
            try:
                async for answer in method(request, context):
                    yield answer
            except CallFailed:
                await context.abort(context.code(), context.details())

        return streamed if name.endswith("Stream") else whole


class Served:
    """A route to a server that ends with it."""

    def __init__(self, route: Route, end: Callable[[], Awaitable[Any]]) -> None:
        self.start = route.start
        self.describe = route.describe
        self._route = route
        self._end = end

    async def aclose(self) -> None:
        await self._route.aclose()
        await self._end()


def opening(
    way: str, engine: ScriptedEngine, keys: tuple[str, ...] = (), key: str | None = None
) -> Opening:
    """How a client with `key` opens `way` to the engine, whose server has `keys`."""

    async def over_grpc() -> Route:
        server = grpc.aio.server()
        service = GrpcService(await front_over(engine, 1.0), ApiKeys(keys))
        add_to_server(ServedRpcs(service), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return Served(GrpcRoute(f"grpc://127.0.0.1:{port}", key, 5.0), lambda: server.stop(None))

    async def over_http() -> Route:
        front = await front_over(engine, 1.0)
        app = create_app(OpenAIService(front), ApiKeys(keys))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def end() -> None:
            server.should_exit = server.force_exit = True
            await serving

        return Served(HttpRoute(f"http://127.0.0.1:{port}", key, 5.0), end)

    async def over_handle() -> Route:
        return await front_over(engine, 1.0)

    return {"grpc": over_grpc, "http": over_http, "handle": over_handle}[way]
