"""The way over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf import json_format

from actors.requests import GenerateRequest, RunOutput
from deploy.failures import Failure, exception_of
from deploy.grpc import paceline_pb2 as pb
from deploy.grpc import paceline_pb2_grpc
from deploy.grpc.messages import from_conversation, from_generate_request, from_prompt, to_run
from deploy.grpc.status import FAILURES
from deploy.text import Conversation, Prompt

# A run of a long prompt's answer stays far below it.
_MAX_MESSAGE_BYTES: Final = 64 * 2**20


class GrpcRoute:
    """A server's gRPC port.

    Args:
        target: `grpc://host:port`, or `grpc://host:port/application` where a cluster has several.
        api_key: For a server that asks for one.
        timeout_s: Of calls that are not generations.
    """

    def __init__(self, target: str, api_key: str | None, timeout_s: float) -> None:
        url = urlsplit(target)
        self._channel = grpc.aio.insecure_channel(
            url.netloc, options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        )
        self._stub = paceline_pb2_grpc.PacelineStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = [("application", url.path.strip("/") or "paceline")]
        if api_key is not None:
            self._metadata.append(("authorization", f"Bearer {api_key}"))

    async def start(self, request: GenerateRequest, prompt: Prompt) -> AsyncGenerator[RunOutput]:
        sampling = from_generate_request(request)
        if isinstance(prompt, Conversation):
            call = self._stub.ChatStream(
                from_conversation(prompt, sampling), metadata=self._metadata
            )
        else:
            call = self._stub.GenerateStream(from_prompt(prompt, sampling), metadata=self._metadata)
        return _runs(call, with_logprobs=request.num_logprobs >= 0)

    async def describe(self) -> dict[str, Any]:
        try:
            answer = await self._stub.GetServerInfo(
                pb.GetServerInfoRequest(), metadata=self._metadata, timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _exception(error) from None
        facts: dict[str, Any] = json_format.MessageToDict(answer.info)
        return facts

    async def aclose(self) -> None:
        await self._channel.close()


async def _runs(call: Any, *, with_logprobs: bool) -> AsyncGenerator[RunOutput]:
    try:
        async for answer in call:
            yield to_run(answer, with_logprobs=with_logprobs)
    except grpc.aio.AioRpcError as error:
        raise _exception(error) from None
    except asyncio.CancelledError:
        call.cancel()
        raise
    finally:
        if not call.done():
            call.cancel()


def _exception(error: grpc.aio.AioRpcError) -> Exception:
    return exception_of(FAILURES.get(error.code(), Failure.INTERNAL), error.details() or str(error))
