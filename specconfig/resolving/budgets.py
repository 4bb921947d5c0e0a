"""Do the batch limits leave room for drafting?"""

from __future__ import annotations

from specconfig.decisions import DecisionLog
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from specconfig.resolving.kv_memory import kv_plan


def check_budgets(config: EngineConfig, log: DecisionLog) -> None:
    """Refuse budgets under which no step can draft; note the limits a drafter imposes."""
    _check_chunking(config)
    _check_kv(config, log)
    spec = config.speculative
    if spec is None:
        return
    if spec.speculator.prefers_whole_prompts and config.scheduler.enable_chunked_prefill:
        log.warn(
            f"{spec.speculator.variant} stores one piece per step: set enable_chunked_prefill: "
            "false to keep each prompt in one piece"
        )
    tokens = config.scheduler.max_num_batched_tokens
    seqs = config.scheduler.max_num_seqs
    k = config.num_speculative_tokens
    settings = f"num_speculative_tokens={k}, max_num_seqs={seqs}, max_num_batched_tokens={tokens}"
    least = max(config.num_lookahead_tokens, k)
    if tokens <= least:
        raise ConfigError(
            "max_num_batched_tokens",
            tokens,
            f"more than {least}, the slots one request drafts into",
            f"set it to at least {least + 1}, or lower num_speculative_tokens",
            message=f"not enough slots in a step to draft: {settings}",
        )
    active = config.max_num_active_seqs
    if active < seqs:
        log.note(
            "max_num_active_seqs",
            active,
            "fallback",
            f"{tokens} batched tokens hold {active} draft blocks of {config.num_lookahead_tokens}",
        )
        log.warn(
            f"only {active} of max_num_seqs={seqs} requests run together: each needs "
            f"{config.num_lookahead_tokens} of max_num_batched_tokens={tokens}"
        )
    new_slots = active * config.max_num_new_slots_for_drafting
    if new_slots >= tokens:
        raise ConfigError(
            "max_num_batched_tokens",
            tokens,
            f"more than {new_slots} = max_num_seqs x {config.max_num_new_slots_for_drafting} rows "
            "the drafter adds",
            f"raise it above {new_slots}, lower max_num_seqs, or lower num_speculative_tokens",
            message=f"drafting leaves no token for the requests themselves: {settings}",
        )
    full = active * (1 + k)
    if full > tokens:
        log.warn(
            f"a full decode batch needs {full} tokens ({active} x {1 + k}) but a step has "
            f"{tokens}: some requests wait every step ({settings})"
        )
    _effective_length(config, log)
    _prefix_hashes(config, log)


def _check_chunking(config: EngineConfig) -> None:
    tokens = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and tokens < config.max_model_len:
        raise ConfigError(
            "max_num_batched_tokens",
            tokens,
            f"at least max_model_len={config.max_model_len} without chunked prefill",
            "set enable_chunked_prefill: true, raise max_num_batched_tokens or lower max_model_len",
        )


def _effective_length(config: EngineConfig, log: DecisionLog) -> None:
    limit, draft_limit = config.max_model_len, config.draft_max_model_len
    if limit < config.model.max_model_len:
        log.note(
            "max_model_len",
            limit,
            "fallback",
            "the draft has positions of its own and declares no more",
        )
        log.warn(
            f"max_model_len is lowered from {config.model.max_model_len} to {limit}: the draft "
            "cannot go further. Set speculative_config.max_model_len to keep the target's length "
            "and stop drafting there instead"
        )
    elif draft_limit is not None and draft_limit < limit:
        log.note(
            "draft_max_model_len",
            draft_limit,
            "given",
            "sequences longer than this continue without drafts",
        )


def _prefix_hashes(config: EngineConfig, log: DecisionLog) -> None:
    """Say how prefix hits stay valid for a drafter that reads one token ahead."""
    spec = config.speculative
    if spec is None or not spec.speculator.needs_eagle_block_drop:
        return
    field = "num_hash_lookahead_tokens"
    if config.num_hash_lookahead_tokens:
        reason = "block hashes cover what the drafter read past the block; no tail block is dropped"
        log.note(field, config.num_hash_lookahead_tokens, "inferred", reason)
    elif not config.cache.enable_prefix_caching:
        log.note(field, 0, "inferred", "prefix caching is off")
    elif config.use_block_drop:
        reason = "disable_lookahead_block_hashes: the tail block of a hit is dropped instead"
        log.note(field, 0, "given", reason)
    else:
        log.note(field, 0, "given", "disable_eagle_block_drop: tails of hits are used as they are")


def _check_kv(config: EngineConfig, log: DecisionLog) -> None:
    """The KV budget must hold one step of one request, and should hold a whole sequence."""
    budget = config.cache.kv_cache_memory_bytes
    plan = kv_plan(config)
    if budget is None or plan.num_blocks is None or plan.num_tokens is None:
        return
    least = 1 + plan.lookahead_blocks
    if plan.num_blocks < least:
        raise ConfigError(
            "kv_cache_memory_bytes",
            budget,
            f"at least {least * plan.block_bytes} bytes: {least} block(s) of {plan.block_bytes}",
            f"raise it to {least * plan.block_bytes} or more",
        )
    if plan.num_tokens < config.max_model_len:
        log.warn(
            f"kv_cache_memory_bytes={budget} holds {plan.num_tokens} tokens, less than one "
            f"sequence of max_model_len={config.max_model_len}: longer requests will be refused"
        )
