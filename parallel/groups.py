"""Communicators of one role's ranks: NCCL between GPUs, gloo between CPUs, nothing for one rank.

Target ranks form one group, draft ranks another when the draft is split. A group is never global
state: a process that hosts a shard of both models holds two. Rendezvous is a store that rank 0
opens on a port of the system's choice, on the loopback interface where all ranks are on one node;
its address and the random key of the meeting travel through the launcher. As for the collectives
themselves, the network between the nodes of a cluster is assumed to be its own.

On CPU a sum is taken in rank order over exchanged parts, so that an element's bits depend neither
on the shape of the tensor nor on which rank computes it. Ring sums, gloo's included, start at a
different rank for each chunk, and a row's bits would depend on how many rows share the call.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from parallel.topology import Rendezvous

# Longer than any step may take, and than the slowest rank may load: who hangs is for the verifier
# to say, which ends the processes. A rank that is gone is seen at once, as the end of its
# connections.
GROUP_TIMEOUT_S = 3600.0


class GroupError(RuntimeError):
    """Ranks could not meet, or a collective failed: a rank is gone or hung."""


class TPGroup(Protocol):
    """What sharded layers and the sampler need. Every rank makes the same calls in one order.

    `bytes_sent` counts what this rank hands to others, by operation: the payload once for each
    rank that it goes to. `seconds` is the time spent in calls, waiting for others included (on
    CUDA only the time to start them).
    """

    rank: int
    size: int
    bytes_sent: Counter[str]
    num_calls: Counter[str]
    seconds: dict[str, float]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, equal bits on every rank. `x` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], in rank order. Shapes must agree."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`x[rank]` of [size, ...], summed over ranks."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x` on every rank; overwrites `x` elsewhere."""

    def close(self) -> None:
        """Leave the group; others see it. Idempotent."""


class SingleRank:
    """The group of one: no communication."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.bytes_sent: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass


class RankGroup:
    """A group of several ranks over gloo or NCCL.

    Args:
        rendezvous: Where the ranks meet; equal on every rank.
        rank: This rank.
        device: Of the tensors that will be passed. Decides the backend.
        timeout_s: For each collective, and for the meeting where that has no time of its own.
        meeting_timeout_s: For the meeting.
        store: The store itself on the rank that opened it.

    Raises:
        GroupError: the ranks did not meet in time.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        *,
        timeout_s: float = GROUP_TIMEOUT_S,
        meeting_timeout_s: float | None = None,
        store: Any = None,
    ) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.bytes_sent: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._group: Any = None
        self._name = f"{rendezvous.role} group {rendezvous.generation}, rank {rank}"
        self._muted = False
        timeout = timedelta(seconds=timeout_s)
        patience_s = timeout_s if meeting_timeout_s is None else meeting_timeout_s
        try:
            if store is None:
                store = TCPStore(rendezvous.host, rendezvous.port, None, False, timeout=timeout)
            prefix = PrefixStore(
                f"{rendezvous.key}/{rendezvous.role}/{rendezvous.generation}", store
            )
            prefix.set_timeout(timeout)
            prefix.set(f"here/{rank}", "")
            prefix.wait([f"here/{r}" for r in range(self.size)], timedelta(seconds=patience_s))
            self._group = _backend(prefix, rank, rendezvous, device, timeout)
            # The first collective builds the connections: a missing rank shows here, not in a step.
            self.all_gather(torch.zeros(1, device=device))
        except (RuntimeError, dist.DistError) as error:
            raise GroupError(
                f"{self._name}: not all of {rendezvous.size} ranks met at {rendezvous.host}:"
                f"{rendezvous.port} in {patience_s:g} s: {error}"
            ) from error
        self._store = store
        self.bytes_sent.clear()
        self.num_calls.clear()
        self.seconds.clear()

    @property
    def backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else "gloo"

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside, collectives return right shapes and meaningless values, without a peer.

        For a forward that only finds out shapes, at a time when other ranks may still load.
        """
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._muted:
            return x
        if self._device.type == "cuda":
            self._count("all_reduce", x, 2)
            self._wait("all_reduce", lambda group: group.allreduce([x]))
            return x
        return _sum_in_order(self._gather("all_reduce", x))

    def all_gather(self, x: Tensor) -> Tensor:
        if self._muted:
            return x[None].expand(self.size, *x.shape)
        return self._gather("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self._muted:
            return x[self.rank]
        x = x.contiguous()
        self._count("reduce_scatter", x[0], self.size - 1)
        if self._device.type == "cuda":
            total = torch.empty_like(x[0])
            self._wait("reduce_scatter", lambda group: group._reduce_scatter_base(total, x))
            return total
        parts = torch.empty_like(x)
        self._wait("reduce_scatter", lambda group: group.alltoall_base(parts, x, [], []))
        return _sum_in_order(parts)

    def broadcast(self, x: Tensor) -> Tensor:
        if self._muted:
            return x
        x = x.contiguous()
        self._count("broadcast", x, self.size - 1 if self.rank == 0 else 0)
        self._wait("broadcast", lambda group: group.broadcast([x]))
        return x

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = None

    def _gather(self, operation: str, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        self._count(operation, x, self.size - 1)
        self._wait(operation, lambda group: group.allgather([list(out.unbind(0))], [x]))
        return out

    def _count(self, operation: str, x: Tensor, times: int) -> None:
        self.num_calls[operation] += 1
        if times:
            self.bytes_sent[operation] += x.numel() * x.element_size() * times

    def _wait(self, operation: str, start: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise GroupError(f"{self._name}: the group is closed")
        started = time.perf_counter()
        try:
            start(self._group).wait()
        except (RuntimeError, dist.DistError) as error:
            # Others wait for this rank in calls that it will not make: let them know at once.
            self.close()
            raise GroupError(f"{self._name}: {operation} failed: {error}") from error
        self.seconds[operation] += time.perf_counter() - started


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum of [size, ...] over ranks, in rank order; overwrites `parts`."""
    wide = parts.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0]
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class GroupHost:
    """Rank 0's side of rendezvous: a store that lives as long as this object.

    `host`: the one address it listens at.
    """

    def __init__(self, host: str) -> None:
        # The store would listen on every interface: it takes over a socket that does not.
        listening = socket.create_server((host, 0), backlog=64)
        self.store = TCPStore(
            host,
            listening.getsockname()[1],
            None,
            True,
            wait_for_workers=False,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            master_listen_fd=listening.detach(),
        )

    @property
    def port(self) -> int:
        return int(self.store.port)


def join_group(
    rendezvous: Rendezvous | None,
    rank: int,
    device: torch.device,
    *,
    host: GroupHost | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
    meeting_timeout_s: float | None = None,
) -> TPGroup:
    """The group that `rendezvous` describes; one rank's when it is None. Blocks until all met."""
    if rendezvous is None or rendezvous.size == 1:
        return SingleRank()
    store = host.store if host is not None else None
    return RankGroup(
        rendezvous,
        rank,
        device,
        timeout_s=timeout_s,
        meeting_timeout_s=meeting_timeout_s,
        store=store,
    )


def _backend(
    store: Any, rank: int, rendezvous: Rendezvous, device: torch.device, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, rendezvous.size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._threads = 1
    # The interface that reaches the store reaches the other ranks; gloo's own choice, by host
    # name, need not.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(rendezvous))]
    return dist.ProcessGroupGloo(store, rank, rendezvous.size, gloo)


def _own_address(rendezvous: Rendezvous) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        return str(probe.getsockname()[0])
