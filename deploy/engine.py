"""The Engine deployment: one replica is one verifier with its workers on one placement group."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from actors.errors import EngineDead
from actors.requests import GenerateRequest, RunOutput
from deploy.engine_client import ReplicaReport
from deploy.facts import ServedModel
from deploy.gang import GangSeat, describe_gang, take_seat
from specconfig.app_args import AppArgs
from specconfig.engine import EngineConfig
from specconfig.runtime_knobs import RuntimeKnobs

logger = logging.getLogger("ray.serve")

# While work waits, an engine that completed no step for this long is not alive.
STALE_STEP_S = 60.0
# Drafts after which not one acceptance means that something is wrong, not that the text is hard.
_NO_ACCEPTANCE_DRAFTS = 200

# (config, placement group, seat in a gang of data-parallel ranks) -> a running
# actors.startup.launch.Replica
StartReplica = Callable[[EngineConfig, Any, GangSeat | None], Any]


def start_replica(config: EngineConfig, placement_group: Any, seat: GangSeat | None) -> Any:
    """Start the real thing. Imported late: the driver that only builds the app needs no torch."""
    from actors.startup.launch import Replica
    from actors.startup.nodes import replica_placement

    if seat is None:
        return Replica.start(config, placement_group)
    first_bundle = seat.rank * len(replica_placement(config).bundles)
    return Replica.start(config, placement_group, first_bundle, seat.member)


class Engine:
    """Serve's shell around one `Replica`: identity, health, knobs; no engine logic."""

    def __init__(self, args: AppArgs, start: StartReplica = start_replica) -> None:
        config = args.resolve()
        self._name = _replica_name()
        self._warned = False
        self._knobs = RuntimeKnobs()
        self._config = config
        self._seat = take_seat(config)
        try:
            self._replica = start(config, _placement_group(), self._seat)
        except BaseException:
            if self._seat is not None:
                self._seat.close()
            raise
        logger.info("engine ready: %s", config.runtime.served_model_name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RunOutput]:
        """The engine's own stream: a run of tokens a step. Cancelling it frees its KV."""
        # A coroutine: Serve runs plain functions in threads. It awaits this one, then streams.
        runs: AsyncIterator[RunOutput] = self._replica.engine.generate(request)
        return runs

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Apply the runtime knobs. Unknown keys are refused and the update fails."""
        limit = self._config.num_speculative_tokens
        knobs = RuntimeKnobs.of(user_config, limit)
        wanted = limit if knobs.max_speculative_tokens is None else knobs.max_speculative_tokens
        self._replica.engine.set_speculation(knobs.speculation_enabled, wanted)
        self._knobs = knobs

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if reason := self._sick():
            raise EngineDead(reason)
        self._warn_of_useless_drafts()

    async def report(self) -> ReplicaReport:
        """Health and statistics, for /health and /metrics."""
        return ReplicaReport(self._name, self._sick(), self._snapshot())

    async def describe(self) -> dict[str, Any]:
        """Resolved facts, for /server_info."""
        config = self._config
        return {
            "served": dataclasses.asdict(ServedModel.of(config)),
            "lossless": config.is_lossless,
            "config_digest": config.compute_hash(),
            "config": config.model_dump(
                mode="json", exclude={"decisions": True, "model": {"hf_config"}}
            ),
            "verifier_pid": os.getpid(),
            "replica": self._replica.describe(),
            "data_parallel": describe_gang(config, self._seat),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """What a request router may weigh replicas by."""
        snapshot = self._snapshot()
        keys = ("num_running", "num_waiting", "kv_blocks", "acceptance_length")
        return {key: snapshot[key] for key in keys}

    def _sick(self) -> str:
        """Why the engine cannot be trusted with requests; empty when it can."""
        if self._replica is None:
            return "the engine is shutting down"
        status = self._replica.engine.status()
        if not status.is_healthy:
            return status.error or "the engine's step loop has ended"
        if status.seconds_since_step > STALE_STEP_S:
            return f"no step was completed for {status.seconds_since_step:.0f} s, with work waiting"
        return ""

    def _snapshot(self) -> dict[str, Any]:
        """The engine's numbers under the names `deploy.metrics` reads."""
        status = self._replica.engine.status()
        return {
            **status.stats,
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "kv_blocks": {
                "free": status.num_free_blocks,
                "cached": status.num_cached_blocks,
                "used": status.num_referenced_blocks,
            },
            "seconds_since_step": status.seconds_since_step,
            "draft_lost": status.draft_lost is not None,
            "speculation_enabled": self._knobs.speculation_enabled,
            "is_lossless": self._config.is_lossless,
        }

    def _warn_of_useless_drafts(self) -> None:
        stats = self._snapshot()
        useless = stats["num_drafts"] >= _NO_ACCEPTANCE_DRAFTS and not stats["num_accepted_tokens"]
        if useless and not self._warned:
            self._warned = True
            logger.warning(
                "%d drafts and not one token accepted: check that the drafter's tokenizer and "
                "checkpoint belong to this target (paceline explain shows both)",
                stats["num_drafts"],
            )

    async def __del__(self) -> None:
        # A constructor that failed has no replica.
        replica = getattr(self, "_replica", None)
        if replica is not None:
            self._replica = None
            await asyncio.to_thread(replica.stop)
            if self._seat is not None:
                await asyncio.to_thread(self._seat.close)


def _replica_name() -> str:
    from ray import serve

    try:
        return str(serve.get_replica_context().replica_tag)
    except Exception:  # outside Serve: tests and offline use
        return "local"


def _placement_group() -> Any:
    import ray

    return ray.util.get_current_placement_group() if ray.is_initialized() else None
