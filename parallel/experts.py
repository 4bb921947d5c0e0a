"""Experts that serve the rows of several data-parallel ranks.

With expert parallelism and data parallelism, a layer's experts lie over all tensor-parallel ranks
of all replicas: rank t of replica d holds part d * T + t of D * T. Attention stays each replica's
own. In a layer, the rows of all replicas are gathered to every rank (padded to the most rows that
any has), each rank computes its experts for them, and the sums go back to the rows' owners: first
over replicas, then over the replica's tensor-parallel ranks. Replicas therefore run as many
forwards as each other (lockstep, see `parallel.gang`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.groups import TPGroup


@dataclass(frozen=True)
class ExpertShare:
    """Which part of each layer's experts a rank holds: number `index` of `count` equal ones."""

    index: int
    count: int

    @classmethod
    def of(cls, group: TPGroup, replica: int = 0, num_replicas: int = 1) -> ExpertShare:
        """The share of the calling rank of `group`, in a replica among those that share experts."""
        return cls(replica * group.size + group.rank, num_replicas * group.size)


class ExpertExchange:
    """One rank's way to the same rank of the other replicas. Inert until it has `group`.

    `begin` opens a forward on every replica; `gather` and `scatter` then come once a layer.
    """

    def __init__(self) -> None:
        self.group: TPGroup | None = None
        self._num_rows: list[int] = []  # of each replica, in this forward

    def begin(self, num_rows: int, device: torch.device) -> None:
        """Tell the other replicas how many rows this one has in the forward that begins.

        Raises:
            RuntimeError: the group was never joined; experts of other ranks would be left out.
        """
        if self.group is None:
            raise RuntimeError("experts span replicas, but the replicas have not met")
        rows = self.group.all_gather(torch.tensor([num_rows], device=device))
        self._num_rows = rows.flatten().tolist()

    def gather(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [n, H], experts [n, k] and their weights [n, k] of all replicas' rows.

        Rows that only fill up to the longest have -1 for an expert.
        """
        if self.group is None:
            return x, index, weights
        most = max(self._num_rows)
        parts = (x, index.to(torch.int32), weights)
        # One message: what belongs to a row lies side by side, as bytes.
        mine = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        padding = mine.new_full((most - len(mine), mine.shape[1]), 255)  # index: -1
        rows = self.group.all_gather(torch.cat([mine, padding])).flatten(0, 1)
        sizes = [part.shape[1] * part.element_size() for part in parts]
        states, experts, gates = (
            column.contiguous().view(part.dtype)
            for column, part in zip(torch.split(rows, sizes, 1), parts, strict=True)
        )
        is_padding = experts[:, :1] < 0
        # The padding's bytes are no numbers in floating point.
        states = states.masked_fill(is_padding, 0.0)
        return states, experts.to(index.dtype), gates.masked_fill(is_padding, 0.0)

    def scatter(self, out: Tensor, num_rows: int) -> Tensor:
        """[n, H]: the sums over replicas of this one's rows in `out` (of all gathered rows)."""
        if self.group is None:
            return out
        by_replica = out.view(self.group.size, -1, out.shape[-1])
        return self.group.reduce_scatter(by_replica)[:num_rows]
