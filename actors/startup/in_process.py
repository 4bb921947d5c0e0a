"""A whole engine in one process, for tests, benchmarks, training and offline use. No Ray here;
`actors.startup.launch` does the same with actors."""

from __future__ import annotations

from typing import Any

import torch

from actors.errors import LoadError
from actors.startup.draft_watch import DraftWatch, Switch
from actors.startup.preflight import (
    build_acceptance,
    build_lookup_drafter,
    check_supported,
    load_tokenizer,
    size_kv,
)
from actors.startup.workers import ModelDrafter, build_drafter, measure_memory, resolve_device
from actors.steps.client import InProcessStepClient
from actors.steps.patience import StepPatience
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.placement import DrafterHome, drafter_seat
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
    seat = drafter_seat(config)
    is_computed = seat is not None and seat.home is not DrafterHome.VERIFIER
    drafter = build_drafter(config, device, None, target.host) if is_computed else None
    loaded = {"target": target.host.kv_layers("target")}
    if drafter is not None:
        loaded["draft"] = drafter.kv_layers("draft")
    sizing = size_kv(config, [measure_memory(config, device, str(device), loaded, target.host)])

    def ready(host: ModelDrafter | Any) -> None:
        host.allocate(sizing.num_blocks)
        if warm_up:
            host.warm_up()

    ready(target.host)
    if drafter is not None:
        ready(drafter)
    client = InProcessStepClient(target, drafter)
    engine = VerifierEngine(
        EngineLimits.from_config(config, sizing.num_blocks),
        client,
        tokenizer if tokenizer is not None else load_tokenizer(config),
        build_lookup_drafter(config),
        build_acceptance(config),
        StepPatience(config.runtime.step_timeout_s),
    )

    def rebuild(generation: int) -> Switch:
        new = build_drafter(config, device, None, target.host)
        ready(new)
        return lambda: client.replace_drafter(new, generation)

    if is_computed:
        DraftWatch(engine, rebuild)  # ends with the engine
    return engine
