"""KV arithmetic that `explain` and the engine share: what a token and a block cost."""

from __future__ import annotations


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, width: int) -> int:
    """Keys and values of one token on one rank, bytes; `width`: of one number."""
    return 2 * num_layers * num_kv_heads * head_dim * width


def kv_block_bytes(
    block_size: int, target_bytes_per_token: int, draft_bytes_per_token: int, *, is_apart: bool
) -> int:
    """One KV block where it costs most. Target and draft use the same block ids: on one device a
    block is both parts, on devices of their own (`is_apart`) the larger one decides."""
    parts = (target_bytes_per_token, draft_bytes_per_token)
    return block_size * (max(parts) if is_apart else sum(parts))
