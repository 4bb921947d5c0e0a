"""Types that the bodies of this surface are made of.

JSON's types are taken as they are: no text for a number, no true for 1. Lists end at their first
fault, so a wrong entry in a long list costs no more than a right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)


class ApiFault(ValueError):
    """A mistake found inside a validator. `param`: the field, seen from the part it is in."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


class Strict(BaseModel):
    """Base of every request part: no field we did not declare. Null asks for nothing."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _known_and_set(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = {name: value for name, value in values.items() if value is not None}
        for name in values:
            if name not in cls.model_fields:
                raise ApiFault(name, "no such field is known here", "unknown_parameter")
        return values


def _whole(value: Any) -> Any:
    # JSON has one kind of number: some clients write 2 as 2.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# One text needs no list around it.
TextOrTexts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "texts"
    return "id_lists" if isinstance(first, list) else "ids"


# The type of a list's first element says what it is a list of: no other form is tried.
PROMPT_KINDS = frozenset({"text", "texts", "ids", "id_lists"})
PromptForms = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("id_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_form",
        custom_error_message="must be text, a list of token ids, or a list with one of these",
    ),
]
