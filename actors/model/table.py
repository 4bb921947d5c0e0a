"""Embedding tables that are kept packed, often as the head's own weight; look-ups make the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from actors.native import products

_LIB = torch.library.Library("paceline", "FRAGMENT")
_LIB.define(
    "packed_rows(Tensor ids, Tensor panels, int num_rows, int in_features, int format) -> Tensor"
)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features] in panels of 16 outputs.

    `panels`: one-dimensional, of any dtype; what lies in it is the format's business.
    """

    panels: Tensor
    format: int
    out_features: int
    in_features: int


def _packed_rows(
    ids: Tensor, panels: Tensor, num_rows: int, in_features: int, format: int
) -> Tensor:
    lib = products.load()
    assert lib is not None
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, in_features)
    wrong = lib.look_up(
        panels.data_ptr(), format, num_rows, in_features, ids.data_ptr(), ids.numel(),
        out.data_ptr(),
    )  # fmt: skip
    if wrong:
        raise IndexError(f"token ids {ids.flatten().tolist()[:8]} are not all below {num_rows}")
    return out


def _packed_rows_meta(
    ids: Tensor, panels: Tensor, num_rows: int, in_features: int, format: int
) -> Tensor:
    return ids.new_empty(*ids.shape, in_features, dtype=torch.float32)


_LIB.impl("packed_rows", _packed_rows, "CPU")
_LIB.impl("packed_rows", _packed_rows_meta, "Meta")


class PackedTable(nn.Embedding):
    """In place of `nn.Embedding`, below what a class makes of it. Ids int64, rows float32."""

    panels: Tensor
    format: int

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = torch.ops.paceline.packed_rows(
            ids, self.panels, self.num_embeddings, self.embedding_dim, self.format
        )
        return out

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Shape and dtype only, for modeling code that looks at them."""
        return torch.empty(self.num_embeddings, self.embedding_dim, device="meta")


def can_look_up(table: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether its rows can come from a packed weight: all that this embedding does with its table
    is done by `nn.Embedding`, which its own `forward`, if it has one, calls by `super`."""
    own = type(table).forward
    return (
        isinstance(table, nn.Embedding)
        and products.load() is not None
        and (own is nn.Embedding.forward or "__class__" in own.__code__.co_freevars)
    )


def look_up_in(table: nn.Embedding, weight: PackedWeight) -> None:
    """Let `table` take its rows from `weight`, and forget its own."""
    kind = type(table)
    del table._parameters["weight"]
    if kind is nn.Embedding:
        table.__class__ = PackedTable
    else:
        # Between the class and nn.Embedding: what its forward calls as super is PackedTable's.
        table.__class__ = type(f"Packed{kind.__name__}", (kind, PackedTable), {})
    assert isinstance(table, PackedTable)
    table.panels, table.format = weight.panels, weight.format
