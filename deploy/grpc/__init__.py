"""The gRPC surface: `paceline.v1`, and the standard health service beside it.

In a Serve file:

    grpc_options: {port: 9000, grpc_servicer_functions: [deploy.grpc.add_to_server]}
"""

from __future__ import annotations

from typing import Any


def add_to_server(servicer: Any, server: Any) -> None:
    """What Serve's gRPC proxy serves of an application. It routes each call by its name."""
    from grpc_health.v1 import health_pb2_grpc

    from deploy.grpc import paceline_pb2_grpc

    paceline_pb2_grpc.add_PacelineServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
