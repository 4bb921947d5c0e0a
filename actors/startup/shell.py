"""What the launcher puts on Ray: shells that import their role in the process they run in.

Handing Ray a role's class itself would import torch and transformers in the verifier's process
too, seconds of every start and recovery, for nothing.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar


class RoleShell:
    """One rank of a role; the calls are those of the role's class."""

    role: ClassVar[str]  # qualified name of the class

    def __init__(self, config_json: str, rank: int) -> None:
        module, _, name = self.role.partition(":")
        self._rank: Any = getattr(importlib.import_module(module), name)(config_json, rank)

    def call(self, method: str, *args: Any) -> Any:
        """Result of the role's `method`."""
        return getattr(self._rank, method)(*args)


class Target(RoleShell):
    """Named so that a process list says `ray::Target`."""

    role = "actors.target.actor:TargetActor"


class Draft(RoleShell):
    """Named so that a process list says `ray::Draft`."""

    role = "actors.draft.actor:DraftActor"
