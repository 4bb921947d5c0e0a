"""Check Paceline on one CUDA device, and measure it. See gpu_check.sh.

NEVER RUN ON A GPU when it was written: only the dry run on a CPU was. What fails there is part of
the report, not the end of it.

Each section runs in a process of its own with a time limit, and writes what it has after each
measurement; the report is rewritten after each section. So nothing that hangs or crashes takes
more with it than its own rest. With --cpu the sections run in this process, with tiny shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import Context, Report, timed, write_json

# Seconds a section may take; in total under six minutes.
BUDGETS = {
    "environment": 25,
    "attention": 25,
    "forward": 25,
    "engine": 45,
    "capture": 20,
    "nccl": 40,
    "two_processes": 45,
    "speed_1b": 50,
    "speed_8b": 70,
}


# --- sections that need no engine -------------------------------------------------------------


def environment(ctx: Context) -> None:
    """Versions, the device, and how fast it copies and launches."""
    import torch
    import transformers

    ctx.put("versions", {"torch": torch.__version__, "transformers": transformers.__version__})
    if ctx.is_cpu:
        ctx.put("threads", torch.get_num_threads())
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    ctx.put(
        "device",
        {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "free_bytes": free,
            "total_bytes": total,
            "cuda": torch.version.cuda,
        },
    )
    nccl_version: Any = torch.cuda.nccl.version
    ctx.attempt("nccl_version", lambda: ".".join(map(str, nccl_version())))

    def bandwidth() -> float:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        seconds = timed(lambda: target.copy_(source), ctx, 10)
        return round(2 * source.numel() / seconds / 1e9, 1)

    ctx.attempt("copy_gb_per_s", bandwidth)

    def launch() -> float:
        small = torch.zeros(1, device="cuda")
        return round(timed(lambda: small.add_(1), ctx, 200) * 1e6, 2)

    ctx.attempt("launch_us", launch)


def attention(ctx: Context) -> None:
    """The torch path on the device against a dense computation in float64 on the CPU."""
    from benchmarks.gpu_models import attention_error

    shapes: list[Report] = [
        {"heads": 8, "kv_heads": 2, "head_dim": 64},
        {"heads": 32, "kv_heads": 8, "head_dim": 128},
        {"heads": 4, "kv_heads": 4, "head_dim": 64, "window": 7},
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "softcap": 30.0},
    ]
    for shape in shapes[:2] if ctx.is_cpu else shapes:
        for dtype, bound in (("float32", 2e-5), ("bfloat16", 3e-2)):
            name = f"{dtype} " + " ".join(f"{k}={v}" for k, v in shape.items())

            def measure(shape: Any = shape, dtype: str = dtype, bound: float = bound) -> Report:
                error = attention_error(ctx.device, dtype, **shape)
                return {"max_error": error, "bound": bound, "ok": error <= bound}

            ctx.attempt(name, measure)


def forward(ctx: Context) -> None:
    """A tiny model's logits on the device against the CPU: linears, norms, rotary, paged KV."""
    from benchmarks.gpu_models import TINY, forward_error

    for dtype, bound in (("float32", 5e-4), ("bfloat16", 0.1)):

        def measure(dtype: str = dtype, bound: float = bound) -> Report:
            error = forward_error(TINY, ctx.device, dtype)
            return {"max_error": error, "bound": bound, "ok": error <= bound}

        ctx.attempt(dtype, measure)


def engine(ctx: Context) -> None:
    """Whole engines, float32: drafts change nothing, and the device says what the CPU says."""
    from benchmarks.gpu_models import TINY, answers, build_engine

    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    draft = {"method": "draft_model", "model": "random/tiny-draft"}
    num = 40 if ctx.is_cpu else 120

    def run(device: str, spec: Any, **kw: Any) -> Any:
        running, _ = build_engine(TINY, device, "float32", spec)
        try:
            return answers(running, num, 4, **kw)
        finally:
            running.stop()

    plain = ctx.attempt("plain", lambda: {"tokens": run(ctx.device, None)})
    if plain is None:
        return
    expected = plain.pop("tokens")
    ctx.put("plain", {"ok": all(len(ids) == num for ids in expected)})
    cases: list[tuple[str, str, Any]] = [("plain on the CPU", "cpu", None)]
    for k in (4,) if ctx.is_cpu else (1, 4, 7):
        cases.append((f"ngram K={k}", ctx.device, {**ngram, "num_speculative_tokens": k}))
        cases.append((f"draft model K={k}", ctx.device, {**draft, "num_speculative_tokens": k}))
    for name, device, spec in cases:

        def compare(device: str = device, spec: Any = spec) -> Report:
            return agreement(expected, run(device, spec))

        ctx.attempt(name, compare)

    def seeded() -> Report:
        sampling = {"temperature": 0.8, "top_p": 0.9}
        first = run(ctx.device, None, **sampling)
        return agreement(first, run(ctx.device, {**ngram, "num_speculative_tokens": 4}, **sampling))

    ctx.attempt("seeded, ngram K=4", seeded)


def agreement(expected: list[list[int]], got: list[list[int]]) -> Report:
    """Whether all tokens are equal; else where each answer first differs."""
    firsts = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(a))
        for a, b in zip(expected, got, strict=True)
    ]
    return {"ok": expected == got, "equal_tokens": firsts, "of": [len(a) for a in expected]}


