"""Tensor-parallel replicas on a real Ray: the tokens of one rank, with every way to draft."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.errors import EngineDead, EngineError
from actors.requests import GenerateRequest, RunOutput
from actors.startup.in_process import build_in_process
from actors.startup.launch import Replica
from specconfig import EngineArgs
from specconfig.engine import EngineConfig
from tests.sampling_fields import check_every_field, check_same_answers
from tests.tiny import CONSTANT_K

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("fake_gpu_ray")]

PROMPT = [70, 71, 72, 73] * 6
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


def config(
    target: Path, tensor_parallel_size: int, spec: dict[str, Any] | None, k: int = 4, **kw: Any
) -> EngineConfig:
    if spec is not None:
        spec = {"num_speculative_tokens": k, **CONSTANT_K, **spec}
    return EngineArgs(
        model=str(target),
        speculative_config=spec,
        tensor_parallel_size=tensor_parallel_size,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        num_threads=1,
        compile_layers="off",
        **{"device": "cpu", **kw},
    ).resolve()


def answers(engine: Any, max_tokens: int = 24) -> dict[str, list[int]]:
    """Output of all laws, in one batch."""

    async def one(name: str, law: dict[str, Any]) -> list[int]:
        ids: list[int] = []
        request = GenerateRequest(name, PROMPT, ignore_eos=True, max_tokens=max_tokens, **law)
        async for run in engine.generate(request):
            assert run.error is None, run.error
            ids += run.token_ids
        return ids

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*(one(name, law) for name, law in LAWS.items()))

    return dict(zip(LAWS, asyncio.run(everyone()), strict=True))


@contextmanager
def running(cfg: EngineConfig) -> Iterator[Replica]:
    replica = Replica.start(cfg)
    try:
        yield replica
    finally:
        replica.stop()


@pytest.fixture(scope="module")
def expected(tiny_pair: tuple[Path, Path]) -> dict[str, list[int]]:
    """Plain decoding in one process."""
    engine = build_in_process(config(tiny_pair[0], 1, None), warm_up=False)
    try:
        return answers(engine)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def every_field(tiny_pair: tuple[Path, Path]) -> dict[str, RunOutput]:
    """Answers to requests with every field, of plain decoding in one process."""
    engine = build_in_process(config(tiny_pair[0], 1, None), warm_up=False)
    try:
        return check_every_field(engine, 0)
    finally:
        engine.stop()


def check(replica: Replica, expected: dict[str, list[int]], ranks: dict[str, int]) -> None:
    """Drafts change no token, and the actors are `ranks` many by role.

    All drafters and placements: tests/unit/parallel/test_engine.py, without Ray.
    """
    assert answers(replica.engine) == expected
    stats = replica.engine.status().stats
    assert stats["num_draft_tokens"] > 0
    assert stats["num_draft_losses"] == 0
    actors = replica.describe()["actors"]
    assert sorted((fact["role"], fact["rank"]) for fact in actors) == [
        (role, rank) for role in sorted(ranks) for rank in range(ranks[role])
    ]


def test_a_draft_on_each_device_is_lost_and_rebuilt_as_one(
    tiny_pair: tuple[Path, Path], expected: dict[str, list[int]]
) -> None:
    """Target TP 2, draft TP 1: two whole drafts that divide the requests by slot."""
    spec = {"method": "draft_model", "model": str(tiny_pair[1]), "draft_tensor_parallel_size": 1}
    with running(config(tiny_pair[0], 2, spec)) as replica:
        assert answers(replica.engine) == expected
        pids = {f["rank"]: f["pid"] for f in replica.describe()["actors"] if f["role"] == "draft"}
        assert sorted(pids) == [0, 1]
        os.kill(pids[1], signal.SIGKILL)
        assert answers(replica.engine) == expected
        deadline = time.monotonic() + 120.0
        while replica.describe()["num_draft_rebuilds"] < 1 or replica.engine.status().draft_lost:
            assert time.monotonic() < deadline, "the drafts were not rebuilt"
            time.sleep(0.2)
        before = replica.engine.status().stats["num_draft_tokens"]
        assert answers(replica.engine) == expected
        assert replica.engine.status().stats["num_draft_tokens"] > before


def test_a_draft_split_like_the_target_and_a_lost_rank_ends_the_step_for_all(
    tiny_pair: tuple[Path, Path],
    expected: dict[str, list[int]],
    every_field: dict[str, RunOutput],
) -> None:
    spec = {"method": "draft_model", "model": str(tiny_pair[1])}
    with running(config(tiny_pair[0], 2, spec)) as replica:
        check(replica, expected, {"target": 2, "draft": 2})
        check_same_answers(replica.engine, every_field)
        pids = {f["rank"]: f["pid"] for f in replica.describe()["actors"] if f["role"] == "target"}

        async def interrupted() -> tuple[float, str | None]:
            request = GenerateRequest("one", PROMPT, ignore_eos=True, max_tokens=150)
            killed_at, error = 0.0, None
            try:
                async for run in replica.engine.generate(request):
                    if not killed_at:
                        os.kill(pids[1], signal.SIGKILL)
                        killed_at = time.monotonic()
                    error = run.error
            except EngineError as raised:
                error = str(raised)
            return killed_at, error

        killed_at, error = asyncio.run(interrupted())
        assert error is not None and "rank" in error
        assert time.monotonic() - killed_at < 20.0, "no waiting for a timeout"
        with pytest.raises(EngineDead):
            replica.check_health()
