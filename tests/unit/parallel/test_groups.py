"""Groups of real processes: sums with one order, generations, ranks that are gone or late."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import torch

from parallel.groups import GroupError, GroupHost, RankGroup, SingleRank, TPGroup
from parallel.topology import (
    RankIdentity,
    Rendezvous,
    TopologyError,
    check_unique_devices,
    even_range,
    kv_head_range,
    split_range,
)
from tests.unit.parallel.conftest import CPU, Ranks


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 33, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def collectives(group: TPGroup) -> dict[str, object]:
    sums = {rows: group.all_reduce(part(group.rank, rows)[:rows].clone()) for rows in (1, 7)}
    half = group.all_reduce(torch.full((3,), 1.0 + group.rank, dtype=torch.bfloat16))
    return {
        "sums": sums,
        "half": half,
        "gathered": group.all_gather(torch.tensor([group.rank])),
        "broadcast": group.broadcast(torch.tensor([group.rank + 5])),
        "bytes": dict(group.bytes_sent),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(ranks: Ranks, size: int) -> None:
    found = ranks.run(size, collectives)
    for rows in (1, 7):
        expected = part(0, rows)
        for rank in range(1, size):
            expected = expected + part(rank, rows)
        assert all(torch.equal(f["sums"][rows], expected) for f in found)
    assert all(f["gathered"].flatten().tolist() == list(range(size)) for f in found)
    assert all(f["broadcast"].tolist() == [5] for f in found)
    assert found[0]["half"].tolist() == [size * (size + 1) / 2] * 3
    assert found[0]["bytes"] == {
        "all_reduce": (size - 1) * (8 * 33 * 4 + 6),
        "all_gather": (size - 1) * 8,
        "broadcast": (size - 1) * 8,
    }
    assert "broadcast" not in found[1]["bytes"]


def leave_early(group: TPGroup) -> float:
    if group.rank == 1:
        raise ValueError("out of memory, say")
    started = time.monotonic()
    with pytest.raises(GroupError, match="all_reduce failed"):
        group.all_reduce(torch.ones(4))
    with pytest.raises(GroupError, match="is closed"):
        group.all_reduce(torch.ones(4))
    return time.monotonic() - started


def test_a_rank_that_fails_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(4, leave_early)
    assert not outcomes[1][0] and "out of memory" in outcomes[1][1]
    for rank in (0, 2, 3):
        is_fine, waited = outcomes[rank]
        assert is_fine, waited
        assert waited < 15.0, "well before the group's timeout of 30 s"
    assert len(ranks.run(4, collectives)) == 4, "the next generation meets at the same store"


def test_a_rank_that_does_not_come() -> None:
    host = GroupHost("127.0.0.1")
    meeting = Rendezvous("127.0.0.1", host.port, "draft", 2, 3, "k")
    with pytest.raises(GroupError, match=r"draft group 3, rank 0: not all of 2 ranks met"):
        RankGroup(meeting, 0, CPU, timeout_s=1.0, store=host.store)


def test_a_stranger_who_knows_port_and_role_takes_no_part() -> None:
    host = GroupHost("127.0.0.1")
    meeting = Rendezvous("127.0.0.1", host.port, "draft", 2, 3, "secret of this meeting")

    def intrude() -> None:
        with pytest.raises(GroupError, match="not all of 2 ranks met"):
            RankGroup(meeting._replace(key="a guess"), 1, CPU, timeout_s=1.0)

    stranger = threading.Thread(target=intrude)
    stranger.start()
    with pytest.raises(GroupError, match="not all of 2 ranks met"):
        RankGroup(meeting, 0, CPU, timeout_s=1.0, store=host.store)
    stranger.join(20)


def test_the_meeting_place_listens_at_its_own_address_only() -> None:
    host = GroupHost("127.0.0.1")
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [c.laddr.ip for c in listening if c.laddr.port == host.port] == ["127.0.0.1"]


def test_single_rank_says_nothing() -> None:
    group, x = SingleRank(), torch.ones(3)
    assert group.all_reduce(x) is x and group.broadcast(x) is x
    assert group.all_gather(x).shape == (1, 3)
    assert not group.bytes_sent


def test_two_ranks_on_one_device_are_refused() -> None:
    def rank(number: int, device: str | None, node: str = "a") -> RankIdentity:
        return RankIdentity("target", number, node, f"10.0.0.{node}", device)

    check_unique_devices([rank(0, None), rank(1, None)])
    check_unique_devices([rank(0, "u"), rank(1, "u", "b"), rank(2, "v")])
    with pytest.raises(TopologyError, match="target rank 0 and target rank 2 are both on GPU u"):
        check_unique_devices([rank(0, "u"), rank(1, "v"), rank(2, "u")])


def test_ranges() -> None:
    for total, size in ((10, 3), (97, 4), (4, 4), (261, 2)):
        ranges = [split_range(total, rank, size) for rank in range(size)]
        assert [i for begin, end in ranges for i in range(begin, end)] == list(range(total))
    assert even_range(8, 1, 4, "x") == (2, 4)
    with pytest.raises(
        TopologyError, match=r"moe_intermediate_size=6 .* use one of \[1, 2, 3, 6\]"
    ):
        even_range(6, 0, 4, "moe_intermediate_size")
    assert [kv_head_range(2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert kv_head_range(8, 1, 2) == (4, 8)
    with pytest.raises(TopologyError, match="num_key_value_heads=3"):
        kv_head_range(3, 0, 2)
