"""Ways from a client to a server. Each takes the engine's own request and gives its own runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from actors.requests import GenerateRequest, RunOutput
from deploy.text import Prompt


class Route(Protocol):
    """A way to one served model."""

    async def start(self, request: GenerateRequest, prompt: Prompt) -> AsyncGenerator[RunOutput]:
        """Runs of a request. Closing the generator ends the request on the server."""

    async def describe(self) -> dict[str, Any]:
        """The resolved facts of one engine."""

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""


async def open_route(target: str, api_key: str | None, timeout_s: float) -> Route:
    """The way that `target` names; see `AsyncClient`."""
    scheme, is_url, _ = target.partition("://")
    if not is_url:
        from deploy.client.over_handle import open_handle

        return await open_handle(target, timeout_s)
    if scheme in ("http", "https"):
        from deploy.client.over_http import HttpRoute

        return HttpRoute(target, api_key, timeout_s)
    if scheme == "grpc":
        from deploy.client.over_grpc import GrpcRoute

        return GrpcRoute(target, api_key, timeout_s)
    raise ValueError(
        f"the target {target!r} is neither http://, https:// nor grpc://, nor an application's name"
    )
