"""Measure Paceline on this machine. The last line of output is one JSON document.

    python -m benchmarks.run --model DIR [--suites steps,neighbour,invariance,actors] [--out FILE]

What a user sees, beside other systems too, is `benchmarks.peers.run`; this looks inside. Machines
are noisy: what is compared is measured alternately in one run, and ratios of medians are reported
next to the raw numbers. Suites:

    steps      milliseconds of one engine step with 1 and with 5 rows (a verify step of K = 4)
    neighbour  step time alone and with one core kept busy by another process
    invariance what row-independent bits cost: prefill and decode with the switch on and off
    actors     step time over sockets to a target actor against the in-process engine
    tp         step time of a small random model split over two ranks against one, and its parts
    start      seconds from `Replica.start` to ready, models already converted and compiled
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.threads import compute_environment, usable_cores

Measure = Callable[[argparse.Namespace], dict[str, Any]]


def _config(options: argparse.Namespace, spec: dict[str, Any] | None = None, **kw: Any) -> Any:
    from specconfig import EngineArgs

    args: dict[str, Any] = {
        "model": str(options.model),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "compile_layers": options.compile,
        "num_threads": options.threads,
        **kw,
    }
    return EngineArgs(speculative_config=spec, **args).resolve()


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def _median_ms(samples: list[float]) -> float:
    return round(statistics.median(samples) * 1e3, 3)


class _Stepper:
    """A target runner driven by hand: one request in a steady state, any number of rows."""

    def __init__(self, config: Any, context: int = 256) -> None:
        import torch

        from actors.steps.messages import (
            BlockDelta,
            SlotParams,
            StepPlan,
            TargetEntry,
            token_array,
        )
        from actors.target.runner import TargetRunner

        self._make = (StepPlan, TargetEntry, token_array)
        self.context = context
        self.runner = TargetRunner(config, torch.device("cpu"))
        self.runner.host.allocate(200)
        ids = token_array([(7 * i) % 1000 + 5 for i in range(context)])
        plan = StepPlan(
            0, 0, (SlotParams(0, context, 1),), (BlockDelta(0, 0, token_array(range(1, 120))),),
            (TargetEntry(0, 0, ids, 0, 0, 1),),
        )  # fmt: skip
        self.runner.run(plan, None)

    def step(self, num_rows: int) -> float:
        plan_of, entry_of, array = self._make
        entry = entry_of(0, self.context, array([11] * num_rows), num_rows - 1, 0, num_rows)
        started = time.perf_counter()
        self.runner.run(plan_of(0, 1, (), (), (entry,)), None)
        return time.perf_counter() - started


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Alternate 1-row and 5-row steps."""
    stepper = _Stepper(_config(options))
    counts = (1, 2, 3, 4, 5, 8)
    for n in counts:
        stepper.step(n)
    samples: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(options.repeats):
        for n in counts:
            samples[n].append(stepper.step(n))
    ratios = [five / one for one, five in zip(samples[1], samples[5], strict=True)]
    return {
        "step_ms": {str(n): _median_ms(s) for n, s in samples.items()},
        "step_ms_min": {str(n): round(min(s) * 1e3, 3) for n, s in samples.items()},
        "verify_5_rows_over_1_row": round(statistics.median(ratios), 3),
    }


async def _decode_s(engine: Any, ids: list[int], new_tokens: int, **kw: Any) -> float:
    """Seconds a token of one answer, its first left out."""
    from actors.requests import GenerateRequest

    request = GenerateRequest(
        request_id=f"bench-{time.perf_counter_ns()}",
        prompt_token_ids=ids,
        max_tokens=new_tokens,
        temperature=0.0,
        ignore_eos=True,
        **kw,
    )
    first, last = 0.0, None
    async for out in engine.generate(request):
        if out.is_acknowledgment:
            continue
        first = first or time.perf_counter()
        last = out
    ended = time.perf_counter()
    assert last is not None and last.error is None
    return (ended - first) / (new_tokens - 1)


_BURN = "while True: pass"


