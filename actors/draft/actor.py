"""Process edge of a draft rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
import torch

from actors.startup.rank import rank_identity
from actors.startup.workers import build_draft_host, resolve_device
from actors.steps.client import DraftShare, draft_handler, serve_steps
from actors.steps.protocols import DraftHostLike
from parallel.groups import GroupHost, SingleRank, TPGroup, join_group
from parallel.placement import num_draft_shares
from parallel.topology import RankIdentity, Rendezvous
from parallel.transport.socket import FrameSocket
from specconfig.engine import EngineConfig

CONNECT_TIMEOUT_S = 60.0


class DraftActor:
    """One draft rank. Same order of calls as a target rank, see there."""

    def __init__(self, config_json: str, rank: int) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = EngineConfig.from_json(config_json)
        self._rank = rank
        self._host: GroupHost | None = None
        self._group: TPGroup = SingleRank()

    def identify(self) -> RankIdentity:
        """Node and device of this rank."""
        context = ray.get_runtime_context()
        device = resolve_device(self._config)
        address = ray.util.get_node_ip_address()
        return rank_identity("draft", self._rank, device, context.get_node_id(), address)

    def open_rendezvous(self) -> int:
        """Rank 0: the port at which the ranks meet."""
        self._host = GroupHost()
        return self._host.port

    def load(self, meeting: Rendezvous | None = None) -> dict[str, Any]:
        """Meet the other ranks and load the draft's weights; facts as of a target rank."""
        device = resolve_device(self._config)
        self._group = join_group(meeting, self._rank, device, host=self._host)
        self._draft = build_draft_host(self._config, device, self._group)
        return {
            "role": "draft",
            "rank": self._rank,
            "pid": os.getpid(),
            "device": str(device),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "kv_layers": {"draft": self._draft.kv_layers("draft")},
        }

    def allocate(self, num_blocks: int) -> None:
        """Create the draft's KV tensors, for the target's block ids."""
        self._draft.allocate(num_blocks)

    def warm_up(self) -> None:
        """Compile and prepare kernels."""
        self._draft.warm_up()

    def loop(self, path: str, target_path: str, generation: int) -> None:
        """Serve steps; drafts go to target rank 0, listening at `target_path`: rank 0's where the
        draft is split, everyone's own share where each rank holds a whole draft."""
        pid = os.getpid()
        num_shares = num_draft_shares(self._config)
        draft: DraftHostLike = self._draft
        targets = []
        if num_shares > 1:
            draft = DraftShare(self._draft, self._rank, num_shares)
        if self._rank == 0 or num_shares > 1:
            targets.append(
                FrameSocket.connect(
                    target_path, "draft", self._rank, generation, pid, CONNECT_TIMEOUT_S
                )
            )
        connection = FrameSocket.connect(
            path, "draft", self._rank, generation, pid, CONNECT_TIMEOUT_S
        )
        try:
            serve_steps(connection, draft_handler(draft, targets))
        finally:
            connection.close()
            for target in targets:
                target.close()
            # Ranks that wait for this one in a collective learn it here.
            self._group.close()
