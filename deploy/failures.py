"""What a request fails of on its way to an engine and there, whichever surface it came through.

Errors of one request are `actors.errors.RequestError`; what else there is:

    RequestAborted       the engine gave the request up; it is not the request's field that is wrong
    root_cause           the exception a remote replica raised, out of Ray's wrapping
    is_replica_loss      another replica (or this one, restarted) can take the request over
    is_busy              a queue was full
"""

from __future__ import annotations

from typing import Final

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import EngineDead, EngineError, InvalidRequest, QueueFull

_LOSSES: Final = (
    RayActorError,
    WorkerCrashedError,
    ObjectLostError,
    DeploymentUnavailableError,
    EngineDead,
)


class RequestAborted(EngineError):
    """A request that ended without its answer, for a reason of its own; the engine lives."""


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


def is_busy(error: BaseException) -> bool:
    """Whether a queue was full."""
    return isinstance(root_cause(error), BackPressureError | QueueFull)