def neighbour(options: argparse.Namespace) -> dict[str, Any]:
    """Steps in pairs of blocks: alone, then with a process that never sleeps on one core."""
    stepper = _Stepper(_config(options))
    for n in (1, 5):
        stepper.step(n)
    alone: dict[int, list[float]] = {1: [], 5: []}
    busy: dict[int, list[float]] = {1: [], 5: []}
    for _ in range(4):
        for n in (1, 5):
            alone[n] += [stepper.step(n) for _ in range(options.repeats // 4)]
        with subprocess.Popen([sys.executable, "-c", _BURN]) as burner:
            try:
                time.sleep(0.3)
                for n in (1, 5):
                    busy[n] += [stepper.step(n) for _ in range(options.repeats // 4)]
            finally:
                burner.kill()
    ratio = {
        str(n): round(statistics.median(busy[n]) / statistics.median(alone[n]), 3) for n in (1, 5)
    }
    return {
        "alone_ms": {str(n): _median_ms(alone[n]) for n in alone},
        "busy_ms": {str(n): _median_ms(busy[n]) for n in busy},
        "busy_over_alone": ratio,
        "worst_busy_step_ms": round(max(busy[1] + busy[5]) * 1e3, 1),
        "environment": {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")},
    }


def invariance(options: argparse.Namespace) -> dict[str, Any]:
    """A 512-row prompt chunk and a 5-row step with `batch_invariant` on and off."""
    import torch

    from actors.steps.messages import BlockDelta, SlotParams, StepPlan, TargetEntry, token_array
    from actors.target.runner import TargetRunner

    def prepare(exact: bool) -> Callable[[int, int], float]:
        runner = TargetRunner(_config(options, batch_invariant=exact), torch.device("cpu"))
        runner.host.allocate(200)
        admission = (SlotParams(0, 8, 1),)
        blocks = (BlockDelta(0, 0, token_array(range(1, 120))),)

        def run(start: int, rows: int) -> float:
            ids = token_array([(7 * i) % 1000 + 5 for i in range(rows)])
            plan = StepPlan(0, 0, admission, blocks, (TargetEntry(0, start, ids, 0, 0, 1),))
            began = time.perf_counter()
            runner.run(plan, None)
            return time.perf_counter() - began

        return run

    sides = {"on": prepare(True), "off": prepare(False)}
    shapes = {"chunk_512": (0, 512), "chunk_512_at_1024": (1024, 512), "verify_5": (600, 5)}
    out: dict[str, Any] = {}
    for name, (start, rows) in shapes.items():
        samples: dict[str, list[float]] = {"on": [], "off": []}
        for i in range(6 if rows > 100 else options.repeats):
            for side, run in sides.items():
                elapsed = run(start, rows)
                if i:
                    samples[side].append(elapsed)
        out[name] = {side: _median_ms(s) for side, s in samples.items()}
        out[name]["on_over_off"] = round(out[name]["on"] / out[name]["off"], 3)
    return out


def actors(options: argparse.Namespace) -> dict[str, Any]:
    """Decode milliseconds a token: separate target actor against the same engine in process."""
    import ray

    from actors.startup.in_process import build_in_process
    from actors.startup.launch import Replica
    from actors.startup.preflight import load_tokenizer

    config = _config(options, NGRAM)
    tokenizer = load_tokenizer(config)
    ids = tokenizer("The history of the old harbour begins", add_special_tokens=False)["input_ids"]
    local = build_in_process(config, tokenizer=tokenizer)
    _start_ray()
    started = time.perf_counter()
    replica = Replica.start(config)
    start_s = time.perf_counter() - started
    in_process, separate = [], []
    for _ in range(6):
        for engine, samples in ((local, in_process), (replica.engine, separate)):
            plain = _decode_s(engine, ids, options.new_tokens, speculation_enabled=False)
            samples.append(asyncio.run(plain))
    overhead = [b - a for a, b in zip(in_process, separate, strict=True)]
    local.stop()
    replica.stop()
    ray.shutdown()
    return {
        "in_process_ms": _median_ms(in_process),
        "separate_ms": _median_ms(separate),
        "overhead_ms": _median_ms(overhead),
        "overhead_of_minima_ms": round((min(separate) - min(in_process)) * 1e3, 3),
        "start_s": round(start_s, 2),
    }


_SMALL_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


def _write_small_model(folder: Path, tokenizer_from: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.save_pretrained(folder)
    shape = {**_SMALL_SHAPE, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tp(options: argparse.Namespace) -> dict[str, Any]:
    """Both replicas run one thread a rank, alternately; a rank that waits leaves its core."""
    import tempfile

    import ray

    from actors.startup.launch import Replica
    from actors.startup.preflight import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = _write_small_model(Path(folder), options.model)
        small = argparse.Namespace(**{**vars(options), "model": model, "threads": 1})
        configs = [_config(small, compile_layers="off", tensor_parallel_size=n) for n in (1, 2)]
        tokenizer = load_tokenizer(configs[0])
        text = "The history of the old harbour begins"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        _start_ray()
        replicas = [Replica.start(config) for config in configs]
        steps: list[list[float]] = [[], []]
        forwards: list[list[float]] = [[], []]
        calls = {}
        for _ in range(8):
            for i, replica in enumerate(replicas):
                before = replica.engine.status().stats
                traffic = replica.traffic()
                decode_s = asyncio.run(_decode_s(replica.engine, ids, options.new_tokens))
                after = replica.engine.status().stats
                num = after["num_steps"] - before["num_steps"]
                steps[i].append(decode_s)
                spent = after["forward_time_s"]["sum"] - before["forward_time_s"]["sum"]
                forwards[i].append(spent / num)
                now = replica.traffic()
                calls = {
                    what: {op: round((n - traffic[what].get(op, 0)) / num, 4)
                           for op, n in now[what].items()}
                    for what in now
                }  # fmt: skip
        for replica in replicas:
            replica.stop()
        ray.shutdown()
    return {
        "step_ms": {"tp1": _median_ms(steps[0]), "tp2": _median_ms(steps[1])},
        "forward_ms": {"tp1": _median_ms(forwards[0]), "tp2": _median_ms(forwards[1])},
        "overhead_ms": _median_ms([b - a for a, b in zip(*steps, strict=True)]),
        "per_step_tp2": calls,
        "ms_per_collective": _collective_ms(_SMALL_SHAPE["hidden_size"]),
    }


def _collective_ms(width: int) -> float:
    """Milliseconds of one small all-reduce between two processes that do nothing else."""
    import multiprocessing

    from parallel.groups import GroupHost

    host = GroupHost("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        jobs = [(rank, host.port, width) for rank in range(2)]
        return max(pool.starmap(_time_collectives, jobs, chunksize=1))


def _time_collectives(rank: int, port: int, width: int, repeats: int = 300) -> float:
    import torch

    from parallel.groups import join_group
    from parallel.topology import Rendezvous

    torch.set_num_threads(1)
    group = join_group(
        Rendezvous("127.0.0.1", port, "target", 2, 1, "key"), rank, torch.device("cpu")
    )
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        group.all_reduce(torch.ones(1, width))
        samples.append(time.perf_counter() - started)
    return _median_ms(samples)


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Second start of a replica (the first fills the compile cache)."""
    import ray

    from actors.startup.launch import Replica

    _start_ray()
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        Replica.start(_config(options, NGRAM)).stop()
        seconds.append(round(time.perf_counter() - began, 2))
    ray.shutdown()
    return {"first_s": seconds[0], "again_s": seconds[1]}


def _start_ray() -> None:
    import ray

    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = root + os.pathsep + os.environ.get("PYTHONPATH", "")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
    )


SUITES: dict[str, Measure] = {
    "steps": steps,
    "neighbour": neighbour,
    "invariance": invariance,
    "actors": actors,
    "tp": tp,
    "start": start,
}


def main(argv: list[str] | None = None) -> None:
    """Run the chosen suites."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--suites", default="steps,neighbour,invariance,actors")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--default-spin", action="store_true", help="leave OpenMP's own spinning")
    parser.add_argument("--spin", type=int, help="GOMP_SPINCOUNT instead of the product's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    wanted = compute_environment(options.threads)
    if options.spin is not None:
        wanted["GOMP_SPINCOUNT"] = str(options.spin)
    if options.default_spin:
        wanted.pop("GOMP_SPINCOUNT")
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        # OpenMP reads its environment once, when torch is loaded: start over with it set.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.run", *(argv or sys.argv[1:])],
            {**os.environ, **wanted},
        )
    report: dict[str, Any] = {
        "machine": {"cores": usable_cores(), "cpu": platform.processor() or platform.machine()},
        "arguments": sys.argv[1:],
    }
    for name in options.suites.split(","):
        print(f"--- {name}", flush=True)
        report[name] = SUITES[name](options)
        print(json.dumps(report[name]), flush=True)
    line = json.dumps(report)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
