"""The C attention against the torch path, and its independence of everything but the position."""

from __future__ import annotations

import pytest
import torch

from actors.model.attention import PagedCache, native_kernels, paged_attention_torch
from actors.native import build

HEAD_DIM, BLOCK = 32, 16


class Scene:
    """Random q, k, v of one long sequence, written to scattered blocks."""

    def __init__(self, length: int, heads: int, kv_heads: int) -> None:
        generator = torch.Generator().manual_seed(3)

        def rand(n: int) -> torch.Tensor:
            return torch.randn(1, n, length, HEAD_DIM, generator=generator)

        self.q, self.k, self.v = rand(heads), rand(kv_heads), rand(kv_heads)
        num_blocks = -(-length // BLOCK)
        self.table = (torch.randperm(num_blocks, generator=generator) + 1).int()[None].contiguous()
        self.cache = PagedCache(
            num_blocks + 1, kv_heads, HEAD_DIM, BLOCK, torch.float32, torch.device("cpu")
        )
        # What an earlier owner left must not matter, not even infinities.
        self.cache.keys.fill_(float("inf"))
        self.cache.values.fill_(float("nan"))
        position = torch.arange(length)
        self.slots = self.table[0, position // BLOCK].long() * BLOCK + position % BLOCK

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
            self.table, self.slots[rows], HEAD_DIM**-0.5, softcap, window, True, sinks,
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


def test_rows_with_sinks_do_not_depend_on_the_call() -> None:
    scene, sinks = Scene(700, 9, 3), torch.linspace(-3.0, 3.0, 9)
    whole = scene.attend(0, 700, 0, 0.0, sinks)
    # Alone a row's partitions are handed out to threads, in company they are not.
    for begin, end in ((0, 1), (254, 259), (511, 516), (698, 699)):
        assert torch.equal(scene.attend(begin, end, 0, 0.0, sinks), whole[begin:end])
    nothing = scene.attend(0, 700, 0, 0.0, torch.full((9,), -1e30))
    assert torch.equal(nothing, scene.attend(0, 700))


@pytest.mark.parametrize("sinks", [None, torch.linspace(-3.0, 60.0, 6)], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 40])
def test_against_torch_path(window: int, softcap: float, sinks: torch.Tensor | None) -> None:
    scene = Scene(300, 6, 2)
    ours = scene.attend(0, 300, window, softcap, sinks)
    clean = PagedCache(20, 2, HEAD_DIM, BLOCK, torch.float32, torch.device("cpu"))
    reference = paged_attention_torch(
        scene.q, scene.k, scene.v, clean.keys, clean.values,
        torch.tensor([0, 300], dtype=torch.int32), torch.tensor([300], dtype=torch.int32),
        scene.table, scene.slots, HEAD_DIM**-0.5, softcap, window, sinks,
    )[0]  # fmt: skip
    torch.testing.assert_close(ours, reference, atol=2e-6, rtol=1e-5)
    assert torch.equal(scene.cache.keys[scene.table[0, 0]], clean.keys[scene.table[0, 0]])


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
