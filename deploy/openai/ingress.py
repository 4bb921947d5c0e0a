"""The HTTP application: routes, authentication, and the rule that every error is OpenAI JSON."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.metrics import CONTENT_TYPE, render
from deploy.openai.errors import ApiError, from_exception, unauthorized
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from deploy.openai.service import OpenAIService

MAX_BODY_BYTES = 32 * 2**20
# Probes and scrapers carry no key; these paths show no user data.
OPEN_PATHS = frozenset({"/health", "/metrics"})


def create_app(service: OpenAIService, api_keys: Sequence[str] = ()) -> FastAPI:
    """The ASGI application over `service`. With `api_keys`, one of them must be presented."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(ErrorsAsJson)
    if api_keys:
        app.add_middleware(RequireKey, api_keys=api_keys)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse(await read_body(request), ChatCompletionRequest)
        return await _reply(request, service.chat(body, request_id(request.scope)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse(await read_body(request), CompletionRequest)
        return await _reply(request, service.complete(body, request_id(request.scope)))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(service.models())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(service.model(name))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return JSONResponse(
            await service.tokenize(parse(await read_body(request), TokenizeRequest))
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse(
            await service.detokenize(parse(await read_body(request), DetokenizeRequest))
        )

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


def request_id(scope: Scope) -> str:
    """The id the proxy or the client gave, else a new one; the same for the whole request."""
    state: dict[str, Any] = scope.setdefault("state", {})
    if "request_id" not in state:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        state["request_id"] = given[:128] or uuid.uuid4().hex
    return str(state["request_id"])


async def read_body(request: Request) -> bytes:
    """The body, at most `MAX_BODY_BYTES`.

    Raises:
        ApiError: 413.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(
                413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
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


class ErrorsAsJson:
    """Turns whatever a route raises into the OpenAI error object."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watch(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if started:
                raise
            await from_exception(error, request_id(scope)).response()(scope, receive, send)


class RequireKey:
    """Asks for `Authorization: Bearer KEY` on every path but the open ones."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key:
            refusal = unauthorized("no API key given; send 'Authorization: Bearer KEY'")
        elif self._known(key.strip()):
            await self._app(scope, receive, send)
            return
        else:
            refusal = unauthorized("the API key is not valid")
        await refusal.response()(scope, receive, send)

    def _known(self, key: str) -> bool:
        # Digests of equal length, all compared: time tells neither length nor position.
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
