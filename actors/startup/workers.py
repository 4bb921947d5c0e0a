"""What processes do alike that compute: their device, and the drafter they host. No Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from actors.errors import LoadError
from actors.kvcache.sizing import GpuMemory, KVLayers, RankMemory
from actors.memory import available_bytes
from actors.model.host import ModelHost
from actors.startup.preflight import import_drafter
from actors.steps.protocols import Drafter
from parallel.groups import TPGroup
from parallel.placement import drafter_seat
from specconfig.engine import EngineConfig


class ModelDrafter(Drafter, Protocol):
    """A drafter that computes: one rank of it, from loading to drafting."""

    def allocate(self, num_blocks: int) -> None:
        """Create its KV, for the target's block ids."""

    def warm_up(self) -> None:
        """Compile and prepare kernels."""

    def kv_layers(self, owner: str) -> KVLayers:
        """What this rank caches."""


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of a compute process: the configured one, or CUDA where there is one."""
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LoadError("device: cuda, but torch sees no CUDA device here; use device: cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def build_drafter(
    config: EngineConfig,
    device: torch.device,
    group: TPGroup | None = None,
    target: ModelHost | None = None,
) -> ModelDrafter:
    """Load the drafter, or this rank's part of it.

    `group`: of the drafter's ranks, its own. `target`: the model it lives with, for a drafter that
    reads the target's states. One that replaces a lost drafter is made beside running steps: it
    may read the target's weights, but steps of the target must not notice it before it is used.
    """
    seat = drafter_seat(config)
    assert seat is not None
    drafter: ModelDrafter
    if seat.reads_target:
        drafter = import_drafter(config)(config, device, group, target)
    else:
        drafter = import_drafter(config)(config, device, group)
    return drafter


def measure_memory(
    config: EngineConfig,
    device: torch.device,
    device_name: str,
    layers: Mapping[str, KVLayers],
    host: object,
) -> RankMemory:
    """What this process keeps and what is left, once all that share its device have loaded.

    Ranks of a group call it together: where KV is sized by a GPU's memory, `host` (a `ModelHost`;
    of others nothing is known) runs its largest step. `device_name`: as in `RankMemory`.
    """
    kept = tuple(layers.values())
    if device.type != "cuda":
        return RankMemory(device_name, kept, available_bytes=available_bytes())
    is_sized = config.cache.kv_cache_memory_bytes is None
    peak = host.activation_bytes() if is_sized and isinstance(host, ModelHost) else 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    gpu = GpuMemory(total, free, torch.cuda.memory_allocated(device), peak)
    return RankMemory(device_name, kept, gpu)
