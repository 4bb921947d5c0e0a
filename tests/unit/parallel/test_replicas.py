"""Experts spread over data-parallel replicas: tokens and logits of a model that has them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.startup.preflight import build_lookup_drafter, load_tokenizer
from actors.startup.shell import LoadOrder
from actors.steps.client import SocketStepClient
from actors.target.actor import TargetActor
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.experts import ExpertShare
from parallel.gang.coordinator import Coordinator
from parallel.gang.member import GangMember
from parallel.groups import join_group
from parallel.topology import Rendezvous
from parallel.transport.socket import FrameListener, SocketDir
from specconfig import ConfigError
from specconfig.engine import EngineConfig
from tests.unit.parallel.conftest import CPU, Ranks
from tests.unit.parallel.test_engine import NGRAM, NUM_BLOCKS, answers, config, moe_dir, single
from tests.unit.parallel.test_shard import MOE, prompt

__all__ = ["moe_dir"]
# Rows of each forward, by replica: more, fewer, a chunk beside a single row.
CHUNKS = ((20, 1, 1, 5, 3), (1, 9, 1, 1, 18))


def share_of_logits(
    rank: int, num_replicas: int, tp: list[Rendezvous], rows: list[Rendezvous], path: str
) -> dict[str, Any]:
    """Logits of one rank's replica: of its own prompt, in its own chunks."""
    from actors.model.inputs import EntryRows, SlotTables
    from actors.model.paged_lm import PagedCausalLM
    from actors.steps.messages import BlockDelta, SlotParams, token_array
    from specconfig import EngineArgs

    size = tp[0].size
    replica, tp_rank = divmod(rank, size)
    group = join_group(tp[replica], tp_rank, CPU)
    lm = PagedCausalLM(
        EngineArgs(model=path, dtype="float32", max_model_len=200).resolve().model,
        device=CPU,
        max_positions=201,
        group=group,
        experts=ExpertShare.of(group, replica, num_replicas),
    )
    peers = join_group(rows[tp_rank], replica, CPU)
    tables = SlotTables(1, 200, 0, 16)
    tables.apply([SlotParams(0, 1, 0)], [BlockDelta(0, 0, token_array(range(1, 13)))])
    lm.allocate(40, 16)
    batch = tables.flatten([EntryRows(0, 0, token_array([3]), 1)], CPU)
    try:
        lm.forward(batch)
        raise AssertionError("a forward without the other replicas' experts")
    except RuntimeError as error:
        assert "have not met" in str(error)
    lm.join_replicas(peers)
    ids = prompt(30, seed=replica)
    out, start = [], 0
    for count in CHUNKS[replica % 2]:
        entry = EntryRows(0, start, token_array(ids[start : start + count]), count)
        out.append(lm.forward(tables.flatten([entry], CPU)).logits)
        start += count
    found = {"logits": torch.cat(out), "parameters": lm.num_parameters}
    found["calls"] = dict(peers.num_calls)
    peers.close()
    group.close()
    return found


@pytest.mark.parametrize(
    ("name", "num_replicas", "size"),
    [("mixtral", 2, 1), ("mixtral", 4, 1), ("qwen2_moe", 2, 2), ("gpt_oss", 2, 1)],
)
def test_against_transformers(
    ranks: Ranks, family_dir: Callable[..., Path], name: str, num_replicas: int, size: int
) -> None:
    path = family_dir(name, **MOE, shared_expert_intermediate_size=64)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tp = [ranks.meeting("target", size) for _ in range(num_replicas)]
    rows = [ranks.meeting("experts", num_replicas) for _ in range(size)]
    total = num_replicas * size
    ranks.start(total, share_of_logits, num_replicas, tp, rows, str(path))
    outcomes = ranks.finish(total)
    assert all(is_fine for is_fine, _ in outcomes), outcomes
    found = [value for _, value in outcomes]
    for replica in range(num_replicas):
        logits = torch.cat([f["logits"] for f in found[replica * size :][:size]], -1)
        with torch.inference_mode():
            expected = plain(torch.tensor([prompt(30, seed=replica)])).logits[0]
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    num_whole = sum(p.numel() for p in plain.parameters())
    assert all(f["parameters"] < num_whole for f in found)
    assert all(f["calls"] == found[0]["calls"] for f in found)
    num_layers = plain.config.num_hidden_layers
    # Row counts once a forward, rows once a layer; the sums back once a layer.
    assert found[0]["calls"] == {
        "all_gather": 5 * (1 + num_layers),
        "reduce_scatter": 5 * num_layers,
    }


