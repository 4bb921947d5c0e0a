"""Weights of GGUF files as they came: block types that the kernel of `linear.c` reads itself."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from actors.model.linear import Format
from actors.model.table import PackedWeight
from actors.native.products import PANEL

Bytes = npt.NDArray[np.uint8]


class _Block(NamedTuple):
    """`inputs` of one row in so many bytes: in order, fields of `count` units of `size` bytes."""

    inputs: int
    fields: tuple[tuple[int, int], ...]


_FIFTH_BITS: Final = (32, 0)  # a field of single bits

_BLOCKS: Final = {
    Format.BF16: _Block(1, ((1, 2),)),
    Format.F16: _Block(1, ((1, 2),)),
    Format.Q8_0: _Block(32, ((1, 2), (32, 1))),
    Format.Q4_0: _Block(32, ((1, 2), (16, 1))),
    Format.Q4_1: _Block(32, ((2, 2), (16, 1))),
    Format.Q5_0: _Block(32, ((1, 2), _FIFTH_BITS, (16, 1))),
    Format.Q5_1: _Block(32, ((2, 2), _FIFTH_BITS, (16, 1))),
    Format.Q4_K: _Block(256, ((2, 2), (140, 1))),
    Format.Q5_K: _Block(256, ((2, 2), (172, 1))),
    Format.Q6_K: _Block(256, ((208, 1), (1, 2))),
}


def format_of(kind: str) -> Format | None:
    """The format that keeps blocks of this type (a name of `gguf.GGMLQuantizationType`) as they
    are; None: there is none, or nothing is won by it."""
    found = Format.__members__.get(kind)
    return found if found in _BLOCKS else None


def pack_blocks(rows: Bytes, format: Format, in_features: int) -> PackedWeight:
    """A weight [out_features, in_features] whose rows are given as the file has them, in bytes.

    The layout is described in actors/native/quantised.h.
    """
    block, (out_features, row_bytes) = _BLOCKS[format], rows.shape
    num_blocks = in_features // block.inputs
    missing = -out_features % PANEL
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, row_bytes), np.uint8)])
    blocks = rows.reshape(-1, PANEL, num_blocks, row_bytes // num_blocks)
    panels, begin = np.empty((len(blocks), num_blocks, blocks.shape[-1] * PANEL), np.uint8), 0
    for field in block.fields:
        end = begin + (4 if field == _FIFTH_BITS else field[0] * field[1])
        part = blocks[..., begin:end]
        if field == _FIFTH_BITS:
            turned = _packed_bits(part)
        else:
            turned = part.reshape(*part.shape[:3], *field).transpose(0, 2, 3, 1, 4)
        panels[..., begin * PANEL : end * PANEL] = turned.reshape(*panels.shape[:2], -1)
        begin = end
    return PackedWeight(torch.from_numpy(panels).flatten(), format, out_features, in_features)


def _packed_bits(fifth: Bytes) -> Bytes:
    """Fifth bits of 32 inputs, [panels, outputs, blocks, 4], in an order that lets the kernel make
    64 bytes at a time: bit b of a byte is of inputs 2 b and 2 b + 1 of the first 16 inputs, then of
    the others; in between, the outputs."""
    bits = np.unpackbits(fifth, axis=-1, bitorder="little").reshape(*fifth.shape[:3], 2, 8, 2)
    return np.packbits(bits.transpose(0, 2, 3, 5, 1, 4), axis=-1, bitorder="little")
