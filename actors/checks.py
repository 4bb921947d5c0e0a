"""What a request may ask of an engine: one set of rules for every surface and for admission.

Every field has a rule for its type and its range: what passes fits the plan that workers get.
Errors name the field, the value and the limit. A surface that calls a field otherwise says how in
`names`, so that its users read of the field they wrote.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np

from actors.errors import InvalidRequest, PromptTooLong
from actors.requests import GenerateRequest

MAX_STOPS: Final = 16
MAX_STOP_IDS: Final = 1024
MAX_SALT_CHARS: Final = 1024
MAX_ID_CHARS: Final = 1024
# Far beyond where every token is equally likely; float32 scores stay numbers.
MAX_TEMPERATURE: Final = 100.0
_INT32: Final = 2**31 - 1
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


def _is_int(value: Any, least: int, most: int) -> bool:
    # True == 1 in Python; who writes it means something else. numpy's integers have no wire form.
    return type(value) is int and least <= value <= most


def _is_real(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and least <= value <= most


def _is_text(value: Any, least: int, most: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= most and is_encodable(value)


def _is_list(value: Any, most: int) -> bool:
    return isinstance(value, tuple | list) and len(value) <= most


# Field, what must hold, and how to say it.
_Rule = tuple[str, Callable[[GenerateRequest, RequestLimits], bool], str]


def _switch(field: str) -> _Rule:
    return field, lambda r, _: isinstance(getattr(r, field), bool), "must be True or False"


RULES: Final[tuple[_Rule, ...]] = (
    (
        "request_id",
        lambda r, _: _is_text(r.request_id, 1, MAX_ID_CHARS),
        f"must be text of 1 to {MAX_ID_CHARS} characters",
    ),
    (
        "max_tokens",
        lambda r, _: r.max_tokens is None or _is_int(r.max_tokens, 1, _INT32),
        f"must be a whole number of at least 1 and at most {_INT32}",
    ),
    (
        "min_tokens",
        lambda r, limits: _is_int(r.min_tokens, 0, limits.max_model_len),
        "must be a whole number of at least 0 and at most max_model_len, {limits.max_model_len}",
    ),
    (
        "min_tokens",
        lambda r, _: r.max_tokens is None or r.min_tokens <= r.max_tokens,
        "must not be above max_tokens, {r.max_tokens}",
    ),
    (
        "temperature",
        lambda r, _: _is_real(r.temperature, 0, MAX_TEMPERATURE),
        f"must be a number of at least 0 and at most {MAX_TEMPERATURE:g}",
    ),
    (
        "top_k",
        lambda r, _: _is_int(r.top_k, 0, _INT32),
        f"must be a whole number of at least 0 (0: all tokens) and at most {_INT32}",
    ),
    (
        "top_p",
        lambda r, _: _is_real(r.top_p, 0, 1) and r.top_p > 0,
        "must be a number above 0 and at most 1",
    ),
    ("min_p", lambda r, _: _is_real(r.min_p, 0, 1), "must be a number between 0 and 1"),
    (
        "seed",
        lambda r, _: r.seed is None or _is_int(r.seed, -(2**63), 2**63 - 1),
        "must be a whole number that fits a signed 64-bit integer",
    ),
    (
        "num_logprobs",
        lambda r, limits: _is_int(r.num_logprobs, -1, limits.max_logprobs),
        "must be between -1 (none) and this server's max_logprobs, {limits.max_logprobs}",
    ),
    (
        "stop",
        lambda r, _: _is_list(r.stop, MAX_STOPS),
        f"at most {MAX_STOPS} stop strings are allowed, as a tuple",
    ),
    (
        "stop",
        lambda r, limits: all(_is_text(s, 1, limits.max_model_len) for s in r.stop),
        "stop strings must be text, must not be empty and must have at most as many characters "
        "as max_model_len, {limits.max_model_len}",
    ),
    (
        "stop_token_ids",
        lambda r, _: _is_list(r.stop_token_ids, MAX_STOP_IDS),
        f"at most {MAX_STOP_IDS} ids are allowed, as a tuple",
    ),
    _switch("include_stop_str_in_output"),
    _switch("ignore_eos"),
    _switch("skip_special_tokens"),
    _switch("speculation_enabled"),
    (
        "num_speculative_tokens",
        lambda r, _: (
            r.num_speculative_tokens is None or _is_int(r.num_speculative_tokens, 0, _INT32)
        ),
        f"must be a whole number of at least 0 and at most {_INT32}",
    ),
    (
        "cache_salt",
        lambda r, _: r.cache_salt is None or _is_text(r.cache_salt, 0, MAX_SALT_CHARS),
        f"must be text of at most {MAX_SALT_CHARS} characters",
    ),
)


def check_sampling(
    request: GenerateRequest, limits: RequestLimits, names: Names = _OWN_NAMES
) -> None:
    """Check everything but the prompt.

    Raises:
        InvalidRequest: with the field in `param`.
    """
    for field, holds, rule in RULES:
        if not holds(request, limits):
            named = names.get(field, field)
            words = rule.format(r=request, limits=limits)
            raise InvalidRequest(
                f"'{named}' is {shown(getattr(request, field))}: {words}", param=named
            )
    check_ids(
        names.get("stop_token_ids", "stop_token_ids"), request.stop_token_ids, limits.vocab_size
    )


def check_prompt(
    request: GenerateRequest, limits: RequestLimits, names: Names = _OWN_NAMES
) -> None:
    """Check the prompt's ids and that one output token has room after them.

    Raises:
        InvalidRequest: with the field in `param`.
        PromptTooLong: the prompt leaves no room for one output token.
    """
    ids: Any = request.prompt_token_ids
    if not isinstance(ids, tuple | list | np.ndarray):
        raise InvalidRequest(f"'prompt' is {shown(ids)}: must be a list of ids", param="prompt")
    if len(ids) == 0:
        raise InvalidRequest("the prompt has 0 tokens, at least 1 is needed", param="prompt")
    if len(ids) >= limits.max_model_len:
        raise PromptTooLong(len(ids), limits.max_model_len)
    check_ids(names.get("prompt", "prompt"), ids, limits.vocab_size)


def check_ids(named: str, ids: Any, vocab_size: int) -> None:
    """Check token ids: a list, a tuple or a numpy array of integers below `vocab_size`.

    Raises:
        InvalidRequest: it names the field (`named`), or the entry that is no id.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest(
                f"'{named}' is an array of {ids.ndim} dimensions of {ids.dtype}: must be one of "
                "integers, with one dimension",
                param=named,
            )
    elif set(map(type, ids)) - {int}:
        number, value = next((i, v) for i, v in enumerate(ids) if type(v) is not int)
        raise InvalidRequest(
            f"'{named}[{number}]' is {shown(value)}: must be a token id, a whole number",
            param=f"{named}[{number}]",
        )
    if len(ids) == 0:
        return
    ends = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    for id_ in map(int, ends):
        if not 0 <= id_ < vocab_size:
            raise InvalidRequest(
                f"'{named}' holds token id {shown(id_)}, token ids go from 0 to {vocab_size - 1}",
                param=named,
            )


def is_encodable(text: str) -> bool:
    """Whether `text` is text: halves of surrogate pairs are no characters and have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """`text` with halves of surrogate pairs written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """`value` for an error message: short, and itself encodable."""
    try:
        return encodable(reprlib.repr(value))
    except ValueError:  # Python does not write integers of thousands of digits
        return f"a {type(value).__name__} that is too long to show"
