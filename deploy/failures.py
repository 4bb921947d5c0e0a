"""What a request fails of on its way to an engine and there, whichever surface it came through.

Errors of one request are `actors.errors.RequestError`; what else there is:

    RequestAborted       the engine gave the request up; it is not the request's field that is wrong
    ModelNotFound        another model is served here
    Unauthenticated      no API key, or none of the server's
    root_cause           the exception a remote replica raised, out of Ray's wrapping
    is_replica_loss      another replica (or this one, restarted) can take the request over
    is_intended          it was ended on purpose, through no fault of a request
    is_busy              a queue was full
    failure_of           what kind of failure an exception is, and what its caller is told
    exception_of         the exception of a failure that a server told of: the way back
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Final

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import (
    EngineDead,
    EngineError,
    EngineStopped,
    InvalidRequest,
    QueueFull,
    RequestError,
)
from deploy.outlook import NoReplicaComing

logger = logging.getLogger("ray.serve")

_LOSSES: Final = (
    RayActorError,
    WorkerCrashedError,
    ObjectLostError,
    DeploymentUnavailableError,
    EngineDead,
)


class Failure(StrEnum):
    """Kinds of failure, which each surface says in its own code."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not_found"
    BUSY = "busy"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ABORTED = "aborted"
    INTERNAL = "internal"


class RequestAborted(EngineError):
    """A request that ended without its answer, for a reason of its own; the engine lives."""


class ModelNotFound(RequestError):
    """The server does not have that model."""


class ServerBusy(RequestError):
    """A server, elsewhere, that has no room now."""


class Unauthenticated(RequestError):
    """No API key, or none that the server knows."""


def unsupported(param: str, why: str) -> InvalidRequest:
    """The error for something that this server does not have."""
    return InvalidRequest(
        f"'{param}' is not supported: {why}", param=param, code="unsupported_parameter"
    )


def root_cause(error: BaseException) -> BaseException:
    """The exception a remote replica raised, out of Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return root_cause(error.cause) if error.cause is not error else error
    return error


def is_replica_loss(error: BaseException) -> bool:
    """Whether another replica (or this one, restarted) can take the request over."""
    return isinstance(root_cause(error), _LOSSES)


def is_intended(error: BaseException) -> bool:
    """Whether a replica was lost because somebody ended it: Serve does, to replace a gang or an
    old version. No request is at fault then."""
    cause = root_cause(error)
    if isinstance(cause, EngineStopped):
        return True
    # Ray has no class for it.
    return isinstance(cause, RayActorError) and "killed by `ray.kill`" in str(cause)


def is_busy(error: BaseException) -> bool:
    """Whether a queue was full."""
    return isinstance(root_cause(error), BackPressureError | QueueFull | ServerBusy)


def failure_of(error: BaseException, request_id: str) -> tuple[Failure, str]:
    """The kind of any exception that a request ended with, and what its caller is told.

    What is not a known failure is logged under the request's id, with its traceback; the caller is
    told the id only.
    """
    cause = root_cause(error)
    message = str(cause)
    if isinstance(cause, Unauthenticated):
        return Failure.UNAUTHENTICATED, message
    if isinstance(cause, ModelNotFound):
        return Failure.NOT_FOUND, message
    if isinstance(cause, BackPressureError):
        return Failure.BUSY, "the server's queue is full; retry later"
    if isinstance(cause, QueueFull):
        return Failure.BUSY, message
    if isinstance(cause, RequestError):
        return Failure.INVALID, message
    if isinstance(cause, RequestAborted):
        return Failure.ABORTED, message
    if isinstance(cause, TimeoutError):
        return Failure.TIMEOUT, message or "the request took too long"
    if isinstance(cause, NoReplicaComing):
        return Failure.UNAVAILABLE, f"{cause}; request {request_id} was not started"
    if is_replica_loss(cause):
        logger.error("request %s lost its engine: %s", request_id, cause)
        detail = message if isinstance(cause, EngineDead) else "the engine replica was lost"
        return Failure.UNAVAILABLE, f"{detail}; request {request_id} could not be continued"
    logger.error("request %s failed", request_id, exc_info=error)
    return Failure.INTERNAL, (
        f"internal error; the server's log has the details under request id {request_id}"
    )


_TOLD: Final = {
    Failure.INVALID: InvalidRequest,
    Failure.UNAUTHENTICATED: Unauthenticated,
    Failure.NOT_FOUND: ModelNotFound,
    Failure.BUSY: ServerBusy,
}


def exception_of(
    failure: Failure, message: str, param: str | None = None, code: str | None = None
) -> Exception:
    """The exception of a failure that a server told of."""
    if failure in _TOLD:
        return _TOLD[failure](message, param=param, code=code)
    if failure is Failure.TIMEOUT:
        return TimeoutError(message)
    if failure is Failure.UNAVAILABLE:
        return EngineDead(message)
    if failure is Failure.ABORTED:
        return RequestAborted(message)
    return EngineError(message)
