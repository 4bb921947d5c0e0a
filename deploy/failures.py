"""What a request fails of on its way to an engine and there, whichever surface it came through.

Errors of one request are `actors.errors.RequestError`; what else there is:

    RequestAborted       the engine gave the request up; it is not the request's field that is wrong
    root_cause           the exception a remote replica raised, out of Ray's wrapping
    is_replica_loss      another replica (or this one, restarted) can take the request over
    is_intended          it was ended on purpose, through no fault of a request
    is_busy              a queue was full
"""

from __future__ import annotations

from typing import Final

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import EngineDead, EngineError, EngineStopped, InvalidRequest, QueueFull

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


def is_intended(error: BaseException) -> bool:
    """Whether a replica was lost because somebody ended it: Serve does, to replace a gang or an
    old version. No request is at fault then."""
    cause = root_cause(error)
    if isinstance(cause, EngineStopped | DeploymentUnavailableError):
        return True
    # Ray has no class for it.
    return isinstance(cause, RayActorError) and "killed by `ray.kill`" in str(cause)


def is_busy(error: BaseException) -> bool:
    """Whether a queue was full."""
    return isinstance(root_cause(error), BackPressureError | QueueFull)
