"""The RPCs by name. Light: whoever builds the application imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpc_health.v1 import health_pb2

    from deploy.grpc import paceline_pb2 as pb
    from deploy.grpc.service import GrpcService


class Rpcs:
    """The RPCs as methods of the ingress: Serve calls them by name."""

    _grpc: GrpcService

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> pb.Answer:
        return await self._grpc.whole(request, grpc_context)

    async def GenerateStream(self, request: pb.GenerateRequest, grpc_context: Any) -> Any:
        async for answer in self._grpc.stream(request, grpc_context):
            yield answer

    async def Chat(self, request: pb.ChatRequest, grpc_context: Any) -> pb.Answer:
        return await self._grpc.whole(request, grpc_context)

    async def ChatStream(self, request: pb.ChatRequest, grpc_context: Any) -> Any:
        async for answer in self._grpc.stream(request, grpc_context):
            yield answer

    async def ListModels(self, _: pb.ListModelsRequest, grpc_context: Any) -> Any:
        return await self._grpc.list_models(grpc_context)

    async def GetServerInfo(self, _: pb.GetServerInfoRequest, grpc_context: Any) -> Any:
        return await self._grpc.server_info(grpc_context)

    async def Check(self, _: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        return await self._grpc.health()

    async def Watch(self, _: health_pb2.HealthCheckRequest) -> Any:
        async for answer in self._grpc.watch_health():
            yield answer

    async def List(self, _: health_pb2.HealthListRequest) -> health_pb2.HealthListResponse:
        return await self._grpc.list_health()