def capture(ctx: Context) -> None:
    """The engine's forward, as it is, in a CUDA graph: what would have to change for it."""
    from benchmarks.gpu_models import capture_engine_forward

    if ctx.is_cpu:
        ctx.put("skipped", "no CUDA")
        return
    ctx.attempt("engine forward", lambda: capture_engine_forward(ctx.device))


def nccl(ctx: Context) -> None:
    """The collective backend with one rank: what start-up and tear-down need to work."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    backend = "gloo" if ctx.is_cpu else "nccl"

    def one_rank() -> Report:
        with tempfile.TemporaryDirectory() as folder:
            store = FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            try:
                x = torch.ones(4096, device=ctx.device)
                dist.all_reduce(x)
                dist.broadcast(x, 0)
                ok = bool((x == 1).all())
                seconds = timed(lambda: dist.all_reduce(x), ctx, 100)
            finally:
                dist.destroy_process_group()
        return {"ok": ok, "backend": backend, "all_reduce_us": round(seconds * 1e6, 1)}

    ctx.attempt("one rank", one_rank)
    if not ctx.is_cpu:
        from benchmarks.gpu_processes import duplicate_device

        # NCCL refuses two ranks on one device; the text of the refusal is worth knowing.
        ctx.attempt("two ranks on one device", lambda: duplicate_device(20.0), 22.0)


def two_processes(ctx: Context) -> None:
    """Target and draft in processes of their own on one device, over the engine's sockets."""
    from benchmarks.gpu_models import TINY
    from benchmarks.gpu_processes import colocated

    ctx.attempt("colocated", lambda: colocated(TINY, ctx.device, 40.0), 20.0)


def speed_1b(ctx: Context) -> None:
    """Tokens per second and graph replays of a 1B Llama shape in bfloat16."""
    from benchmarks.gpu_models import LLAMA_1B, TINY
    from benchmarks.gpu_speed import measure_speed

    measure_speed(ctx, TINY if ctx.is_cpu else LLAMA_1B)


def speed_8b(ctx: Context) -> None:
    """The same with an 8B shape."""
    from benchmarks.gpu_models import LLAMA_8B
    from benchmarks.gpu_speed import measure_speed

    if ctx.is_cpu:
        ctx.put("skipped", "same code as speed_1b")
        return
    measure_speed(ctx, LLAMA_8B)


SECTIONS: dict[str, Callable[[Context], None]] = {
    "environment": environment,
    "attention": attention,
    "forward": forward,
    "engine": engine,
    "capture": capture,
    "nccl": nccl,
    "two_processes": two_processes,
    "speed_1b": speed_1b,
    "speed_8b": speed_8b,
}


# --- running them -----------------------------------------------------------------------------


def run_here(name: str, device: str, path: Path | None, budget_s: float) -> Report:
    """The section in this process; what it raises is part of its result."""
    ctx = Context(device, path, budget_s)
    started = time.monotonic()
    try:
        SECTIONS[name](ctx)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        ctx.put("error", f"{type(error).__name__}: {error}")
        ctx.put("traceback", traceback.format_exc().splitlines()[-8:])
    ctx.put("seconds", round(time.monotonic() - started, 1))
    return ctx.result


def run_apart(name: str, device: str, budget_s: float) -> Report:
    """The section in a process group of its own, killed whole when its time is up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name,
                   "--device", device, "--budget", str(budget_s - 5), str(path)]  # fmt: skip
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        ended = ""
        try:
            _, stderr = process.communicate(timeout=budget_s)
            if process.returncode:
                lines = stderr.decode(errors="replace").strip().splitlines()
                ended = f"exit status {process.returncode}: " + " | ".join(lines[-3:])
        except subprocess.TimeoutExpired:
            ended = f"killed after {budget_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found: Report = json.loads(path.read_text()) if path.exists() else {}
    if ended:
        found["ended"] = ended
    return found


def failures(value: Any, where: str = "") -> list[str]:
    """Paths in the report of what is wrong or could not be measured."""
    if not isinstance(value, dict):
        return []
    found = [where] if value.get("ok") is False or "error" in value or "ended" in value else []
    for key, child in value.items():
        found += failures(child, f"{where}/{key}" if where else str(key))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the sections; 1 if something is wrong or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", default="gpu_check.json", type=Path)
    parser.add_argument("--cpu", action="store_true", help="dry run with tiny shapes")
    parser.add_argument("--only", default="", help="comma-separated sections")
    parser.add_argument("--limit", type=float, default=345.0, help="seconds in total")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.section:
        run_here(options.section, options.device, options.report, options.budget)
        return 0

    device = "cpu" if options.cpu else "cuda"
    wanted = [name for name in options.only.split(",") if name] or list(SECTIONS)
    started = time.monotonic()
    report: Report = {"device": device, "never_run_on_a_gpu_when_written": True, "sections": {}}
    for name in wanted:
        left = options.limit - (time.monotonic() - started)
        if left < 15:
            report["sections"][name] = {"skipped": f"{left:.0f} s left in total"}
        elif options.cpu:
            report["sections"][name] = run_here(name, device, None, BUDGETS[name])
        else:
            report["sections"][name] = run_apart(name, device, min(BUDGETS[name], left))
        report["seconds"] = round(time.monotonic() - started, 1)
        report["failures"] = failures(report["sections"])
        write_json(options.report, report)
        print(f"{report['seconds']:6.1f} s  {name}", flush=True)
    print(json.dumps(report, indent=1, default=str))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
