"""GGUF blocks kept as they came give the bits of the weights that gguf-py makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.model.blocks import format_of, pack_blocks
from actors.model.linear import Format, PackedLinear
from actors.model.table import PackedTable, PackedWeight, look_up_in
from actors.native import products

gguf: Any = pytest.importorskip("gguf")

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
# Where a block has its float16 numbers; the rest may be any bits.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "F16": (0,),
}  # fmt: skip


def random_rows(kind: str, out_features: int, in_features: int, seed: int = 0) -> Any:
    """Rows of blocks of any bits, scales of any sign, a few of them subnormal: uint8."""
    made, number = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        return gguf.quantize(made.standard_normal((out_features, in_features), np.float32), number)
    inputs, size = gguf.GGML_QUANT_SIZES[number]
    rows = made.integers(0, 256, (out_features, in_features // inputs, size), np.uint8)
    for begin in HALVES[kind]:
        numbers = made.standard_normal((*rows.shape[:2], 1)) * 0.01
        numbers[made.random(numbers.shape) < 0.1] = 1e-6
        rows[..., begin : begin + 2] = numbers.astype(np.float16).view(np.uint8)
    return rows.reshape(out_features, -1)


def both(
    kind: str, out_features: int, in_features: int
) -> tuple[PackedWeight, PackedWeight, torch.Tensor]:
    """Packed as it came, packed as float32, and the float32 weight."""
    rows = random_rows(kind, out_features, in_features)
    plain = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(out_features, -1)
    format = format_of(kind)
    assert format is not None
    weight = torch.from_numpy(np.ascontiguousarray(plain))
    filled = torch.cat([weight, torch.zeros(-out_features % products.PANEL, in_features)])
    panels = filled.view(-1, products.PANEL, in_features).transpose(1, 2).contiguous().flatten()
    return (
        pack_blocks(rows, format, in_features),
        PackedWeight(panels, Format.F32, out_features, in_features),
        weight,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_weight(kind: str) -> None:
    # The second: neither whole panels nor whole chunks.
    for out_features, in_features in ((64, 512), (90, 768)):
        packed, plain, weight = both(kind, out_features, in_features)
        assert packed.panels.numel() == random_rows(kind, 16, in_features).size * (
            -(-out_features // 16)
        ), "as large as in the file"
        bias = torch.randn(out_features)
        ours, theirs = PackedLinear(packed, bias), PackedLinear(plain, bias)
        x = torch.randn(40, in_features)
        torch.testing.assert_close(
            theirs(x), torch.nn.functional.linear(x, weight, bias), atol=1e-3, rtol=1e-4
        )
        for rows in (1, 2, 3, 4, 5, 6, 7, 40):
            assert torch.equal(ours(x[:rows]), theirs(x[:rows])), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_looked_up_are_the_dequantised_ones(kind: str) -> None:
    packed, _, weight = both(kind, 90, 768)
    table = torch.nn.Embedding(90, 768, device="meta")
    look_up_in(table, packed)
    ids = torch.tensor([[0, 17, 89], [16, 15, 3]])
    found = table(ids)
    # As integers, so that zeros of another sign are seen.
    assert torch.equal(found.view(torch.int32), weight[ids].view(torch.int32))
    with pytest.raises(IndexError, match="90"):
        table(torch.tensor([90]))


class Scaled(torch.nn.Embedding):
    """As Gemma has it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.tensor(3.0).to(self.weight.dtype)


def test_what_a_class_does_with_its_rows_stays() -> None:
    packed, _, weight = both("Q8_0", 90, 64)
    table = Scaled(90, 64, device="meta")
    look_up_in(table, packed)
    assert isinstance(table, (Scaled, PackedTable)) and table.weight.is_meta
    assert torch.equal(table(torch.tensor([3, 4])), weight[3:5] * 3)
    assert not list(table.parameters()), "the table is held once"
