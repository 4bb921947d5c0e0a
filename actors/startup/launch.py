"""Start and stop one replica's actors on a placement group. With actors, knows Ray.

The verifier is not an actor here: it runs in the process that calls `Replica.start`, which under
Serve is the replica of the Engine deployment. Start-up happens in stages over all actors (load,
size, allocate, warm up), then each runs its step loop on a socket until it closes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.errors import EngineDead, LoadError, WorkerLost
from actors.startup.draft_watch import DraftWatch, NotRebuildable, Switch
from actors.startup.nodes import ReplicaNodes, replica_placement
from actors.startup.preflight import (
    build_acceptance,
    build_lookup_drafter,
    check_q_carrier,
    check_supported,
    load_tokenizer,
    size_kv,
)
from actors.startup.shell import (
    LOAD_TIMEOUT_S,
    Draft,
    LoadOrder,
    Pending,
    RankFacts,
    RankRole,
    Remote,
    RoleShell,
    Target,
    TargetRole,
    collect,
    first_failure,
)
from actors.steps.client import SocketStepClient
from actors.steps.patience import StepPatience
from actors.threads import compute_environment
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.gang.member import GangMember
from parallel.placement import (
    DrafterHome,
    RolePlacement,
    drafter_seat,
    pack_strategy,
)
from parallel.topology import Rendezvous, TopologyError, check_unique_devices
from parallel.transport.frames import TransportError
from parallel.transport.socket import CONNECT_TIMEOUT_S, FrameSocket
from specconfig.engine import EngineConfig

logger = logging.getLogger(__name__)

_GENERATION = 1  # of the worker group: its loss ends the replica


class Replica:
    """A running engine: the verifier here, target and draft actors on the placement group."""

    def __init__(
        self,
        config: EngineConfig,
        group: PlacementGroup,
        owns_group: bool,
        first_bundle: int = 0,
        gang: GangMember | None = None,
    ) -> None:
        self.config = config
        self._gang = gang
        self._group = group
        self._owns_group = owns_group
        self._seat = drafter_seat(config)
        self._nodes = ReplicaNodes(group, replica_placement(config).shifted(first_bundle))
        self._placement = self._nodes.placement
        self._draft_paths: tuple[str, list[str]] | None = None
        self._targets: list[Remote[TargetRole]] = []
        self._drafts: list[Remote[RankRole]] = []
        self._target_facts: list[RankFacts] = []
        self._draft_facts: list[RankFacts] = []
        self._num_blocks = 0
        self._num_meetings = 0
        self._watch: DraftWatch | None = None
        self._is_stopping = False
        self._lock = threading.Lock()  # actors are made under it, and not once it stops
        self.engine: VerifierEngine

    # --- start --------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        group: PlacementGroup | None = None,
        first_bundle: int = 0,
        gang: GangMember | None = None,
    ) -> Replica:
        """Start a replica on `group`, or on a group of its own. Blocks until it can serve.

        `first_bundle`: where its bundles begin in `group`. `gang`: the data-parallel ranks to
        agree with on K; left when the replica stops.

        Raises:
            LoadError: a model, draft or tokenizer cannot be served, or memory does not suffice.
            WorkerLost: an actor died while starting.
        """
        check_supported(config)
        owns_group = group is None
        with ExitStack() as undoing:
            if group is None:
                bundles = list(replica_placement(config).bundles)
                group = placement_group(bundles, strategy=pack_strategy(config))
                undoing.callback(remove_placement_group, group)
                ray.get(group.ready(), timeout=LOAD_TIMEOUT_S)
            replica = cls(config, group, owns_group, first_bundle, gang)
            undoing.pop_all()  # from here on it is the replica's to remove
        try:
            replica._start()
        except BaseException:
            replica.stop()
            raise
        return replica

    def _start(self) -> None:
        started = time.perf_counter()
        check_q_carrier(self.config, is_one_node=self._nodes.is_one_node)
        self._targets = [
            Remote(self._create(Target, place, rank))
            for rank, place in enumerate(self._placement.targets)
        ]
        self._create_drafts()
        replica, num_replicas = self._expert_seat
        meeting = self._meet("target", self._targets)
        order = LoadOrder(meeting, self._meet_in_targets(), replica, num_replicas)
        draft_order = LoadOrder(self._meet_drafts())
        loading = [t.ask(TargetRole.load, order) for t in self._targets]
        drafts_loading = [d.ask(RankRole.load, draft_order) for d in self._drafts]
        # Its import takes a while too: let it run beside the actors' loading.
        tokenizer = load_tokenizer(self.config)
        collect([*loading, *drafts_loading])
        loaded = time.perf_counter()
        if num_replicas > 1:
            self._join_replicas()
        everyone: list[Remote[Any]] = [*self._targets, *self._drafts]
        # One role after the other: where they share a device, each measures on a quiet one.
        memory = collect([target.ask(TargetRole.measure) for target in self._targets])
        memory += collect([draft.ask(RankRole.measure) for draft in self._drafts])
        sizing = size_kv(self.config, memory)
        self._num_blocks = sizing.num_blocks
        collect([rank.ask(RankRole.allocate, sizing.num_blocks) for rank in everyone])
        facts = collect([rank.ask(RankRole.warm_up) for rank in everyone])
        self._target_facts = facts[: len(self._targets)]
        self._draft_facts = facts[len(self._targets) :]
        self._warn_of_batch_dependence()
        if self._drafts:
            self._draft_paths = self._nodes.draft_paths()
        draft_path = self._draft_paths[0] if self._draft_paths else None
        targets = self._connect(
            "target", self._targets, [draft_path] * len(self._targets), _GENERATION
        )
        self._client = SocketStepClient(targets, self._connect_drafts(0))
        self.engine = VerifierEngine(
            EngineLimits.from_config(self.config, sizing.num_blocks),
            self._client,
            tokenizer,
            build_lookup_drafter(self.config),
            build_acceptance(self.config),
            patience=StepPatience(self.config.runtime.step_timeout_s),
            generation=_GENERATION,
            gang=self._gang,
        )
        if self._seat is not None and self._seat.home is not DrafterHome.VERIFIER:
            self._watch = DraftWatch(self.engine, self._rebuild_drafter)
        logger.info(
            "replica ready in %.1f s (load %.1f s, warm-up %.1f s)",
            time.perf_counter() - started,
            loaded - started,
            time.perf_counter() - loaded,
        )

    def _warn_of_batch_dependence(self) -> None:
        facts = self._target_facts
        if self.config.runtime.batch_invariant and not all(f.batch_invariant for f in facts):
            logger.warning(
                "batch_invariant is asked for, but this model on this machine does not give it "
                "(float32 on a CPU with a C compiler does, for most models): output may differ in "
                "the last bits with batch composition"
            )

    def _create(self, role: type[RoleShell], place: RolePlacement, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=True,
        )
        # Two threads: `loop` occupies one, so that control calls still get through.
        options: dict[str, Any] = {
            "num_cpus": place.num_cpus,
            "num_gpus": place.num_gpus,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            "max_concurrency": 2,
            "runtime_env": {"env_vars": compute_environment(self.config.runtime.num_threads)},
        }
        return ray.remote(role).options(**options).remote(self.config.to_json(), rank)

    def _create_drafts(self) -> None:
        """Draft processes in place of the last ones."""
        with self._lock:
            for draft in self._drafts:
                draft.kill()
            if self._is_stopping:
                raise InterruptedError("the replica stops")
            self._drafts = [
                Remote(self._create(Draft, place, rank))
                for rank, place in enumerate(self._placement.drafts)
            ]

    @property
    def _drafts_are_apart(self) -> bool:
        return self._seat is not None and self._seat.home is DrafterHome.OWN

    @property
    def _is_draft_split(self) -> bool:
        return self._seat is not None and self._seat.num_parts > 1

    def _meet(self, role: str, ranks: Sequence[Remote[Any]]) -> Rendezvous | None:
        """Where the ranks of a role meet; None for a single one.

        Raises:
            LoadError: two of them are on one device.
        """
        if len(ranks) < 2:
            return None
        identities = collect([rank.ask(RankRole.identify) for rank in ranks])
        try:
            check_unique_devices(identities)
        except TopologyError as error:
            raise LoadError(str(error)) from error
        is_one_node = len({identity.node_id for identity in identities}) == 1
        host = "127.0.0.1" if is_one_node else identities[0].node_ip
        (port,) = collect([ranks[0].ask(RankRole.open_rendezvous, host)])
        self._num_meetings += 1
        return Rendezvous(host, port, role, len(ranks), self._num_meetings, secrets.token_hex(16))

    def _meet_drafts(self) -> Rendezvous | None:
        """Of a draft that is split over processes of its own."""
        return self._meet("draft", self._drafts) if self._is_draft_split else None

    def _meet_in_targets(self) -> Rendezvous | None:
        """Of a drafter that is split over the target's processes, apart from those."""
        if self._drafts_are_apart or not self._is_draft_split:
            return None
        return self._meet("draft", self._targets)

    @property
    def _expert_seat(self) -> tuple[int, int]:
        """(index, number) of this replica among those over which experts are spread."""
        if self._gang is None or not self.config.parallel.experts_span_replicas:
            return 0, 1
        return self._gang.rank, self.config.parallel.data_parallel_size

    def _join_replicas(self) -> None:
        """Every target rank meets its like in the other replicas, once all have loaded."""
        gang = self._gang
        assert gang is not None
        body: bytes | None = None
        if gang.rank == 0:
            first = self._targets[0]
            (identity,) = collect([first.ask(RankRole.identify)])
            (own_port,) = collect([first.ask(RankRole.open_rendezvous, identity.node_ip)])
            body = f"{identity.node_ip} {own_port} {secrets.token_hex(16)}".encode()
        try:
            host, port, key = gang.share(body, LOAD_TIMEOUT_S).decode().split(" ")
            size = self.config.parallel.data_parallel_size
            meeting = Rendezvous(host, int(port), "experts", size, _GENERATION, key)
            joining = [
                t.ask(TargetRole.join_replicas, meeting, gang.rank, LOAD_TIMEOUT_S)
                for t in self._targets
            ]
            collect(joining, gang.check)
        except TransportError as error:
            raise WorkerLost(f"data-parallel rank {gang.rank}: {error}") from error

    def _connect(
        self,
        role: str,
        ranks: Sequence[Remote[Any]],
        draft_paths: Sequence[str | None],
        generation: int,
    ) -> list[FrameSocket]:
        """Start the step loops of `role`; its connections, the one with rank 0 first."""
        places = self._placement.targets if role == "target" else self._placement.drafts
        gate = self._nodes.open(role, places, generation)
        loops: list[Pending[None]] = [
            rank.ask(RankRole.loop, path, draft_path, generation)
            for rank, path, draft_path in zip(ranks, gate.paths, draft_paths, strict=True)
        ]
        try:
            accepted = gate.accept_all(CONNECT_TIMEOUT_S)
        except TransportError as error:
            first_failure(loops)
            raise WorkerLost(f"a {role} actor did not connect: {error}") from error
        return [connection for connection, _ in sorted(accepted, key=lambda item: item[1].rank)]

    def _connect_drafts(self, generation: int) -> list[FrameSocket]:
        if self._draft_paths is None:
            return []
        return self._connect("draft", self._drafts, self._draft_paths[1], generation)

    # --- a lost drafter -----------------------------------------------------------------------

    def _rebuild_drafter(self, generation: int) -> Switch:
        """A new drafter where the last one was, in the watch's thread."""
        assert self._watch is not None
        check = self._watch.check
        if not self._drafts_are_apart:
            return self._rebuild_in_targets(generation)
        self._create_drafts()
        order = LoadOrder(self._meet_drafts())
        collect([d.ask(RankRole.load, order) for d in self._drafts], check)
        collect([d.ask(RankRole.allocate, self._num_blocks) for d in self._drafts], check)
        self._draft_facts = collect([d.ask(RankRole.warm_up) for d in self._drafts], check)
        drafts = self._connect_drafts(generation)
        return lambda: self._client.replace_drafts(drafts)

    def _rebuild_in_targets(self, generation: int) -> Switch:
        assert self._watch is not None and self._seat is not None
        is_on_gpu = self._target_facts[0].device.startswith("cuda")
        if self._is_draft_split and is_on_gpu:
            # Its ranks would meet and warm up while the target's compute, in another thread:
            # two communicators on one device at once can wait for each other for ever.
            raise NotRebuildable(
                "it is split over the target's GPUs, where it cannot be made beside running steps; "
                "a restart of the replica brings it back, and placement: colocated, where the "
                "method has it, can be rebuilt"
            )
        meeting = self._meet_in_targets()
        ranks = self._targets[: self._seat.num_parts]
        rebuilding = [t.ask(TargetRole.rebuild_drafter, generation, meeting) for t in ranks]
        self._target_facts[: len(ranks)] = collect(rebuilding, self._watch.check)
        return lambda: None  # the plans of the new generation change over

    # --- state and end ------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Facts of the running replica: one dict per actor, KV blocks, placement, the drafter's
        losses."""
        return {
            "actors": [asdict(fact) for fact in (*self._target_facts, *self._draft_facts)],
            "num_kv_blocks": self._num_blocks,
            "bundles": list(self._placement.bundles),
            "target_nodes": self._nodes.describe(),
            "draft_placement": self.config.draft_placement,
            "num_draft_rebuilds": self._watch.num_rebuilds if self._watch else 0,
            "drafter": self._watch.state if self._watch else None,
        }

    def traffic(self) -> dict[str, dict[str, float]]:
        """Collective calls, bytes and seconds of target rank 0 so far, by operation."""
        (counts,) = collect([self._targets[0].ask(TargetRole.traffic)])
        return counts

    def check_health(self) -> None:
        """Raise EngineDead when the engine cannot serve."""
        status = self.engine.status()
        if not status.is_healthy:
            raise EngineDead(status.error or "the engine has stopped")

    def stop(self) -> None:
        """End the engine and every process it started. Idempotent.

        A step that does not end in time, of a worker that hangs, keeps nothing alive: its
        processes are killed, which ends the step.
        """
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        with ExitStack() as ending:
            # Last in, first out; each is done whatever the others raise.
            if self._owns_group:
                ending.callback(remove_placement_group, self._group)
            ending.callback(self._nodes.close)
            ending.callback(self._kill_all)
            if self._gang is not None:
                ending.callback(self._gang.close)
            if hasattr(self, "engine"):
                ending.callback(self._stop_engine)
            if self._watch is not None:
                ending.callback(self._watch.stop)

    def _stop_engine(self) -> None:
        try:
            self.engine.stop()
        except TimeoutError as error:
            logger.warning("%s; killing its processes", error)

    def _kill_all(self) -> None:
        ranks: list[Remote[Any]] = [*self._targets, *self._drafts]
        for rank in ranks:
            rank.kill()
