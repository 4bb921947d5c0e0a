"""A server with the OpenAI API, as a benchmark sees it: its model, what it takes, one request."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp

from deploy.bench.prompts import BenchPrompt
from deploy.bench.stream import EventLines, Received
from deploy.errors import UserError, one_line

Endpoint = Literal["chat", "completions"]
ENDPOINTS: Final[Mapping[Endpoint, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
_QUESTION_S: Final = 30.0
# Counters of servers whose usage says nothing about drafts.
_COUNTERS: Final = {
    "num_drafts": "vllm:spec_decode_num_drafts_total",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, the same for every run.

    `extra_body` is added to each request. The last two say what the server was found to take:
    `ignore_eos` (answers have exactly `max_tokens` tokens) and usage at a stream's end.
    """

    endpoint: Endpoint
    model: str
    prompts: tuple[BenchPrompt, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    extra_body: Mapping[str, Any] | None = None
    ignores_eos: bool = True
    has_usage: bool = True

    def prompt(self, index: int) -> BenchPrompt:
        """The prompt of request `index`: they take turns."""
        return self.prompts[index % len(self.prompts)]

    def body(self, index: int) -> bytes:
        """The body of request `index`."""
        prompt = self.prompt(index)
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.endpoint == "chat":
            fields["messages"] = list(prompt.messages)
        else:
            fields["prompt"] = prompt.text
        if self.temperature > 0:
            fields["seed"] = self.seed + index
        if self.ignores_eos:
            fields["ignore_eos"] = True
        if self.has_usage:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps({**fields, **(self.extra_body or {})}).encode()


class Server:
    """A connection pool to one server."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def find_model(self, wanted: str | None) -> str:
        """`wanted`, or the first model that the server names.

        Raises:
            UserError: Nobody answers at the URL, a key is wanted, or the model is unknown.
        """
        status, text = await self._get("/v1/models")
        if status in (401, 403):
            raise UserError(f"{self.url} wants an API key: --api-key or $PACELINE_API_KEY")
        names = _model_names(text) if status == 200 else []
        if wanted is None:
            if not names:
                raise UserError(
                    f"{self.url}/v1/models names no model (status {status}); give --model, or "
                    "the URL without its path"
                )
            return names[0]
        if names and wanted not in names:
            raise UserError(f"{self.url} has no model {wanted!r}; it has {', '.join(names)}")
        return wanted

    async def fitted(self, workload: Workload) -> Workload:
        """`workload` as the server takes it: without the fields that it refuses by name.

        Raises:
            UserError: It refuses the request for another reason.
        """
        while True:
            probe = replace(workload, max_tokens=2)
            received = await self.ask(probe, 0, _QUESTION_S * 4)
            if received.error is None:
                return replace(workload, has_usage=received.usage is not None)
            if workload.ignores_eos and "ignore_eos" in received.error:
                workload = replace(workload, ignores_eos=False)
            elif workload.has_usage and "stream_options" in received.error:
                workload = replace(workload, has_usage=False)
            else:
                raise UserError(f"{self.url} refuses a request: {received.error}")

    async def ask(self, workload: Workload, index: int, seconds: float) -> Received:
        """Send request `index` and read its stream; what goes wrong is `Received.error`."""
        received, lines = Received(), EventLines()
        path = ENDPOINTS[workload.endpoint]
        try:
            async with self._http.post(
                self.url + path,
                data=workload.body(index),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                if answer.status != 200:
                    received.error = f"{answer.status}: {_reason(await answer.text())}"
                    return received
                async for chunk in answer.content.iter_any():
                    now = time.perf_counter()
                    for payload in lines.feed(chunk):
                        received.take(payload, now)
        except TimeoutError:
            received.error = f"no end after {seconds:g} s (--timeout)"
        except aiohttp.ClientError as error:
            received.error = _fault(error)
        except ValueError:
            received.error = "an event of the stream is no JSON"
        if received.error is None and not received.is_whole:
            received.error = "the stream ended before [DONE]"
        return received

    async def draft_counters(self) -> dict[str, float] | None:
        """Totals of a server that counts drafts in /metrics only; None: it does not."""
        with contextlib.suppress(UserError):
            status, page = await self._get("/metrics")
            if status == 200:
                totals = {key: _total(page, name) for key, name in _COUNTERS.items()}
                found = {key: value for key, value in totals.items() if value is not None}
                return found if len(found) == len(_COUNTERS) else None
        return None

    async def _get(self, path: str) -> tuple[int, str]:
        try:
            async with self._http.get(
                self.url + path, timeout=aiohttp.ClientTimeout(total=_QUESTION_S)
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UserError(f"no server at {self.url}: {_fault(error)}") from None


@contextlib.asynccontextmanager
async def connected(url: str, api_key: str | None) -> AsyncIterator[Server]:
    """The server at `url`, with or without the API's `/v1`.

    Raises:
        UserError: It is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{url!r} is no URL of a server; one looks like http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # No limit: the load decides how many connections are open.
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        yield Server(base, http)


def _fault(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number) if number and number > 0 else str(error.os_error.strerror)
    if isinstance(error, TimeoutError):
        return f"no answer within {_QUESTION_S:g} s"
    return one_line(error) or type(error).__name__


def _model_names(text: str) -> Sequence[str]:
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _reason(text: str) -> str:
    """The message of an error answer, in whichever of the usual shapes."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    return " ".join(str(message or text).split())[:300]


def _total(page: str, name: str) -> float | None:
    """The sum over all series of a counter on a page of Prometheus' text format."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values)) if values else None
