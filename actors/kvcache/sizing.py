"""How many KV blocks the memory of every device holds, with the arithmetic to print.

All ranks use the same block ids, so the device that holds the fewest decides. What a device must
hold is what the processes on it keep: a draft on devices of its own costs the target nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import LoadError
from specconfig.kv_sizes import kv_block_bytes, kv_bytes_per_token

# Share of the memory still available that KV may take on a CPU when nothing was said.
_CPU_SHARE = 0.4


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
        return sum(kv_bytes_per_token(*shape, self.bytes_per_element) for shape in self.shapes)

    @property
    def largest_layer(self) -> int:
        """Bytes of one token in the layer that keeps most."""
        of_one = (kv_bytes_per_token(1, h, d, self.bytes_per_element) for _, h, d in self.shapes)
        return max(of_one, default=0)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU as one process sees it once all that share it have loaded. `weight_bytes`: what the
    process holds; `activation_bytes`: what its largest step takes beside that, measured."""

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one process keeps, and of which memory. `device` is the same text for all processes
    that share it; `gpu` None: it is a CPU's, of which `available_bytes` are left (None: unknown).
    """

    device: str
    layers: tuple[KVLayers, ...]
    gpu: GpuMemory | None = None
    available_bytes: int | None = None


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
    ranks: Sequence[RankMemory],
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
) -> KVSizing:
    """Blocks that fit every device.

    Args:
        ranks: All processes of the replica that keep KV.
        budget_bytes: KV of one target rank and the draft rank beside it; None: from the memory.
        gpu_memory_utilization: Share of a GPU's whole memory for weights, activations and KV of
            the replica's processes on it.

    Raises:
        LoadError: one request of `max_model_len` tokens does not fit. Reservations, lookahead
            included, end at `max_model_len`, so this is also the largest single need; less
            would leave a request that can only preempt itself.
    """
    by_device: dict[str, list[RankMemory]] = defaultdict(list)
    for rank in ranks:
        if any(layers.bytes_per_token for layers in rank.layers):
            by_device[rank.device].append(rank)
    wanted = -(-max_model_len // block_size) * max_num_seqs + 1
    found = []
    for device, sharing in by_device.items():
        if budget_bytes is not None:
            found.append(_from_budget(device, sharing, block_size, budget_bytes))
        elif sharing[0].gpu is not None:
            found.append(_on_gpu(device, sharing, block_size, gpu_memory_utilization))
        else:
            found.append(_on_cpu(device, sharing, block_size, wanted))
    least = min(found, key=lambda sizing: sizing.num_blocks)
    return _checked(least, block_size, max_model_len)


def _from_budget(
    device: str, sharing: Sequence[RankMemory], block_size: int, budget: int
) -> KVSizing:
    """A budget is per rank: of each model only the largest rank counts."""
    layers = _largest(sharing)
    return _divide(device, f"budget {_mib(budget)}", budget, block_size, layers, 0)


def _on_gpu(
    device: str, sharing: Sequence[RankMemory], block_size: int, utilization: float
) -> KVSizing:
    gpus = [rank.gpu for rank in sharing if rank.gpu is not None]
    total, free = min(g.total_bytes for g in gpus), min(g.free_bytes for g in gpus)
    weights, activations = sum(g.weight_bytes for g in gpus), sum(g.activation_bytes for g in gpus)
    share = int(total * utilization) - weights - activations
    budget = max(0, min(share, free - activations))
    told = (
        f"gpu_memory_utilization {utilization:g} x {_mib(total)} - weights {_mib(weights)} - "
        f"activations {_mib(activations)} = {_mib(share)}; free {_mib(free)} - activations = "
        f"{_mib(free - activations)}; the smaller one is the budget"
    )
    layers = [each for rank in sharing for each in rank.layers]
    # A step copies the keys and values of one layer twice: gathered, then laid out in order.
    copies = 2 * max((each.largest_layer for each in layers), default=0)
    return _divide(device, told, budget, block_size, layers, copies)


def _on_cpu(
    device: str, sharing: Sequence[RankMemory], block_size: int, wanted_blocks: int
) -> KVSizing:
    layers = [each for rank in sharing for each in rank.layers]
    per_block = block_size * sum(each.bytes_per_token for each in layers)
    budget, told = wanted_blocks * per_block, "what max_num_seqs requests of full length need"
    known = [r.available_bytes for r in sharing if r.available_bytes is not None]
    if known and (most := int(min(known) * _CPU_SHARE)) < budget:
        budget, told = most, f"{_CPU_SHARE:g} of the {_mib(min(known))} that are available"
    return _divide(device, f"{told} = {_mib(budget)}", budget, block_size, layers, 0)


def _largest(sharing: Sequence[RankMemory]) -> list[KVLayers]:
    largest: dict[str, KVLayers] = {}
    for layers in (each for rank in sharing for each in rank.layers):
        known = largest.setdefault(layers.owner, layers)
        largest[layers.owner] = max(known, layers, key=lambda x: x.bytes_per_token)
    return list(largest.values())


def _divide(
    device: str, told: str, budget: int, block_size: int, layers: Sequence[KVLayers], copies: int
) -> KVSizing:
    lines = [f"{device}: {told}"]
    for m in (each for each in layers if each.shapes):
        shapes = " + ".join(f"{n} layers x {h} KV heads x {d}" for n, h, d in m.shapes)
        lines.append(
            f"{m.owner}: 2 (K and V) x {shapes if len(m.shapes) == 1 else f'({shapes})'} x "
            f"{m.bytes_per_element} bytes = {m.bytes_per_token:,} bytes per token"
        )
    if copies:
        lines.append(f"a step's copies of one layer's KV: {copies:,} bytes per token")
    per_token = sum(m.bytes_per_token for m in layers)
    per_block = kv_block_bytes(block_size, per_token, copies, is_apart=False)
    num_blocks = budget // per_block if per_block else 0
    lines.append(
        f"one KV block: {block_size} tokens x {per_token + copies:,} bytes = {per_block:,} bytes"
    )
    lines.append(
        f"budget {_mib(budget)} / {per_block:,} bytes = {num_blocks:,} blocks, "
        f"one of them padding: {max(num_blocks - 1, 0) * block_size:,} tokens"
    )
    return KVSizing(num_blocks, block_size * per_token, tuple(lines))


def _checked(sizing: KVSizing, block_size: int, max_model_len: int) -> KVSizing:
    blocks_per_request = -(-max_model_len // block_size)
    need = blocks_per_request + 1
    num_blocks = sizing.num_blocks
    if num_blocks < need:
        raise LoadError(
            "the KV cache is too small for one request of max_model_len:\n  "
            + "\n  ".join(sizing.lines)
            + f"\n  max_model_len {max_model_len:,} needs {blocks_per_request:,} blocks + 1 for "
            f"padding = {_mib(need * sizing.bytes_per_block)} of KV; raise the KV memory budget "
            f"(gpu_memory_utilization, or kv_cache_memory_bytes) to that, free memory, or lower "
            f"max_model_len to at most {max(num_blocks - 1, 0) * block_size:,}"
        )
    line = (
        f"max_model_len {max_model_len:,} takes {blocks_per_request:,} blocks: "
        f"{(num_blocks - 1) / blocks_per_request:.1f} requests of full length at a time"
    )
    return KVSizing(num_blocks, sizing.bytes_per_block, (*sizing.lines, line))
