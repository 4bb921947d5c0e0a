"""Put an engine together in one process. No Ray here.

`build_in_process` is the whole engine in one process, for tests, benchmarks and offline use;
`actors.launch` does the same with actors.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from actors.errors import LoadError
from actors.kvcache.sizing import KVLayers
from actors.messages import DraftTokens, RowStats, StepPlan
from actors.preflight import (
    build_lookup_drafter,
    check_supported,
    import_drafter,
    load_tokenizer,
    size_kv,
)
from actors.step_client import InProcessStepClient
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
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


class FusedTarget:
    """A target with the draft model in its process: the drafts come first in the same call."""

    def __init__(self, target: TargetRunner, draft: DraftModelHost) -> None:
        self._client = InProcessStepClient(target, draft)

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        del drafts  # nobody else proposes
        self._client.send(plan)
        return self._client.recv(0.0)


def build_in_process(
    config: EngineConfig, *, tokenizer: Any | None = None, warm_up: bool = True
) -> VerifierEngine:
    """A whole engine in this process: the same verifier and workers, called directly."""
    check_supported(config)
    if config.parallel.tensor_parallel_size > 1:
        raise LoadError(
            f"tensor_parallel_size={config.parallel.tensor_parallel_size}: each rank is a process; "
            "start a Replica (actors.launch), or set tensor_parallel_size: 1"
        )
    device = resolve_device(config)
    if config.runtime.num_threads:
        torch.set_num_threads(config.runtime.num_threads)
    target = TargetRunner(config, device)
    draft = build_draft_host(config, device) if config.drafter_host == "draft" else None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    loaded = {"target": target.kv_layers("target")}
    if draft is not None:
        loaded["draft"] = draft.kv_layers("draft")
    sizing = size_kv(config, device.type, free, loaded)
    for host in (target, draft):
        if host is not None:
            host.allocate(sizing.num_blocks)
            if warm_up:
                host.warm_up()
    return VerifierEngine(
        EngineLimits.from_config(config, sizing.num_blocks),
        InProcessStepClient(target, draft),
        tokenizer if tokenizer is not None else load_tokenizer(config),
        build_lookup_drafter(config),
    )
