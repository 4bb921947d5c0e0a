"""KV blocks by numbers: what each device holds, and which one decides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import LoadError
from actors.kvcache.block_table import BlockTables
from actors.kvcache.sizing import GpuMemory, KVLayers, KVSizing, RankMemory, size_kv_cache
from specconfig.resolving.kv_memory import kv_plan
from tests.unit.specconfig.catalog import engine

GIB = 2**30
TARGET = KVLayers("target", ((30, 3, 64),), 4)  # 46,080 bytes per token, 1,536 a layer
DRAFT = KVLayers("draft", ((10, 3, 64),), 4)  # 15,360


def size(*ranks: RankMemory, **changes: Any) -> KVSizing:
    options = {"block_size": 16, "max_model_len": 512, "max_num_seqs": 8, **changes}
    return size_kv_cache(ranks, **options)


def on_cpu(*layers: KVLayers, available: int | None = None, device: str = "node") -> RankMemory:
    return RankMemory(device, layers, available_bytes=available)


def on_gpu(device: str, *layers: KVLayers, **changes: int) -> RankMemory:
    memory = {"total_bytes": 80 * GIB, "free_bytes": 60 * GIB, "weight_bytes": 16 * GIB,
              "activation_bytes": 2 * GIB}  # fmt: skip
    return RankMemory(device, layers, GpuMemory(**{**memory, **changes}))


def blocks(budget: int, *layers: KVLayers, copied: int = 0) -> int:
    return budget // (16 * (sum(each.bytes_per_token for each in layers) + copied))


def test_a_budget_is_divided_and_the_arithmetic_printed() -> None:
    per_token = 2 * 40 * 3 * 64 * 4
    sizing = size(on_cpu(TARGET, DRAFT), budget_bytes=100 * 16 * per_token + 5)
    assert sizing.num_blocks == 100 and sizing.total_bytes == 100 * 16 * per_token
    text = "\n".join(sizing.lines)
    assert "30 layers" in text and "10 layers" in text and "100 blocks" in text


def test_utilization_is_of_the_whole_gpu_less_weights_and_activations() -> None:
    sizing = size(on_gpu("a", TARGET), gpu_memory_utilization=0.5)
    # 40 GiB of 80, less 16 of weights and 2 of activations; 2 copies of one layer ride along.
    assert sizing.num_blocks == blocks(22 * GIB, TARGET, copied=2 * 1536)
    assert "0.5 x 81,920.0 MiB - weights 16,384.0 MiB - activations 2,048.0 MiB" in sizing.lines[0]


def test_what_others_have_taken_is_not_there() -> None:
    sizing = size(on_gpu("a", TARGET, free_bytes=10 * GIB), gpu_memory_utilization=0.9)
    assert sizing.num_blocks == blocks(8 * GIB, TARGET, copied=2 * 1536)


def test_a_colocated_draft_shares_the_gpu_once() -> None:
    draft = on_gpu("a", DRAFT, weight_bytes=GIB, activation_bytes=GIB, free_bytes=58 * GIB)
    sizing = size(on_gpu("a", TARGET), draft, gpu_memory_utilization=0.9)
    # 72 GiB, less 17 of weights and 3 of activations; both parts of a block lie there.
    assert sizing.num_blocks == blocks(52 * GIB, TARGET, DRAFT, copied=2 * 1536)


def test_a_dedicated_draft_costs_the_target_nothing_and_its_own_gpu_is_asked() -> None:
    target = on_gpu("a", TARGET)
    alone = size(target)
    roomy = on_gpu("b", DRAFT, weight_bytes=GIB, free_bytes=78 * GIB)
    assert size(target, roomy).num_blocks == alone.num_blocks
    full = on_gpu("b", DRAFT, weight_bytes=GIB, free_bytes=3 * GIB)
    least = size(target, full)
    assert least.num_blocks == blocks(GIB, DRAFT, copied=2 * 1536) < alone.num_blocks
    assert least.lines[0].startswith("b: ")


def test_the_fullest_rank_decides() -> None:
    ranks = [on_gpu(str(n), TARGET, free_bytes=n * GIB) for n in (30, 12, 40)]
    assert size(*ranks).num_blocks == blocks(10 * GIB, TARGET, copied=2 * 1536)


def test_ranks_of_one_machine_share_its_memory() -> None:
    pair = [on_cpu(TARGET, available=GIB), on_cpu(TARGET, available=GIB)]
    sizing = size(*pair, max_num_seqs=1000)
    assert sizing.num_blocks == blocks(int(GIB * 0.4), TARGET, TARGET)
    apart = [on_cpu(TARGET, available=GIB, device=name) for name in "ab"]
    assert size(*apart, max_num_seqs=1000).num_blocks == blocks(int(GIB * 0.4), TARGET)
    # With room for all, no more than what the requests can fill.
    assert size(*pair).num_blocks == 8 * 32 + 1
    # A budget is per rank, however many there are.
    assert size(*pair, budget_bytes=2**26).num_blocks == blocks(2**26, TARGET)


def test_a_rank_that_keeps_nothing_decides_nothing() -> None:
    nothing = on_gpu("b", KVLayers("draft", (), 4), free_bytes=0)
    assert size(on_gpu("a", TARGET), nothing).num_blocks == size(on_gpu("a", TARGET)).num_blocks


@given(st.integers(1, 600), st.integers(1, 32), st.integers(0, 2**24))
def test_what_is_accepted_holds_one_full_request(
    max_model_len: int, block_size: int, budget: int
) -> None:
    sizes = {"block_size": block_size, "max_model_len": max_model_len, "budget_bytes": budget}
    try:
        sizing = size(on_cpu(DRAFT), **sizes)
    except LoadError as error:
        assert "max_model_len" in str(error) and "raise" in str(error)
        return
    assert sizing.total_bytes <= budget
    tables = BlockTables(sizing.num_blocks, block_size, max_model_len, True)
    assert tables.reserve(tables.open(), 0, max_model_len, 100)


def test_too_little_says_all_numbers_and_what_to_change() -> None:
    with pytest.raises(LoadError, match=r"max_model_len 512 needs 32 blocks \+ 1") as caught:
        size(on_gpu("GPU 7", TARGET, free_bytes=GIB, activation_bytes=GIB))
    text = str(caught.value)
    assert "lower max_model_len to at most 0" in text and "gpu_memory_utilization 0.9 x" in text
    assert "GPU 7: " in text and "activations 1,024.0 MiB" in text and "free 1,024.0 MiB" in text


@pytest.mark.parametrize("placement", ["colocated", "dedicated"])
def test_explain_and_the_engine_count_alike(placement: str) -> None:
    config = engine(
        {"model": "meta/tiny", "K": 3},
        dtype="float32", placement=placement, kv_cache_memory_bytes=4 * GIB,
    )  # fmt: skip
    layers = [KVLayers("target", ((32, 8, 128),), 4), KVLayers("draft", ((22, 4, 64),), 4)]
    ranks = [on_cpu(*layers)]
    if placement == "dedicated":
        ranks = [on_cpu(each, device=each.owner) for each in layers]
    sizing = size(*ranks, budget_bytes=4 * GIB)
    assert kv_plan(config).num_blocks == sizing.num_blocks
