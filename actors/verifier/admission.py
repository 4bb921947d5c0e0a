"""Checks of a request before it is queued. Errors name the field, the value and the limit."""

from __future__ import annotations

import math

import numpy as np

from actors.errors import InvalidRequest, PromptTooLong
from actors.requests import GenerateRequest
from actors.steps.messages import token_array
from actors.verifier.detokenize import Detokenizer, TextStream
from actors.verifier.finish import FinishRules
from actors.verifier.limits import EngineLimits

_MAX_SALT_CHARS = 1024


def admit(
    params: GenerateRequest, limits: EngineLimits, tokenizer: object | None
) -> tuple[FinishRules, TextStream | None]:
    """The request's rules for ending and its output text, if this replica can serve it.

    Raises:
        InvalidRequest: with the field in `param`.
        PromptTooLong: the prompt leaves no room for one output token.
    """
    prompt_len = len(params.prompt_token_ids)
    _check_prompt(params, limits, prompt_len)
    _check_sampling(params, limits)
    max_tokens = limits.max_model_len - prompt_len
    if params.max_tokens is not None:
        max_tokens = min(max_tokens, params.max_tokens)
    rules = FinishRules(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=frozenset(() if params.ignore_eos else limits.eos_token_ids),
        stop_token_ids=frozenset(params.stop_token_ids),
        include_stop_in_text=params.include_stop_str_in_output,
    )
    text = None
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        text = TextStream(detokenizer, params.stop, params.include_stop_str_in_output)
    elif params.stop:
        raise InvalidRequest("stop strings need a tokenizer; this server has none", param="stop")
    return rules, text


def _check_prompt(params: GenerateRequest, limits: EngineLimits, prompt_len: int) -> None:
    if prompt_len == 0:
        raise InvalidRequest("the prompt has 0 tokens, at least 1 is needed", param="prompt")
    if prompt_len >= limits.max_model_len:
        raise PromptTooLong(prompt_len, limits.max_model_len)
    if not limits.enable_chunked_prefill and prompt_len > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, but max_num_batched_tokens is "
            f"{limits.max_num_batched_tokens} and enable_chunked_prefill is false, so a prompt "
            f"must fit one step; shorten the prompt or enable chunked prefill",
            param="prompt",
        )
    _check_ids("prompt", params.prompt_token_ids, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)


def _check_ids(field: str, ids: object, limits: EngineLimits) -> None:
    try:
        array = np.asarray(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{field} must be a list of token ids: {error}", param=field) from None
    illegal = (array < 0) | (array >= limits.vocab_size)
    if illegal.any():
        raise InvalidRequest(
            f"{field} holds token id {int(array[illegal.argmax()])}, ids go from 0 to "
            f"{limits.vocab_size - 1}",
            param=field,
        )
    token_array(array)


def _check_sampling(params: GenerateRequest, limits: EngineLimits) -> None:
    p = params

    def need(ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise InvalidRequest(f"{field} is {getattr(p, field)!r}, {rule}", param=field)

    need(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", "must be at least 1")
    need(p.min_tokens >= 0, "min_tokens", "must be at least 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        need(False, "min_tokens", f"must not be above max_tokens, {p.max_tokens}")
    need(
        math.isfinite(p.temperature) and p.temperature >= 0,
        "temperature",
        "must be a number of at least 0",
    )
    need(p.top_k >= 0, "top_k", "must be at least 0 (0: all tokens)")
    need(0 < p.top_p <= 1, "top_p", "must be above 0 and at most 1")
    need(0 <= p.min_p <= 1, "min_p", "must be between 0 and 1")
    need(p.seed is None or -(2**63) <= p.seed < 2**63, "seed", "must fit a signed 64-bit integer")
    need(
        -1 <= p.num_logprobs <= limits.max_logprobs,
        "num_logprobs",
        f"must be between -1 (none) and this server's max_logprobs, {limits.max_logprobs}",
    )
    need(all(p.stop), "stop", "stop strings must not be empty")
    need(
        p.cache_salt is None or len(p.cache_salt) <= _MAX_SALT_CHARS,
        "cache_salt",
        f"must have at most {_MAX_SALT_CHARS} characters",
    )
    need(
        p.num_speculative_tokens is None or p.num_speculative_tokens >= 0,
        "num_speculative_tokens",
        "must be at least 0",
    )
