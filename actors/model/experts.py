"""Mixture-of-experts layers whose rows do not depend on their company.

transformers' expert kernels multiply all rows of an expert at once, and its routers call the plain
linear: both give bits that depend on how many rows share the call. Here each expert's weights are
packed like any linear layer's (see `actors.model.linear`), a token's experts are summed in the
router's order, and the router's product goes through a packed weight too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from actors.model.linear import PackedLinear, can_pack, pack

EXPERTS_NAME = "paceline_packed"

_LIB = torch.library.Library("paceline", "FRAGMENT")
# One op, since which experts a batch hits is data: a compiled layer must not look inside.
_LIB.define(
    "packed_experts(Tensor x, Tensor index, Tensor weights, Tensor[] gate_up, Tensor[] down, "
    "int[] gate_up_formats, int[] down_formats, int width, int activation) -> Tensor"
)
_activations: list[Callable[[Tensor], Tensor]] = []


def _packed_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    gate_up_formats: list[int],
    down_formats: list[int],
    width: int,
    activation: int,
) -> Tensor:
    num_rows, top_k = index.shape
    act = _activations[activation]
    linear = torch.ops.paceline.packed_linear
    parts = x.new_zeros(num_rows, top_k, x.shape[-1])
    for expert in index.unique().tolist():
        if expert >= len(down):
            continue  # another rank's
        rows, place = (index == expert).nonzero(as_tuple=True)
        both = linear(x[rows], gate_up[expert], None, 2 * width, gate_up_formats[expert])
        gate, up = both.chunk(2, -1)
        out = linear(act(gate) * up, down[expert], None, x.shape[-1], down_formats[expert])
        parts[rows, place] = out * weights[rows, place, None]
    total = parts[:, 0]
    for place_in_order in range(1, top_k):
        total = total + parts[:, place_in_order]
    return total.contiguous()


def _packed_experts_meta(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_LIB.impl("packed_experts", _packed_experts, "CPU")
_LIB.impl("packed_experts", _packed_experts, "MkldnnCPU")
_LIB.impl("packed_experts", _packed_experts_meta, "Meta")


def _experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    out: Tensor = torch.ops.paceline.packed_experts(
        hidden_states,
        top_k_index,
        top_k_weights.to(hidden_states.dtype),
        [linear.panels for linear in module.packed_gate_up],
        [linear.panels for linear in module.packed_down],
        [linear.format for linear in module.packed_gate_up],
        [linear.format for linear in module.packed_down],
        module.packed_down[0].in_features,
        module.packed_activation,
    )
    return out


def pack_experts(model: nn.Module) -> int:
    """Pack every layer of stacked experts, and its router, that can be. Returns how many layers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
    count = 0
    for module in list(model.modules()):
        if not _can_pack_experts(module):
            continue
        _pack_one(module)
        count += 1
    if count:
        for module in list(model.modules()):
            if type(module).__name__.endswith("Router"):
                _pack_router(module)
            elif hasattr(module, "shared_expert_gate"):
                _run_inside(module, _RowsApart())
    return count


def _can_pack_experts(module: Any) -> bool:
    """Stacked [experts, out, in], gate above up, gated as `act_fn(gate) * up`, no biases."""
    from transformers.integrations.moe import _default_apply_gate

    return (
        getattr(module, "has_gate", False)
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and not module.has_post_expert_norm
        and type(module)._apply_gate is _default_apply_gate
        and all(can_pack(getattr(module, n)) for n in ("gate_up_proj", "down_proj"))
    )


def _pack_one(module: Any) -> None:
    for name in ("gate_up", "down"):
        stacked = module._parameters.pop(f"{name}_proj")
        packed = nn.ModuleList(PackedLinear(pack(weight), None) for weight in stacked)
        setattr(module, f"packed_{name}", packed)
    _activations.append(module.act_fn)
    module.packed_activation = len(_activations) - 1
    # transformers chooses the implementation by the layer's config, which all layers share.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = EXPERTS_NAME


def _pack_router(module: Any) -> None:
    """Send the router's product through a packed weight; the rest of its code runs as it is."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not can_pack(weight):
        return
    module.packed_router = PackedLinear(pack(weight), None)
    _run_inside(module, _RowsApart(module))


def _run_inside(module: Any, mode: TorchFunctionMode) -> None:
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return plain(module, *args, **kwargs)

    module.forward = forward


# Two of the widest vectors: what torch's elementwise loops take at a time.
_WIDE = 32


class _RowsApart(TorchFunctionMode):
    """Inside, what mixes rows is computed so that it does not.

    A linear with `router.weight` goes through `router.packed_router`. A sigmoid is taken in rows of
    whole vectors: torch treats the elements behind a buffer's last whole vectors differently, so
    that a row's result would depend on how many rows there are.
    """

    def __init__(self, router: Any = None) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        router = self._router
        # Read anew each time: while a layer is traced, its tensors are others.
        is_linear = func is nn.functional.linear and len(args) == 2
        if is_linear and router is not None and args[1] is router.weight:
            return router.packed_router(args[0])
        if func in (torch.Tensor.sigmoid, torch.sigmoid) and args[0].shape[-1] % _WIDE:
            width = args[0].shape[-1]
            wide = args[0].new_zeros(*args[0].shape[:-1], -(-width // _WIDE) * _WIDE)
            wide[..., :width] = args[0]
            return torch.sigmoid(wide)[..., :width]
        return func(*args, **(kwargs or {}))
