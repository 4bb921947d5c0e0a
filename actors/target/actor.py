"""Process edge of a target rank: identity, start-up in stages, the step loop."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
import torch

from actors.startup.rank import rank_identity
from actors.startup.workers import build_draft_host, resolve_device
from actors.steps.client import DraftSource, ReconnectingDrafts, serve_steps, target_handler
from actors.steps.drafts import FusedRank, FusedTarget, HostedDrafts, SharedDrafts
from actors.steps.protocols import TargetRunnerLike
from actors.target.runner import TargetRunner
from parallel.groups import GroupHost, SingleRank, TPGroup, join_group
from parallel.placement import num_draft_shares
from parallel.topology import RankIdentity, Rendezvous
from parallel.transport.socket import FrameListener, FrameSocket
from specconfig.engine import EngineConfig

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0


class TargetActor:
    """One target rank. Created by `actors.startup.launch`; methods are called in this order:
    identify and open_rendezvous (with several ranks), load, allocate, join_replicas (with experts
    spread over replicas), warm_up, loop. `loop` returns when the verifier stops or is gone."""

    def __init__(self, config_json: str, rank: int) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = EngineConfig.from_json(config_json)
        self._rank = rank
        self._host: GroupHost | None = None
        self._group: TPGroup = SingleRank()
        self._draft_group: TPGroup = SingleRank()
        self._replicas: TPGroup = SingleRank()

    def identify(self) -> RankIdentity:
        """Node and device of this rank."""
        context = ray.get_runtime_context()
        device = resolve_device(self._config)
        address = ray.util.get_node_ip_address()
        return rank_identity("target", self._rank, device, context.get_node_id(), address)

    def open_rendezvous(self) -> int:
        """Rank 0: the port at which the ranks meet."""
        if self._host is None:
            self._host = GroupHost()
        return self._host.port

    def load(
        self,
        with_draft: bool,
        meeting: Rendezvous | None = None,
        draft_meeting: Rendezvous | None = None,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> dict[str, Any]:
        """Meet the other ranks and load the weights (`with_draft`: the draft model's too, in this
        process; all of it on rank 0, or its shards where there is a `draft_meeting`).

        `replica` of `num_replicas`: among those over which experts are spread.

        Returns facts for sizing and `describe`: pid, device, threads, free device bytes.
        """
        device = resolve_device(self._config)
        self._device = device
        self._group = join_group(meeting, self._rank, device, host=self._host)
        self._target = TargetRunner(
            self._config, device, self._group, replica=replica, num_replicas=num_replicas
        )
        self._hosts_draft = with_draft
        self._draft = None
        if with_draft and (draft_meeting is not None or self._rank == 0):
            self._draft_group = join_group(draft_meeting, self._rank, device, host=self._host)
            self._draft = build_draft_host(self._config, device, self._draft_group)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return {
            "role": "target",
            "rank": self._rank,
            "pid": os.getpid(),
            "device": str(device),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "parameters": self._target.model.num_parameters,
            "kv_layers": {
                "target": self._target.kv_layers("target"),
                **({"draft": self._draft.kv_layers("draft")} if self._draft else {}),
            },
            "free_device_bytes": free,
        }

    def join_replicas(self, meeting: Rendezvous, replica: int, timeout_s: float) -> None:
        """Meet the same rank of the other replicas, with which the experts are shared.

        They may still be loading: `timeout_s` is how long they are waited for.
        """
        meeting = meeting._replace(role=f"{meeting.role}-{self._rank}")
        self._replicas = join_group(
            meeting,
            replica,
            self._device,
            host=self._host if replica == 0 else None,
            meeting_timeout_s=timeout_s,
        )
        self._target.model.join_replicas(self._replicas)

    def allocate(self, num_blocks: int) -> None:
        """Create the KV tensors."""
        self._target.allocate(num_blocks)
        if self._draft is not None:
            self._draft.allocate(num_blocks)

    def warm_up(self) -> dict[str, Any]:
        """Compile and prepare kernels. Returns what is only known then."""
        self._target.warm_up()
        if self._draft is not None:
            self._draft.warm_up()
        return {
            "layers_compiled": self._target.model.compiled,
            "batch_invariant": self._target.model.is_batch_invariant,
        }

    def traffic(self) -> dict[str, dict[str, float]]:
        """Collective calls of the target's ranks so far, bytes handed to others and seconds, by
        operation."""
        return {
            "calls": dict(self._group.num_calls),
            "bytes": dict(self._group.bytes_sent),
            "seconds": dict(self._group.seconds),
        }

    def loop(self, path: str, draft_path: str | None, generation: int) -> None:
        """Serve steps from the verifier at `path`; drafts arrive at rank 0's `draft_path`, if
        given."""
        listener = None
        if draft_path is not None and self._rank == 0:
            listener = FrameListener(draft_path, generation)
        target, source = self._wire(listener, has_draft_process=draft_path is not None)
        connection = FrameSocket.connect(
            path, "target", self._rank, generation, os.getpid(), CONNECT_TIMEOUT_S
        )
        try:
            serve_steps(connection, target_handler(target, source, answers=self._rank == 0))
        finally:
            connection.close()
            # Ranks that wait for this one in a collective learn it here.
            self._group.close()
            self._draft_group.close()
            self._replicas.close()
            if listener is not None:
                listener.close()

    def _wire(
        self, listener: FrameListener | None, *, has_draft_process: bool
    ) -> tuple[TargetRunnerLike, DraftSource | None]:
        """The rank as the step sees it, and where its drafts come from."""
        source: DraftSource | None = None
        if listener is not None:
            source = ReconnectingDrafts(listener, num_shares=num_draft_shares(self._config))
        if self._group.size == 1:
            if self._draft is not None:
                return FusedTarget(self._target, self._draft), None
            return self._target, source
        if has_draft_process:
            return self._target, SharedDrafts(source, self._group, self._device)
        if not self._hosts_draft:
            return self._target, None
        hosted = HostedDrafts(self._draft, self._draft_group, self._group, self._device)
        is_split = self._draft_group.size > 1
        shared = hosted if is_split else SharedDrafts(hosted, self._group, self._device)
        return FusedRank(self._target, hosted, shared), None
