"""The way over HTTP, by the OpenAI routes with the fields that this server adds."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any, Final

import httpx

from actors.requests import (
    FinishReason,
    GenerateRequest,
    RunOutput,
    SpeculationStats,
    TokenLogprob,
)
from deploy.failures import Failure, exception_of
from deploy.text import Conversation, Prompt, Text

# Fields of the engine that the routes call the same.
_SAME: Final = (
    "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "cache_salt",
)  # fmt: skip
_FAILURES: Final = {
    401: Failure.UNAUTHENTICATED,
    404: Failure.NOT_FOUND,
    408: Failure.TIMEOUT,
    413: Failure.INVALID,
    422: Failure.INVALID,
    429: Failure.BUSY,
    503: Failure.UNAVAILABLE,
}


class HttpRoute:
    """A server's HTTP port.

    Args:
        target: Its address, with the route prefix if there is one.
        api_key: For a server that asks for one.
        timeout_s: To connect, and of calls that are not generations.
    """

    def __init__(self, target: str, api_key: str | None, timeout_s: float) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=target.rstrip("/"),
            headers=headers,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None),
        )

    async def start(self, request: GenerateRequest, prompt: Prompt) -> AsyncGenerator[RunOutput]:
        body: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
        body |= {
            "stop": list(request.stop) or None,
            "stop_token_ids": list(request.stop_token_ids) or None,
            "speculation": {
                "enabled": request.speculation_enabled,
                "num_speculative_tokens": request.num_speculative_tokens,
            },
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
            "return_token_ids": True,
        }
        if isinstance(prompt, Conversation):
            path = "/v1/chat/completions"
            body |= {
                "messages": [asdict(turn) for turn in prompt.turns],
                "add_generation_prompt": prompt.add_generation_prompt,
                "continue_final_message": prompt.continue_final_message,
                "chat_template_kwargs": dict(prompt.template_kwargs),
                "max_completion_tokens": request.max_tokens,
                "logprobs": request.num_logprobs >= 0,
                "top_logprobs": max(request.num_logprobs, 0) or None,
            }
        else:
            path = "/v1/completions"
            body |= {
                "prompt": prompt.text if isinstance(prompt, Text) else list(prompt),
                "max_tokens": request.max_tokens,
                "logprobs": request.num_logprobs if request.num_logprobs >= 0 else None,
            }
            if isinstance(prompt, Text):
                body["add_special_tokens"] = prompt.add_special_tokens
            if request.max_tokens is None:
                body["max_tokens"] = await self._room_after(prompt)
        return self._runs(path, body, request)

    async def describe(self) -> dict[str, Any]:
        return await self._json("GET", "/server_info")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _room_after(self, prompt: Any) -> int:
        """Output tokens that fit after a prompt: on this route, unset means 16."""
        if isinstance(prompt, Text):
            asked = {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
            counted = await self._json("POST", "/tokenize", asked)
            room = int(counted["max_model_len"]) - int(counted["count"])
        else:
            (model,) = (await self._json("GET", "/v1/models"))["data"]
            room = int(model["max_model_len"]) - len(prompt)
        return max(room, 1)  # the server says what is wrong with a prompt that fills it

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        if response.status_code != 200:
            raise _exception(response.status_code, response.text)
        answer: dict[str, Any] = response.json()
        return answer

    async def _runs(
        self, path: str, body: dict[str, Any], request: GenerateRequest
    ) -> AsyncGenerator[RunOutput]:
        # Between two tokens an engine may be replaced: no limit on reading but the server's own.
        timeout = httpx.Timeout(self._http.timeout.connect, read=None)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise _exception(response.status_code, text)
                async for event in _events(response):
                    if "error" in event:
                        raise _from_object(Failure.ABORTED, event["error"])
                    run = _run(event, request)
                    if run is not None:
                        yield run
        except httpx.HTTPError as error:
            raise _unreachable(error) from None


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Data of the stream's events.

    Raises:
        EngineDead: the stream ended without saying that it was whole.
    """
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise exception_of(Failure.UNAVAILABLE, "the server ended the stream before the answer")


def _run(event: dict[str, Any], request: GenerateRequest) -> RunOutput | None:
    """A chunk as the run that it was made of; None for a chunk without tokens or an end."""
    if not event["choices"]:
        return None
    choice, usage = event["choices"][0], event.get("usage")
    tokens = choice.get("token_ids", [])
    if usage is None or (not tokens and choice["finish_reason"] is None):
        return None
    text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    reason = choice["finish_reason"]
    return RunOutput(
        request_id=request.request_id,
        token_ids=tuple(tokens),
        text=text,
        accepted=tuple(choice.get("accepted", ())),
        logprobs=_logprobs(choice, tokens) if request.num_logprobs >= 0 else None,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
        finish_reason=None if reason is None else FinishReason(reason),
        stop_reason=choice.get("stop_reason"),
        speculation=_speculation(usage["speculation"]),
    )


def _speculation(usage: dict[str, Any]) -> SpeculationStats:
    return SpeculationStats(
        usage["num_steps"],
        usage["num_drafts"],
        usage["num_draft_tokens"],
        usage["num_accepted_tokens"],
        tuple(usage["num_accepted_tokens_per_pos"]),
    )


def _logprobs(choice: dict[str, Any], tokens: list[int]) -> tuple[TokenLogprob, ...]:
    given = choice["logprobs"]
    if given is None:
        return ()
    if "content" in given:  # chat
        values = [entry["logprob"] for entry in given["content"]]
    else:
        values = given["token_logprobs"]
    return tuple(
        TokenLogprob(token, value, tuple((int(i), lp) for i, lp in top))
        for token, value, top in zip(tokens, values, choice["top_token_ids"], strict=True)
    )


def _unreachable(error: httpx.HTTPError) -> Exception:
    if isinstance(error, httpx.TimeoutException):
        return exception_of(Failure.TIMEOUT, f"the server did not answer in time: {error}")
    return exception_of(Failure.UNAVAILABLE, f"the server cannot be reached: {error}")


def _exception(status: int, text: str) -> Exception:
    by_class = Failure.INVALID if status < 500 else Failure.INTERNAL
    failure = _FAILURES.get(status, by_class)
    try:
        return _from_object(failure, json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        # A proxy in front, not this server.
        return exception_of(failure, f"HTTP status {status}: {text[:200]}")


def _from_object(failure: Failure, error: dict[str, Any]) -> Exception:
    return exception_of(failure, error["message"], error.get("param"), error.get("code"))
