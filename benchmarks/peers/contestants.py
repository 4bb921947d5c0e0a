"""Who is compared: how each is started, and how it is asked.

A contestant is one process with one or more modes. All read the same model, have the same number
of seats and greedy answers of the same length, and no cache of prompts, so each answer pays for its
own: libraries have none. Servers are asked as users ask them, by the generator of
`paceline bench`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from actors.threads import compute_environment
from benchmarks.peers.cases import Case, token_ids
from benchmarks.peers.processes import PeerError, Process, ServerProcess, WorkerProcess
from deploy.bench.command import Bounds, Load, measure
from deploy.bench.load import Outcome, Progress
from deploy.bench.server import Workload, connected
from deploy.bench.stream import Received
from deploy.bench.summary import Json, summarise

_ROOT: Final = Path(__file__).parents[2]
_WORKER: Final = Path(__file__).with_name("worker.py")
_START_S: Final = 600.0
_NAME: Final = "compared"
NGRAM: Final[Mapping[str, Any]] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
# One server, drafts switched off for a request.
_OFF: Final[Mapping[str, Any]] = {"speculation": {"enabled": False}}


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for all."""

    model: Path
    gguf: Path | None
    folder: Path
    seats: int
    max_tokens: int
    max_model_len: int
    run_s: float
    pythons: Mapping[str, Path]
    vllm_environment: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None


# Figures of a mode and a case, in the shape of a run of `paceline bench`.
Ask = Callable[[str, Case], Json]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One process: `system` names it in results, with the mode."""

    system: str
    modes: tuple[str, ...]
    start: Callable[[Setup], AbstractContextManager[Ask]]
    most_clients: int | None = None

    def takes(self, case: Case) -> bool:
        """Whether it can answer so many at once."""
        return self.most_clients is None or case.num_clients <= self.most_clients


@contextlib.contextmanager
def _ended(process: Process) -> Iterator[None]:
    try:
        yield
    finally:
        process.end()


@contextlib.contextmanager
def _paceline(setup: Setup, *, speculates: bool, from_gguf: bool = False) -> Iterator[Ask]:
    port = _free_port()
    args: dict[str, Any] = {
        "model": str(setup.gguf if from_gguf else setup.model),
        "served_model_name": _NAME,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.seats,
        "enable_prefix_caching": False,
    }
    if speculates:
        args["speculative_config"] = dict(NGRAM)
    file = setup.folder / f"paceline-{port}.yaml"
    app = {
        "name": "paceline",
        "route_prefix": "/",
        "import_path": "deploy.app:build",
        "args": args,
    }
    http = {"host": "127.0.0.1", "port": port}
    file.write_text(
        yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http, "applications": [app]})
    )
    process = ServerProcess(
        [sys.executable, "-m", "deploy.cli", "serve", file],
        {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
        setup.folder / "paceline.log",
    )
    with _ended(process):
        url = f"http://127.0.0.1:{port}"
        process.wait_healthy(f"{url}/health", _START_S)
        yield partial(_ask_server, url, setup)


@contextlib.contextmanager
def _vllm(setup: Setup, *, speculates: bool) -> Iterator[Ask]:
    port, python = _free_port(), setup.pythons["vllm"]
    command: list[str | Path] = [
        python.with_name("vllm"), "serve", setup.model, "--served-model-name", _NAME,
        "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.seats),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if speculates:
        command += ["--speculative-config", json.dumps(NGRAM)]
    environment = {
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": "",
        **vllm_tuning(python),
        **setup.vllm_environment,
    }
    process = ServerProcess(command, environment, setup.folder / "vllm.log")
    with _ended(process):
        url = f"http://127.0.0.1:{port}"
        process.wait_healthy(f"{url}/health", _START_S)
        yield partial(_ask_server, url, setup)


def vllm_tuning(python: Path) -> dict[str, str]:
    """What its documentation recommends for CPUs, and all cores: by itself it leaves one idle."""
    cores = sorted(os.sched_getaffinity(0))
    wanted = [
        *python.parent.parent.glob("lib/libiomp5.so"),
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
    ]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": ":".join(map(str, wanted)),
    }


def _ask_server(url: str, setup: Setup, mode: str, case: Case) -> Json:
    workload = Workload(
        "chat", _NAME, case.prompts, setup.max_tokens, extra_body=_OFF if mode == "off" else None
    )
    load = Load(case.num_requests, case.num_clients, case.num_clients)

    async def run() -> Json:
        async with connected(url, None) as server:
            return await measure(server, workload, load, Bounds(setup.run_s, setup.run_s))

    return asyncio.run(run())


@contextlib.contextmanager
def _library(setup: Setup, *, kind: str, from_gguf: bool = False) -> Iterator[Ask]:
    # Threads as the product sets them for its own engine; others as they come.
    ours = {**compute_environment(None), "PYTHONPATH": str(_ROOT)}
    process = WorkerProcess(
        [setup.pythons[kind], _WORKER, kind, (setup.gguf if from_gguf else setup.model) or "",
         str(setup.seats)],
        ours if kind == "paceline" else {"PYTHONPATH": ""},
        setup.folder / f"{kind}-library.log",
    )  # fmt: skip
    with _ended(process):
        process.result(_START_S)
        yield partial(_ask_library, process, setup)


def _ask_library(process: WorkerProcess, setup: Setup, mode: str, case: Case) -> Json:
    ids = token_ids(setup.tokenizer, case)
    job = {"mode": mode, "max_tokens": setup.max_tokens, "clients": case.num_clients}
    process.run({**job, "prompts": ids[:1]}, setup.run_s)
    result = process.run({**job, "prompts": ids}, setup.run_s)
    outcomes = []
    for i, answer in enumerate(result["answers"]):
        if answer["tokens"] != setup.max_tokens:
            raise PeerError(f"an answer has {answer['tokens']} tokens, not {setup.max_tokens}")
        usage = {"completion_tokens": answer["tokens"], "prompt_tokens": len(ids[i])}
        received = Received(answer["first"], answer["last"], usage=usage, is_whole=True)
        outcomes.append(Outcome(i, answer["due"], answer["last"], received))
    progress = Progress(outcomes, len(outcomes), result["started"], result["ended"])
    workload = Workload("chat", _NAME, case.prompts, setup.max_tokens)
    return {"load": {"clients": case.num_clients}, **summarise(progress, workload)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# In the order of a round; every second round goes backwards.
CONTESTANTS: Final = (
    Contestant("paceline", ("plain",), partial(_paceline, speculates=False)),
    Contestant("vllm", ("plain",), partial(_vllm, speculates=False)),
    Contestant("paceline", ("ngram", "off"), partial(_paceline, speculates=True)),
    Contestant("vllm", ("ngram",), partial(_vllm, speculates=True)),
    Contestant("engine", ("plain", "ngram"), partial(_library, kind="paceline")),
    Contestant("transformers", ("plain", "lookup"), partial(_library, kind="transformers"), 1),
    Contestant(
        "paceline-gguf", ("plain",), partial(_paceline, speculates=False, from_gguf=True)
    ),
    Contestant(
        "openvino", ("plain", "lookup"), partial(_library, kind="openvino", from_gguf=True), 1
    ),
    Contestant(
        "paceline-gguf", ("ngram", "off"), partial(_paceline, speculates=True, from_gguf=True)
    ),
)  # fmt: skip
SYSTEMS: Final = tuple(dict.fromkeys(contestant.system for contestant in CONTESTANTS))
