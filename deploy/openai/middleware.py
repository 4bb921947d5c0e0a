"""What every route has around it: errors as JSON, keys, and what browsers ask."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from typing import Any, Final

from starlette._utils import get_route_path
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.openai.errors import from_exception, unauthorized

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
    """Asks for `Authorization: Bearer KEY` on every path but the open ones."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Behind a route prefix `path` holds the prefix too.
        if scope["type"] != "http" or get_route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            refusal = unauthorized("no API key given; send 'Authorization: Bearer KEY'")
        elif self._known(key.strip()):
            await self._app(scope, receive, send)
            return
        else:
            refusal = unauthorized("the API key is not valid")
        await refusal.response()(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        # Digests of equal length, all compared: time tells neither length nor position.
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
