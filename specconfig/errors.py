"""Errors of the configuration layer.

    ConfigError (ValueError)
    +-- UnknownKeyError        a key that no field has; carries the nearest valid name
    +-- MethodMismatchError    the requested method and the checkpoint disagree
    +-- FormatError            a checkpoint's config.json lacks or breaks something we need
    +-- FactsUnavailable       no config.json / GGUF header could be read for a model

All are ``ValueError`` so that callers that only know "bad configuration" keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError


class ConfigError(ValueError):
    """A configuration value that cannot work, with what would.

    Attributes:
        field: Dotted path of the setting, as the user would write it.
        value: What was given (or derived); shown with ``repr``.
        allowed: The rule or the set of valid values, in words.
        fix: One action that makes the configuration valid.
    """

    def __init__(
        self, field: str, value: object, allowed: str, fix: str = "", message: str = ""
    ) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        self.fix = fix
        text = message or f"{field}={value!r} is not valid"
        if allowed:
            text += f"; allowed: {allowed}"
        if fix:
            text += f"; fix: {fix}"
        super().__init__(text)
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (launcher, Serve controller); keep the four parts.
        return (type(self), (self.field, self.value, self.allowed, self.fix, self._message))


class UnknownKeyError(ConfigError):
    """A key that is not a field."""


class MethodMismatchError(ConfigError):
    """An explicit method that contradicts what the draft checkpoint declares."""


class FormatError(ConfigError):
    """A checkpoint config that is structurally wrong for its own format."""


class FactsUnavailable(ConfigError):
    """Model facts could not be read."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Closest valid spelling of ``name``, or None when nothing is similar."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_key(section: str, key: str, valid: Iterable[str], value: object = None) -> ConfigError:
    """Error for a key no field has, proposing the nearest field."""
    names = sorted(valid)
    close = nearest(key, names)
    path = f"{section}.{key}" if section else key
    # The whole list helps only when nothing is close; otherwise it buries the answer.
    fix = f"did you mean {close!r}?" if close else f"remove {key!r}"
    allowed = repr(close) if close else "one of: " + ", ".join(names)
    return UnknownKeyError(path, value, allowed, fix, message=f"unknown key {path!r}")


def check_keys(section: str, given: Mapping[str, object], valid: Iterable[str]) -> None:
    """Raise for the first key of ``given`` that is not in ``valid``."""
    names = set(valid)
    for key in given:
        if key not in names:
            raise unknown_key(section, key, names, given[key])


def from_validation(error: ValidationError, section: str, names: Iterable[str]) -> ConfigError:
    """Turn pydantic's first complaint into a ConfigError, keeping a nested ConfigError as it is."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_key(section, location, names, first.get("input"))
    path = ".".join(part for part in (section, location) if part)
    return ConfigError(path, first.get("input"), first["msg"], "")
