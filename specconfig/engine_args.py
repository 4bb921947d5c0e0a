"""``EngineArgs``: what an engine is told, and its resolution to a plan."""

from __future__ import annotations

from specconfig.engine import EngineConfig
from specconfig.engine_fields import EngineFields
from specconfig.facts.source import FactsSource
from specconfig.resolving.engine import resolve_engine


class EngineArgs(EngineFields):
    """Everything an engine can be told. Unknown keys are errors that propose the nearest field."""

    def resolve(self, facts: FactsSource | None = None) -> EngineConfig:
        """The frozen plan. Reads config.json files (or ``facts``), never weights.

        Args:
            facts: ``(model, revision) -> config dict``; the file system and hub when None.

        Raises:
            ConfigError: with field, value, allowed values and fix.
        """
        return resolve_engine(self, facts)
