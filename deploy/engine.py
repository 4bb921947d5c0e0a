"""The Engine deployment: one replica is one verifier with its workers on one placement group."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from actors.errors import EngineDead
from actors.requests import GenerateRequest, RunOutput
from actors.steps.patience import SUSPECT_SHARE
from deploy.channel.messages import ReplyTo
from deploy.channel.sender import Channels
from deploy.engine_client import ReplicaReport, this_node
from deploy.facts import ServedModel
from deploy.gang import GangSeat, describe_gang, take_seat
from specconfig.app_args import AppArgs
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from specconfig.runtime_knobs import RuntimeKnobs

logger = logging.getLogger("ray.serve")

# Times a step's limit: the engine ends itself at the limit, unless its own thread hangs.
_STALE_LIMITS = 2.0
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
        self._is_configured = False
        self._refused: str | None = None  # why the last user_config is not in use
        self._config = config
        self._seat = take_seat(config)
        try:
            self._replica = start(config, _placement_group(), self._seat)
        except BaseException:
            if self._seat is not None:
                self._seat.close()
            raise
        self._channels = Channels(this_node().id)
        self._replica.engine.after_delivery(self._channels.flush)
        logger.info("engine ready: %s", config.runtime.served_model_name)

    async def generate(self, request: GenerateRequest, reply_to: ReplyTo) -> None:
        """Serve a request, whose runs go over the channel to its front. Returns when the last one
        is out, so that Serve counts the request, and waits for it, until then. Cancelling it
        frees its KV.

        Raises:
            RequestError: the request is refused.
            RequestLost, EngineStopped: the engine ended with the request in it.
            ChannelLost: the front cannot be reached, or is gone.
        """
        channel = await self._channels.to(reply_to)
        engine = self._replica.engine
        taken = RunOutput.acknowledgment(request.request_id, len(request.prompt_token_ids))
        with channel.delivery(taken) as delivery:

            def deliver(run: RunOutput) -> None:
                if (end := engine.ended_with(run)) is not None:
                    delivery.fail(end)
                else:
                    delivery.put(run)

            engine.add_request(request, deliver)
            try:
                delivery.acknowledge()
                await delivery.done
            except BaseException:
                engine.abort(request.request_id)
                raise

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Apply the runtime knobs.

        Only a first start is refused for wrong ones. Raising from a later update would make Serve
        replace a replica that runs well with ones that cannot start: it keeps what it has, and
        says so in log, /server_info and metrics.

        Raises:
            ConfigError: the first ones cannot work.
        """
        limit = self._config.num_speculative_tokens
        try:
            knobs = RuntimeKnobs.of(user_config, limit)
        except ConfigError as error:
            if not self._is_configured:
                raise
            self._refused = str(error)
            logger.error("user_config is refused, the last one stays in use: %s", error)
            return
        self._is_configured, self._refused = True, None
        wanted = limit if knobs.max_speculative_tokens is None else knobs.max_speculative_tokens
        self._replica.engine.set_speculation(knobs.speculation_enabled, wanted)
        self._knobs = knobs

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if reason := self._sick(_STALE_LIMITS):
            raise EngineDead(reason)
        self._warn_of_useless_drafts()

    async def report(self) -> ReplicaReport:
        """Health and statistics, for /health and /metrics. A step that takes suspiciously long
        shows here before it ends the replica."""
        return ReplicaReport(self._name, self._sick(SUSPECT_SHARE), self._snapshot())

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
            "user_config": {**self._knobs.model_dump(), "refused": self._refused},
            "verifier_pid": os.getpid(),
            "replica": self._replica.describe(),
            "data_parallel": describe_gang(config, self._seat),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """What a request router may weigh replicas by."""
        snapshot = self._snapshot()
        keys = ("num_running", "num_waiting", "kv_blocks", "acceptance_length")
        return {key: snapshot[key] for key in keys}

    def _sick(self, share: float) -> str:
        """Why the engine cannot be trusted with requests; empty when it can. `share`: of what the
        step in flight may take, after which it counts."""
        if self._replica is None:
            return "the engine is shutting down"
        status = self._replica.engine.status()
        if not status.is_healthy:
            return status.error or "the engine's step loop has ended"
        limit_s = share * status.step_limit_s
        if status.seconds_since_step > limit_s:
            return (
                f"no step was completed for {status.seconds_since_step:.0f} s, with work waiting; "
                f"after {limit_s:.0f} s that is too long, as steps were so far"
            )
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
            "step_limit_s": status.step_limit_s,
            "draft_lost": status.draft_lost is not None,
            "speculation_enabled": self._knobs.speculation_enabled,
            "is_lossless": self._config.is_lossless,
            "user_config_refused": self._refused is not None,
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
            self._channels.close()
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
