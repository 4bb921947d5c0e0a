"""What explaining a file gives: plans with their sources, or problems to fix."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from specconfig.decisions import Decision
from specconfig.engine import EngineConfig
from specconfig.model import Frozen
from specconfig.resolving.kv_memory import KvPlan


class Problem(Frozen):
    """One thing to correct in the file."""

    line: int = Field(description="Line of the file, from 1.")
    field: str = Field(description="Dotted path of the setting.")
    value: str = Field(description="What was given, as text.")
    message: str = Field(description="What is wrong, with the allowed values.")
    fix: str = Field(description="What to change.")


class AppExplanation(Frozen):
    """One engine: its plan and how each value came to be."""

    name: str
    values: tuple[Decision, ...] = Field(description="Every value with its source.")
    config: EngineConfig
    serving: dict[str, Any] = Field(description="Settings outside the engine.")
    memory: KvPlan
    capabilities: dict[str, Any]
    cannot_start: Problem | None = Field(
        default=None, description="Why this installation refuses the file at start."
    )


class Explanation(Frozen):
    """Meaning of one file: explained applications, or problems to fix."""

    path: str
    apps: tuple[AppExplanation, ...] = ()
    problems: tuple[Problem, ...] = ()
    skipped: tuple[str, ...] = Field(default=(), description="Applications that are not ours.")

    @property
    def ok(self) -> bool:
        """Whether the file is valid; see ``can_start`` too."""
        return not self.problems

    @property
    def can_start(self) -> bool:
        """Whether this installation serves it."""
        return not self.refusals

    @property
    def refusals(self) -> tuple[Problem, ...]:
        """Everything that keeps this installation from serving it, in the file's order."""
        unread = (app.cannot_start for app in self.apps)
        found = (*self.problems, *(problem for problem in unread if problem is not None))
        return tuple(sorted(found, key=lambda problem: problem.line))

    def to_json(self) -> str:
        """Everything as JSON; ``from_json`` gives an equal explanation."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """Inverse of ``to_json``."""
        return cls.model_validate(json.loads(text))
