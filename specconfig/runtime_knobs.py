"""What changes in a running engine: `user_config` of the Engine deployment."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specconfig.errors import ConfigError, from_validation

SECTION = "user_config"


class RuntimeKnobs(BaseModel):
    """`user_config` of the Engine deployment: what changes without a restart."""

    # Strict: `max_speculative_tokens: true` is a slip, not a 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    speculation_enabled: bool = Field(default=True, description="Whether drafts are made.")
    max_speculative_tokens: int | None = Field(
        default=None, ge=0, description="Largest K of a step; None = the engine's."
    )

    @classmethod
    def of(cls, user_config: object, num_speculative_tokens: int) -> RuntimeKnobs:
        """The knobs that `user_config` sets on an engine with K = `num_speculative_tokens`.

        Raises:
            ConfigError: an unknown key, a wrong type, or a K that the engine does not have.
        """
        given = {} if user_config is None else user_config
        if not isinstance(given, Mapping):
            raise ConfigError(SECTION, given, "a mapping", "write key: value lines")
        try:
            knobs = cls(**{str(key): value for key, value in given.items()})
        except ValidationError as error:
            raise from_validation(error, SECTION, cls.model_fields) from None
        wanted = knobs.max_speculative_tokens
        if wanted is not None and wanted > num_speculative_tokens:
            raise ConfigError(
                f"{SECTION}.max_speculative_tokens",
                wanted,
                f"at most num_speculative_tokens={num_speculative_tokens} of this engine; a larger "
                "K needs a restart with a new speculative_config",
                f"set it to {num_speculative_tokens} or less, or remove it",
            )
        return knobs
