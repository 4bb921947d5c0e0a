"""The draft's own model config and parallel layout, for methods with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from specconfig.errors import ConfigError
from specconfig.facts.model_facts import (
    apply_transform,
    declared_length,
    is_moe,
    model_config,
    rope_types,
)
from specconfig.facts.source import load_facts
from specconfig.facts.splits import check_experts, check_heads
from specconfig.formats.mtp_families import rewrite
from specconfig.formats.speculators import TOKENS_KEY, convert_if_speculators
from specconfig.model import ModelConfig, ParallelConfig, text_section
from specconfig.speculators.resolution import Resolution

CACHE_ONLY_ROPE = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
"""RoPE types whose length only sizes a table; growing it changes no frequency."""

_PREFIX = "speculative_config"


class DraftHooks(Protocol):
    """What a method with a checkpoint of its own decides about its draft's config."""

    @property
    def tokens_repeat_modules(self) -> bool:
        """Whether K must be a multiple of the checkpoint's own count."""

    @property
    def may_share_target_positions(self) -> bool:
        """Whether its position table may grow to the target's length."""

    def adapt(self, res: Resolution, hf: dict[str, Any]) -> None:
        """Rewrite the config in place, before sizes are read."""

    def checkpoint_tokens(self, hf: Mapping[str, Any]) -> tuple[int | None, str]:
        """K that the checkpoint declares, and the key that says so."""

    def missing_tokens(self, res: Resolution) -> ConfigError:
        """Error for a K that nobody gave."""


def load_draft(res: Resolution) -> dict[str, Any]:
    """Draft config after format conversion, the MTP rewrite and the target's transform."""
    if res.draft_hf is not None:
        return res.draft_hf
    res.require_target()
    model = str(res.values["model"])
    hf = load_facts(res.facts, model, res.values["revision"], f"{_PREFIX}.model")
    hf = convert_if_speculators(hf, model)
    if res.method != "dspark":
        # DSpark layers sit in the same checkpoints as MTP modules; the rewrite would hide them.
        rewrite(hf)
    if res.target_transform is not None:
        # A callable is a run-time switch meant for both models; dict overrides patch the target's
        # structure and must not reach the draft.
        res.draft_overrides = apply_transform(hf, res.target_transform)
    res.draft_hf = hf
    return hf


def build_draft(res: Resolution, hooks: DraftHooks) -> None:
    """Fill ``res.draft``, ``res.draft_parallel`` and K for a checkpoint drafter."""
    target = res.require_target()
    hf = load_draft(res)
    before = _architecture(hf)
    hooks.adapt(res, hf)
    after = _architecture(hf)
    res.log.note(
        f"{_PREFIX}.draft_model_config",
        after,
        "checkpoint" if before == after else "inferred",
        "draft architecture as declared" if before == after else f"draft config wraps {before}",
    )
    resolve_num_tokens(res, hooks, hf)
    derived = declared_length(hf) or target.max_model_len
    lift_positions(res, hooks, hf, target)
    limit = _draft_max_model_len(res, derived, target)
    own_tokenizer = bool(res.values["use_heterogeneous_vocab"])
    model = str(res.values["model"])
    revision = res.values["revision"]
    res.draft = model_config(
        hf,
        model=model,
        tokenizer=model if own_tokenizer else target.tokenizer,
        # The tokenizer's revision follows the tokenizer: the target's with the target's.
        tokenizer_revision=revision if own_tokenizer else target.tokenizer_revision,
        revision=revision,
        dtype=target.dtype,
        quantization=res.values["quantization"],
        field=f"{_PREFIX}.model",
        max_model_len=None,
        hf_overrides=res.draft_overrides,
        derived_max_model_len=max(derived, limit),
    ).model_copy(update={"max_model_len": limit, "derived_max_model_len": derived})
    res.draft_parallel = draft_parallel(res, res.draft, target)


def _architecture(hf: dict[str, Any]) -> str:
    return str((hf.get("architectures") or [""])[0])


def lift_positions(
    res: Resolution, hooks: DraftHooks, hf: dict[str, Any], target: ModelConfig
) -> None:
    """Grow the draft's position table to the target's length where that is only a table."""
    text = text_section(hf)
    safe = set(rope_types(hf)) <= CACHE_ONLY_ROPE
    res.draft_shares_target_positions = hooks.may_share_target_positions and safe
    old = text.get("max_position_embeddings")
    if not res.draft_shares_target_positions or old is None or old >= target.max_model_len:
        return
    owner = next((s for s in hf.values() if isinstance(s, dict) and s == text), hf)
    owner["max_position_embeddings"] = target.max_model_len
    res.log.note(
        f"{_PREFIX}.draft_model_config.max_position_embeddings",
        target.max_model_len,
        "target",
        f"drafts at the target's positions; RoPE type allows growing {old}",
    )


