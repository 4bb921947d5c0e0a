"""A whole engine over real rank processes, without Ray: the tokens of a single rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.draft.actor import DraftActor
from actors.errors import LoadError
from actors.requests import GenerateRequest
from actors.startup.in_process import build_in_process
from actors.startup.preflight import build_lookup_drafter, check_q_carrier, load_tokenizer
from actors.startup.shell import LoadOrder
from actors.steps.client import SocketStepClient
from actors.target.actor import TargetActor
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.placement import DrafterHome, drafter_seat, place_replica
from parallel.topology import Rendezvous
from parallel.transport.frames import ConnectionLost
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
from specconfig import ConfigError, EngineArgs
from specconfig.engine import EngineConfig
from tests.tiny import CONSTANT_K, VOCAB_SIZE, byte_tokenizer, write_tiny_model
from tests.unit.parallel.conftest import Ranks
from tests.unit.parallel.test_shard import MOE

NUM_BLOCKS = 80
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPT = [70, 71, 72, 73] * 6
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "num_logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


def config(target: Path, size: int, spec: dict[str, Any] | None = None, **kw: Any) -> EngineConfig:
    return EngineArgs(
        model=str(target),
        speculative_config=spec and {**CONSTANT_K, **spec},
        tensor_parallel_size=size,
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        num_threads=1,
        compile_layers="off",
        **kw,
    ).resolve()


def answers(engine: VerifierEngine, max_tokens: int = 20) -> dict[str, list[int]]:
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


def serve_rank(
    rank: int,
    config_json: str,
    orders: dict[str, LoadOrder],
    has_draft_process: bool,
    paths: dict[str, str],
    rebuild_at: Rendezvous | None = None,
) -> dict[str, int]:
    """What the actors of this rank do, called by their methods. Whoever listens at the control
    path has the drafter rebuilt."""
    target = TargetActor(config_json, rank)
    actors: list[Any] = [target]
    if has_draft_process:
        actors.append(DraftActor(config_json, rank))
    for actor in actors:
        actor.load(orders[actor.role])
    for actor in actors:
        actor.allocate(NUM_BLOCKS)
        actor.warm_up()
    loops = [
        threading.Thread(target=actor.loop, args=(paths[actor.role], paths["drafts"], generation))
        for generation, actor in zip((1, 0), actors, strict=False)
    ]
    if "control" in paths:
        loops.append(threading.Thread(target=obey, args=(target, paths["control"], rebuild_at)))
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    return dict(target._loaded.group.num_calls)


def obey(target: TargetActor, path: str, rebuild_at: Rendezvous | None) -> None:
    """The actor's second thread: control calls while the steps run."""
    connection = FrameSocket.connect(path, "control", target._rank, 0, 0, 30.0)
    try:
        while True:
            generation = connection.recv(120.0).step
            target.rebuild_drafter(generation, rebuild_at)
            connection.send(1, generation, b"", 5.0)
    except ConnectionLost:
        connection.close()


@contextmanager
def running(
    ranks: Ranks,
    cfg: EngineConfig,
    control: str | None = None,
    rebuild_at: Rendezvous | None = None,
) -> Iterator[VerifierEngine]:
    size = cfg.parallel.tensor_parallel_size
    seat = drafter_seat(cfg)
    is_split = seat is not None and seat.num_parts > 1
    is_apart = seat is not None and seat.home is DrafterHome.OWN
    draft_meeting = ranks.meeting("draft", size) if is_split else None
    orders = {
        "target": LoadOrder(ranks.meeting("target", size), None if is_apart else draft_meeting),
        "draft": LoadOrder(draft_meeting),
    }
    num_drafts = len(place_replica(cfg, use_gpus=False).drafts)
    sockets = SocketDir()
    listeners = [FrameListener(sockets.socket_path(name), g) for name, g in (("v", 1), ("d", 0))]
    paths = {
        "target": listeners[0].path,
        "draft": listeners[1].path,
        "drafts": sockets.socket_path("drafts"),
    }
    if control is not None:
        paths["control"] = control
    ranks.start(size, serve_rank, cfg.to_json(), orders, is_apart, paths, rebuild_at)
    connections = [
        [c for c, _ in sorted((x.accept(60.0) for _ in range(n)), key=lambda item: item[1].rank)]
        for x, n in zip(listeners, (size, num_drafts), strict=True)
    ]
    client = SocketStepClient(*connections)
    engine = VerifierEngine(
        EngineLimits.from_config(cfg, NUM_BLOCKS),
        client,
        load_tokenizer(cfg),
        build_lookup_drafter(cfg),
        generation=1,
    )
    try:
        yield engine
    finally:
        engine.stop()
        outcomes = ranks.finish(size)
        for listener in listeners:
            listener.close()
        sockets.close()
    assert all(is_fine for is_fine, _ in outcomes), outcomes
    assert all(calls == outcomes[0][1] for _, calls in outcomes)


