"""Bundles of gangs and nodes, the args that lead to them, and what is refused."""

from pathlib import Path

import pytest

from deploy.app import _grouping
from deploy.gang import GangSeat, agrees_on_k, describe_gang, take_seat
from parallel.placement import ReplicaPlacement, RolePlacement, pack_strategy, place_replica
from specconfig.app_args import AppArgs
from specconfig.errors import ConfigError
from tests.tiny import write_tiny_config

TABLE = [[1, 2, 4], [3, 8, 1]]


def args(tmp_path: Path, **kw) -> AppArgs:
    spec = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1,
            "prompt_lookup_max": 3, "num_speculative_tokens_per_batch_size": TABLE}  # fmt: skip
    return AppArgs(
        model=str(write_tiny_config(tmp_path / "m")), device="cpu", speculative_config=spec, **kw
    )


def placement(num_targets: int, drafts: list[int]) -> ReplicaPlacement:
    return ReplicaPlacement(
        tuple({"CPU": 1.0} for _ in range(8)),
        tuple(RolePlacement(bundle, 0.4, 0) for bundle in range(num_targets)),
        tuple(RolePlacement(bundle, 0.3, 0) for bundle in drafts),
    )


def bundles(places) -> list[int]:
    return [place.bundle for place in places]


def test_ranks_of_a_node_are_neighbours_and_the_verifiers_node_comes_first() -> None:
    made = placement(4, [0, 1, 2, 3]).ordered(["a", "b", "a", "b"], home="b")
    assert bundles(made.targets) == [1, 3, 0, 2]
    assert bundles(made.drafts) == [1, 3, 0, 2], "draft rank r stays beside target rank r"
    single = placement(4, [0]).ordered(["a", "b", "a", "b"], home="b")
    assert bundles(single.drafts) == [1], "a draft on rank 0's device moves with it"


def test_dedicated_drafts_and_gangs_keep_to_their_own_bundles() -> None:
    made = placement(2, [2, 3]).shifted(4)
    assert (bundles(made.targets), bundles(made.drafts)) == ([4, 5], [6, 7])
    nodes = ["x"] * 4 + ["b", "a", "b", "a"]
    ordered = made.ordered(nodes, home="a")
    assert (bundles(ordered.targets), bundles(ordered.drafts)) == ([5, 4], [7, 6])
    unchanged = made.ordered(["a"] * 8, home="a")
    assert unchanged == made


def test_a_gang_is_as_large_as_data_parallelism_and_replicas_come_in_whole_gangs(tmp_path) -> None:
    two = args(tmp_path, data_parallel_size=2)
    assert two.resolved_num_replicas == 2
    config = _grouping(two.resolve())["gang_scheduling_config"]
    assert config.gang_size == 2
    assert args(tmp_path, data_parallel_size=2, num_replicas=4).resolved_num_replicas == 4
    with pytest.raises(ConfigError, match="multiple of data_parallel_size=2"):
        args(tmp_path, data_parallel_size=2, num_replicas=3)
    one = args(tmp_path)
    assert one.resolved_num_replicas == 1
    assert _grouping(one.resolve()) == {"placement_group_strategy": "PACK"}


def test_strict_pack_is_asked_of_ray_where_ray_takes_it(tmp_path) -> None:
    config = args(tmp_path, strict_pack=True).resolve()
    assert pack_strategy(config) == "STRICT_PACK"
    assert _grouping(config) == {"placement_group_strategy": "STRICT_PACK"}
    assert len(place_replica(config, use_gpus=False).bundles) == 1
    with pytest.raises(ConfigError, match="strict_pack"):
        args(tmp_path, strict_pack=True, data_parallel_size=2)


def test_disable_is_decided_once_and_said(tmp_path) -> None:
    config = args(tmp_path, data_parallel_size=2).resolve()
    assert config.num_speculative_tokens_for_batch(8) == 4, "static K on every rank"
    assert not agrees_on_k(config)
    assert any("static K" in d.reason for d in config.decisions)
    facts = describe_gang(config, GangSeat("g", 1, 2))
    assert facts == {
        "size": 2, "dynamic_k_dp_policy": "disable", "k": "static", "rank": 1, "gang_id": "g",
    }  # fmt: skip


def test_agree_keeps_the_table(tmp_path) -> None:
    config = args(tmp_path, data_parallel_size=2, dynamic_k_dp_policy="agree").resolve()
    assert agrees_on_k(config)
    assert config.num_speculative_tokens_for_batch(8) == 1
    assert describe_gang(config, None)["k"] == "follows the largest batch among the ranks"
    assert take_seat(config) is None, "outside Serve there is no gang"
    assert describe_gang(args(tmp_path).resolve(), None) == {"size": 1}


def test_experts_over_replicas_are_said_to_be(tmp_path) -> None:
    config = args(tmp_path, data_parallel_size=2).resolve()
    parallel = config.parallel.model_copy(update={"enable_expert_parallel": True})
    assert parallel.experts_span_replicas and parallel.num_expert_ranks == 2
    facts = describe_gang(config.model_copy(update={"parallel": parallel}), None)
    assert facts["experts"] == "spread over 2 ranks; replicas step together"