def serve_replica(
    rank: int, config_json: str, num_replicas: int, meeting: Rendezvous, paths: list[str]
) -> int:
    target = TargetActor(config_json, 0)
    target.load(LoadOrder(replica=rank, num_replicas=num_replicas))
    target.allocate(NUM_BLOCKS)
    target.join_replicas(meeting, rank, 60.0)
    target.warm_up()
    target.loop(paths[rank], None, 1)
    return target._replicas.num_calls["reduce_scatter"]


def replica_engine(
    cfg: EngineConfig, listener: FrameListener, member: GangMember
) -> VerifierEngine:
    connection, _ = listener.accept(60.0)
    return VerifierEngine(
        EngineLimits.from_config(cfg, NUM_BLOCKS),
        SocketStepClient([connection], []),
        load_tokenizer(cfg),
        build_lookup_drafter(cfg),
        generation=1,
        gang=member,
    )


@pytest.mark.parametrize(
    ("policy", "drafter"), [("disable", "ngram"), ("agree", "ngram"), ("agree", "draft")]
)
def test_engines_in_lockstep(
    ranks: Ranks, moe_dir: Callable[[str], Path], policy: str, drafter: str
) -> None:
    """Two replicas, the second one idle at first and at the end: dummy steps keep them together."""
    path = moe_dir("mixtral")
    method: dict[str, Any] = NGRAM
    if drafter == "draft":
        # It has experts too; they stay within the replica.
        method = {"method": "draft_model", "model": str(moe_dir("qwen3_moe"))}
    spec = {
        **method,
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 4, 1]],
    }
    cfg = config(
        path, 1, spec, enable_expert_parallel=True, data_parallel_size=2,
        dynamic_k_dp_policy=policy, placement="fused" if drafter == "draft" else "auto",
    )  # fmt: skip
    expected = single(config(path, 1))
    sockets = SocketDir()
    meeting = ranks.meeting("experts", 2)
    coordinator = Coordinator("127.0.0.1", 2, "same", lockstep=True)
    with ExitStack() as stack:
        stack.callback(coordinator.close)
        stack.callback(sockets.close)
        listeners = [FrameListener(sockets.socket_path(f"v{r}"), 1) for r in range(2)]
        ranks.start(2, serve_replica, cfg.to_json(), 2, meeting, [x.path for x in listeners])
        members = [
            GangMember(coordinator.address, rank, "same", lockstep=True) for rank in range(2)
        ]
        engines = [replica_engine(cfg, x, m) for x, m in zip(listeners, members, strict=True)]
        try:
            assert answers(engines[0]) == expected, "while the other is idle"
            dummies = engines[1].status().stats["num_dp_dummy_steps"]
            assert dummies > 0
            with ThreadPoolExecutor(2) as pool:
                both = list(pool.map(answers, engines))
            assert both == [expected, expected]
            assert answers(engines[1]) == expected
            assert engines[0].status().stats["num_dp_dummy_steps"] > 0
            assert engines[0].status().stats["num_draft_tokens"] > 0
        finally:
            # In turn: the gang falls apart with the first, and the second finds it out.
            for engine in engines:
                engine.stop()
        outcomes = ranks.finish(2)
    assert all(is_fine for is_fine, _ in outcomes), outcomes
    assert outcomes[0][1] == outcomes[1][1], "as many expert exchanges on both"


def test_what_rank_0_shares_reaches_all_and_a_lost_rank_ends_the_wait() -> None:
    coordinator = Coordinator("127.0.0.1", 3, "same", lockstep=True)
    try:
        first, early = (
            GangMember(coordinator.address, rank, "same", lockstep=True) for rank in range(2)
        )
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(early.share, None, 20.0)
            assert first.share(b"here 5", 20.0) == b"here 5"
            assert waiting.result(20) == b"here 5"
        late = GangMember(coordinator.address, 2, "same", lockstep=True)
        assert late.share(None, 20.0) == b"here 5"
        first.check()
        late.close()
        noticed = threading.Event()
        for _ in range(400):
            try:
                first.check()
            except Exception as error:
                assert "rank 2 is gone" in str(error)
                noticed.set()
                break
            noticed.wait(0.05)
        assert noticed.is_set()
    finally:
        coordinator.close()


def test_experts_that_do_not_split_over_the_replicas_are_refused(
    moe_dir: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match=r"8 experts.*size is 3.*\[1, 2, 4, 8\]"):
        config(moe_dir("mixtral"), 1, enable_expert_parallel=True, data_parallel_size=3)
