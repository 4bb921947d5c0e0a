"""A whole engine in one process, for tests, benchmarks and offline use. No Ray here;
`actors.startup.launch` does the same with actors."""

from __future__ import annotations

from typing import Any

import torch

from actors.errors import LoadError
from actors.startup.preflight import (
    build_lookup_drafter,
    check_supported,
    load_tokenizer,
    size_kv,
)
from actors.startup.workers import build_draft_host, resolve_device
from actors.steps.client import InProcessStepClient
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from specconfig.engine import EngineConfig


def build_in_process(
    config: EngineConfig, *, tokenizer: Any | None = None, warm_up: bool = True
) -> VerifierEngine:
    """A whole engine in this process: the same verifier and workers, called directly."""
    check_supported(config)
    if config.parallel.tensor_parallel_size > 1:
        raise LoadError(
            f"tensor_parallel_size={config.parallel.tensor_parallel_size}: each rank is a process; "
            "start a Replica (actors.startup.launch), or set tensor_parallel_size: 1"
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
