"""Start and stop one replica's actors on a placement group. With actors, knows Ray.

The verifier is not an actor here: it runs in the process that calls `Replica.start`, which under
Serve is the replica of the Engine deployment. Start-up happens in stages over all actors (load,
size, allocate, warm up), then each runs its step loop on a socket until it closes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.assembly import build_lookup_drafter, check_supported, load_tokenizer, size_kv
from actors.draft.actor import DraftActor
from actors.errors import LoadError, WorkerLost
from actors.protocols import GangLike
from actors.step_client import SocketStepClient
from actors.target.actor import TargetActor
from actors.threads import compute_environment
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.placement import ReplicaPlacement, RolePlacement, place_replica
from parallel.transport.frames import TransportError
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
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
        gang: GangLike | None = None,
    ) -> None:
        self.config = config
        self._gang = gang
        self._group = group
        self._owns_group = owns_group
        placement: ReplicaPlacement = place_replica(config, use_gpus=_uses_gpus(config))
        self._placement = placement.shifted(first_bundle)
        self._sockets = SocketDir()
        self._generation = 1
        self._listener = FrameListener(self._sockets.socket_path("verifier"), self._generation)
        self._targets: list[Any] = []
        self._drafts: list[Any] = []
        self._loops: list[Any] = []
        self._facts: list[dict[str, Any]] = []
        self._num_draft_rebuilds = 0
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
        gang: GangLike | None = None,
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
            group = placement_group(cls.bundles(config), strategy="PACK")
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
        tokenizer = load_tokenizer(self.config)
        draft_in_target = self.config.drafter_host == "draft" and self._placement.is_fused
        self._targets = [
            self._create(TargetActor, place, rank)
            for rank, place in enumerate(self._placement.targets)
        ]
        self._drafts = self._create_drafts()
        self._facts = _call(
            [t.load.remote(draft_in_target) for t in self._targets]
            + [d.load.remote() for d in self._drafts]
        )
        loaded = time.perf_counter()
        sizing = size_kv(self.config, *self._sizing_device())
        self._num_blocks = sizing.num_blocks
        _call([a.allocate.remote(sizing.num_blocks) for a in self._targets + self._drafts])
        warm = _call([a.warm_up.remote() for a in self._targets + self._drafts])
        if self.config.runtime.batch_invariant and not all(warm[: len(self._targets)]):
            logger.warning(
                "batch_invariant is asked for, but only float32 on a CPU with a C compiler gives "
                "it: output may differ in the last bits with batch composition"
            )
        connections = self._connect(with_drafts=bool(self._drafts))
        self._client = SocketStepClient(
            [connections["target"]], [connections["draft"]] if "draft" in connections else []
        )
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

    def _create(self, role: type[Any], place: RolePlacement, rank: int) -> Any:
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
            self._create(DraftActor, place, rank)
            for rank, place in enumerate(self._placement.drafts)
        ]

    def _sizing_device(self) -> tuple[Any, int | None]:
        import torch

        fact = self._facts[0]
        return torch.device(fact["device"]), fact["free_device_bytes"]

    def _connect(self, *, with_drafts: bool) -> dict[str, FrameSocket]:
        path = self._sockets.socket_path("verifier")
        draft_path = self._sockets.socket_path("drafts") if with_drafts else None
        self._loops = [t.loop.remote(path, draft_path, self._generation) for t in self._targets]
        self._loops += [d.loop.remote(path, draft_path, self._generation) for d in self._drafts]
        connections: dict[str, FrameSocket] = {}
        for _ in self._loops:
            connection, hello = self._accept()
            connections[hello] = connection
        return connections

    def _accept(self) -> tuple[FrameSocket, str]:
        try:
            connection, hello = self._listener.accept(CONNECT_TIMEOUT_S)
        except TransportError as error:
            done, _ = ray.wait(self._loops, timeout=0)
            if done:
                _call(done)  # raises what ended the actor's loop
            raise WorkerLost(f"an actor did not connect: {error}") from error
        return connection, hello.role

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
        facts = _call([d.load.remote() for d in self._drafts])
        self._facts = [f for f in self._facts if f["role"] != "draft"] + facts
        _call([d.allocate.remote(self._num_blocks) for d in self._drafts])
        _call([d.warm_up.remote() for d in self._drafts])
        path = self._sockets.socket_path("verifier")
        draft_path = self._sockets.socket_path("drafts")
        self._loops = [d.loop.remote(path, draft_path, self._generation) for d in self._drafts]
        connection, _ = self._accept()
        self.engine.restore_draft(lambda: self._client.replace_drafts([connection]))

    # --- state and end ------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Facts of the running replica: one dict per actor, KV blocks, placement."""
        return {
            "actors": self._facts,
            "num_kv_blocks": self._num_blocks,
            "bundles": list(self._placement.bundles),
            "draft_placement": self.config.draft_placement,
            "num_draft_rebuilds": self._num_draft_rebuilds,
        }

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
        self._listener.close()
        for actor in self._targets + self._drafts:
            ray.kill(actor)
        self._sockets.close()
        if self._owns_group:
            remove_placement_group(self._group)


def _call(refs: list[Any]) -> list[Any]:
    """Results of actor calls; the first failure is raised as what it was in the actor."""
    try:
        return list(ray.get(refs, timeout=LOAD_TIMEOUT_S))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise LoadError(str(cause)) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerLost(f"an actor died: {error}") from error
