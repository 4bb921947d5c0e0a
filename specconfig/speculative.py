"""``SpeculativeConfig``: one resolved, frozen description of how this server speculates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specconfig.acceptance import BUILTIN, EXACT_MATCH, is_custom
from specconfig.model import ModelConfig, ParallelConfig
from specconfig.options import SpeculativeFields
from specconfig.registry import load_class
from specconfig.speculators.base import SpeculatorConfig


class SpeculativeConfig(SpeculativeFields):
    """Resolved speculation. Build it with ``resolving.speculation.resolve_speculation``.

    Fields of ``SpeculativeFields`` hold final values here; the fields below are derived. Read
    capabilities through ``speculator`` or, better, through ``EngineConfig``.
    """

    method: str = Field(description="Canonical method name.")
    num_speculative_tokens: int = Field(gt=0, description="K.")
    num_speculative_tokens_schedule: Literal["goodput", "constant"] = Field(
        description="Whether K follows what drafts gain and cost."
    )
    prompt_lookup_max: int | None = Field(default=None, ge=0, description="0 = not looked up.")
    prompt_lookup_min: int | None = Field(default=None, ge=0, description="0 = not looked up.")
    custom_method: str | None = Field(
        default=None, description="Registered name that `method` is the base of."
    )
    config_class: str = Field(description="Qualified name of the SpeculatorConfig class.")
    draft_model_config: ModelConfig | None = Field(
        default=None, description="Draft model; the target itself for lookup drafters."
    )
    draft_parallel_config: ParallelConfig | None = Field(
        default=None, description="Layout of the draft's ranks."
    )
    draft_shares_target_positions: bool = Field(
        default=False, description="Drafts at target positions, on any length of the target."
    )
    draft_length_is_given: bool = Field(
        default=False, description="The user limited the draft's length: stop drafting there."
    )
    draft_placement: Literal["fused", "colocated", "dedicated"] | None = Field(
        default=None, description="Processes of a separate draft model; None = no such model."
    )
    mask_token_id: int | None = Field(
        default=None, description="Input id of positions drafted in parallel."
    )
    aux_hidden_state_layer_ids: tuple[int, ...] | None = Field(
        default=None, description="Residual streams the target hands over; None = its default."
    )
    shared_vocab_size: int | None = Field(
        default=None, description="Drafts at or above this id can never be accepted."
    )
    acceptance_implementation: str = Field(
        default=EXACT_MATCH.implementation, description="`module:name` of the acceptance rule."
    )
    acceptance_is_lossless: bool = Field(
        default=True, description="Whether that rule keeps the target's distribution."
    )
    requested: dict[str, Any] = Field(
        default_factory=dict, description="The user's options; resolving them again gives this."
    )

    @property
    def speculator(self) -> SpeculatorConfig:
        """Capabilities bound to these settings."""
        return load_class(self.config_class)(self)

    @property
    def resolved_acceptance_options(self) -> dict[str, Any]:
        """Keyword arguments of the acceptance rule, by its own names."""
        if is_custom(self.rejection_sample_method):
            return dict(self.acceptance_options or {})
        fields = BUILTIN[self.rejection_sample_method].options
        return {keyword: getattr(self, name) for keyword, name in fields.items()}

    @property
    def is_lossless(self) -> bool:
        """Whether the output distribution is exactly the target's."""
        return self.acceptance_is_lossless

    @property
    def use_eagle_block_drop(self) -> bool:
        """Whether the tail block of a prefix hit needs care at all."""
        return self.speculator.needs_eagle_block_drop and not self.disable_eagle_block_drop
