"""What the calls of `paceline.v1` do, over the same front as every surface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

from actors.requests import RunOutput
from deploy.api_keys import ApiKeys
from deploy.failures import failure_of
from deploy.front import Front
from deploy.grpc import paceline_pb2 as pb
from deploy.grpc.messages import conversation_of, prompt_of, to_answer, to_generate_request
from deploy.grpc.status import CODES
from deploy.runs import merge
from deploy.text import Prompt

T = TypeVar("T")
Asked = pb.GenerateRequest | pb.ChatRequest

_WATCH_PERIOD_S: Final = 5.0


class CallContext(Protocol):
    """The part of Serve's gRPC context that is used here."""

    def invocation_metadata(self) -> list[tuple[str, str]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class CallFailed(Exception):
    """Ends a call whose context has the status already."""


class GrpcService:
    """One ingress replica's calls.

    Args:
        front: Checks requests and reaches engines.
        keys: Of which a caller presents one, if there are any.
    """

    def __init__(self, front: Front, keys: ApiKeys) -> None:
        self._front = front
        self._keys = keys

    async def whole(self, request: Asked, context: CallContext) -> pb.Answer:
        """The whole answer."""
        request_id = self._front.new_request_id("grpc")

        async def answer() -> pb.Answer:
            runs = await self._start(request, context, request_id)
            async with aclosing(runs):
                whole = merge([run async for run in runs])
            context.set_trailing_metadata(_trailer(whole))
            return to_answer(request_id, whole)

        return await _call(answer(), context, request_id)

    async def stream(self, request: Asked, context: CallContext) -> AsyncIterator[pb.Answer]:
        """The answer as it is made. Closing the iterator frees the request's KV within a step."""
        request_id = self._front.new_request_id("grpc")
        runs = await _call(self._start(request, context, request_id), context, request_id)
        async with aclosing(runs):
            while (run := await _call(anext(runs, None), context, request_id)) is not None:
                if run.is_acknowledgment:
                    continue
                if run.finish_reason is not None:
                    context.set_trailing_metadata(_trailer(run))
                yield to_answer(request_id, run)

    async def list_models(self, context: CallContext) -> pb.ListModelsResponse:
        """The served model."""

        async def models() -> pb.ListModelsResponse:
            self._authenticate(context)
            served = self._front.served
            model = pb.Model(
                id=served.name,
                max_model_len=served.max_model_len,
                vocab_size=served.vocab_size,
                num_speculative_tokens=served.num_speculative_tokens,
            )
            return pb.ListModelsResponse(models=[model])

        return await _call(models(), context, self._front.new_request_id("grpc"))

    async def server_info(self, context: CallContext) -> pb.GetServerInfoResponse:
        """The resolved facts of one engine."""

        async def info() -> pb.GetServerInfoResponse:
            self._authenticate(context)
            response = pb.GetServerInfoResponse()
            # Through JSON: a Struct takes nothing else.
            facts = json.loads(json.dumps(await self._front.describe()))
            json_format.ParseDict(facts, response.info)
            return response

        return await _call(info(), context, self._front.new_request_id("grpc"))

    async def health(self) -> health_pb2.HealthCheckResponse:
        """SERVING while at least one engine can answer. Needs no key, as /health does not."""
        health = await self._front.health()
        answer = health_pb2.HealthCheckResponse
        return answer(status=answer.SERVING if health.is_healthy else answer.NOT_SERVING)

    async def list_health(self) -> health_pb2.HealthListResponse:
        """The same for all services, of which there is one."""
        return health_pb2.HealthListResponse(statuses={"": await self.health()})

    async def watch_health(self) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The health now, and again when it has changed."""
        last: health_pb2.HealthCheckResponse | None = None
        while True:
            now = await self.health()
            if now != last:
                last = now
                yield now
            await asyncio.sleep(_WATCH_PERIOD_S)

    async def _start(
        self, request: Asked, context: CallContext, request_id: str
    ) -> AsyncGenerator[RunOutput]:
        self._authenticate(context)
        if request.model:
            self._front.check_model(request.model)
        is_chat = isinstance(request, pb.ChatRequest)
        prompt: Prompt = conversation_of(request) if is_chat else prompt_of(request)
        return await self._front.start(to_generate_request(request.sampling, request_id), prompt)

    def _authenticate(self, context: CallContext) -> None:
        self._keys.check(dict(context.invocation_metadata()).get("authorization", ""))


async def _call(work: Awaitable[T], context: CallContext, request_id: str) -> T:
    """`work`, with an exception turned into the call's status."""
    try:
        return await work
    except Exception as error:
        failure, message = failure_of(error, request_id)
        context.set_code(CODES[failure])
        context.set_details(message)
        raise CallFailed(message) from None


def _trailer(run: RunOutput) -> list[tuple[str, str]]:
    """What a caller that reads no usage wants to know of a finished answer."""
    spec = run.speculation
    return [
        ("paceline-finish-reason", run.finish_reason.value if run.finish_reason else ""),
        ("paceline-acceptance-length", f"{spec.acceptance_length:.4f}"),
        ("paceline-num-output-tokens", str(run.num_output_tokens)),
    ]
