"""Fields of the public API that this server does not have, and the values that ask for nothing.

A client library that always sends `n: 1` or `presence_penalty: 0` must work; a client that asks
for two choices must hear that it cannot have them, by the field's name, not get one silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from deploy.failures import unsupported

# Says whether a value asks for nothing beyond what the server does anyway. None always does.
Neutral = Callable[[Any], bool]


def _is(*values: Any) -> Neutral:
    def check(value: Any) -> bool:
        # 1 == True in Python; the field's meaning differs.
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)

    return check


def _empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def _anything(_: Any) -> bool:
    return True


_ONE_CHOICE = "this server generates one choice per request; leave it out or set it to 1"
_PENALTY = "penalties are not implemented; leave it out or set it to its neutral value"

_BOTH: Final[Mapping[str, tuple[Neutral, str]]] = {
    "n": (_is(1), _ONE_CHOICE),
    "logit_bias": (_empty, "token biases are not implemented"),
    "presence_penalty": (_is(0), _PENALTY),
    "frequency_penalty": (_is(0), _PENALTY),
    "repetition_penalty": (_is(1), _PENALTY),
    "user": (_anything, ""),
    "metadata": (_anything, ""),
    "safety_identifier": (_anything, ""),
    "prompt_cache_key": (_anything, ""),
    "prompt_cache_retention": (_anything, ""),
    "service_tier": (_anything, ""),
    "response_format": (
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        "structured output is not implemented; only {'type': 'text'} is",
    ),
    "prompt_logprobs": (_is(False), "logprobs of the prompt are not implemented"),
}

CHAT: Final[Mapping[str, tuple[Neutral, str]]] = {
    **_BOTH,
    "store": (_is(False), "completions are not stored; leave it out or set it to false"),
    "tools": (_empty, "tool calls are not implemented"),
    "tool_choice": (_is("none", "auto"), "tool calls are not implemented"),
    "parallel_tool_calls": (_anything, ""),
    "functions": (_empty, "function calls are not implemented"),
    "function_call": (_is("none", "auto"), "function calls are not implemented"),
    "modalities": (_is(["text"]), "only text is generated"),
    "audio": (_empty, "only text is generated"),
    "prediction": (
        _empty,
        "predicted outputs are not implemented; drafts come from the server's speculator",
    ),
    "reasoning_effort": (_is("none"), "the served model has no reasoning levels"),
    "verbosity": (_is("medium"), "the served model has no verbosity levels"),
    "web_search_options": (_empty, "the server has no web search"),
    "moderation": (_empty, "the server does not moderate"),
}

COMPLETIONS: Final[Mapping[str, tuple[Neutral, str]]] = {
    **_BOTH,
    "best_of": (_is(1), _ONE_CHOICE),
    "echo": (_is(False), "the prompt is not repeated in the answer"),
    "suffix": (_empty, "insertion is not implemented"),
}


def drop_neutral(body: dict[str, Any], table: Mapping[str, tuple[Neutral, str]]) -> dict[str, Any]:
    """`body` without the table's fields.

    Raises:
        InvalidRequest: A field of the table asks for something; the error names it.
    """
    kept = {}
    for name, value in body.items():
        if name not in table:
            kept[name] = value
            continue
        neutral, why = table[name]
        if value is not None and not neutral(value):
            raise unsupported(name, why)
    return kept
