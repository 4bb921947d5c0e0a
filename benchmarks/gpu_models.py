"""Models without files, and what `gpu_check` measures on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.model import interface, loader, trunk
from actors.model.attention_torch import GatherPlan, HostBatch, paged_attention_torch
from actors.model.inputs import EntryRows, FlatBatch, SlotTables
from actors.model.kv import PagedCache
from actors.model.paged_lm import PagedCausalLM
from actors.requests import GenerateRequest
from actors.startup.preflight import build_lookup_drafter, planned_memory, size_kv
from actors.startup.workers import build_drafter
from actors.steps.client import InProcessStepClient
from actors.steps.messages import BlockDelta, SlotParams, token_array
from actors.steps.protocols import LookupDrafter
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from benchmarks.gpu_report import Report
from specconfig import EngineArgs
from specconfig.engine import EngineConfig


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Report:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip


TINY, TINY_DRAFT, LLAMA_1B, LLAMA_8B = "random/tiny", "random/tiny-draft", "random/1b", "random/8b"
SHAPES = {
    TINY: _llama(64, 128, 2, 4, 2, 512),
    TINY_DRAFT: _llama(32, 64, 1, 2, 1, 512),
    LLAMA_1B: _llama(2048, 8192, 16, 32, 8, 128256),
    LLAMA_8B: _llama(4096, 14336, 32, 32, 8, 128256),
}
_SMALL = 10_000_000
_BLOCK = 16
_WAIT_S = 120.0


@contextmanager
def random_weights() -> Iterator[None]:
    """Inside, models are made from their shape and a fixed seed instead of being loaded."""
    with mock.patch.object(trunk, "load_causal_lm", _make):
        yield


def _make(
    location: str, *, dtype: torch.dtype, device: torch.device, **_: Any
) -> loader.LoadedModel:
    interface.register()
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.initialization import no_init_weights

    shape = {k: v for k, v in SHAPES[location].items() if k not in ("architectures", "dtype")}
    with torch.device(device), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig(**shape), dtype=dtype, attn_implementation=interface.ATTENTION_NAME
        )
    # Small models get the same weights on every device; large ones are made where they stay.
    is_small = sum(p.numel() for p in model.parameters()) < _SMALL
    where = torch.device("cpu") if is_small else device
    generator = torch.Generator(where).manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif is_small:
                noise = torch.randn(parameter.shape, generator=generator) * 0.15
                parameter.copy_(noise)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    model.eval().requires_grad_(False)
    return loader.look_into(model, location)


def resolve(name: str, device: str, dtype: str, spec: Report | None, **kw: Any) -> EngineConfig:
    """The plan of an engine over one of `SHAPES`."""
    args: Report = {
        "max_model_len": 512, "max_num_seqs": 8, "compile_layers": "off",
        "kv_cache_memory_bytes": "64MiB", "enable_prefix_caching": False, **kw,
    }  # fmt: skip
    if spec is not None:
        # Checks of drafts: ones that are mostly wrong would soon not be made.
        spec = {"num_speculative_tokens_schedule": "constant", **spec}
    return EngineArgs(
        model=name, device=device, dtype=dtype, speculative_config=spec, **args
    ).resolve(lambda model, _: SHAPES[model])


def build_engine(
    name: str, device: str, dtype: str, spec: Report | None, **kw: Any
) -> tuple[VerifierEngine, TargetRunner]:
    """An engine in this process, and its target."""
    config = resolve(name, device, dtype, spec, **kw)
    where = torch.device(device)
    with random_weights():
        target = TargetRunner(config, where)
        drafter = build_drafter(config, where) if config.draft_model is not None else None
    num_blocks = size_kv(config, [planned_memory(config, where.type)]).num_blocks
    for host in (target.host, drafter):
        if host is not None:
            host.allocate(num_blocks)
            host.warm_up()
    return build_verifier(config, num_blocks, InProcessStepClient(target, drafter)), target


def build_verifier(
    config: EngineConfig, num_blocks: int, client: Any, drafter: LookupDrafter | None = None
) -> VerifierEngine:
    """An engine over workers that are there already; a drafter of one's own in place of its."""
    return VerifierEngine(
        EngineLimits.from_config(config, num_blocks),
        client,
        None,
        drafter if drafter is not None else build_lookup_drafter(config),
    )


