"""Which rank holds what, and which device each rank is on. Pure arithmetic over small values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TopologyError(ValueError):
    """Ranks cannot be laid out as asked; the message names the numbers and what would do."""


@dataclass(frozen=True)
class RankIdentity:
    """Where one rank runs. `device` is the GPU's uuid, or None for a rank that computes on CPU."""

    role: str
    rank: int
    node_id: str
    node_ip: str
    device: str | None


class Rendezvous(NamedTuple):
    """How the ranks of one group find each other. `generation` grows with each rebuild. `key`:
    random, of this meeting alone; who does not know it takes no part."""

    host: str
    port: int
    role: str
    size: int
    generation: int
    key: str


def check_unique_devices(ranks: Sequence[RankIdentity]) -> None:
    """Refuse two ranks of one communicator on one device: NCCL would hang or fail at its start.

    Raises:
        TopologyError: names both ranks and the device.
    """
    seen: dict[tuple[str, str], RankIdentity] = {}
    for rank in ranks:
        if rank.device is None:
            continue
        other = seen.setdefault((rank.node_id, rank.device), rank)
        if other is not rank:
            raise TopologyError(
                f"{other.role} rank {other.rank} and {rank.role} rank {rank.rank} are both on GPU "
                f"{rank.device} of node {rank.node_ip}; each rank of a group needs a device of its "
                "own: give every bundle one whole GPU, or lower tensor_parallel_size"
            )


def split_range(total: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of `rank` when `total` items are split as evenly as they go.

    The first ranks get one item more. A vocabulary needs no padding this way.
    """
    each, rest = divmod(total, size)
    begin = rank * each + min(rank, rest)
    return begin, begin + each + (rank < rest)


def even_range(total: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """[begin, end) of `rank` when `total` must split without rest.

    Args:
        total: Number of items.
        rank: Whose range.
        size: Number of ranks.
        what: The configuration field that holds `total`, for the message.

    Raises:
        TopologyError: with the sizes that would do.
    """
    if total % size:
        raise TopologyError(
            f"{what}={total} does not split over tensor_parallel_size={size}; use one of "
            f"{divisors(total)}"
        )
    each = total // size
    return rank * each, (rank + 1) * each


def kv_head_range(num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of the KV heads of `rank`; with more ranks than heads, ranks share a head.

    Raises:
        TopologyError: neither number divides the other.
    """
    if num_kv_heads % size == 0:
        return even_range(num_kv_heads, rank, size, "num_key_value_heads")
    if size % num_kv_heads == 0:
        head = rank * num_kv_heads // size
        return head, head + 1
    raise TopologyError(
        f"num_key_value_heads={num_kv_heads} neither splits over nor is shared evenly by "
        f"tensor_parallel_size={size}; use one of {divisors(num_kv_heads)} or a multiple of "
        f"{num_kv_heads}"
    )


def divisors(number: int) -> list[int]:
    """Ascending divisors of `number`, at most the first 16."""
    return [d for d in range(1, number + 1) if number % d == 0][:16]
