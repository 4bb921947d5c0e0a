"""Process edge of a draft rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from actors.assembly import build_draft_host, resolve_device
from actors.step_client import draft_handler, serve_steps
from parallel.transport.socket import FrameSocket
from specconfig.engine import EngineConfig

CONNECT_TIMEOUT_S = 60.0


class DraftActor:
    """One draft rank. Same order of calls as a target rank: load, allocate, warm_up, loop."""

    def __init__(self, config_json: str, rank: int) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = EngineConfig.from_json(config_json)
        self._rank = rank

    def load(self) -> dict[str, Any]:
        """Load the draft's weights; facts as of a target rank."""
        device = resolve_device(self._config)
        self._draft = build_draft_host(self._config, device)
        return {
            "role": "draft",
            "rank": self._rank,
            "pid": os.getpid(),
            "device": str(device),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
        }

    def allocate(self, num_blocks: int) -> None:
        """Create the draft's KV tensors, for the target's block ids."""
        self._draft.allocate(num_blocks)

    def warm_up(self) -> None:
        """Compile and prepare kernels."""
        self._draft.warm_up()

    def loop(self, path: str, target_path: str, generation: int) -> None:
        """Serve steps; drafts go straight to the target listening at `target_path`."""
        pid = os.getpid()
        target = FrameSocket.connect(
            target_path, "draft", self._rank, generation, pid, CONNECT_TIMEOUT_S
        )
        connection = FrameSocket.connect(
            path, "draft", self._rank, generation, pid, CONNECT_TIMEOUT_S
        )
        try:
            serve_steps(connection, draft_handler(self._draft, [target]))
        finally:
            connection.close()
            target.close()
