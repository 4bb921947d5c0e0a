"""The C attention against the torch path, and its independence of everything but the position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.model.attention_op import native_kernels
from actors.model.attention_torch import GatherPlan, HostBatch, paged_attention_torch
from actors.model.kv import AttentionBatch, PagedAttention, PagedCache, PagedKV, attend
from actors.native import build

CPU = torch.device("cpu")

HEAD_DIM, BLOCK = 32, 16


class Scene:
    """Random q, k, v of one long sequence, written to scattered blocks."""

    def __init__(self, length: int, heads: int, kv_heads: int, block: int = BLOCK) -> None:
        generator = torch.Generator().manual_seed(3)

        def rand(n: int) -> torch.Tensor:
            return torch.randn(1, n, length, HEAD_DIM, generator=generator)

        self.q, self.k, self.v = rand(heads), rand(kv_heads), rand(kv_heads)
        num_blocks = -(-length // block)
        self.table = (torch.randperm(num_blocks, generator=generator) + 1).int()[None].contiguous()
        self.cache = PagedCache(
            num_blocks + 1, kv_heads, HEAD_DIM, block, torch.float32, torch.device("cpu")
        )
        # What an earlier owner left must not matter, not even infinities.
        self.cache.keys.fill_(float("inf"))
        self.cache.values.fill_(float("nan"))
        position = torch.arange(length)
        self.slots = self.table[0, position // block].long() * block + position % block

    def attend(
        self,
        begin: int,
        end: int,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = slice(begin, end)
        out: torch.Tensor = torch.ops.paceline.paged_attention(
            self.q[:, :, rows], self.k[:, :, rows], self.v[:, :, rows],
            self.cache.keys, self.cache.values,
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            self.table, self.slots[rows], HEAD_DIM**-0.5, softcap, window, True, True, sinks,
        )  # fmt: skip
        return out[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("window", [0, 40, 300])
def test_rows_do_not_depend_on_the_call(heads: int, kv_heads: int, window: int) -> None:
    scene = Scene(700, heads, kv_heads)
    assert native_kernels(scene.cache.keys) is not None, "no C compiler: the exact path is untested"
    whole = scene.attend(0, 700, window)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for begin, end in ((0, 1), (3, 8), (254, 259), (255, 256), (511, 516), (600, 700)):
                assert torch.equal(scene.attend(begin, end, window), whole[begin:end])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("block", [1, 2, 4, 12, 24, 48])
def test_rows_of_any_block_size_do_not_depend_on_the_call(block: int) -> None:
    scene = Scene(560, 4, 2, block)
    assert native_kernels(scene.cache.keys) is not None
    for window in (0, 40):
        whole = scene.attend(0, 560, window)
        for begin, end in ((0, 1), (3, 8), (254, 259), (511, 516), (530, 560)):
            assert torch.equal(scene.attend(begin, end, window), whole[begin:end])


def test_rows_with_sinks_do_not_depend_on_the_call() -> None:
    scene, sinks = Scene(700, 9, 3), torch.linspace(-3.0, 3.0, 9)
    whole = scene.attend(0, 700, 0, 0.0, sinks)
    # Alone a row's partitions are handed out to threads, in company they are not.
    for begin, end in ((0, 1), (254, 259), (511, 516), (698, 699)):
        assert torch.equal(scene.attend(begin, end, 0, 0.0, sinks), whole[begin:end])
    nothing = scene.attend(0, 700, 0, 0.0, torch.full((9,), -1e30))
    assert torch.equal(nothing, scene.attend(0, 700))


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int,
    softcap: float,
    causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, heads, head_dim] in float64 for the last n of the sequence's positions."""
    n, length = query.shape[1], keys.shape[1]
    group = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * query.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, column = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
    seen = (column <= position) if causal else torch.ones(n, length, dtype=torch.bool)
    if window:
        seen = seen & (column > position - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, n, 1)
        scores = torch.cat([scores, sink], -1)
    return (scores.softmax(-1)[..., :length] @ values).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 24)), min_size=1, max_size=4),
    heads=st.sampled_from([(6, 2), (4, 4), (8, 1)]),
    window=st.sampled_from([0, 1, 40, 290]),
    softcap=st.sampled_from([0.0, 3.0]),
    causal=st.booleans(),
    has_sinks=st.booleans(),
    block=st.sampled_from([1, 4, 12, 16, 48]),
    seed=st.integers(0, 1000),
)
def test_kernel_and_torch_path_against_dense_attention(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int,
    softcap: float,
    causal: bool,
    has_sinks: bool,
    block: int,
    seed: int,
) -> None:
    """Context goes in through `write_kv`, the new rows through the op; alone or in company a row's
    bits are the same."""
    made = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    lens = [context + rows for context, rows in requests]
    rows = [r for _, r in requests]
    width = -(-max(lens) // block)
    order = torch.randperm(len(lens) * width, generator=made) + 1
    table = order.reshape(len(lens), width).int().contiguous()
    sinks = torch.randn(num_heads, generator=made) if has_sinks else None
    layer = PagedAttention(kv_heads, HEAD_DIM, window=window, causal=causal)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=made)

    keys, values = ([new(kv_heads, n) for n in lens] for _ in "kv")
    queries = [new(num_heads, n) for n in rows]

    def where(r: int, begin: int, end: int) -> np.ndarray:
        at = np.arange(begin, end)
        return table[r].numpy()[at // block].astype(np.int64) * block + at % block

    def batch(wanted: list[int]) -> tuple[AttentionBatch, list[torch.Tensor]]:
        """The new rows of some of the requests, and a padding row."""
        slots = [where(r, lens[r] - rows[r], lens[r]) for r in wanted]
        host = HostBatch(
            np.cumsum([0, *(rows[r] for r in wanted)], dtype=np.int32),
            np.array([lens[r] for r in wanted], dtype=np.int32),
            table[wanted].numpy(),
            np.concatenate([*slots, [-1]]),
        )
        parts = (
            queries,
            *([x[:, -n:] for x, n in zip(kv, rows, strict=True)] for kv in (keys, values)),
        )
        flat = [
            torch.cat([*(part[r] for r in wanted), torch.zeros(part[0].shape[0], 1, HEAD_DIM)], 1)
            for part in parts
        ]
        return AttentionBatch.from_host(host, CPU), [x[None] for x in flat]

    def run(wanted: list[int], *, with_torch: bool) -> list[torch.Tensor]:
        kv = PagedKV([layer.geometry], torch.float32, CPU)
        kv.allocate(1 + order.numel(), block)
        cache = kv.caches[0]
        if not with_torch:  # what an earlier owner left must not matter, not even infinities
            cache.keys.fill_(float("inf"))
            cache.values.fill_(float("nan"))
        assert kv.is_exact
        for r, (context, _) in enumerate(requests):
            context_batch = AttentionBatch.from_host(
                HostBatch(*batch([r])[0].host[:3], where(r, 0, context)), CPU
            )
            layer.write(keys[r][None, :, :context], values[r][None, :, :context], context_batch)
        sent, (q, k, v) = batch(wanted)
        if with_torch:
            plan = GatherPlan(sent.host, block, CPU)
            args = (q, k, v, cache.keys, cache.values, plan, HEAD_DIM**-0.5)
            out = paged_attention_torch(*args, softcap, window, causal, sinks)
        else:
            out = attend(cache, q, k, v, sent, softcap=softcap, causal=causal, sinks=sinks)
        ends = np.cumsum([rows[r] for r in wanted])
        return [out[0, e - rows[r] : e] for r, e in zip(wanted, ends, strict=True)]

    everyone = list(range(len(lens)))
    ours, reference = run(everyone, with_torch=False), run(everyone, with_torch=True)
    law = {"window": window, "softcap": softcap, "causal": causal, "sinks": sinks}
    for r in everyone:
        expected = dense(queries[r], keys[r], values[r], **law)
        torch.testing.assert_close(ours[r].double(), expected, atol=5e-6, rtol=1e-4)
        torch.testing.assert_close(reference[r].double(), expected, atol=5e-6, rtol=1e-4)
        assert torch.equal(run([r], with_torch=False)[0], ours[r])


def test_a_layer_may_read_another_ones_cache() -> None:
    """No keys of its own: nothing is written, and the other's are seen."""
    scene = Scene(50, 4, 2)
    expected = scene.attend(0, 50)
    before = scene.cache.keys.clone()
    layer = PagedAttention(2, HEAD_DIM)
    layer.paged_cache = scene.cache
    host = HostBatch(
        np.array([0, 5], dtype=np.int32), np.array([50], dtype=np.int32), scene.table.numpy(),
        scene.slots[45:].numpy(),
    )  # fmt: skip
    plain = AttentionBatch.from_host(host, CPU)
    out = layer(scene.q[:, :, 45:], None, None, plain)
    assert torch.equal(out[0], expected[45:])
    assert torch.equal(scene.cache.keys, before)
    gathered = replace(plain, gather=GatherPlan(host, BLOCK, CPU))
    assert torch.equal(layer(scene.q[:, :, 45:], None, None, gathered), out), "the kernel is there"


def test_padding_rows_write_nothing() -> None:
    scene = Scene(32, 4, 2)
    scene.slots[20:] = -1
    scene.attend(0, 32)
    tail = scene.cache.keys[scene.table[0, 1].long(), :, :, 4:]
    assert torch.isinf(tail).all()


def test_without_a_compiler_the_torch_path_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(40, 4, 2)
    exact = scene.attend(0, 40)
    build.load_kernels.cache_clear()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    scene.cache.values.fill_(0.0)
    scene.cache.keys.fill_(0.0)
    try:
        assert native_kernels(scene.cache.keys) is None
        torch.testing.assert_close(scene.attend(0, 40), exact, atol=2e-6, rtol=1e-5)
    finally:
        build.load_kernels.cache_clear()


def test_heads_that_are_not_whole_vectors_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    build.load_kernels.cache_clear()
    assert build.load_kernels(20, BLOCK) is None
    assert "head_dim 20 is no multiple of 8" in caplog.text


def test_a_broken_compiler_is_reported_not_fatal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    build.load_kernels.cache_clear()
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    try:
        assert build.load_kernels(HEAD_DIM, BLOCK) is None
        assert "building the native attention failed" in caplog.text
    finally:
        build.load_kernels.cache_clear()
