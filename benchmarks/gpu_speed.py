"""Speed of one model shape: forwards, graph replays, tokens per second of the whole engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from actors.startup.preflight import planned_memory, size_kv
from actors.steps.client import InProcessStepClient
from actors.steps.messages import Int32Array
from actors.steps.protocols import LookupDrafter
from actors.target.runner import TargetRunner
from benchmarks.gpu_models import (
    Steps,
    answers,
    attending,
    build_verifier,
    capture,
    prompt,
    random_weights,
    resolve,
    static_attention,
)
from benchmarks.gpu_report import Context, Report, timed


class KnownAnswers(LookupDrafter):
    """A drafter that knows what will be said and is right in `rate` of its tokens: what a
    drafter of that quality would give, without one."""

    def __init__(self, known: Sequence[Sequence[int]], rate: float, vocab: int) -> None:
        self._known = {tuple(p[:24]): p for p in known}
        self._rate = rate
        self._vocab = vocab

    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        whole = self._known[tuple(token_ids[:24].tolist())]
        first = len(token_ids)
        return [
            token if (position * 2654435761 + key) % 1000 < self._rate * 1000
            else (token + 1) % self._vocab
            for position, token in enumerate(whole[first : first + max_drafts], first)
        ]  # fmt: skip


def measure_speed(ctx: Context, name: str) -> None:
    """Forward times, graph replays, tokens per second and memory of one shape."""
    dtype = "float32" if ctx.is_cpu else "bfloat16"
    _forwards(ctx, name, dtype)
    if not ctx.is_cpu:
        ctx.put("peak_bytes", torch.cuda.max_memory_allocated())
        torch.cuda.empty_cache()
    ctx.attempt("engine", lambda: _tokens_per_second(ctx, name, dtype), 15.0)


def _forwards(ctx: Context, name: str, dtype: str) -> None:
    batch, context = (2, 32) if ctx.is_cpu else (32, 256)
    tiers = (0, 4) if ctx.is_cpu else (0, 1, 2, 4, 7)
    started = time.monotonic()
    steps = Steps(name, ctx.device, dtype, batch, context)
    ctx.put("parameters_millions", round(steps.model.num_parameters / 1e6))
    ctx.put("load_s", round(time.monotonic() - started, 1))

    def eager() -> Report:
        found: Report = {}
        for size in dict.fromkeys((1, min(8, batch), batch)):
            for k in tiers:
                rows = steps.batch_of(1 + k, size)
                run = partial(steps.logits, rows)
                found[f"batch {size}, K={k}"] = round(timed(run, ctx, 10) * 1e3, 3)
        return found

    ctx.attempt("eager_forward_ms", eager)
    ctx.attempt("graphs", lambda: _graphs(ctx, steps, tiers), 10.0)


def _graphs(ctx: Context, steps: Steps, tiers: Sequence[int]) -> Report:
    """Decode and verify for each K as a CUDA graph, with static attention."""
    found: Report = {} if not ctx.is_cpu else {"capture": "skipped: no CUDA"}
    for size in dict.fromkeys((1, min(8, steps.batch))):
        for k in tiers:
            run = partial(steps.logits, steps.batch_of(1 + k, size))
            wanted = run()
            one: Report = {}
            with attending(static_attention(size, 1 + k)):
                one["static_attention_max_difference"] = float((run() - wanted).abs().max())
                if not ctx.is_cpu:
                    graph, out = capture(run)
                    one["replay_ms"] = round(timed(graph.replay, ctx, 20) * 1e3, 3)
                    one["replay_max_difference"] = float((out - wanted).abs().max())
            found[f"batch {size}, K={k}"] = one
            ctx.put("graphs", found)
    return found


def _tokens_per_second(ctx: Context, name: str, dtype: str) -> Report:
    """Whole engine, plain and with drafts of known quality; memory against its limit."""
    num = 16 if ctx.is_cpu else 96
    k = 4
    kv_bytes = 64 << 20 if ctx.is_cpu else 4 << 30
    ngram = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1,
             "prompt_lookup_max": 3}  # fmt: skip
    config = resolve(name, ctx.device, dtype, ngram, kv_cache_memory_bytes=kv_bytes)
    with random_weights():
        target = TargetRunner(config, torch.device(ctx.device))
    num_blocks = size_kv(config, [planned_memory(config, torch.device(ctx.device).type)]).num_blocks
    target.host.allocate(num_blocks)
    target.host.warm_up()
    found: Report = {"kv_blocks": num_blocks}
    if not ctx.is_cpu:
        weights = sum(p.numel() * p.element_size() for p in target.host.model.model.parameters())
        used = torch.cuda.memory_allocated()
        found["memory"] = {
            "allocated": used, "weights": weights, "kv_limit": kv_bytes,
            "ok": used <= weights + kv_bytes + (512 << 20),
        }  # fmt: skip
    for batch in (1, 8):
        engine = build_verifier(config, num_blocks, InProcessStepClient(target))
        engine.set_speculation(False)
        try:
            answers(engine, 4, batch)
            started = time.perf_counter()
            plain = answers(engine, num, batch)
            found[f"batch {batch}, plain"] = {
                "tokens_per_s": round(batch * num / (time.perf_counter() - started), 1)
            }
        finally:
            engine.stop()
        known = [prompt(n) + plain[n] for n in range(batch)]
        for rate in (1.0, 0.7):
            if ctx.left_s < 5:
                return found
            drafter = KnownAnswers(known, rate, config.model.vocab_size)
            engine = build_verifier(config, num_blocks, InProcessStepClient(target), drafter)
            try:
                started = time.perf_counter()
                got = answers(engine, num, batch)
                seconds = time.perf_counter() - started
                found[f"batch {batch}, K={k}, {rate:.0%} of drafts right"] = {
                    "tokens_per_s": round(batch * num / seconds, 1),
                    "acceptance_length": round(engine.stats.acceptance_length, 2),
                    "same_tokens": got == plain,
                }
            finally:
                engine.stop()
    return found
