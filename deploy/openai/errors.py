"""Every error of the HTTP surface as the OpenAI error object.

    ApiError                      status, type, code, param; rendered as {"error": {...}}
    `-- from_exception(...)       anything else: refused requests, lost engines, bugs

A client never sees a traceback: an unknown exception becomes a 500 that carries the request id,
and the traceback goes to the log under the same id.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, Final

from fastapi.responses import JSONResponse
from ray.serve.exceptions import BackPressureError

from actors.checks import encodable, shown
from actors.errors import EngineDead, QueueFull, RequestError
from deploy.failures import RequestAborted, is_replica_loss, root_cause

logger = logging.getLogger("ray.serve")
_MAX_CHARS: Final = 2000


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        # Messages repeat what clients wrote, which need not be short, nor text.
        return {
            "error": {
                "message": encodable(self.message[:_MAX_CHARS]),
                "type": self.kind,
                "param": self.param and encodable(self.param[:_MAX_CHARS]),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def unauthorized(message: str) -> ApiError:
    """401, with the challenge HTTP asks for."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def model_not_found(name: str, served: str) -> ApiError:
    """404 for a model name this server does not serve."""
    return ApiError(
        404,
        f"the model {shown(name)} does not exist here; this server serves {served!r}",
        param="model",
        code="model_not_found",
    )


def too_busy(message: str, retry_after_s: float | None) -> ApiError:
    """429 with Retry-After in whole seconds, at least 1."""
    wait = max(1, math.ceil(retry_after_s if retry_after_s is not None else 1))
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(wait)},
    )


def unavailable(message: str, retry_after_s: int = 5) -> ApiError:
    """503: the engine is down or on its way back."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="engine_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def from_exception(error: BaseException, request_id: str) -> ApiError:
    """The answer for any exception a request ended with."""
    cause = root_cause(error)
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, QueueFull):
        return too_busy(cause.message, cause.retry_after_s)
    if isinstance(cause, RequestError):
        return ApiError(400, cause.message, param=cause.param, code=cause.code)
    if isinstance(cause, RequestAborted):
        return ApiError(500, str(cause), kind="internal_error", code="request_aborted")
    if isinstance(cause, BackPressureError):
        return too_busy(
            "the server's queue is full; retry later", getattr(cause, "retry_after_s", None)
        )
    if isinstance(cause, TimeoutError | asyncio.TimeoutError):
        return ApiError(
            408, str(cause) or "the request took too long", kind="timeout_error", code="timeout"
        )
    if is_replica_loss(cause):
        logger.error("request %s lost its engine: %s", request_id, cause)
        detail = str(cause) if isinstance(cause, EngineDead) else "the engine replica was lost"
        return unavailable(f"{detail}; request {request_id} could not be continued")
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500,
        f"internal error; the server's log has the details under request id {request_id}",
        kind="internal_error",
        code="internal_error",
    )
