"""The record of how each value came to be, kept beside the values themselves."""

from __future__ import annotations

import warnings as python_warnings
from typing import Any, Literal

from pydantic import Field

from specconfig.model import Frozen

Source = Literal["given", "inferred", "checkpoint", "target", "default", "fallback"]


class Decision(Frozen):
    """One resolved value, its source, and the rule that set it."""

    field: str = Field(description="Dotted path of the value.")
    value: Any = Field(description="The value, as JSON.")
    source: Source = Field(description="Where it came from.")
    reason: str = Field(description="The rule, in one line.")


class DecisionLog:
    """Collects decisions and warnings while a plan is resolved."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.warnings: list[str] = []

    def note(self, field: str, value: object, source: Source, reason: str) -> None:
        """Record a decision; a later one for the same field replaces it in place."""
        if isinstance(value, tuple):
            value = [list(item) if isinstance(item, tuple) else item for item in value]
        entry = Decision(field=field, value=value, source=source, reason=reason)
        for index, old in enumerate(self.decisions):
            if old.field == field:
                self.decisions[index] = entry
                return
        self.decisions.append(entry)

    def note_given(self, field: str, value: object, reason: str) -> None:
        """Record a value the user wrote, unless a checkpoint already explained it."""
        if all(old.field != field for old in self.decisions):
            self.note(field, value, "given", reason)

    def warn(self, text: str) -> None:
        """Record something legal that the user may not want.

        Warnings travel in ``EngineConfig.warnings``, so none is lost in some process's stderr.
        """
        if text not in self.warnings:
            self.warnings.append(text)

    def deprecated(self, text: str) -> None:
        """Record a deprecation, and raise it as DeprecationWarning for Python callers."""
        self.warn(text)
        python_warnings.warn(text, DeprecationWarning, stacklevel=2)
