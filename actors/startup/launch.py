"""Start and stop one replica's actors on a placement group. With actors, knows Ray.

The verifier is not an actor here: it runs in the process that calls `Replica.start`, which under
Serve is the replica of the Engine deployment. Start-up happens in stages over all actors (load,
size, allocate, warm up), then each runs its step loop on a socket until it closes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.errors import LoadError, WorkerLost
from actors.kvcache.sizing import KVLayers, KVSizing
from actors.startup.nodes import ReplicaNodes
from actors.startup.preflight import build_lookup_drafter, check_supported, load_tokenizer, size_kv
from actors.startup.shell import Draft, RoleShell, Target
from actors.steps.client import SocketStepClient
from actors.threads import compute_environment
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.gang.member import GangMember
from parallel.placement import ReplicaPlacement, RolePlacement, pack_strategy, place_replica
from parallel.topology import Rendezvous, TopologyError, check_unique_devices
from parallel.transport.frames import TransportError
from parallel.transport.socket import FrameSocket
from specconfig.engine import EngineConfig

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
CONNECT_TIMEOUT_S = 60.0
_WATCH_PERIOD_S = 0.5
# A draft group that fails this often is not rebuilt again: something is wrong with it.
_MAX_DRAFT_REBUILDS = 5


def _uses_gpus(config: EngineConfig) -> bool:
    """Whether bundles ask Ray for GPUs: configured, or `auto` on a cluster that has some."""
    if config.runtime.device == "auto":
        return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    return config.runtime.device == "cuda"


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
        placement: ReplicaPlacement = place_replica(config, use_gpus=_uses_gpus(config))
        self._generation = 1
        self._nodes = ReplicaNodes(group, placement.shifted(first_bundle), self._generation)
        self._placement = self._nodes.placement
        self._draft_paths: tuple[str, list[str]] | None = None
        self._targets: list[Any] = []
        self._drafts: list[Any] = []
        self._facts: list[dict[str, Any]] = []
        self._num_draft_rebuilds = 0
        self._num_meetings = 0
        self._is_stopping = threading.Event()
        self.engine: VerifierEngine

    # --- start --------------------------------------------------------------------------------

    @staticmethod
    def bundles(config: EngineConfig) -> list[dict[str, float]]:
        """Placement group bundles of one replica; needs a connected Ray for `device: auto`."""
        return list(place_replica(config, use_gpus=_uses_gpus(config)).bundles)

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
        if group is None:
            group = placement_group(cls.bundles(config), strategy=pack_strategy(config))
            ray.get(group.ready(), timeout=LOAD_TIMEOUT_S)
        replica = cls(config, group, owns_group, first_bundle, gang)
        try:
            replica._start()
        except BaseException:
            replica.stop()
            raise
        return replica

    def _start(self) -> None:
        started = time.perf_counter()
        draft_in_target = self.config.drafter_host == "draft" and self._placement.is_fused
        self._targets = [
            self._create(Target, place, rank) for rank, place in enumerate(self._placement.targets)
        ]
        self._drafts = self._create_drafts()
        meeting = self._meet("target", self._targets)
        draft_meeting = self._meet("draft", self._drafts)
        fused_meeting = None
        if meeting is not None and draft_in_target and self._is_draft_split:
            # A split draft's shards sit in the target's processes and meet where those do.
            fused_meeting = meeting._replace(role="draft")
        replica, num_replicas = self._expert_seat
        loading = [
            t.call.remote("load", draft_in_target, meeting, fused_meeting, replica, num_replicas)
            for t in self._targets
        ] + [d.call.remote("load", draft_meeting) for d in self._drafts]
        # Its import takes a while too: let it run beside the actors' loading.
        tokenizer = load_tokenizer(self.config)
        self._facts = _call(loading)
        loaded = time.perf_counter()
        sizing = self._size_kv()
        self._num_blocks = sizing.num_blocks
        _call([a.call.remote("allocate", sizing.num_blocks) for a in self._targets + self._drafts])
        if num_replicas > 1:
            self._join_replicas()
        warm = _call([a.call.remote("warm_up") for a in self._targets + self._drafts])
        self._take_warm_facts(warm[: len(self._targets)])
        if self._drafts:
            self._draft_paths = self._nodes.draft_paths()
        draft_path = self._draft_paths[0] if self._draft_paths else None
        targets = self._connect("target", self._targets, [draft_path] * len(self._targets))
        drafts = self._connect_drafts()
        self._client = SocketStepClient(targets, drafts)
        self.engine = VerifierEngine(
            EngineLimits.from_config(self.config, sizing.num_blocks),
            self._client,
            tokenizer,
            build_lookup_drafter(self.config),
            generation=self._generation,
            gang=self._gang,
        )
        if self._drafts:
            threading.Thread(target=self._watch_draft, name="paceline-watch", daemon=True).start()
        logger.info(
            "replica ready in %.1f s (load %.1f s, warm-up %.1f s)",
            time.perf_counter() - started,
            loaded - started,
            time.perf_counter() - loaded,
        )

    def _take_warm_facts(self, found: list[dict[str, Any]]) -> None:
        """What target ranks know once they have run: `found`, in rank order."""
        targets = self._facts[: len(found)]
        for fact, new in zip(targets, found, strict=True):
            fact.update(new)
        if self.config.runtime.batch_invariant and not all(f["batch_invariant"] for f in targets):
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

    def _create_drafts(self) -> list[Any]:
        return [
            self._create(Draft, place, rank) for rank, place in enumerate(self._placement.drafts)
        ]

    @property
    def _is_draft_split(self) -> bool:
        parallel = self.config.draft_parallel
        return parallel is not None and parallel.tensor_parallel_size > 1

    def _meet(self, role: str, actors: list[Any]) -> Rendezvous | None:
        """Where the ranks of a role meet; None for a single one.

        Raises:
            LoadError: two of them are on one device.
        """
        if len(actors) < 2 or (role == "draft" and not self._is_draft_split):
            return None
        identities = _call([actor.call.remote("identify") for actor in actors])
        try:
            check_unique_devices(identities)
        except TopologyError as error:
            raise LoadError(str(error)) from error
        (port,) = _call([actors[0].call.remote("open_rendezvous")])
        is_one_node = len({identity.node_id for identity in identities}) == 1
        host = "127.0.0.1" if is_one_node else identities[0].node_ip
        self._num_meetings += 1
        return Rendezvous(host, port, role, len(actors), self._num_meetings)

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
            identity, port = _call(
                [self._targets[0].call.remote(m) for m in ("identify", "open_rendezvous")]
            )
            body = f"{identity.node_ip} {port}".encode()
        try:
            host, _, port = gang.share(body, LOAD_TIMEOUT_S).decode().partition(" ")
            size = self.config.parallel.data_parallel_size
            meeting = Rendezvous(host, int(port), "experts", size, self._generation)
            _call(
                [
                    t.call.remote("join_replicas", meeting, gang.rank, LOAD_TIMEOUT_S)
                    for t in self._targets
                ],
                gang.check,
            )
        except TransportError as error:
            raise WorkerLost(f"data-parallel rank {gang.rank}: {error}") from error

    def _size_kv(self) -> KVSizing:
        """KV blocks that fit every rank: the same ids are used on all of them."""
        targets = [fact for fact in self._facts if fact["role"] == "target"]
        free = [f["free_device_bytes"] for f in targets if f["free_device_bytes"] is not None]
        largest: dict[str, KVLayers] = {}
        for fact in self._facts:
            for owner, layers in fact["kv_layers"].items():
                known = largest.setdefault(owner, layers)
                largest[owner] = max(known, layers, key=lambda x: x.bytes_per_token)
        device_type = targets[0]["device"].partition(":")[0]
        return size_kv(self.config, device_type, min(free, default=None), largest)

    def _connect(
        self, role: str, actors: list[Any], draft_paths: Sequence[str | None]
    ) -> list[FrameSocket]:
        """Start the step loops of `role`; its connections, the one with rank 0 first."""
        places = self._placement.targets if role == "target" else self._placement.drafts
        paths = self._nodes.open(role, places)
        loops = [
            actor.call.remote("loop", path, draft_path, self._generation)
            for actor, path, draft_path in zip(actors, paths, draft_paths, strict=True)
        ]
        try:
            accepted = self._nodes.accept_all(places, CONNECT_TIMEOUT_S)
        except TransportError as error:
            done, _ = ray.wait(loops, timeout=0)
            if done:
                _call(done)  # raises what ended the actor's loop
            raise WorkerLost(f"a {role} actor did not connect: {error}") from error
        return [connection for connection, _ in sorted(accepted, key=lambda item: item[1].rank)]

    def _connect_drafts(self) -> list[FrameSocket]:
        if self._draft_paths is None:
            return []
        return self._connect("draft", self._drafts, self._draft_paths[1])

    # --- the draft group ----------------------------------------------------------------------

    def _watch_draft(self) -> None:
        """Rebuild the draft group when it is lost; requests go on without drafts meanwhile."""
        while not self._is_stopping.wait(_WATCH_PERIOD_S):
            lost = self.engine.status().draft_lost
            if lost is None:
                continue
            if self._num_draft_rebuilds >= _MAX_DRAFT_REBUILDS:
                logger.error("the draft group was lost again (%s); serving without drafts", lost)
                return
            self._num_draft_rebuilds += 1
            logger.warning("the draft group was lost (%s); rebuilding it", lost)
            try:
                self._rebuild_draft()
            except Exception:
                logger.exception("rebuilding the draft group failed")

    def _rebuild_draft(self) -> None:
        for draft in self._drafts:
            ray.kill(draft)
        self._drafts = self._create_drafts()
        meeting = self._meet("draft", self._drafts)
        facts = _call([d.call.remote("load", meeting) for d in self._drafts])
        self._facts = [f for f in self._facts if f["role"] != "draft"] + facts
        _call([d.call.remote("allocate", self._num_blocks) for d in self._drafts])
        _call([d.call.remote("warm_up") for d in self._drafts])
        drafts = self._connect_drafts()
        self.engine.restore_draft(lambda: self._client.replace_drafts(drafts))

    # --- state and end ------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Facts of the running replica: one dict per actor, KV blocks, placement."""
        return {
            "actors": [
                {**fact, "kv_layers": {o: asdict(x) for o, x in fact["kv_layers"].items()}}
                for fact in self._facts
            ],
            "num_kv_blocks": self._num_blocks,
            "bundles": list(self._placement.bundles),
            "target_nodes": self._nodes.describe(),
            "draft_placement": self.config.draft_placement,
            "num_draft_rebuilds": self._num_draft_rebuilds,
        }

    def traffic(self) -> dict[str, dict[str, float]]:
        """Collective calls, bytes and seconds of target rank 0 so far, by operation."""
        (counts,) = _call([self._targets[0].call.remote("traffic")])
        return dict(counts)

    def check_health(self) -> None:
        """Raise EngineDead when the engine cannot serve."""
        status = self.engine.status()
        if not status.is_healthy:
            raise WorkerLost(status.error or "the engine has stopped")

    def stop(self) -> None:
        """End the engine and every process it started. Idempotent."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        if hasattr(self, "engine"):
            self.engine.stop()
        if self._gang is not None:
            self._gang.close()
        for actor in self._targets + self._drafts:
            ray.kill(actor)
        self._nodes.close()
        if self._owns_group:
            remove_placement_group(self._group)


def _call(refs: list[Any], check: Callable[[], None] | None = None) -> list[Any]:
    """Results of actor calls; the first failure is raised as what it was in the actor.

    First in time: ranks that wait for the failed one would only say that it did not come.
    `check` is called now and then meanwhile; what it raises ends the wait.
    """
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    pending = list(refs)
    try:
        while pending:
            left = max(deadline - time.monotonic(), 0.0)
            done, pending = ray.wait(pending, timeout=left if check is None else min(left, 1.0))
            if check is not None:
                check()
            if not done and left == 0.0:
                raise LoadError(f"{len(pending)} actors did not answer in {LOAD_TIMEOUT_S:g} s")
            ray.get(done)
        return list(ray.get(refs))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise LoadError(str(cause)) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerLost(f"an actor died: {error}") from error
