"""Working state while one ``speculative_config`` is resolved. Never leaves the resolver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specconfig.acceptance import EXACT_MATCH, AcceptanceMethod
from specconfig.decisions import DecisionLog
from specconfig.errors import ConfigError
from specconfig.facts.model_facts import HfTransform
from specconfig.facts.source import FactsSource
from specconfig.model import ModelConfig, ParallelConfig
from specconfig.options import SpeculativeFields, SpeculativeOptions


@dataclass
class Resolution:
    """Mutable scratch pad handed to the hooks of a ``SpeculatorConfig`` class.

    ``values`` holds every user-visible field (defaults included); hooks write resolved values
    there. ``draft_hf`` is a private copy of the draft's config and may be rewritten freely.
    """

    options: SpeculativeOptions
    target: ModelConfig | None
    parallel: ParallelConfig
    facts: FactsSource | None
    log: DecisionLog
    target_transform: HfTransform | None = None
    values: dict[str, Any] = field(default_factory=dict)
    custom_method: str | None = None
    draft_hf: dict[str, Any] | None = None
    draft_overrides: dict[str, Any] | None = None
    draft: ModelConfig | None = None
    draft_parallel: ParallelConfig | None = None
    draft_shares_target_positions: bool = False
    mask_token_id: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    shared_vocab_size: int | None = None
    acceptance: AcceptanceMethod = EXACT_MATCH

    def __post_init__(self) -> None:
        names = SpeculativeFields.model_fields
        self.values = {name: getattr(self.options, name) for name in names}

    @property
    def given(self) -> frozenset[str]:
        """Names the user set to something other than null."""
        return frozenset(
            name
            for name in self.options.model_fields_set
            if getattr(self.options, name) is not None
        )

    @property
    def method(self) -> str | None:
        """Method so far."""
        method: str | None = self.values["method"]
        return method

    def require_target(self) -> ModelConfig:
        """The target, which every checkpoint drafter needs."""
        if self.target is None:
            raise ConfigError(
                "target_model_config",
                None,
                "the resolved target model",
                "resolve through EngineArgs(model=..., speculative_config=...)",
                message="target_model_config must be present to resolve a draft checkpoint",
            )
        return self.target

    def reset_lookup(self) -> None:
        """Zero the n-gram window for methods that never look it up."""
        self.values["prompt_lookup_min"] = self.values["prompt_lookup_max"] = 0

    def use_target_as_draft(self) -> None:
        """Lookup drafters share the target's vocabulary; they have no model of their own."""
        self.draft = self.target
        self.draft_parallel = self.parallel
