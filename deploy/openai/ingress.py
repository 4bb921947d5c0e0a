"""The HTTP application: routes, authentication, and the rule that every error is OpenAI JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from deploy.metrics import CONTENT_TYPE, render
from deploy.openai.errors import ApiError
from deploy.openai.middleware import ErrorsAsJson, RequireKey, cors, request_id
from deploy.openai.parsing import Body, parse
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deploy.openai.service import OpenAIService


def create_app(
    service: OpenAIService, api_keys: Sequence[str] = (), allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """The ASGI application over `service`.

    Args:
        service: What the routes do.
        api_keys: One of them must be presented; none: open.
        allowed_origins: Of web pages that may call it.
    """
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(ErrorsAsJson)
    if api_keys:
        app.add_middleware(RequireKey, api_keys=api_keys)
    # Outermost: browsers ask without a key whether they may send one.
    if allowed_origins:
        app.add_middleware(cors, allowed_origins=allowed_origins)
    max_bytes = max_body_bytes(service.max_model_len)

    async def read(request: Request, model: type[Body]) -> Body:
        return parse(await read_body(request, max_bytes), model)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatCompletionRequest)
        return await _reply(request, service.chat(body, request_id(request.scope)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        return await _reply(request, service.complete(body, request_id(request.scope)))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(service.models())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(service.model(name))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return JSONResponse(await service.tokenize(await read(request, TokenizeRequest)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse(await service.detokenize(await read(request, DetokenizeRequest)))

    @app.get("/health")
    async def health() -> Response:
        status, body = await service.health()
        return JSONResponse(body, status_code=status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(render(await service.reports()), media_type=CONTENT_TYPE)

    @app.get("/server_info")
    async def server_info() -> Response:
        return JSONResponse(await service.server_info())

    return app


def max_body_bytes(max_model_len: int) -> int:
    """Bytes of the largest body that is read: 256 KiB, and 64 for each token of the context."""
    return 2**18 + 64 * max_model_len


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, at most `max_bytes`; one that says that it is larger is not read at all.

    Raises:
        ApiError: 413.
    """
    said = request.headers.get("content-length", "")
    size = int(said[:20]) if said.isdecimal() else 0
    body = bytearray()
    if size <= max_bytes:
        async for part in request.stream():
            body += part
            size = max(size, len(body))
            if size > max_bytes:
                break
    if size > max_bytes:
        raise ApiError(
            413,
            f"the body has {size} bytes or more, the limit is {max_bytes}: it follows from the "
            "length of the model's context",
            code="request_too_large",
        )
    return bytes(body)


async def _reply(
    request: Request, answer: Awaitable[dict[str, Any] | AsyncIterator[str]]
) -> Response:
    """Send `answer`; while it is being made, a client that goes away ends the work."""
    made = await _unless_disconnected(request, answer)
    if made is None:
        return Response(status_code=499)  # nobody reads it
    if isinstance(made, dict):
        return JSONResponse(made)
    # Proxies in front must pass each event on at once.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(made, media_type="text/event-stream", headers=headers)


async def _unless_disconnected(
    request: Request, answer: Awaitable[dict[str, Any] | AsyncIterator[str]]
) -> dict[str, Any] | AsyncIterator[str] | None:
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    """404 of an unknown route and 405 of a wrong method, as the framework raises them."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    messages = {
        404: f"no such route: {what}",
        405: f"method not allowed: {what}",
    }
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    return ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code),
        headers=dict(error.headers or {}),
    ).response()
