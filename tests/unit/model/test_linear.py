"""Packed linears: a row's bits are its own, for the long inputs of real models too."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

from actors.model import huge_pages
from actors.model.linear import Format, PackedLinear, pack, pack_linears
from actors.native import products


@pytest.mark.parametrize("in_features", [64, 576, 1536, 3072, 8192])
@pytest.mark.parametrize("out_features", [64, 570])
def test_rows_do_not_depend_on_their_number(in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(out_features, in_features, generator=generator)
    packed = PackedLinear(pack(weight), torch.randn(out_features, generator=generator))
    x = torch.randn(130, in_features, generator=generator)
    whole = packed(x)
    torch.testing.assert_close(
        whole, torch.nn.functional.linear(x, weight, packed.bias), atol=2e-3, rtol=1e-4
    )
    for count in (1, 2, 3, 5, 8, 17, 33, 64, 129):
        assert torch.equal(packed(x[:count]), whole[:count]), count
    assert torch.equal(packed(x[None, 7:8])[0], whole[7:8]), "[1, rows, features], a middle row"


def test_only_shape_and_type_of_the_weight_remain() -> None:
    weight = PackedLinear(pack(torch.randn(24, 40)), None).weight
    assert weight.shape == (24, 40) and weight.dtype == torch.float32 and weight.is_meta


def test_weights_that_came_as_bfloat16_take_two_bytes_and_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(90, 300, generator=generator).bfloat16().float()
    packed, x = pack(weight), torch.randn(40, 300, generator=generator)
    assert packed.format == Format.BF16 and packed.panels.element_size() == 2
    other = weight.clone()
    other[3, 5] += 1e-6  # no bfloat16
    plain = pack(other)
    assert plain.format == Format.F32
    for rows in (1, 2, 3, 4, 6, 7, 40):
        ours = PackedLinear(packed, None)(x[:rows])
        theirs = PackedLinear(plain, None)(x[:rows])
        same = [i for i in range(90) if i != 3]
        assert torch.equal(ours[:, same], theirs[:, same]), rows


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages here")
def test_panels_that_move_stay_what_they_are_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.table, model.head = nn.Embedding(90, 64), nn.Linear(64, 90, bias=False)
    model.head.weight = model.table.weight
    model.others = nn.ModuleList(nn.Linear(64, 40) for _ in range(3))
    pack_linears(model)
    x, ids = torch.randn(3, 64), torch.tensor([4, 89])
    before = [model.head(x), model.table(ids), *(linear(x) for linear in model.others)]
    old = model.head.panels.data_ptr()
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 30_000)  # of several chunks
    huge_pages.move_panels(model)
    after = [model.head(x), model.table(ids), *(linear(x) for linear in model.others)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert model.head.panels.data_ptr() != old
    if products.load() is not None:
        assert model.table.panels.data_ptr() == model.head.panels.data_ptr()
