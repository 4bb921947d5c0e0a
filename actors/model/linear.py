"""Linear layers with weights packed once.

On CPU in float32, oneDNN packs a weight for its kernels and `mkldnn._linear_pointwise` uses it:
the ops that inductor itself emits. With a row hint of at least 4 the packed kernel computes a row
the same way, bit for bit, whatever the number of rows; plain `F.linear` does not. `ROW_HINT` was
measured for 1 to 512 rows (docs/adr). Where the ops are missing the plain linear serves.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROW_HINT = 16

_LIB = torch.library.Library("paceline", "FRAGMENT")
# `weight` is opaque to the compiler: it must neither be constant-folded nor re-laid out. `out`
# carries the number of output features, which the packed tensor's shape does not show inductor.
_LIB.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features) -> Tensor")


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _packed_linear_meta(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int
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
        # Shape and dtype only, for modeling code that looks at them.
        self.weight = weight.detach().to("meta")
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.paceline.packed_linear(x, self.packed, self.bias, self.out_features)
        return out


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
