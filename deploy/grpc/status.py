"""Failures as gRPC status codes."""

from __future__ import annotations

from typing import Final

import grpc

from deploy.failures import Failure

CODES: Final = {
    Failure.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Failure.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Failure.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Failure.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Failure.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Failure.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Failure.ABORTED: grpc.StatusCode.ABORTED,
    Failure.INTERNAL: grpc.StatusCode.INTERNAL,
}
FAILURES: Final = {code: failure for failure, code in CODES.items()}
