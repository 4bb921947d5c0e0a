"""From a body's bytes to a request, or to the one error that says what to mend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from actors.checks import encodable, is_encodable, shown
from actors.errors import InvalidRequest
from deploy.openai import unsupported
from deploy.openai.fields import PROMPT_KINDS, ApiFault
from deploy.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# A place in the body: (the place around it, name or index).
_Place = tuple[Any, str | int]


def parse(raw: bytes, model: type[Body]) -> Body:
    """The request in `raw`.

    Raises:
        InvalidRequest: It names the first field at fault.
    """
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if _SURROGATE.search(raw):
        _check_characters(body)
    try:
        return model.model_validate(unsupported.drop_neutral(body, model.table))
    except ValidationError as error:
        raise _first_fault(error) from None


def _check_characters(body: dict[str, Any]) -> None:
    """Refuse halves of surrogate pairs, which only JSON's escapes can write: text has none."""
    todo: list[tuple[_Place | None, Any]] = [(None, body)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, str) and not is_encodable(value):
            raise _half_character(place)
        if isinstance(value, list):
            todo.extend(((place, index), member) for index, member in enumerate(value))
        if isinstance(value, dict):
            for name, member in value.items():
                if not is_encodable(name):
                    raise _half_character((place, name))
                todo.append(((place, name), member))


def _half_character(place: _Place | None) -> InvalidRequest:
    parts: list[str | int] = []
    while place is not None:
        place, part = place
        parts.append(part)
    path = encodable(_path(parts[::-1]))
    return InvalidRequest(
        f"'{path}' holds half of a surrogate pair, which is no character", param=path
    )


def _first_fault(error: ValidationError) -> InvalidRequest:
    fault = error.errors(include_url=False)[0]
    place = [part for part in fault["loc"] if part not in PROMPT_KINDS or part == fault["loc"][0]]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ApiFault):
        path = _path([*place, cause.param])
        return InvalidRequest(f"'{path}': {cause.message}", param=path, code=cause.code)
    path = _path(place)
    if fault["type"] == "missing":
        return InvalidRequest(
            f"'{path}' is required", param=path, code="missing_required_parameter"
        )
    return InvalidRequest(f"'{path}': {_message(fault)}", param=path)


def _message(fault: Mapping[str, Any]) -> str:
    text = str(fault["msg"])
    text = text[0].lower() + text[1:]
    given = fault.get("input")
    return f"{text}, got {shown(given)}" if isinstance(given, int | float | str) else text


def _path(parts: list[str | int]) -> str:
    """`messages[0].content`, from its parts."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".") or "body"
