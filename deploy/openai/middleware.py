"""What every route has around it: errors as JSON, keys, and what browsers ask."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from starlette._utils import get_route_path
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.api_keys import ApiKeys
from deploy.failures import Unauthenticated
from deploy.openai.errors import from_exception

# Probes and scrapers carry no key; these paths show no user data.
OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
_MAX_ID_CHARS: Final = 128


def request_id(scope: Scope) -> str:
    """The id the proxy or the client gave, else a new one; the same for the whole request."""
    state: dict[str, Any] = scope.setdefault("state", {})
    if "request_id" not in state:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        # It goes into logs and answers.
        usable = given.isascii() and given.isprintable()
        state["request_id"] = given[:_MAX_ID_CHARS] if given and usable else uuid.uuid4().hex
    return str(state["request_id"])


def cors(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins call `app`: preflights are answered before anything is checked,
    and every answer, an error too, says that the page may read it."""
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


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
    """Asks for a key on every path but the open ones."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Behind a route prefix `path` holds the prefix too.
        if scope["type"] == "http" and get_route_path(scope) not in OPEN_PATHS:
            given: bytes = dict(scope["headers"]).get(b"authorization", b"")
            try:
                self._keys.check(given.decode(errors="surrogateescape"))
            except Unauthenticated as error:
                await from_exception(error, request_id(scope)).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
