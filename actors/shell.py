"""What `actors.launch` puts on Ray: a shell that imports its role in the process it runs in.

Handing Ray the role's class itself would import torch and transformers in the verifier's process
too, seconds of every start and recovery, for nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

TARGET = "actors.target.actor:TargetActor"
DRAFT = "actors.draft.actor:DraftActor"


class RoleActor:
    """One rank of a role (`TARGET` or `DRAFT`); the calls are those of the role's class."""

    def __init__(self, qualified: str, config_json: str, rank: int) -> None:
        module, _, name = qualified.partition(":")
        self._role: Any = getattr(importlib.import_module(module), name)(config_json, rank)

    def call(self, method: str, *args: Any) -> Any:
        """Result of the role's `method`."""
        return getattr(self._role, method)(*args)
