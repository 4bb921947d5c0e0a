"""A whole engine in one process, for tests, benchmarks, training and offline use. No Ray here;
`actors.startup.launch` does the same with actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
from actors.threads import ComputeThread, compute_alone
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.placement import DrafterHome, drafter_seat
from specconfig.engine import EngineConfig

STAGES: Final = ("loading the target", "loading the drafter", "allocating KV", "warming up")


def build_in_process(
    config: EngineConfig,
    *,
    tokenizer: Any | None = None,
    warm_up: bool = True,
    at_stage: Callable[[str], None] = lambda _stage: None,
) -> VerifierEngine:
    """A whole engine in this process: the same verifier and workers, called directly.

    `at_stage` is told each of `STAGES` as it begins.
    """
    check_supported(config)
    if config.parallel.tensor_parallel_size > 1:
        raise LoadError(
            f"tensor_parallel_size={config.parallel.tensor_parallel_size}: each rank is a process; "
            "start a Replica (actors.startup.launch), or set tensor_parallel_size: 1"
        )
    thread = ComputeThread()
    try:
        return thread.run(_build, config, tokenizer, warm_up, at_stage, thread)
    except BaseException:
        thread.end()
        raise


def _build(
    config: EngineConfig,
    tokenizer: Any | None,
    warm_up: bool,
    at_stage: Callable[[str], None],
    thread: ComputeThread,
) -> VerifierEngine:
    device = resolve_device(config)
    if config.runtime.num_threads:
        torch.set_num_threads(config.runtime.num_threads)
    at_stage(STAGES[0])
    target = TargetRunner(config, device)
    at_stage(STAGES[1])
    seat = drafter_seat(config)
    is_computed = seat is not None and seat.home is not DrafterHome.VERIFIER
    drafter = build_drafter(config, device, None, target.host) if is_computed else None
    loaded = {"target": target.host.kv_layers("target")}
    if drafter is not None:
        loaded["draft"] = drafter.kv_layers("draft")
    sizing = size_kv(config, [measure_memory(config, device, str(device), loaded, target.host)])

    parts: list[ModelDrafter | Any] = [target.host, *filter(None, [drafter])]
    at_stage(STAGES[2])
    for part in parts:
        part.allocate(sizing.num_blocks)
    at_stage(STAGES[3])
    if warm_up:
        for part in parts:
            part.warm_up()
    client = InProcessStepClient(target, drafter)
    engine = VerifierEngine(
        EngineLimits.from_config(config, sizing.num_blocks),
        client,
        tokenizer if tokenizer is not None else load_tokenizer(config),
        build_lookup_drafter(config),
        build_acceptance(config),
        StepPatience(config.runtime.step_timeout_s),
        thread=thread,
    )

    def rebuild(generation: int) -> Switch:
        compute_alone()
        new = build_drafter(config, device, None, target.host)
        new.allocate(sizing.num_blocks)
        if warm_up:
            new.warm_up()
        return lambda: client.replace_drafter(new, generation)

    if is_computed:
        DraftWatch(engine, rebuild)  # ends with the engine
    return engine
