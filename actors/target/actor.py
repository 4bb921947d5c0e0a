"""Process edge of a target rank: identity, start-up in stages, the step loop."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from actors.assembly import FusedTarget, build_draft_host, resolve_device
from actors.protocols import TargetRunnerLike
from actors.step_client import DraftSource, ReconnectingDrafts, serve_steps, target_handler
from actors.target.runner import TargetRunner
from parallel.transport.socket import FrameListener, FrameSocket
from specconfig.engine import EngineConfig

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0


class TargetActor:
    """One target rank. Created by `actors.launch`; methods are called in this order: load,
    allocate, warm_up, loop. `loop` returns when the verifier stops or is gone."""

    def __init__(self, config_json: str, rank: int) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = EngineConfig.from_json(config_json)
        self._rank = rank

    def load(self, with_draft: bool) -> dict[str, Any]:
        """Load the weights (`with_draft`: the draft model's too, in this process).

        Returns facts for sizing and `describe`: pid, device, threads, free device bytes.
        """
        device = resolve_device(self._config)
        self._target = TargetRunner(self._config, device)
        self._draft = build_draft_host(self._config, device) if with_draft else None
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return {
            "role": "target",
            "rank": self._rank,
            "pid": os.getpid(),
            "device": str(device),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "parameters": self._target.model.num_parameters,
            "layers_compiled": self._target.model.compiled,
            "free_device_bytes": free,
        }

    def allocate(self, num_blocks: int) -> None:
        """Create the KV tensors."""
        self._target.allocate(num_blocks)
        if self._draft is not None:
            self._draft.allocate(num_blocks)

    def warm_up(self) -> bool:
        """Compile and prepare kernels. Returns whether this rank's rows are batch-invariant."""
        self._target.warm_up()
        if self._draft is not None:
            self._draft.warm_up()
        return self._target.model.is_batch_invariant

    def loop(self, path: str, draft_path: str | None, generation: int) -> None:
        """Serve steps from the verifier at `path`; drafts arrive at `draft_path`, if given."""
        target: TargetRunnerLike = self._target
        if self._draft is not None:
            target = FusedTarget(self._target, self._draft)
        listener = FrameListener(draft_path, generation) if draft_path else None
        source: DraftSource | None = ReconnectingDrafts(listener) if listener else None
        connection = FrameSocket.connect(
            path, "target", self._rank, generation, os.getpid(), CONNECT_TIMEOUT_S
        )
        try:
            serve_steps(connection, target_handler(target, source))
        finally:
            connection.close()
            if listener is not None:
                listener.close()