def single(cfg: EngineConfig) -> dict[str, list[int]]:
    engine = build_in_process(cfg, warm_up=False)
    try:
        return answers(engine)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", seed=7, num_layers=1)


@pytest.fixture(scope="module")
def expected(tiny_pair: tuple[Path, Path]) -> dict[str, list[int]]:
    """Plain decoding in one process."""
    return single(config(tiny_pair[0], 1))


DRAFT = {"method": "draft_model"}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "ngram 1": ({**NGRAM, "num_speculative_tokens": 1}, {}),
    "ngram 4": ({**NGRAM, "num_speculative_tokens": 4}, {}),
    "split draft": ({**DRAFT, "num_speculative_tokens": 4}, {}),
    "whole draft": (
        {**DRAFT, "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1},
        {},
    ),
    "fused split": ({**DRAFT, "num_speculative_tokens": 4}, {"placement": "fused"}),
    "fused whole": (
        {**DRAFT, "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1},
        {"placement": "fused"},
    ),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_rank(
    ranks: Ranks,
    tiny_pair: tuple[Path, Path],
    expected: dict[str, list[int]],
    case: str,
    size: int,
) -> None:
    spec, extra = CASES[case]
    if spec is not None and spec["method"] == "draft_model":
        spec = {**spec, "model": str(tiny_pair[1])}
    with running(ranks, config(tiny_pair[0], size, spec, **extra)) as engine:
        assert answers(engine) == expected
        assert engine.stats.forward_gap_s.count > 0
        stats = engine.status().stats
        if spec is not None:
            assert stats["num_draft_tokens"] > 0
        assert stats["num_draft_losses"] == 0


@pytest.fixture(scope="module")
def moe_dir(
    family_dir: Callable[..., Path],
) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        path = family_dir(name, **MOE, vocab_size=VOCAB_SIZE, eos_token_id=257, bos_token_id=256)
        byte_tokenizer().save_pretrained(path)
        return path

    return get


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("name", "size"), [("mixtral", 2), ("qwen3_moe", 4)])
def test_experts(
    ranks: Ranks,
    moe_dir: Callable[[str], Path],
    name: str,
    size: int,
    expert_parallel: bool,
) -> None:
    spec = {**NGRAM, "num_speculative_tokens": 4}
    cfg = config(moe_dir(name), size, spec, enable_expert_parallel=expert_parallel)
    with running(ranks, cfg) as engine:
        assert answers(engine) == single(config(moe_dir(name), 1))


def test_expert_parallel_draft(ranks: Ranks, moe_dir: Callable[[str], Path]) -> None:
    spec = {**DRAFT, "model": str(moe_dir("qwen3_moe")), "num_speculative_tokens": 3}
    target = moe_dir("mixtral")
    cfg = config(target, 2, spec, enable_expert_parallel=True)
    assert cfg.draft_parallel is not None and cfg.draft_parallel.enable_expert_parallel
    with running(ranks, cfg) as engine:
        assert answers(engine) == single(config(target, 1))
        assert engine.status().stats["num_draft_tokens"] > 0


def test_refused(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = tiny_pair
    spec = {**DRAFT, "model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        config(target, 4, {**spec, "draft_tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        config(target, 4, {**spec, "draft_tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="4 attention heads must be divisible by"):
        config(target, 3)
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        config(target, 2, enable_expert_parallel=True)
    spec["draft_sample_method"] = "probabilistic"
    for placement, is_refused in (("dedicated", True), ("colocated", True), ("fused", False)):
        cfg = config(target, 2, spec, placement=placement)
        check_q_carrier(cfg, is_one_node=True)
        with pytest.raises(LoadError, match="on several nodes") if is_refused else nullcontext():
            check_q_carrier(cfg, is_one_node=False)
    with pytest.raises(LoadError, match="each rank is a process"):
        build_in_process(config(target, 2))
