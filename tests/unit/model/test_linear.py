"""Packed linears: a row's bits are its own, for the long inputs of real models too."""

from __future__ import annotations

import pytest
import torch

from actors.model import linear
from actors.model.linear import PackedLinear


@pytest.mark.parametrize("in_features", [64, 576, 1536, 3072, 8192])
@pytest.mark.parametrize("out_features", [64, 576])
def test_rows_do_not_depend_on_their_number(in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(out_features, in_features, generator=generator)
    packed = PackedLinear(weight, torch.randn(out_features, generator=generator))
    x = torch.randn(130, in_features, generator=generator)
    whole = packed(x)
    torch.testing.assert_close(
        whole, torch.nn.functional.linear(x, weight, packed.bias), atol=2e-3, rtol=1e-4
    )
    for count in (1, 2, 3, 5, 8, 17, 33, 64, 129):
        assert torch.equal(packed(x[:count]), whole[:count]), count
    assert torch.equal(packed(x[None, 7:8])[0], whole[7:8]), "[1, rows, features], a middle row"


def test_few_rows_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "min_rows", lambda *_: 4)
    generator = torch.Generator().manual_seed(5)
    packed = PackedLinear(torch.randn(24, 40, generator=generator), None)
    assert packed.min_rows == 4
    x = torch.randn(1, 6, 40, generator=generator)
    for count in (1, 3, 4, 6):
        out = packed(x[:, :count])
        assert out.shape == (1, count, 24)
        torch.testing.assert_close(out, packed(x)[:, :count])


def test_only_shape_and_type_of_the_weight_remain() -> None:
    weight = PackedLinear(torch.randn(24, 40), None).weight
    assert weight.shape == (24, 40) and weight.dtype == torch.float32 and weight.is_meta
