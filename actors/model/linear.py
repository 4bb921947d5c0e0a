"""Linear layers with weights packed once.

On CPU in float32, oneDNN packs a weight for its kernels and `mkldnn._linear_pointwise` uses it:
the ops that inductor itself emits. With a row hint of at least 4 the packed kernel computes a row
the same way, bit for bit, whatever the number of rows; plain `F.linear` does not (docs/adr/0012).
On some machines a single row of a long input still takes another path: what the smallest number of
rows is from which on nothing changes is measured for each shape, and calls are filled up to it.
Where the ops are missing the plain linear serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROW_HINT = 16

_LIB = torch.library.Library("paceline", "FRAGMENT")
# `weight` is opaque to the compiler: it must neither be constant-folded nor re-laid out. `out`
# carries the number of output features, which the packed tensor's shape does not show inductor.
# With fewer than `min_rows` rows, rows of zeros are computed beside them.
_LIB.define(
    "packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, int min_rows=1) "
    "-> Tensor"
)


def _packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, min_rows: int = 1
) -> Tensor:
    if min_rows > 1:
        num_rows = x.numel() // x.shape[-1]
        if num_rows < min_rows:
            wide = x.new_zeros(min_rows, x.shape[-1])
            wide[:num_rows] = x.reshape(num_rows, x.shape[-1])
            out = _multiply(wide, weight, bias)[:num_rows]
            return out.reshape(*x.shape[:-1], out_features)
    return _multiply(x, weight, bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


# Around the widths of vectors and of the kernel's tiles, where it changes its path.
_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48)
_min_rows: dict[tuple[int, int, int], int] = {}


def min_rows(packed: Tensor, in_features: int, out_features: int) -> int:
    """The least number of rows from which on a row's bits do not depend on how many there are.

    Measured once for each shape and number of threads. 16 where no number was found: whoever needs
    to know checks the whole model (`PagedCausalLM.warm_up`).
    """
    key = (in_features, out_features, torch.get_num_threads())
    if key not in _min_rows:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, in_features, generator=generator)
        # More rows than are ever filled up to: the path that larger batches take.
        whole = _multiply(x, packed)
        differs = [n for n in _PROBED_ROWS if not torch.equal(_multiply(x[:n], packed), whole[:n])]
        after = [n for n in _PROBED_ROWS if n > max(differs, default=0)]
        _min_rows[key] = min(after[0] if after else 16, 16)
        if differs:
            logger.info(
                "linear layers of %d inputs and %d outputs are filled up to %d rows",
                in_features, out_features, _min_rows[key],
            )  # fmt: skip
    return _min_rows[key]


def _packed_linear_meta(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, min_rows: int = 1
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_LIB.impl("packed_linear", _packed_linear, "CPU")
_LIB.impl("packed_linear", _packed_linear, "MkldnnCPU")
_LIB.impl("packed_linear", _packed_linear_meta, "Meta")


def can_pack(weight: Tensor) -> bool:
    """Whether this weight can be packed here: CPU, float32, oneDNN ops present."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` (inference). The original weight is not kept.

    `in_features`, `out_features` as in `nn.Linear`. Input [..., in_features], same dtype.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROW_HINT)
        # An attribute, not a buffer: state dicts and device moves cannot handle the opaque layout.
        self.packed = packed
        self.min_rows = min_rows(packed, self.in_features, self.out_features)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.paceline.packed_linear(
            x, self.packed, self.bias, self.out_features, self.min_rows
        )
        return out

    @property
    def weight(self) -> Tensor:
        """Shape and dtype only, for modeling code that looks at them."""
        return torch.empty(self.out_features, self.in_features, device="meta")


def pack_linears(module: nn.Module) -> tuple[int, int]:
    """Replace every `nn.Linear` below `module` that can be packed.

    Returns (number packed, number left plain). Weights shared by two layers are packed once each:
    a tied lm_head keeps the embedding table and gains a packed copy.
    """
    packed = plain = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                packed += 1
            else:
                plain += 1
    return packed, plain


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
                x, part.packed, part.bias, part.out_features, part.min_rows
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
        self.packed = linear.packed
        self.out_features = linear.out_features
        self.register_buffer("bias", linear.bias, persistent=False)
        self.min_rows = linear.min_rows
        self.begin, self.end = begin, end
        self._shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.product(x, self)[..., self.begin : self.end]


# Projections of one input, by the names that transformers' modeling code uses.
_FUSIBLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(layers: Sequence[nn.Module]) -> None:
    """Pack q, k, v and gate, up weights as one matrix each."""
    for layer in layers:
        for module in list(layer.modules()):
            for names in _FUSIBLE:
                linears = [getattr(module, n, None) for n in names]
                if not all(type(m) is nn.Linear and can_pack(m.weight) for m in linears):
                    continue
                biases = [m.bias for m in linears if m.bias is not None]  # type: ignore[union-attr]
                if biases and len(biases) != len(linears):
                    continue
                weight = torch.cat([m.weight.detach() for m in linears])  # type: ignore[union-attr]
                fused = PackedLinear(weight, torch.cat(biases) if biases else None)
                shared = _Fused(len(names))
                begin = 0
                for name, linear in zip(names, linears, strict=True):
                    end = begin + linear.out_features  # type: ignore[union-attr]
                    setattr(module, name, _FusedSlice(fused, shared, begin, end))
                    begin = end
