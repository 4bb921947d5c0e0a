"""``SpeculativeConfig``: one resolved, frozen description of how this server speculates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from specconfig.acceptance import BUILTIN, EXACT_MATCH, is_custom
from specconfig.decisions import DecisionLog
from specconfig.errors import ConfigError
from specconfig.facts import FactsSource
from specconfig.model import ModelConfig, ParallelConfig
from specconfig.model_facts import HfTransform
from specconfig.options import SpeculativeFields, SpeculativeOptions, parse_options
from specconfig.registry import load_class, qualified_name
from specconfig.resolution import Resolution
from specconfig.speculators.base import SpeculatorConfig


class SpeculativeConfig(SpeculativeFields):
    """Resolved speculation. Build it with ``SpeculativeConfig.resolve``.

    Fields of ``SpeculativeFields`` hold final values here; the fields below are derived. Read
    capabilities through ``speculator`` or, better, through ``EngineConfig``.
    """

    method: str = Field(description="Canonical method name.")
    num_speculative_tokens: int = Field(gt=0, description="K.")
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

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any] | SpeculativeConfig,
        *,
        target: ModelConfig | None,
        parallel: ParallelConfig | None = None,
        facts: FactsSource | None = None,
        log: DecisionLog | None = None,
        target_transform: HfTransform | None = None,
    ) -> SpeculativeConfig:
        """Resolve what the user wrote against a target. Pure; ``given`` is not changed.

        Args:
            given: The user's mapping, or a resolved config (resolved again from its request).
            target: Resolved target model; None only for methods without a checkpoint.
            parallel: Target layout; one rank when None.
            facts: Source of config dicts; the file system and hub when None.
            log: Receives decisions and warnings.
            target_transform: Callable hf_overrides of the target, applied to the draft too.

        Raises:
            ConfigError: with field, value, allowed values and fix.
        """
        raw = given.requested if isinstance(given, SpeculativeConfig) else given
        if not isinstance(raw, Mapping):
            raise ConfigError(
                "speculative_config", raw, "a mapping of options", "write it as {key: value}"
            )
        options = parse_options(raw)
        res = Resolution(
            options=options,
            target=target,
            parallel=parallel or ParallelConfig(),
            facts=facts,
            log=log or DecisionLog(),
            target_transform=target_transform,
        )
        return _resolve(res)


def _requested(options: SpeculativeOptions) -> dict[str, Any]:
    dumped = options.model_dump(mode="json", exclude_unset=True)
    return dict(sorted((key, value) for key, value in dumped.items() if value is not None))


def _resolve(res: Resolution) -> SpeculativeConfig:
    from specconfig.checks import check_resolved, settle
    from specconfig.inference import infer_method, select_class

    cls = infer_method(res)
    cls.configure(res)
    if res.values["num_speculative_tokens"] is None:
        raise cls.missing_tokens(res)
    cls = select_class(res, cls)
    settle(res, cls)
    values = dict(res.values)
    spec = SpeculativeConfig(
        **values,
        custom_method=res.custom_method,
        config_class=qualified_name(cls),
        draft_model_config=res.draft,
        draft_parallel_config=res.draft_parallel,
        draft_shares_target_positions=res.draft_shares_target_positions,
        draft_length_is_given="max_model_len" in res.given and cls.loads_draft_checkpoint,
        draft_placement=_placement(res, cls),
        mask_token_id=res.mask_token_id,
        aux_hidden_state_layer_ids=res.aux_layer_ids,
        shared_vocab_size=res.shared_vocab_size,
        acceptance_implementation=res.acceptance.implementation,
        acceptance_is_lossless=res.acceptance.is_lossless,
        requested=_requested(res.options),
    )
    check_resolved(res, cls, spec)
    return spec


def _placement(
    res: Resolution, cls: type[SpeculatorConfig]
) -> Literal["fused", "colocated", "dedicated"] | None:
    wanted = res.parallel.placement
    if cls.host != "draft":
        if wanted != "auto":
            res.log.warn(
                f"placement={wanted!r} has no effect: a {cls.variant} drafter runs in the "
                f"{cls.host} process"
            )
        return None
    if wanted != "auto":
        res.log.note("placement", wanted, "given", "placement")
        return wanted
    res.log.note("placement", "colocated", "default", "the draft shares the target's GPU group")
    return "colocated"
