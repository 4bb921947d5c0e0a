"""Several processes on one device: the colocated layout, and what NCCL says to two ranks."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from typing import Any

import torch

from actors.startup.preflight import planned_memory, size_kv
from actors.startup.workers import build_drafter
from actors.steps.client import SocketStepClient
from actors.steps.drafts import ConnectedDrafts
from actors.steps.serve import serve_draft, serve_target
from actors.steps.target_step import TargetStep
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from benchmarks.gpu_models import TINY_DRAFT, answers, build_engine, random_weights, resolve
from benchmarks.gpu_report import Report
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
from specconfig.engine import EngineConfig

_WAIT_S = 120.0


def _limit_memory(device: str, share: float) -> None:
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)


def _target_process(config_json: str, path: str, draft_path: str, device: str) -> None:
    _limit_memory(device, 0.45)
    config = EngineConfig.from_json(config_json)
    with random_weights():
        target = TargetRunner(config, torch.device(device))
    target.host.allocate(
        size_kv(config, [planned_memory(config, torch.device(device).type)]).num_blocks
    )
    target.host.warm_up()
    drafts = ConnectedDrafts(FrameListener(draft_path, 0))
    connection = FrameSocket.connect(path, "target", 0, 1, os.getpid(), _WAIT_S)
    serve_target(connection, TargetStep(target, drafts))


def _draft_process(config_json: str, path: str, draft_path: str, device: str) -> None:
    _limit_memory(device, 0.45)
    config = EngineConfig.from_json(config_json)
    with random_weights():
        draft = build_drafter(config, torch.device(device))
    draft.allocate(size_kv(config, [planned_memory(config, torch.device(device).type)]).num_blocks)
    draft.warm_up()
    target = FrameSocket.connect(draft_path, "draft", 0, 0, os.getpid(), _WAIT_S)
    connection = FrameSocket.connect(path, "draft", 0, 1, os.getpid(), _WAIT_S)
    serve_draft(connection, draft, target)


def colocated(name: str, device: str, timeout_s: float) -> Report:
    """Target and draft processes on one device against both in this process."""
    spec = {"method": "draft_model", "model": TINY_DRAFT, "num_speculative_tokens": 4}
    num = 24 if device == "cpu" else 96
    engine, _ = build_engine(name, device, "float32", spec)
    try:
        expected = answers(engine, num, 2)
        here_ms = engine.stats.step_time_s.mean * 1e3
    finally:
        engine.stop()
    config = resolve(name, device, "float32", spec)
    sockets = SocketDir()
    listener = FrameListener(sockets.socket_path("verifier"), 1)
    args = (config.to_json(), listener.path, sockets.socket_path("drafts"), device)
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=run, args=args, daemon=True)
        for run in (_target_process, _draft_process)
    ]
    try:
        for child in children:
            child.start()
        connections = {}
        for _ in children:
            connection, hello = listener.accept(timeout_s)
            connections[hello.role] = connection
        num_blocks = size_kv(config, [planned_memory(config, torch.device(device).type)]).num_blocks
        client = SocketStepClient([connections["target"]], [connections["draft"]])
        engine = VerifierEngine(EngineLimits.from_config(config, num_blocks), client, generation=1)
        try:
            got = answers(engine, num, 2)
            apart_ms = engine.stats.step_time_s.mean * 1e3
            lost = engine.stats.num_draft_losses
        finally:
            engine.stop()
    finally:
        for child in children:
            child.kill()
            child.join(5)
        listener.close()
        sockets.close()
    return {
        "ok": got == expected and lost == 0,
        "step_ms_two_processes": round(apart_ms, 3),
        "step_ms_one_process": round(here_ms, 3),
    }


def _duplicate_rank(rank: int, path: str, said: Any) -> None:
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    try:
        torch.cuda.set_device(0)
        store = FileStore(path, 2)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        said.put(f"rank {rank}: accepted")
    except Exception as error:
        said.put(f"rank {rank}: {' '.join(str(error).split())[:300]}")


def duplicate_device(timeout_s: float) -> Report:
    """What NCCL says to two ranks on one device; killed if it only waits."""
    sockets = SocketDir()
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    children = [
        context.Process(
            target=_duplicate_rank, args=(rank, str(sockets.path / "store"), said), daemon=True
        )
        for rank in range(2)
    ]
    texts: list[str] = []
    try:
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        while len(texts) < 2 and (left := deadline - time.monotonic()) > 0:
            try:
                texts.append(said.get(timeout=left))
            except queue.Empty:
                break
    finally:
        for child in children:
            child.kill()
            child.join(5)
        sockets.close()
    return {"said": texts or [f"nothing in {timeout_s:.0f} s"]}
