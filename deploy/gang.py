"""A replica's seat in its gang: Serve names rank and gang, and here the ranks find each other.

Rank 0 runs the coordinator of `parallel.gang` and leaves its address in the cluster's
key-value store, under the gang's id; a restarted gang has a new one. Nothing of it is needed, or
started, unless the ranks must agree on K or share experts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from actors.errors import WorkerLost
from parallel.gang.coordinator import Coordinator
from parallel.gang.member import GangMember
from parallel.transport.frames import TransportError, TransportTimeout
from parallel.transport.tcp import TcpAddress
from specconfig.engine import EngineConfig

logger = logging.getLogger("ray.serve")

JOIN_TIMEOUT_S: Final = 600.0
_DIAL_S: Final = 3.0
_PAUSE_S: Final = 0.1


@dataclass(slots=True)
class GangSeat:
    """Rank of one replica in its gang. `member` is None when there is nothing to agree on."""

    gang_id: str
    rank: int
    size: int
    member: GangMember | None = None
    coordinator: Coordinator | None = None

    def close(self) -> None:
        """Leave; rank 0 takes the coordinator with it. Idempotent."""
        if self.member is not None:
            self.member.close()
        if self.coordinator is not None:
            self.coordinator.close()
            _forget_address(self.gang_id)


def agrees_on_k(config: EngineConfig) -> bool:
    """Whether the ranks decide on K together, step by step."""
    parallel, spec = config.parallel, config.speculative
    return (
        parallel.data_parallel_size > 1
        and parallel.dynamic_k_dp_policy == "agree"
        and spec is not None
        and spec.num_speculative_tokens_per_batch_size is not None
    )


def take_seat(config: EngineConfig) -> GangSeat | None:
    """This replica's seat; None without data parallelism.

    Raises:
        WorkerLost: the other ranks cannot be found, or have another configuration.
    """
    if config.parallel.data_parallel_size == 1:
        return None
    context = _gang_context()
    if context is None:
        logger.warning("not a gang replica: this engine runs as if data_parallel_size were 1")
        return None
    seat = GangSeat(context.gang_id, context.rank, context.world_size)
    lockstep = config.parallel.experts_span_replicas
    if not lockstep and not agrees_on_k(config):
        return seat
    digest = config.compute_hash()
    try:
        if seat.rank == 0:
            seat.coordinator = Coordinator(_node_address(), seat.size, digest, lockstep=lockstep)
            _put_address(seat.gang_id, seat.coordinator.address)
        seat.member = _join(seat, digest, lockstep)
    except TransportError as error:
        seat.close()
        raise WorkerLost(f"data-parallel rank {seat.rank}: {error}") from error
    return seat


def describe_gang(config: EngineConfig, seat: GangSeat | None) -> dict[str, Any]:
    """Data parallelism of this replica, for /server_info."""
    parallel = config.parallel
    facts: dict[str, Any] = {"size": parallel.data_parallel_size}
    if parallel.data_parallel_size == 1:
        return facts
    facts["dynamic_k_dp_policy"] = parallel.dynamic_k_dp_policy
    facts["k"] = "follows the largest batch among the ranks" if agrees_on_k(config) else "static"
    if parallel.experts_span_replicas:
        facts["experts"] = f"spread over {parallel.num_expert_ranks} ranks; replicas step together"
    if seat is not None:
        facts |= {"rank": seat.rank, "gang_id": seat.gang_id}
        if seat.member is not None and seat.member.fallback is not None:
            facts["k"] = f"static: {seat.member.fallback}"
    return facts


def _join(seat: GangSeat, digest: str, lockstep: bool) -> GangMember:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        # Read again each time: what is there may be from a gang that is gone.
        address = _get_address(seat.gang_id)
        try:
            if address is not None:
                return GangMember(address, seat.rank, digest, lockstep=lockstep, timeout_s=_DIAL_S)
            why = "rank 0 has not said where it is"
        except TransportTimeout as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise TransportTimeout(f"the gang did not form in {JOIN_TIMEOUT_S:.0f} s: {why}")
        time.sleep(_PAUSE_S)


def _gang_context() -> Any:
    from ray import serve

    try:
        return serve.get_replica_context().gang_context
    except Exception:  # outside Serve: tests and offline use
        return None


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


# The store is not a public interface of Ray, but its own language-model deployments meet the same
# way; everything that touches it is below.


def _key(gang_id: str) -> bytes:
    return f"paceline-gang-{gang_id}".encode()


def _put_address(gang_id: str, address: TcpAddress) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(gang_id), msgpack.packb(list(address)), overwrite=True)


def _get_address(gang_id: str) -> TcpAddress | None:
    from ray.experimental.internal_kv import _internal_kv_get

    raw = _internal_kv_get(_key(gang_id))
    return None if raw is None else TcpAddress(*msgpack.unpackb(raw))


def _forget_address(gang_id: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    try:
        _internal_kv_del(_key(gang_id))
    except Exception:
        logger.debug("the store was gone before the gang's address could be removed")
