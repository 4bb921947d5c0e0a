"""Linear layers with weights packed once, for the kernel of `actors/native/linear.c`.

Packed, a weight is kept as small as it came: float32 values that are bfloat16 ones in fact take two
bytes each, blocks of a GGUF file stay what they are (`actors.model.blocks`), and all are float32
again in registers. The kernel computes a row the same way, bit for bit,
whatever the number of rows. Without a C compiler oneDNN packs float32 weights, which is slower, and
a row's bits may depend on how many there are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from actors.model.table import PackedTable, PackedWeight, can_look_up, look_up_in
from actors.native import products

_LIB = torch.library.Library("paceline", "FRAGMENT")
# `out_features` is what the panels' shape does not show.
_LIB.define(
    "packed_linear(Tensor x, Tensor panels, Tensor? bias, SymInt out_features, int format) "
    "-> Tensor"
)


class Format(enum.IntEnum):
    """How panels hold their weights: the order of `formats` in linear.c, names as GGUF has them."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10


# Not the kernel's: a oneDNN layout.
_ONEDNN = -1
_ONEDNN_ROW_HINT = 16


def _packed_linear(
    x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, format: int
) -> Tensor:
    if format == _ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(x, panels, bias, "none", [], "")  # type: ignore[no-any-return]
    lib = products.load()
    assert lib is not None
    in_features = x.shape[-1]
    rows = x.numel() // in_features
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], out_features)
    lib.linear(
        panels.data_ptr(), format, None if bias is None else bias.data_ptr(), out_features,
        in_features, x.data_ptr(), in_features, rows, out.data_ptr(), out_features,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _packed_linear_meta(
    x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, format: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_LIB.impl("packed_linear", _packed_linear, "CPU")
_LIB.impl("packed_linear", _packed_linear, "MkldnnCPU")
_LIB.impl("packed_linear", _packed_linear_meta, "Meta")


def can_pack(weight: Tensor) -> bool:
    """Whether this weight can be packed here: on CPU, in float32."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and (products.load() is not None or hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    )


def pack(weight: Tensor) -> PackedWeight:
    """`weight`, float32 [out_features, in_features], in panels: of bfloat16 where no bit is lost.

    Raises:
        ValueError: there is no kernel here, and oneDNN cannot pack it.
    """
    out_features, in_features = weight.shape
    weight = weight.detach()
    if products.load() is None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROW_HINT)
        return PackedWeight(packed, _ONEDNN, out_features, in_features)
    format = Format.F32
    small = weight.bfloat16()
    if torch.equal(small.float(), weight):
        weight, format = small, Format.BF16
    missing = -out_features % products.PANEL
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, in_features)])
    panels = weight.view(-1, products.PANEL, in_features).transpose(1, 2).contiguous().flatten()
    return PackedWeight(panels, format, out_features, in_features)


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` (inference). The original weight is not kept.

    `in_features`, `out_features` as in `nn.Linear`. Input float32 [..., in_features].
    """

    bias: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.format = weight.format
        # An attribute, not a buffer: state dicts and casts do not know the layout.
        self.panels = weight.panels
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.paceline.packed_linear(
            x, self.panels, self.bias, self.out_features, self.format
        )
        return out

    @property
    def weight(self) -> Tensor:
        """Shape and dtype only, for modeling code that looks at them."""
        return torch.empty(self.out_features, self.in_features, device="meta")


def pack_linears(module: nn.Module) -> tuple[int, int]:
    """Replace every `nn.Linear` below `module` that can be packed.

    Returns (number packed, number left plain). A table that is tied to a packed weight takes its
    rows from that.
    """
    tables = {id(m.weight): m for m in module.modules() if can_look_up(m)}
    packed = plain = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if can_pack(child.weight):
                weight = pack(child.weight)
                setattr(parent, name, PackedLinear(weight, child.bias))
                packed += 1
                if id(child.weight) in tables:
                    look_up_in(tables[id(child.weight)], weight)
            else:
                plain += 1
    return packed, plain


def num_weights(module: nn.Module) -> int:
    """Parameters below `module`, packed ones too; what is shared counts once."""
    packed: dict[int, int] = {}
    for part in module.modules():
        if isinstance(part, PackedTable):
            packed[part.panels.data_ptr()] = part.num_embeddings * part.embedding_dim
        elif isinstance(part, (PackedLinear, _FusedSlice)):
            packed[part.panels.data_ptr()] = part.out_features * part.in_features
    return sum(p.numel() for p in module.parameters()) + sum(packed.values())


class _Fused:
    """A packed linear that several projections share. Layers call them one after the other with
    the same input, so the whole product is kept until each has had its part.

    Sameness is identity of the tensor object, which is held until all parts are served, so that no
    other can take its place. In a compiled layer this runs while it is traced only: the graph holds
    one product and its slices.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._num_served = 0

    def product(self, x: Tensor, part: _FusedSlice) -> Tensor:
        out = self._out
        if x is not self._x or out is None:
            out = torch.ops.paceline.packed_linear(
                x, part.panels, part.bias, part.out_features, part.format
            )
            self._x, self._out, self._num_served = x, out, 0
        self._num_served += 1
        if self._num_served == self._num_parts:
            self._x = self._out = None
        return out


class _FusedSlice(nn.Module):
    """Columns [begin, end) of a packed linear that several projections share."""

    def __init__(self, linear: PackedLinear, shared: _Fused, begin: int, end: int) -> None:
        super().__init__()
        self.panels, self.format = linear.panels, linear.format
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.register_buffer("bias", linear.bias, persistent=False)
        self.begin, self.end = begin, end
        self._shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.product(x, self)[..., self.begin : self.end]


# Projections of one input, by the names that transformers' modeling code uses.
_FUSIBLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(layers: Sequence[nn.Module]) -> None:
    """Make one matrix each of q, k, v and gate, up weights: of those that are packed alike, or of
    all that are not packed yet."""
    for layer in layers:
        for module in list(layer.modules()):
            for names in _FUSIBLE:
                alike: dict[object, list[str]] = {}
                for name in names:
                    linear = getattr(module, name, None)
                    if type(linear) is nn.Linear and can_pack(linear.weight):
                        alike.setdefault((None, linear.bias is None), []).append(name)
                    elif _has_whole_panels(linear):
                        alike.setdefault((linear.format, linear.bias is None), []).append(name)
                for some in alike.values():
                    if len(some) > 1:
                        _fuse(module, some)


def _has_whole_panels(linear: object) -> TypeGuard[PackedLinear]:
    return type(linear) is PackedLinear and linear.out_features % products.PANEL == 0


def _fuse(module: nn.Module, names: Sequence[str]) -> None:
    linears: list[Any] = [getattr(module, name) for name in names]
    if isinstance(linears[0], PackedLinear):
        packed = PackedWeight(
            torch.cat([m.panels for m in linears]),
            linears[0].format,
            sum(m.out_features for m in linears),
            linears[0].in_features,
        )
    else:
        packed = pack(torch.cat([m.weight.detach() for m in linears]))
    bias = None if linears[0].bias is None else torch.cat([m.bias for m in linears])
    fused, shared, begin = PackedLinear(packed, bias), _Fused(len(names)), 0
    for name, linear in zip(names, linears, strict=True):
        end = begin + linear.out_features
        setattr(module, name, _FusedSlice(fused, shared, begin, end))
        begin = end
