"""What the routes do, without HTTP: validate, tokenise, generate, answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from actors.checks import check_ids
from deploy.engine_client import ReplicaReport
from deploy.front import Front
from deploy.openai.answers import Answer, ChatAnswer, Json, TextAnswer
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from deploy.openai.sampling import names_of, to_generate_request
from deploy.openai.streaming import events


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Choices of the surface that no engine needs to know."""

    least_tokens_per_chunk: int = 1
    stream_keepalive_s: float | None = None


class OpenAIService:
    """One ingress replica's work."""

    def __init__(self, front: Front, options: ServiceOptions | None = None) -> None:
        self._front = front
        self._served = front.served
        self._options = options or ServiceOptions()
        self._created = int(time.time())

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
        self._front.check_model(body.model)
        engine_id = self._front.new_request_id(prefix)
        asked = to_generate_request(body, engine_id)
        runs = await self._front.start(asked, body.to_prompt, names_of(body))
        text = self._front.text
        answer = kind(engine_id, int(time.time()), self._served.name, body, text.token_bytes)
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
        self._front.check_model(name)
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": self._served.max_model_len,
        }

    async def tokenize(self, body: TokenizeRequest) -> Json:
        """POST /tokenize."""
        self._front.check_model(body.model)
        text = self._front.text

        def work() -> Json:
            ids = list(text.ids_of(body.to_prompt()))
            answer = {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": self._served.max_model_len,
            }
            if body.return_token_strs:
                answer["token_strs"] = text.token_strings(ids)
            return answer

        return await self._front.off_loop(work)

    async def detokenize(self, body: DetokenizeRequest) -> Json:
        """POST /detokenize."""
        self._front.check_model(body.model)
        check_ids("tokens", body.tokens, self._served.vocab_size)
        text = self._front.text
        decoded = await self._front.off_loop(
            lambda: text.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        )
        return {"prompt": decoded}

    async def health(self) -> tuple[int, Json]:
        """Status and body of GET /health: 200 while at least one engine can answer."""
        health = await self._front.health()
        body = {
            "status": "ok" if health.is_healthy else "unavailable",
            "replicas": health.num_replicas,
            "healthy_replicas": health.num_healthy,
            "reason": health.reason,
        }
        return (200 if health.is_healthy else 503), body

    async def reports(self) -> Sequence[ReplicaReport]:
        """Every engine replica's report."""
        return await self._front.reports()

    async def server_info(self) -> Json:
        """GET /server_info: the resolved facts of one engine."""
        return await self._front.describe()
