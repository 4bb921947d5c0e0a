"""From ``EngineArgs`` to ``EngineConfig``: the target first, then speculation, then budgets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specconfig.decisions import DecisionLog
from specconfig.engine import EngineConfig
from specconfig.engine_fields import EngineFields, merge_flags
from specconfig.errors import ConfigError
from specconfig.facts.end_tokens import tokenizer_ends
from specconfig.facts.model_facts import (
    HfTransform,
    apply_transform,
    config_ends,
    full_text,
    merge_overrides,
    model_config,
)
from specconfig.facts.source import GENERATION_KEY, FactsSource, expand, load_facts
from specconfig.facts.splits import check_experts, check_heads
from specconfig.model import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from specconfig.resolving.bits import note_batch_invariance
from specconfig.resolving.budgets import check_budgets
from specconfig.resolving.served_speculator import serve_speculators_model
from specconfig.resolving.speculation import resolve_speculation


def resolve_engine(args: EngineFields, facts: FactsSource | None = None) -> EngineConfig:
    """Resolve all sections. Pure: the same arguments and facts give an equal plan."""
    log = DecisionLog()
    model = _locate(args.model)
    hf = load_facts(facts, model, args.revision, "model")
    plan = serve_speculators_model(args, model, hf, log)
    if plan is not None:
        model, tokenizer, revision = plan.target, plan.target, None
        given: dict[str, Any] | None = plan.speculative
        hf = load_facts(facts, model, None, "speculators_config.verifier.name_or_path")
    else:
        tokenizer, revision = _locate(args.tokenizer or model), args.revision
        given = merge_flags(args)
    transform = args.hf_overrides if callable(args.hf_overrides) else None
    target = _target(args, hf, model, tokenizer, revision, facts, log)
    parallel = _parallel(args, target)
    speculative = None
    if given is not None:
        given = _locate_draft(given)
        speculative = resolve_speculation(
            given,
            target=target,
            parallel=parallel,
            facts=facts,
            log=log,
            target_transform=transform,
        )
    config = EngineConfig(
        model=target,
        cache=CacheConfig(
            block_size=args.block_size,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_chunked_prefill=args.enable_chunked_prefill,
            max_num_queued_requests=args.max_num_queued_requests,
        ),
        parallel=parallel,
        runtime=RuntimeConfig(
            device=args.device,
            batch_invariant=args.batch_invariant,
            compile_layers=args.compile_layers,
            num_threads=args.num_threads,
            step_timeout_s=args.step_timeout_s,
            seed=args.seed,
            target_gpu_fraction=args.target_gpu_fraction,
            draft_gpu_fraction=args.draft_gpu_fraction,
            max_logprobs=args.max_logprobs,
            served_model_name=args.served_model_name or args.model,
        ),
        speculative=speculative,
    )
    given_bits = "batch_invariant" in args.model_fields_set
    note_batch_invariance(config, log, "given" if given_bits else "default")
    check_budgets(config, log)
    return config.model_copy(
        update={"decisions": tuple(log.decisions), "warnings": tuple(log.warnings)}
    )


def _locate(model: str) -> str:
    """Expanded path when it exists; otherwise the text as written (a hub id)."""
    path = expand(model)
    return path if Path(path).exists() else model


def _locate_draft(given: Mapping[str, Any]) -> dict[str, Any]:
    located = dict(given)
    if isinstance(located.get("model"), str):
        located["model"] = _locate(located["model"])
    return located


def _target(
    args: EngineFields,
    hf: dict[str, Any],
    model: str,
    tokenizer: str,
    revision: str | None,
    facts: FactsSource | None,
    log: DecisionLog,
) -> ModelConfig:
    overrides: dict[str, Any] | None = None
    if isinstance(args.hf_overrides, dict):
        overrides = copy.deepcopy(args.hf_overrides)
        merge_overrides(hf, copy.deepcopy(overrides))
        log.note("model.hf_config", sorted(overrides), "given", "patched by hf_overrides")
    elif args.hf_overrides is not None:
        transform: HfTransform = args.hf_overrides
        name = getattr(transform, "__qualname__", repr(transform))
        overrides = apply_transform(hf, transform)
        log.note("model.hf_config", name, "given", "rewritten by hf_overrides")
    target = model_config(
        hf,
        model=model,
        tokenizer=tokenizer,
        tokenizer_revision=args.tokenizer_revision
        or (revision if args.tokenizer is None else None),
        revision=revision,
        dtype=_dtype(args),
        field="model",
        max_model_len=args.max_model_len,
        hf_overrides=overrides,
    )
    target = _with_ends(target, hf, facts, log)
    if args.max_model_len is None:
        log.note("max_model_len", target.max_model_len, "checkpoint", "length the model declares")
    return target


def _with_ends(
    target: ModelConfig, hf: Mapping[str, Any], facts: FactsSource | None, log: DecisionLog
) -> ModelConfig:
    """The target with all ids that end an answer, its configs' and its tokenizer's."""
    ends = config_ends(hf, full_text(hf), hf.get(GENERATION_KEY) or {})
    for index, why in tokenizer_ends(facts, target.tokenizer, target.tokenizer_revision).items():
        if index < target.vocab_size:
            ends.setdefault(index, why)
    ids = tuple(sorted(ends))
    if ids:
        told = "; ".join(f"{index}: {ends[index]}" for index in ids)
        log.note("eos_token_ids", ids, "checkpoint", told)
    return target.model_copy(update={"eos_token_ids": ids})


def _dtype(args: EngineFields) -> Any:
    # float32 on a CPU whatever the checkpoint says; with device 'auto' each worker settles it.
    return "float32" if args.dtype == "auto" and args.device == "cpu" else args.dtype


def _parallel(args: EngineFields, target: ModelConfig) -> ParallelConfig:
    check_heads(target, args.tensor_parallel_size, "tensor_parallel_size", "target")
    if args.enable_expert_parallel and not target.is_moe:
        raise ConfigError(
            "enable_expert_parallel",
            True,
            f"false for {target.model!r}, which has no experts",
            "remove enable_expert_parallel",
        )
    parallel = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        placement=args.placement,
        strict_pack=args.strict_pack,
        dynamic_k_dp_policy=args.dynamic_k_dp_policy,
    )
    check_experts(target, parallel, "target")
    return parallel
