"""A verifier whose workers are on another node of the cluster. Several Ray nodes, one machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from actors.errors import RequestLost
from actors.requests import GenerateRequest
from actors.startup.in_process import build_in_process
from actors.startup.launch import Replica
from actors.startup.nodes import replica_placement
from specconfig import EngineArgs
from specconfig.engine import EngineConfig
from tests.tiny import CONSTANT_K

pytestmark = pytest.mark.ray

ROOT = str(Path(__file__).parents[2])
REPEATING = [70, 71, 72, 73] * 8


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A head without CPUs, where the verifier runs, and two nodes for workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHONPATH", ROOT + os.pathsep + os.environ.get("PYTHONPATH", ""))
        common = {"object_store_memory": 80_000_000, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"head": 1}, **common}
        )
        try:
            others = [
                cluster.add_node(num_cpus=2, resources={name: 4.0}, **common)
                for name in ("one", "two")
            ]
            ray.init(address=cluster.address, log_to_driver=False)
            yield [node.node_id for node in others]
        finally:
            ray.shutdown()
            cluster.shutdown()


def config(model: Path, spec: dict[str, Any], **kw: Any) -> EngineConfig:
    return EngineArgs(
        model=str(model), dtype="float32", device="cpu", max_model_len=256, max_num_seqs=4,
        num_threads=1, speculative_config={"num_speculative_tokens": 3, **CONSTANT_K, **spec}, **kw,
    ).resolve()  # fmt: skip


def tokens(engine: Any, name: str, on_run: Callable[[int], None] = lambda n: None) -> list[int]:
    async def run() -> list[int]:
        ids: list[int] = []
        request = GenerateRequest(name, REPEATING, temperature=0.0, ignore_eos=True, max_tokens=120)
        async for output in engine.generate(request):
            assert output.error is None, output.error
            ids.extend(output.token_ids)
            on_run(len(ids))
        return ids

    return asyncio.run(asyncio.wait_for(run(), 60))


def plain(model: Path, spec: dict[str, Any]) -> list[int]:
    engine = build_in_process(config(model, spec), warm_up=False)
    try:
        return tokens(engine, "plain")
    finally:
        engine.stop()


def pid_of(replica: Replica, role: str) -> int:
    return int(next(f["pid"] for f in replica.describe()["actors"] if f["role"] == role))


def test_target_and_draft_on_other_nodes_and_the_end_of_each(
    nodes: list[str], tiny_pair: tuple[Path, Path]
) -> None:
    """`dedicated`: target on one node, draft on another, verifier on a third."""
    target, draft = tiny_pair
    spec = {"method": "draft_model", "model": str(draft)}
    expected = plain(target, spec)
    cfg = config(target, spec, placement="dedicated")
    bundles = [
        {**bundle, name: 1.0}
        for bundle, name in zip(replica_placement(cfg).bundles, ("one", "two"), strict=True)
    ]
    group = placement_group(bundles, strategy="PACK")
    ray.get(group.ready(), timeout=60)
    replica = Replica.start(cfg, group)
    try:
        assert replica.describe()["target_nodes"] == [nodes[0]]
        assert tokens(replica.engine, "first") == expected
        before = replica.engine.stats.num_draft_tokens
        assert before > 0

        killed: list[int] = []

        def kill(num_tokens: int) -> None:
            if num_tokens > 20 and not killed:
                killed.append(pid_of(replica, "draft"))
                os.kill(killed[0], signal.SIGKILL)

        assert tokens(replica.engine, "draft dies", kill) == expected
        deadline = time.monotonic() + 60
        while replica.engine.status().draft_lost is not None or not killed:
            assert time.monotonic() < deadline, "the draft was not rebuilt"
            time.sleep(0.2)
        before = replica.engine.stats.num_draft_tokens
        assert tokens(replica.engine, "rebuilt") == expected
        assert replica.engine.stats.num_draft_tokens > before

        victim = pid_of(replica, "target")
        killed_s: list[float] = []

        def kill_target(num_tokens: int) -> None:
            if num_tokens > 20 and not killed_s:
                killed_s.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)

        with pytest.raises(RequestLost, match="WorkerLost"):
            tokens(replica.engine, "killed", kill_target)
        assert time.monotonic() - killed_s[0] < 3, "the end of file, not a timeout"
        assert not replica.engine.status().is_healthy
    finally:
        replica.stop()
        remove_placement_group(group)
    # Killed, it stays in the process table until its node's raylet gets round to it.
    deadline = time.monotonic() + 20
    while psutil.pid_exists(victim) and psutil.Process(victim).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