def resolve_num_tokens(res: Resolution, hooks: DraftHooks, hf: dict[str, Any]) -> None:
    """K from the user, else from the checkpoint; both must fit together."""
    wanted = res.values["num_speculative_tokens"]
    declared, origin = hooks.checkpoint_tokens(hf)
    proposed = hf.get(TOKENS_KEY)
    if wanted is None and proposed is not None:
        wanted = res.values["num_speculative_tokens"] = int(proposed)
        source = "proposal_methods[0].speculative_tokens"
        res.log.note(f"{_PREFIX}.num_speculative_tokens", wanted, "checkpoint", source)
    elif wanted is not None:
        limit = f"checkpoint declares {declared}" if declared else "checkpoint sets no limit"
        res.log.note_given(f"{_PREFIX}.num_speculative_tokens", wanted, limit)
    else:
        if declared is None:
            raise hooks.missing_tokens(res)
        res.values["num_speculative_tokens"] = declared
        res.log.note(f"{_PREFIX}.num_speculative_tokens", declared, "checkpoint", origin)
        return
    if hooks.tokens_repeat_modules and declared and wanted > declared and wanted % declared:
        raise ConfigError(
            f"{_PREFIX}.num_speculative_tokens",
            wanted,
            f"up to {declared}, or a multiple of {declared} ({origin})",
            f"use {declared} or {declared * -(-wanted // declared)}",
            message=f"num_speculative_tokens={wanted} must be divisible by n_predict={declared}",
        )


def _draft_max_model_len(res: Resolution, derived: int, target: ModelConfig) -> int:
    wanted: int | None = res.values["max_model_len"]
    if wanted is None:
        return min(derived, target.max_model_len)
    if wanted > derived:
        raise ConfigError(
            f"{_PREFIX}.max_model_len",
            wanted,
            f"at most {derived}, the length draft model {res.values['model']!r} declares",
            f"lower it to {derived} or less",
        )
    if wanted > target.max_model_len:
        raise ConfigError(
            f"{_PREFIX}.max_model_len",
            wanted,
            f"at most {target.max_model_len}, the target's max_model_len",
            f"lower it to {target.max_model_len} or less",
        )
    return wanted


def draft_tensor_parallel_size(res: Resolution) -> int:
    """1 or the target's degree: both models share one GPU group, split alike or not at all."""
    wanted: int | None = res.values["draft_tensor_parallel_size"]
    target_tp = res.parallel.tensor_parallel_size
    if wanted is None:
        res.log.note(f"{_PREFIX}.draft_tensor_parallel_size", target_tp, "target", "as the target")
        res.values["draft_tensor_parallel_size"] = target_tp
        return target_tp
    if wanted not in (1, target_tp):
        allowed = "1" if target_tp == 1 else f"1 or {target_tp}"
        raise ConfigError(
            f"{_PREFIX}.draft_tensor_parallel_size",
            wanted,
            f"{allowed} (target tensor_parallel_size={target_tp})",
            "set it to 1 to run the drafter unsplit, or remove it to follow the target",
        )
    res.log.note(
        f"{_PREFIX}.draft_tensor_parallel_size",
        wanted,
        "given",
        f"1 or the target's {target_tp} is allowed",
    )
    return wanted


def draft_parallel(res: Resolution, draft: ModelConfig, target: ModelConfig) -> ParallelConfig:
    """Draft layout: TP rule, and experts spread only when the final draft config has experts."""
    degree = draft_tensor_parallel_size(res)
    check_heads(draft, degree, f"{_PREFIX}.draft_tensor_parallel_size", "draft")
    expert_parallel = res.parallel.enable_expert_parallel and is_moe(draft.hf_config)
    if res.parallel.enable_expert_parallel:
        res.log.note(
            f"{_PREFIX}.draft_parallel_config.enable_expert_parallel",
            expert_parallel,
            "target",
            "the draft is MoE" if expert_parallel else "the draft has no experts to spread",
        )
    where = "split like the target" if degree == res.parallel.tensor_parallel_size else "unsplit"
    res.log.note(f"{_PREFIX}.draft_parallel_config", f"TP {degree}, PP 1", "inferred", where)
    parallel = ParallelConfig(
        tensor_parallel_size=degree,
        enable_expert_parallel=expert_parallel,
        placement=res.parallel.placement,
    )
    check_experts(draft, parallel, "draft")
    return parallel
