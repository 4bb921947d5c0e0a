"""What a request may ask of an engine: one set of rules for every surface and for admission.

Errors name the field, the value and the limit. A surface that calls a field otherwise says how in
`names`, so that its users read of the field they wrote.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np

from actors.errors import InvalidRequest, PromptTooLong
from actors.requests import GenerateRequest

MAX_STOPS: Final = 16
MAX_SALT_CHARS: Final = 1024
Names = Mapping[str, str]
_OWN_NAMES: Final[Names] = {}


class RequestLimits(Protocol):
    """The numbers of a server that bound a request."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...


# Field, what must hold, and how to say it. A value of a wrong type fails its rule.
_Rule = tuple[str, Callable[[GenerateRequest, RequestLimits], bool], str]
_RULES: Final[tuple[_Rule, ...]] = (
    ("max_tokens", lambda r, _: r.max_tokens is None or r.max_tokens >= 1, "must be at least 1"),
    ("min_tokens", lambda r, _: r.min_tokens >= 0, "must be at least 0"),
    (
        "min_tokens",
        lambda r, _: r.max_tokens is None or r.min_tokens <= r.max_tokens,
        "must not be above max_tokens, {r.max_tokens}",
    ),
    (
        "temperature",
        lambda r, _: math.isfinite(r.temperature) and r.temperature >= 0,
        "must be a number of at least 0",
    ),
    ("top_k", lambda r, _: r.top_k >= 0, "must be at least 0 (0: all tokens)"),
    ("top_p", lambda r, _: 0 < r.top_p <= 1, "must be above 0 and at most 1"),
    ("min_p", lambda r, _: 0 <= r.min_p <= 1, "must be between 0 and 1"),
    (
        "seed",
        lambda r, _: r.seed is None or -(2**63) <= r.seed < 2**63,
        "must fit a signed 64-bit integer",
    ),
    (
        "num_logprobs",
        lambda r, limits: -1 <= r.num_logprobs <= limits.max_logprobs,
        "must be between -1 (none) and this server's max_logprobs, {limits.max_logprobs}",
    ),
    ("stop", lambda r, _: all(len(s) > 0 for s in r.stop), "stop strings must not be empty"),
    (
        "stop",
        lambda r, _: len(r.stop) <= MAX_STOPS,
        f"at most {MAX_STOPS} stop strings are allowed",
    ),
    (
        "cache_salt",
        lambda r, _: r.cache_salt is None or len(r.cache_salt) <= MAX_SALT_CHARS,
        f"must have at most {MAX_SALT_CHARS} characters",
    ),
    (
        "num_speculative_tokens",
        lambda r, _: r.num_speculative_tokens is None or r.num_speculative_tokens >= 0,
        "must be at least 0",
    ),
)


def check_sampling(
    request: GenerateRequest, limits: RequestLimits, names: Names = _OWN_NAMES
) -> None:
    """Check everything but the prompt.

    Raises:
        InvalidRequest: with the field in `param`.
    """
    for field, holds, rule in _RULES:
        try:
            good = holds(request, limits)
        except TypeError:
            good = False
        if not good:
            named = names.get(field, field)
            words = rule.format(r=request, limits=limits)
            value = reprlib.repr(getattr(request, field))
            raise InvalidRequest(f"'{named}' is {value}: {words}", param=named)
    _check_ids("stop_token_ids", request.stop_token_ids, limits, names)


def check_prompt(
    request: GenerateRequest, limits: RequestLimits, names: Names = _OWN_NAMES
) -> None:
    """Check the prompt's ids and that one output token has room after them.

    Raises:
        InvalidRequest: with the field in `param`.
        PromptTooLong: the prompt leaves no room for one output token.
    """
    if len(request.prompt_token_ids) == 0:
        raise InvalidRequest("the prompt has 0 tokens, at least 1 is needed", param="prompt")
    if len(request.prompt_token_ids) >= limits.max_model_len:
        raise PromptTooLong(len(request.prompt_token_ids), limits.max_model_len)
    _check_ids("prompt", request.prompt_token_ids, limits, names)


def _check_ids(field: str, ids: Any, limits: RequestLimits, names: Names) -> None:
    named = names.get(field, field)
    try:
        array = np.asarray(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"'{named}' must be a list of token ids: {error}", param=named
        ) from None
    if array.ndim != 1:
        raise InvalidRequest(f"'{named}' must be a list of token ids, without lists", param=named)
    illegal = (array < 0) | (array >= limits.vocab_size)
    if illegal.any():
        raise InvalidRequest(
            f"'{named}' holds token id {int(array[illegal.argmax()])}, ids go from 0 to "
            f"{limits.vocab_size - 1}",
            param=named,
        )
