"""Text form of an explanation."""

from __future__ import annotations

import json
from collections.abc import Iterable

from specconfig.decisions import Decision
from specconfig.engine import EngineConfig
from specconfig.explaining.explanation import AppExplanation, Explanation, Problem
from specconfig.model import ParallelConfig
from specconfig.resolving.kv_memory import KvPlan

_PATH_FIELDS = (
    "model", "speculative_config.method", "speculative_config.model",
    "speculative_config.config_class", "speculative_config.draft_model_config",
    "speculative_config.draft_model_config.max_position_embeddings",
    "speculative_config.num_speculative_tokens",
    "speculative_config.num_speculative_tokens_per_batch_size",
    "speculative_config.num_speculative_tokens_schedule",
    "speculative_config.draft_lm_head_quantization",
    "speculative_config.draft_tensor_parallel_size", "speculative_config.draft_parallel_config",
    "placement", "num_hash_lookahead_tokens", "max_model_len", "max_num_active_seqs",
)  # fmt: skip


def render(explanation: Explanation) -> str:
    """Problems when there are any, else one section per application."""
    lines: list[str] = []
    for problem in sorted(explanation.problems, key=lambda item: item.line):
        lines += _problem(explanation.path, problem)
    for app in explanation.apps:
        text = _app(app, explanation.path)
        lines += ["", *text] if lines else text
    for name in explanation.skipped:
        lines.append(f"skipped: {name} is not built by deploy.app:build")
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> list[str]:
    found = list(rows)
    if not found:
        return []
    widths = [max(len(row[i]) for row in found) for i in range(len(found[0]))]
    return [
        indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in found
    ]


def _app(app: AppExplanation, path: str) -> list[str]:
    config = app.config
    lines = [f"{app.name}: {_headline(config)}", ""]
    lines += ["How it was decided", *_table(_steps(app)), ""]
    title = "Values (nulls, and defaults under speculative_config, left out)"
    lines += [title, *_table(_value_rows(app.values)), ""]
    lines += ["What the engine reads", *_table(_capabilities(app)), ""]
    lines += ["Layout", *_table(_layout(app)), ""]
    lines += ["KV cache", *_table(_memory(app))]
    if config.warnings:
        lines += ["", "Warnings", *(f"  - {warning}" for warning in config.warnings)]
    if app.cannot_start:
        lines += ["", "This version refuses to start it", *_problem(path, app.cannot_start)]
    return lines


def _problem(path: str, problem: Problem) -> list[str]:
    lines = [
        f"{path}:{problem.line}: {problem.message}",
        f"    field: {problem.field}    value: {problem.value}",
    ]
    return [*lines, f"    fix:   {problem.fix}"] if problem.fix else lines


def _headline(config: EngineConfig) -> str:
    spec = config.speculative
    if spec is None:
        return f"{config.model.model}, plain decoding"
    quality = (
        "lossless" if spec.is_lossless
        else f"LOSSY ({spec.rejection_sample_method}: outputs may differ from the target's)"
    )  # fmt: skip
    variant, k = spec.speculator.variant, config.num_speculative_tokens
    return f"{config.model.model}, {variant} with K={k}, {quality}"


def _steps(app: AppExplanation) -> list[tuple[str, ...]]:
    by_field = {value.field: value for value in app.values}
    steps = [by_field[name] for name in _PATH_FIELDS if name in by_field]
    steps = [s for s in steps if s.reason and (s.value is not None or s.source == "fallback")]
    return [
        (f"{number}.", f"{step.field.removeprefix('speculative_config.')} = {_text(step.value)}",
         step.source, step.reason)
        for number, step in enumerate(steps, start=1)
    ]  # fmt: skip


def _value_rows(values: Iterable[Decision]) -> list[tuple[str, ...]]:
    return [
        (value.field, _text(value.value), value.source, value.reason)
        for value in values
        if (value.value is not None or value.source == "fallback")
        and not (value.source == "default" and value.field.startswith("speculative_config."))
    ]


def _capabilities(app: AppExplanation) -> list[tuple[str, ...]]:
    return [(name, _text(value)) for name, value in sorted(app.capabilities.items())]


def _layout(app: AppExplanation) -> list[tuple[str, ...]]:
    config = app.config
    parallel = config.parallel
    rows: list[tuple[str, ...]] = [
        ("verifier", "1 process per replica, no weights"),
        ("target", f"{parallel.tensor_parallel_size} rank(s)"
         + _experts(parallel)),
        ("drafter", _drafter(config)),
        ("replicas", f"{app.serving['num_replicas']} engine"
         + (f" in gangs of {parallel.data_parallel_size} (data parallel), "
            if parallel.data_parallel_size > 1 else ", ") +
         f"{app.serving['max_ongoing_requests']} requests each"),
    ]  # fmt: skip
    return rows


def _experts(parallel: ParallelConfig) -> str:
    if not parallel.enable_expert_parallel:
        return ""
    if parallel.experts_span_replicas:
        return f", experts spread over the gang's {parallel.num_expert_ranks}, in lockstep"
    return ", experts spread"


def _drafter(config: EngineConfig) -> str:
    if config.drafter_host is None:
        return "none"
    if config.drafter_host != "draft" or config.draft_parallel is None:
        return f"in the {config.drafter_host} process"
    degree = config.draft_parallel.tensor_parallel_size
    where = {
        "fused": "inside the target processes",
        "colocated": "on the target's bundles, own processes",
        "dedicated": "on bundles of their own",
    }[config.draft_placement or "colocated"]
    return f"{degree} rank(s) {where}"


def _parts(config: EngineConfig, plan: KvPlan) -> str:
    joined = f"{plan.target_bytes_per_token:,} + {plan.draft_bytes_per_token:,}"
    if config.draft_placement == "dedicated":
        return f"the larger of ({joined.replace('+', 'and')}), on devices of their own"
    return f"({joined})"


def _memory(app: AppExplanation) -> list[tuple[str, ...]]:
    config, plan = app.config, app.memory
    size = config.cache.block_size
    rows: list[tuple[str, ...]] = [
        ("target", f"{plan.target_bytes_per_token:,} bytes per token and rank ({plan.dtype})"),
        ("draft", f"{plan.draft_bytes_per_token:,} bytes per token on rank 0"),
        ("block", f"{size} x {_parts(config, plan)} = {plan.block_bytes:,} bytes"),
        ("lookahead", f"{config.num_lookahead_tokens} slots per request, at most "
         f"{plan.lookahead_blocks} more block(s)"),
    ]  # fmt: skip
    budget = config.cache.kv_cache_memory_bytes
    if budget is None:
        rows.append(("budget", "sized by the engine at start"))
    else:
        rows.append(
            ("budget", f"{budget:,} bytes = {plan.num_blocks:,} blocks = {plan.num_tokens:,} tokens"
             f" = {plan.num_full_sequences} sequences of {config.max_model_len:,}")
        )  # fmt: skip
    return rows
