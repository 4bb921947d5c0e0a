"""Every error of the HTTP surface as the OpenAI error object.

    ApiError                      status, type, code, param; rendered as {"error": {...}}
    `-- from_exception(...)       anything else: refused requests, lost engines, bugs

A client never sees a traceback: an unknown exception becomes a 500 that carries the request id,
and the traceback goes to the log under the same id.
"""

from __future__ import annotations

import math
from typing import Any, Final

from fastapi.responses import JSONResponse

from actors.checks import encodable
from deploy.failures import Failure, failure_of, root_cause
from deploy.outlook import NoReplicaComing

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
    failure, message = failure_of(error, request_id)
    param, code = getattr(cause, "param", None), getattr(cause, "code", None)
    match failure:
        case Failure.INVALID:
            return ApiError(400, message, param=param, code=code)
        case Failure.UNAUTHENTICATED:
            challenge = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code=code, headers=challenge)
        case Failure.NOT_FOUND:
            return ApiError(404, message, param=param, code=code)
        case Failure.TIMEOUT:
            return ApiError(408, message, kind="timeout_error", code="timeout")
        case Failure.BUSY:
            return too_busy(message, getattr(cause, "retry_after_s", None))
        case Failure.UNAVAILABLE:
            return unavailable(message, 30 if isinstance(cause, NoReplicaComing) else 5)
        case Failure.ABORTED:
            # The SDKs repeat a 500 by themselves: this one may have ended engines.
            headers = {"x-should-retry": "false"}
            return ApiError(
                500, message, kind="internal_error", code="request_aborted", headers=headers
            )
        case Failure.INTERNAL:
            return ApiError(500, message, kind="internal_error", code="internal_error")
