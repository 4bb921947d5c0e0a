"""From what the user wrote under ``speculative_config`` to one ``SpeculativeConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specconfig.decisions import DecisionLog
from specconfig.errors import ConfigError
from specconfig.facts.model_facts import HfTransform
from specconfig.facts.source import FactsSource
from specconfig.model import ModelConfig, ParallelConfig
from specconfig.options import SpeculativeOptions, parse_options
from specconfig.registry import qualified_name
from specconfig.resolving.checks import check_resolved, settle
from specconfig.resolving.method import infer_method, select_class
from specconfig.speculative import SpeculativeConfig
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution


def resolve_speculation(
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


def _requested(options: SpeculativeOptions) -> dict[str, Any]:
    dumped = options.model_dump(mode="json", exclude_unset=True)
    return dict(sorted((key, value) for key, value in dumped.items() if value is not None))


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
