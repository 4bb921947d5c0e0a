"""KV arithmetic: what a token, a block and a sequence cost, per rank."""

from __future__ import annotations

from pydantic import Field

from specconfig.engine import EngineConfig
from specconfig.kv_sizes import kv_block_bytes
from specconfig.model import Frozen, ModelConfig


class KvPlan(Frozen):
    """KV sizes on target rank 0, which carries an unsplit draft too."""

    dtype: str = Field(description="dtype assumed for the target's KV.")
    target_bytes_per_token: int = Field(description="Target KV of one token on one rank, bytes.")
    draft_bytes_per_token: int = Field(description="Draft KV of one token on rank 0, bytes.")
    block_bytes: int = Field(
        description="One KV block where it costs most: with its draft part, but for a dedicated "
        "draft, bytes."
    )
    num_blocks: int | None = Field(description="Blocks in kv_cache_memory_bytes; None = unset.")
    num_tokens: int | None = Field(description="Tokens those blocks hold.")
    num_full_sequences: float | None = Field(description="Sequences of max_model_len they hold.")
    lookahead_blocks: int = Field(description="Blocks one request reserves for lookahead, at most.")


def _per_rank(total: int, model: ModelConfig, degree: int) -> int:
    # Latent attention keeps one vector per token, which every rank holds whole; fewer KV heads
    # than ranks are replicated.
    if model.text_config.get("kv_lora_rank"):
        return total
    heads = model.num_key_value_heads
    return total * max(1, heads // degree) // heads


def kv_plan(config: EngineConfig) -> KvPlan:
    """Sizes of a resolved plan; exact for full attention, an upper bound for sliding windows."""
    target = _per_rank(
        config.target_kv_bytes_per_token, config.model, config.parallel.tensor_parallel_size
    )
    draft_model, draft_parallel = config.draft_model, config.draft_parallel
    draft = 0
    if draft_model is not None and draft_parallel is not None and config.draft_has_own_kv:
        draft = _per_rank(
            config.draft_kv_bytes_per_token, draft_model, draft_parallel.tensor_parallel_size
        )
    size = config.cache.block_size
    is_apart = config.draft_placement == "dedicated"
    block = kv_block_bytes(size, target, draft, is_apart=is_apart)
    budget = config.cache.kv_cache_memory_bytes
    blocks = None if budget is None or block == 0 else budget // block
    tokens = None if blocks is None else blocks * size
    return KvPlan(
        dtype=config.model.compute_dtype,
        target_bytes_per_token=target,
        draft_bytes_per_token=draft,
        block_bytes=block,
        num_blocks=blocks,
        num_tokens=tokens,
        num_full_sequences=None if tokens is None else round(tokens / config.max_model_len, 2),
        lookahead_blocks=-(-config.num_lookahead_tokens // size),
    )
