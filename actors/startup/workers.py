"""What target and draft processes do alike when they start. No Ray, no verifier here."""

from __future__ import annotations

from typing import Protocol

import torch

from actors.errors import LoadError
from actors.kvcache.sizing import KVLayers
from actors.startup.preflight import import_drafter
from actors.steps.messages import DraftTokens, StepPlan
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig


class DraftModelHost(Protocol):
    """A drafter that runs in a draft process."""

    def allocate(self, num_blocks: int) -> None: ...
    def warm_up(self) -> None: ...

    def kv_layers(self, owner: str) -> KVLayers:
        """What this rank caches."""

    def run(self, plan: StepPlan) -> DraftTokens: ...


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of a compute process: the configured one, or CUDA where there is one."""
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LoadError("device: cuda, but torch sees no CUDA device here; use device: cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def build_draft_host(
    config: EngineConfig, device: torch.device, group: TPGroup | None = None
) -> DraftModelHost:
    """Load the drafter of a draft process, or this rank's shard of it."""
    drafter: DraftModelHost = import_drafter(config)(config, device, group)
    return drafter
