"""What the routes do, without HTTP: validate, tokenise, generate, answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from actors.checks import check_ids
from deploy.engine_client import EngineClient, ReplicaReport
from deploy.facts import ServedModel
from deploy.openai.answers import Answer, ChatAnswer, Json, TextAnswer
from deploy.openai.errors import model_not_found
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from deploy.openai.sampling import names_of, to_generate_request
from deploy.openai.streaming import events
from deploy.recovery import RecoveryPolicy, generate_with_recovery
from deploy.requests import Seeds, complete_request
from deploy.text import TextProcessor

T = TypeVar("T")
REPORT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Choices of the surface that no engine needs to know."""

    request_timeout_s: float | None = None
    least_tokens_per_chunk: int = 1
    stream_keepalive_s: float | None = None
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)


class OpenAIService:
    """One ingress replica's work."""

    def __init__(
        self,
        client: EngineClient,
        text: TextProcessor,
        served: ServedModel,
        options: ServiceOptions | None = None,
    ) -> None:
        self._client = client
        self._text = text
        self._served = served
        self._seeds = Seeds(served.seed)
        self._options = options or ServiceOptions()
        self._created = int(time.time())
        # Tokenising a long prompt takes tens of milliseconds: never on the event loop, where it
        # would hold up every stream.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    @property
    def max_model_len(self) -> int:
        """Tokens that the served model's context holds."""
        return self._served.max_model_len

    async def chat(self, body: ChatCompletionRequest, request_id: str) -> Json | AsyncIterator[str]:
        """POST /v1/chat/completions."""
        return await self._answer(body, request_id, ChatAnswer, "chatcmpl")

    async def complete(self, body: CompletionRequest, request_id: str) -> Json | AsyncIterator[str]:
        """POST /v1/completions."""
        return await self._answer(body, request_id, TextAnswer, "cmpl")

    async def _answer(
        self, body: Sampling, request_id: str, kind: type[Answer], prefix: str
    ) -> Json | AsyncIterator[str]:
        self._check_model(body.model)
        # Ours, not the client's: a client may repeat its id on a retry while the first try runs.
        engine_id = f"{prefix}-{uuid.uuid4().hex}"
        asked = to_generate_request(body, engine_id)
        request = await self._off_loop(
            lambda: complete_request(
                asked, body.to_prompt(), self._text, self._served, self._seeds, names_of(body)
            )
        )
        answer = kind(engine_id, int(time.time()), self._served.name, body, self._text.token_bytes)
        runs = generate_with_recovery(
            self._client,
            request,
            self._text.token_bytes,
            self._options.recovery,
            self._options.request_timeout_s,
        )
        if not body.stream:
            async with aclosing(runs):
                return answer.whole([run async for run in runs])
        # Waiting for the first run, which may only say that an engine took the request, is what
        # lets a refusal still become a status code.
        first = await anext(runs)
        return events(
            answer,
            first,
            runs,
            request_id,
            least_tokens=self._options.least_tokens_per_chunk,
            keepalive_s=self._options.stream_keepalive_s,
        )

    def models(self) -> Json:
        """GET /v1/models."""
        return {"object": "list", "data": [self.model(self._served.name)]}

    def model(self, name: str) -> Json:
        """GET /v1/models/{id}."""
        self._check_model(name)
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": self._served.max_model_len,
        }

    async def tokenize(self, body: TokenizeRequest) -> Json:
        """POST /tokenize."""
        self._check_model(body.model)

        def work() -> Json:
            ids = list(self._text.ids_of(body.to_prompt()))
            answer = {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": self._served.max_model_len,
            }
            if body.return_token_strs:
                answer["token_strs"] = self._text.token_strings(ids)
            return answer

        return await self._off_loop(work)

    async def detokenize(self, body: DetokenizeRequest) -> Json:
        """POST /detokenize."""
        self._check_model(body.model)
        check_ids("tokens", body.tokens, self._served.vocab_size)
        text = await self._off_loop(
            lambda: self._text.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        )
        return {"prompt": text}

    async def health(self) -> tuple[int, Json]:
        """Status and body of GET /health: 200 while at least one engine can answer."""
        reports = await self.reports()
        reasons = [report.reason for report in reports if report.reason]
        healthy = len(reports) - len(reasons)
        body = {
            "status": "ok" if healthy else "unavailable",
            "replicas": len(reports),
            "healthy_replicas": healthy,
            "reason": "; ".join(reasons) if reasons or healthy else "no engine replica is running",
        }
        return (200 if healthy else 503), body

    async def reports(self) -> Sequence[ReplicaReport]:
        """Every engine replica's report."""
        return await self._client.reports(REPORT_TIMEOUT_S)

    async def server_info(self) -> Json:
        """GET /server_info: the resolved facts of one engine."""
        return await self._client.describe(REPORT_TIMEOUT_S)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            raise model_not_found(name, self._served.name)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
