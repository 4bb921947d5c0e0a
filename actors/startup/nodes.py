"""The nodes of one replica, and what each worker connects to. With actors, knows Ray.

A worker on the verifier's node connects to the verifier's Unix socket. On each other node a relay
stands in for the verifier; the step protocol does not know the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from parallel.placement import ReplicaPlacement, RolePlacement, place_replica
from parallel.transport.relay import Relay
from parallel.transport.socket import FrameListener, FrameSocket, Hello, SocketDir
from parallel.transport.tcp import TcpFrameListener
from specconfig.engine import EngineConfig

_CALL_TIMEOUT_S = 60.0


def replica_placement(config: EngineConfig) -> ReplicaPlacement:
    """Bundles and shares of one replica. They ask Ray for GPUs where the configuration does, or
    leaves it open on a cluster that has some."""
    use_gpus = config.runtime.device == "cuda" or (
        config.runtime.device == "auto"
        and ray.is_initialized()
        and ray.cluster_resources().get("GPU", 0) > 0
    )
    return place_replica(config, use_gpus=use_gpus)


class Gate:
    """Where the ranks of one role connect to the verifier. `paths`: of each rank, on its node."""

    def __init__(self, num_near: int, num_far: int) -> None:
        self.num_near = num_near
        self.num_far = num_far
        self.near: FrameListener | None = None
        self.far: TcpFrameListener | None = None
        self.paths: list[str] = []

    def accept_all(self, timeout_s: float) -> list[tuple[FrameSocket, Hello]]:
        """One connection per worker on the verifier's node, one per other node.

        Raises:
            TransportError: not all came in time. None is left open.
        """
        accepted: list[tuple[FrameSocket, Hello]] = []
        try:
            for listener, count in ((self.near, self.num_near), (self.far, self.num_far)):
                for _ in range(count):
                    assert listener is not None
                    accepted.append(listener.accept(timeout_s))
        except BaseException:
            for connection, _ in accepted:
                connection.close()
            raise
        finally:
            self.close()
        return accepted

    def close(self) -> None:
        """Let nobody else in. Idempotent."""
        for listener in (self.near, self.far):
            if listener is not None:
                listener.close()


class ReplicaNodes:
    """Where the bundles of a replica are, and the sockets and relays between them.

    Args:
        group: Placement group of the replica, ready.
        placement: Roles to bundles; `placement` holds it with its ranks ordered by node.
    """

    def __init__(self, group: PlacementGroup, placement: ReplicaPlacement) -> None:
        self._group = group
        self.home = str(ray.get_runtime_context().get_node_id())
        self._bundle_nodes = _nodes_of_bundles(group)
        self.placement = placement.ordered(self._bundle_nodes, self.home)
        self._addresses = {n["NodeID"]: str(n["NodeManagerAddress"]) for n in ray.nodes()}
        self._sockets = SocketDir()
        self._gates: list[Gate] = []
        self._is_closed = False
        self._relays: dict[str, Any] = {}
        self._home_relay: Relay | None = None

    @property
    def remote(self) -> tuple[str, ...]:
        """Nodes other than the verifier's that have a worker."""
        places = (*self.placement.targets, *self.placement.drafts)
        return tuple(sorted({self._node(place) for place in places} - {self.home}))

    def describe(self) -> list[str]:
        """Node of each target rank, `verifier` where it is the verifier's own."""
        nodes = [self._node(place) for place in self.placement.targets]
        return ["verifier" if node == self.home else node for node in nodes]

    @property
    def is_one_node(self) -> bool:
        """Whether target and draft processes are all on one node."""
        places = (*self.placement.targets, *self.placement.drafts)
        return len({self._node(place) for place in places}) == 1

    # --- the step protocol --------------------------------------------------------------------

    def open(self, role: str, places: Sequence[RolePlacement], generation: int) -> Gate:
        """Let the ranks of `role` connect: those of `generation`, and nobody that an earlier call
        let in."""
        nodes = [self._node(place) for place in places]
        name = f"{role}-{generation}"
        gate = Gate(nodes.count(self.home), len(set(nodes) - {self.home}))
        self._gates.append(gate)
        paths: dict[str, str] = {}
        if gate.num_near:
            gate.near = FrameListener(self._sockets.socket_path(name), generation)
            paths[self.home] = gate.near.path
        if gate.num_far:
            gate.far = TcpFrameListener(self._addresses[self.home], generation)
        for node in dict.fromkeys(nodes):
            if node != self.home and gate.far is not None:
                call = self._relay(node).open.remote(
                    role, nodes.count(node), gate.far.address, generation
                )
                paths[node] = ray.get(call, timeout=_CALL_TIMEOUT_S)
        gate.paths = [paths[node] for node in nodes]
        return gate

    # --- drafts -------------------------------------------------------------------------------

    def draft_paths(self) -> tuple[str, list[str]]:
        """(where target rank 0 listens for drafts, what each draft rank connects to)."""
        target = self._node(self.placement.targets[0])
        if target == self.home:
            listens_at = self._sockets.socket_path("drafts")
        else:
            listens_at = ray.get(
                self._relay(target).socket_path.remote("drafts"), timeout=_CALL_TIMEOUT_S
            )
        nodes = [self._node(place) for place in self.placement.drafts]
        paths = {target: listens_at}
        if set(nodes) - {target}:
            address = self._call(target, "export", listens_at)
            for node in set(nodes) - {target}:
                paths[node] = self._call(node, "reach", address)
        return listens_at, [paths[node] for node in nodes]

    def _call(self, node: str, method: str, *args: Any) -> Any:
        """Call a relay; on the verifier's node, where none is needed otherwise, one in here."""
        if node == self.home:
            if self._home_relay is None:
                self._home_relay = Relay(self._addresses[self.home])
            return getattr(self._home_relay, method)(*args)
        return ray.get(getattr(self._relay(node), method).remote(*args), timeout=_CALL_TIMEOUT_S)

    # --- relays -------------------------------------------------------------------------------

    def _relay(self, node: str) -> Any:
        if self._is_closed:
            raise InterruptedError("the replica stops")
        if node not in self._relays:
            places = (*self.placement.targets, *self.placement.drafts)
            bundle = next(p.bundle for p in places if self._node(p) == node)
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=bundle,
                placement_group_capture_child_tasks=True,
            )
            self._relays[node] = (
                ray.remote(Relay)
                .options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
                .remote(self._addresses[node])
            )
        return self._relays[node]

    def _node(self, place: RolePlacement) -> str:
        return self._bundle_nodes[place.bundle]

    def close(self) -> None:
        """Close the listeners and end the relays. Idempotent."""
        self._is_closed = True
        for gate in self._gates:
            gate.close()
        for relay in self._relays.values():
            ray.kill(relay)
        self._relays = {}
        if self._home_relay is not None:
            self._home_relay.close()
            self._home_relay = None
        self._sockets.close()


def _nodes_of_bundles(group: PlacementGroup) -> list[str]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [str(nodes[index]) for index in sorted(nodes)]