def prompt(n: int, length: int = 24) -> list[int]:
    """A prompt that repeats itself; another one for each `n`."""
    return [(10 + n + i % 5) % 500 for i in range(length)]


def answers(
    engine: VerifierEngine, num_tokens: int, num_requests: int, **sampling: Any
) -> list[list[int]]:
    """Tokens of `num_requests` requests that run together."""
    ended = threading.Semaphore(0)
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    errors: list[str] = []

    def sink(n: int) -> Callable[[Any], None]:
        def take(out: Any) -> None:
            tokens[n].extend(out.token_ids)
            if out.error:
                errors.append(out.error)
            if out.finish_reason is not None:
                ended.release()

        return take

    for n in range(num_requests):
        request = GenerateRequest(
            f"{time.monotonic_ns()}-{n}", prompt(n), max_tokens=num_tokens, ignore_eos=True, seed=n,
            **{"temperature": 0.0, **sampling},
        )  # fmt: skip
        engine.add_request(request, sink(n))
    for _ in range(num_requests):
        if not ended.acquire(timeout=_WAIT_S):
            raise TimeoutError(f"no end: {engine.status()}")
    if errors:
        raise RuntimeError(errors[0])
    return tokens


# --- correctness ------------------------------------------------------------------------------


def attention_error(
    device: str,
    dtype: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    softcap: float = 0.0,
) -> float:
    """Largest difference of the torch path on `device` to a dense float64 computation."""
    made = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).to(kind)

    contexts, rows = [0, 17, 63, 130], [5, 1, 4, 1]
    lens = [c + r for c, r in zip(contexts, rows, strict=True)]
    width = -(-max(lens) // _BLOCK)
    order = torch.randperm(len(lens) * width, generator=made) + 1
    table = order.reshape(len(lens), width).int()
    cache = PagedCache(len(lens) * width + 1, kv_heads, head_dim, _BLOCK, kind, torch.device("cpu"))
    keys = [random(n, kv_heads, head_dim) for n in lens]
    values = [random(n, kv_heads, head_dim) for n in lens]
    query = random(1, heads, sum(rows), head_dim)
    slots, new_keys, new_values, expected = [], [], [], []
    first = 0
    for r, (context, n, length) in enumerate(zip(contexts, rows, lens, strict=True)):
        where = torch.arange(length)
        blocks, offsets = table[r, where // _BLOCK].long(), where % _BLOCK
        old = where < context
        cache.keys[blocks[old], :, :, offsets[old]] = keys[r][old]
        cache.values[blocks[old], :, offsets[old]] = values[r][old]
        slots.append((blocks * _BLOCK + offsets)[~old])
        new_keys.append(keys[r][~old])
        new_values.append(values[r][~old])
        group = heads // kv_heads
        q = query[0, :, first : first + n].double()
        k = keys[r].double().repeat_interleave(group, 1).permute(1, 2, 0)
        scores = q @ k * head_dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(context, length)[:, None]
        hidden = where[None] > position
        if window:
            hidden |= where[None] <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected.append(weights @ values[r].double().repeat_interleave(group, 1).transpose(0, 1))
        first += n
    cache.to(device)
    host = HostBatch(
        np.cumsum([0, *rows], dtype=np.int32), np.array(lens, dtype=np.int32), table.numpy(),
        torch.cat(slots).numpy(),
    )  # fmt: skip
    got = paged_attention_torch(
        query.to(device),
        torch.cat(new_keys).transpose(0, 1)[None].to(device),
        torch.cat(new_values).transpose(0, 1)[None].to(device),
        cache.keys, cache.values, GatherPlan(host, _BLOCK, torch.device(device)),
        head_dim**-0.5, softcap, window,
    )  # fmt: skip
    wanted = torch.cat(expected, 1).transpose(0, 1)
    return float((got[0].cpu().double() - wanted).abs().max())


class Steps:
    """Uniform decode steps over a model: `batch` requests of `context` tokens, `rows` rows each."""

    def __init__(self, name: str, device: str, dtype: str, batch: int, context: int) -> None:
        config = resolve(name, device, dtype, None, max_num_seqs=batch)
        with random_weights():
            self.model = PagedCausalLM(
                config.model, device=torch.device(device), max_positions=1024, compile_layers="off"
            )
        self.device = torch.device(device)
        self.max_rows = 8
        self.width = -(-(context + 2 * self.max_rows) // _BLOCK)
        self.context = context
        self.batch = batch
        self.model.allocate(batch * self.width + 1, _BLOCK)
        self.tables = SlotTables(batch, self.width * _BLOCK, 0, _BLOCK)
        ids = np.arange(1, batch * self.width + 1, dtype=np.int32).reshape(batch, self.width)
        self.tables.apply(
            [SlotParams(slot, 1, slot) for slot in range(batch)],
            [BlockDelta(slot, 0, ids[slot]) for slot in range(batch)],
        )
        for slot in range(batch):
            entry = EntryRows(slot, 0, token_array(prompt(slot, context)), 1)
            self.logits(self.tables.flatten([entry], self.device))

    @torch.inference_mode()
    def logits(self, batch: FlatBatch) -> Tensor:
        return self.model.forward(batch).logits

    def batch_of(self, rows: int, batch: int | None = None) -> FlatBatch:
        tokens = token_array(prompt(3, rows))
        flat = self.tables.flatten(
            [EntryRows(s, self.context, tokens, rows) for s in range(batch or self.batch)],
            self.device,
        )
        # As far as it can be before the forward, so that a graph can be captured from that.
        return flat.over(self.model.kv)


def forward_error(name: str, device: str, dtype: str) -> float:
    """Largest logit difference between device and CPU float32, prompt and verify step."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        there, here = (Steps(name, d, t, 3, 40) for d, t in ((device, dtype), ("cpu", "float32")))
        worst = 0.0
        for rows in (1, 5, 8):
            got = there.logits(there.batch_of(rows)).cpu()
            wanted = here.logits(here.batch_of(rows))
            worst = max(worst, float((got - wanted).abs().max()))
        return worst
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


# --- speed ------------------------------------------------------------------------------------


def static_attention(batch: int, rows: int) -> Callable[..., tuple[Tensor, None]]:
    """Attention for exactly `batch` x `rows` rows whose shapes depend on nothing in the tensors,
    as a CUDA graph needs it; a stand-in until the engine has a kernel of its own for that."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None,
        scaling: float | None = None, seq_lens: Tensor | None = None,
        block_table: Tensor | None = None, slots: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert seq_lens is not None and block_table is not None and slots is not None
        cache: Any = module.paged_cache
        slots = slots.clamp(min=0)  # padding rows write to the padding block
        blocks, offsets = slots // _BLOCK, slots % _BLOCK
        cache.keys[blocks, :, :, offsets] = key[0].transpose(0, 1)
        cache.values[blocks, :, offsets] = value[0].transpose(0, 1)
        heads, dim = query.shape[1], query.shape[3]
        table = block_table.long()
        span = table.shape[1] * _BLOCK
        keys = cache.keys[table].permute(0, 2, 1, 4, 3).reshape(batch, -1, span, dim)
        values = cache.values[table].transpose(1, 2).reshape(batch, -1, span, dim)
        real = query[0, :, : batch * rows]
        q = real.transpose(0, 1).reshape(batch, rows, heads, dim).transpose(1, 2)
        steps = torch.arange(rows, device=query.device)
        position = seq_lens.long()[:, None] - rows + steps
        visible = torch.arange(span, device=query.device) <= position[:, :, None]
        out = nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible[:, None], scale=scaling, enable_gqa=True
        )
        flat = out.transpose(1, 2).reshape(1, batch * rows, heads, dim)
        return nn.functional.pad(flat, (0, 0, 0, 0, 0, query.shape[2] - batch * rows)), None

    return attend


@contextmanager
def attending(function: Callable[..., Any]) -> Iterator[None]:
    """Inside, models attend with `function`."""
    ALL_ATTENTION_FUNCTIONS.register(interface.ATTENTION_NAME, function)
    try:
        yield
    finally:
        interface.register()


def capture(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """(CUDA graph of one call, its output tensor)."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def capture_engine_forward(device: str) -> Report:
    """Whether the engine's forward, as it is, can be captured; raises what stands in the way."""
    steps = Steps(TINY, device, "float32", 2, 32)
    run = partial(steps.logits, steps.batch_of(5))
    wanted = run().clone()
    graph, out = capture(run)
    graph.replay()
    torch.cuda.synchronize()
    return {"ok": bool(torch.allclose(out, wanted, atol=1e-4))}
