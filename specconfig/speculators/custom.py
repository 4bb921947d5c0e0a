"""A drafter class of the user, named by import path."""

from __future__ import annotations

from specconfig.errors import ConfigError
from specconfig.facts.source import is_dotted_path
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution


class CustomClassSpeculatorConfig(SpeculatorConfig):
    """A class imported by the engine and checked against the drafter protocol at start."""

    base_method = "custom_class"
    variant = "custom_class"
    implementation = "actors.draft.drafters.custom:CustomDrafter"
    host = "verifier"
    own_options = frozenset({"model"})

    @classmethod
    def default_model(cls, res: Resolution) -> str | None:
        """There is no default class."""
        raise ConfigError(
            "speculative_config.model",
            None,
            "a dotted class path such as 'package.module.Drafter'",
            "put the class path in model",
            message="method 'custom_class' needs the drafter's class path in model",
        )

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """Take the target as vocabulary source and say that this path is experimental."""
        model = res.values["model"]
        if not is_dotted_path(model):
            raise ConfigError(
                "speculative_config.model",
                model,
                "a dotted class path 'package.module.Class'",
                "put the class path in model",
            )
        res.reset_lookup()
        res.use_target_as_draft()
        res.log.warn(
            f"custom_class {model!r} is experimental: it runs inside the verifier and is trusted"
        )
