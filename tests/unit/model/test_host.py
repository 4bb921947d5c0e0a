"""A model in a compute process: what it loads, and what one forward gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.errors import LoadError
from actors.kvcache.sizing import GpuMemory, RankMemory
from actors.model.host import ModelHost, load_draft, load_target
from actors.model.inputs import EntryRows
from actors.startup.workers import measure_memory
from actors.steps.messages import BlockDelta, SlotParams, Stat, StepPlan, token_array
from parallel.groups import SingleRank
from specconfig import EngineArgs
from specconfig.engine import EngineConfig
from tests.unit.model.conftest import CPU
from tests.unit.model.test_experts import MOE


def resolve(path: Path, **more: Any) -> EngineConfig:
    return EngineArgs(
        model=str(path), dtype="float32", max_model_len=100, compile_layers="off", **more
    ).resolve()


def test_experts_of_a_draft_are_not_spread_over_replicas(family_dir: Callable[..., Path]) -> None:
    path = family_dir("mixtral", **MOE)
    config = resolve(
        path,
        data_parallel_size=2,
        enable_expert_parallel=True,
        speculative_config={
            "method": "draft_model", "model": str(path), "num_speculative_tokens": 2,
        },
    )  # fmt: skip
    assert config.draft_parallel is not None and config.draft_parallel.enable_expert_parallel
    target = load_target(config, CPU, SingleRank(), replica=0, num_replicas=2)
    draft = load_draft(config, CPU, SingleRank())
    assert target.num_parameters < draft.num_parameters
    entries = [EntryRows(0, 0, token_array([3, 4]), 1)]
    plan = StepPlan(0, 1, (SlotParams(0, 2, 0),), (BlockDelta(0, 0, token_array([1])),))
    hosts = [ModelHost(config, m, vocab_size=96, steady_rows=1) for m in (target, draft)]
    for host in hosts:
        host.allocate(4)
        host.take(plan)
    with pytest.raises(RuntimeError, match="have not met"):
        hosts[0].run(entries)
    # No other replica is asked: this one may make as many passes as it likes.
    assert hosts[1].run(entries).columns[Stat.SAMPLED].shape == (1,)


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(4, 4 * 12), (64, 50), (1, 50)])
def test_the_largest_step_that_is_measured(
    family_dir: Callable[..., Path], max_num_seqs: int, rows: int
) -> None:
    """Before any KV is there, and without a trace in what serves afterwards."""
    config = resolve(family_dir("llama"), max_num_seqs=max_num_seqs, max_num_batched_tokens=50)
    model = load_target(config, CPU, SingleRank())
    host = ModelHost(config, model, vocab_size=96, steady_rows=3)
    assert host.run_largest_step() == rows
    host.allocate(8)
    assert len(model.kv.caches) == 3 and model.kv.num_blocks == 8
    assert not any(cache.keys.any() for cache in model.kv.caches)


def test_a_gpu_is_asked_for_what_is_there_and_what_a_step_takes(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(family_dir("llama"), max_num_batched_tokens=50)
    host = ModelHost(config, load_target(config, CPU, SingleRank()), vocab_size=96, steady_rows=3)
    gpu: dict[str, Any] = dict.fromkeys(["empty_cache", "reset_peak_memory_stats", "synchronize"])
    gpu |= {"memory_allocated": 700, "max_memory_allocated": 950, "mem_get_info": (60, 80)}
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    layers = {"target": host.kv_layers("target")}
    device = torch.device("cuda")
    found = measure_memory(config, device, "GPU a", layers, host)
    assert found == RankMemory("GPU a", tuple(layers.values()), GpuMemory(80, 60, 700, 250))
    # Nothing is run where the size is given, nor for a drafter of which nothing is known.
    given = resolve(family_dir("llama"), kv_cache_memory_bytes="64MiB")
    for told, runner in ((given, host), (config, object())):
        known = measure_memory(told, device, "GPU a", layers, runner)
        assert known.gpu == GpuMemory(80, 60, 700, 0)
    on_cpu = measure_memory(config, CPU, "node", layers, host)
    assert on_cpu.gpu is None and on_cpu.available_bytes


def test_what_a_forward_gives(family_dir: Callable[..., Path]) -> None:
    config = resolve(family_dir("llama"))
    with pytest.raises(LoadError, match="has no draft model"):
        load_draft(config, CPU, SingleRank())
    host = ModelHost(config, load_target(config, CPU, SingleRank()), vocab_size=96, steady_rows=3)
    host.allocate(8)
    host.warm_up()
    host.take(StepPlan(0, 1, (SlotParams(0, 4, 0),), (BlockDelta(0, 0, token_array([1, 2])),)))
    found = host.run([EntryRows(0, 0, token_array([3, 4, 5, 6]), 2)], step=1)
    assert found.taps is None and found.columns[Stat.SAMPLED].shape == (2,)
    layers = host.kv_layers("target")
    assert (layers.owner, layers.shapes) == ("target", ((3, 2, 16),))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
