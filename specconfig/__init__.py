"""Configuration of Paceline: from what a user writes to one frozen, validated plan.

    >>> args = EngineArgs(model="org/model", speculative_config={"method": "ngram", ...})
    >>> config = args.resolve()          # EngineConfig, or ConfigError with field, value and fix

Plain Python and pydantic: importing this package loads no tensor library and no drafter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specconfig.acceptance import register_acceptance_method
    from specconfig.app_args import AppArgs
    from specconfig.decisions import Decision
    from specconfig.engine import EngineConfig
    from specconfig.engine_args import EngineArgs
    from specconfig.errors import ConfigError
    from specconfig.explaining.explain import explain_file
    from specconfig.explaining.explanation import Explanation
    from specconfig.model import ModelConfig, ParallelConfig
    from specconfig.registry import register_speculative_method, registered_speculative_methods
    from specconfig.speculative import SpeculativeConfig
    from specconfig.speculators.base import SpeculatorConfig

_HOMES = {
    "AppArgs": "app_args",
    "ConfigError": "errors",
    "Decision": "decisions",
    "EngineArgs": "engine_args",
    "EngineConfig": "engine",
    "Explanation": "explaining.explanation",
    "ModelConfig": "model",
    "ParallelConfig": "model",
    "SpeculativeConfig": "speculative",
    "SpeculatorConfig": "speculators.base",
    "explain_file": "explaining.explain",
    "register_acceptance_method": "acceptance",
    "register_speculative_method": "registry",
    "registered_speculative_methods": "registry",
}

__all__ = [
    "AppArgs",
    "ConfigError",
    "Decision",
    "EngineArgs",
    "EngineConfig",
    "Explanation",
    "ModelConfig",
    "ParallelConfig",
    "SpeculativeConfig",
    "SpeculatorConfig",
    "explain_file",
    "register_acceptance_method",
    "register_speculative_method",
    "registered_speculative_methods",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
