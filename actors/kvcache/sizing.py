"""How many KV blocks a byte budget buys, with the arithmetic to print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import LoadError


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Attention layers of one model that keep KV, per rank. `owner` is for people to read.

    `shapes`: (number of layers, KV heads, head_dim) for each shape that layers have.
    """

    owner: str
    shapes: tuple[tuple[int, int, int], ...]
    bytes_per_element: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * sum(n * h * d for n, h, d in self.shapes) * self.bytes_per_element


@dataclass(frozen=True, slots=True)
class KVSizing:
    """Result of `size_kv_cache`. `num_blocks` includes the reserved padding block 0."""

    num_blocks: int
    bytes_per_block: int
    lines: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def size_kv_cache(
    budget_bytes: int, block_size: int, models: Sequence[KVLayers], max_model_len: int
) -> KVSizing:
    """Blocks that fit `budget_bytes` when target and draft layers share block ids.

    Raises:
        LoadError: one request of `max_model_len` tokens does not fit. Reservations, lookahead
            included, end at `max_model_len`, so this is also the largest single need; less
            would leave a request that can only preempt itself.
    """
    lines = []
    bytes_per_token = 0
    for m in models:
        bytes_per_token += m.bytes_per_token
        shapes = " + ".join(f"{n} layers x {h} KV heads x {d}" for n, h, d in m.shapes)
        lines.append(
            f"{m.owner}: 2 (K and V) x {shapes if len(m.shapes) == 1 else f'({shapes})'} x "
            f"{m.bytes_per_element} bytes = {m.bytes_per_token:,} bytes per token"
        )
    bytes_per_block = bytes_per_token * block_size
    num_blocks = budget_bytes // bytes_per_block
    blocks_per_request = -(-max_model_len // block_size)
    need = blocks_per_request + 1
    lines.append(
        f"one KV block: {block_size} tokens x {bytes_per_token:,} bytes = {bytes_per_block:,} bytes"
    )
    lines.append(
        f"budget {_mib(budget_bytes)} / {bytes_per_block:,} bytes = {num_blocks:,} blocks, "
        f"one of them padding: {max(num_blocks - 1, 0) * block_size:,} tokens"
    )
    if num_blocks < need:
        raise LoadError(
            "the KV cache is too small for one request of max_model_len:\n  "
            + "\n  ".join(lines)
            + f"\n  max_model_len {max_model_len:,} needs {blocks_per_request:,} blocks + 1 for "
            f"padding = {_mib(need * bytes_per_block)}; raise the KV memory budget "
            f"(gpu_memory_utilization, or the KV cache bytes on CPU) to that, or lower "
            f"max_model_len to at most {max(num_blocks - 1, 0) * block_size:,}"
        )
    lines.append(
        f"max_model_len {max_model_len:,} takes {blocks_per_request:,} blocks: "
        f"{(num_blocks - 1) / blocks_per_request:.1f} requests of full length at a time"
    )
    return KVSizing(num_blocks, bytes_per_block, tuple(lines))
