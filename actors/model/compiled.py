"""One decoder layer compiled once and reused for every layer like it.

`torch.compile` on each layer module would work, but its guards cost 0.3 ms a layer and step on a
2-core machine. Instead a layer is traced as a function of (its tensors, its inputs), the graph is
compiled by inductor with the number of rows left symbolic, and each layer calls the result with
its own tensors. Nothing is guarded: the runner calls with the same kinds of inputs every step.

Layers are alike when their classes, tensor shapes and plain attributes agree (the layer index
aside), so a model with sliding and full attention layers gets two graphs.

What makes leaving out the guards safe: each layer is called from one place, with tensors of the
same kinds and the same constants in every step, and only the sizes that are symbolic change. What
reads anything else of the world (the batch's lengths, the routing of experts) is an op that the
graph holds as a call.
"""

from __future__ import annotations

import logging
import operator
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actors.errors import LoadError

logger = logging.getLogger(__name__)

# Sizes of the tracing example: rows, requests and requests + 1 are numbers that are no dimension
# of a model, so that symbolic dimensions are told apart by value.
_EXAMPLE_ROWS = 29
_EXAMPLE_REQS = 37

_TensorSlot = tuple[dict[str, Any], str]


# Compiling takes seconds; below this many parameters a model is fast enough without.
_MIN_PARAMETERS = 30_000_000


def chooses_compiled(
    setting: Literal["auto", "on", "off"],
    num_parameters: int,
    device: torch.device,
    *,
    talks: bool,
) -> bool:
    """Whether layers are to run compiled. `talks`: they exchange something with other ranks.

    Raises:
        LoadError: `setting` is "on", and they cannot.
    """
    if setting == "off" or (setting == "auto" and num_parameters < _MIN_PARAMETERS):
        return False
    if talks:
        if setting == "on":
            raise LoadError("compile_layers: on is for one rank; use auto or off")
        logger.info("layers run eagerly: they wait for other ranks inside")
        return False
    if device.type != "cpu":
        if setting == "on":
            raise LoadError("compile_layers: on is for CPU; on CUDA use auto or off")
        return False
    reason = can_compile()
    if reason is None:
        return True
    if setting == "on":
        raise LoadError(f"compile_layers: on cannot be had, {reason}; use auto or off")
    logger.warning("layers run eagerly: %s", reason)
    return False


def can_compile() -> str | None:
    """Why layers cannot be compiled here, or None when they can."""
    if not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")):
        return "no C++ compiler on this machine"
    return None


def _tensor_slots(layer: nn.Module) -> list[_TensorSlot]:
    """Where a layer keeps its tensors, in a fixed order: parameters, buffers, packed weights.

    Layers of one kind list theirs in the same order, so a graph traced with one layer's tensors
    can be called with another's. The KV tensors are among them, as buffers of `paged_cache`.
    """
    slots: list[_TensorSlot] = []
    for module in layer.modules():
        slots += [(module._parameters, k) for k, v in module._parameters.items() if v is not None]
        slots += [(module._buffers, k) for k, v in module._buffers.items() if v is not None]
        slots += [(module.__dict__, k) for k, v in module.__dict__.items() if isinstance(v, Tensor)]
    return slots


def _plain_attributes(layer: nn.Module) -> tuple[Any, ...]:
    """Everything besides tensors that the layer's code could read as a constant."""
    found: list[Any] = [type(layer)]
    for name, module in layer.named_modules():
        found.append((name, type(module)))
        for key, value in sorted(module.__dict__.items()):
            if key != "layer_idx" and isinstance(value, (int, float, bool, str, type(None))):
                found.append((name, key, value))
        for key, tensor in sorted({**module._parameters, **module._buffers}.items()):
            found.append(
                (name, key, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
            )
    return tuple(found)


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    consts = [None if isinstance(x, Tensor) else x for x in leaves]
    return tensors, consts, spec


def _join(
    tensors: Sequence[Tensor], consts: list[Any], is_tensor: list[bool], spec: pytree.TreeSpec
) -> Any:
    it = iter(tensors)
    leaves = [next(it) if t else c for c, t in zip(consts, is_tensor, strict=True)]
    return pytree.tree_unflatten(leaves, spec)


def _trace_and_compile(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    import torch._inductor.config as inductor_config
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    slots = _tensor_slots(layer)
    weights = [owner[key] for owner, key in slots]
    inputs, consts, spec = _split(args, kwargs)
    is_tensor = [isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))]

    def flat(*tensors: Tensor) -> Any:
        # The layer's own code reads its tensors as attributes: while it is traced, the attributes
        # hold the graph's inputs. The class's forward, since the instance's is the compiled one.
        saved = [owner[key] for owner, key in slots]
        for (owner, key), tensor in zip(slots, tensors, strict=False):
            owner[key] = tensor
        try:
            call_args, call_kwargs = _join(tensors[len(slots) :], consts, is_tensor, spec)
            out = type(layer).forward(layer, *call_args, **call_kwargs)
            return out if isinstance(out, tuple) else (out,)
        finally:
            for (owner, key), tensor in zip(slots, saved, strict=True):
                owner[key] = tensor

    # A fresh environment for each graph: sizes of one must not be tied to those of another.
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dynamic_sizes = {_EXAMPLE_ROWS, _EXAMPLE_REQS, _EXAMPLE_REQS + 1}

    def fake(tensor: Tensor, *, symbolic: bool) -> Tensor:
        if tensor.is_mkldnn:  # an opaque layout; only ever handed to the packed linear op
            return tensor
        if not symbolic:
            # Weights are constants in shape, also where a dimension happens to be 29 or 37.
            return fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        dims = [
            DimDynamic.DYNAMIC if n in dynamic_sizes else DimDynamic.STATIC for n in tensor.shape
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        return fake_mode.from_tensor(tensor, symbolic_context=context)

    fakes = [fake(w, symbolic=False) for w in weights] + [fake(x, symbolic=True) for x in inputs]
    with fake_mode:
        graph = make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
    # What a layer computes twice from the same input is computed once.
    graph.graph = fx_graph_cse(graph.graph)
    graph.recompile()
    # Inductor reads the symbolic sizes from the traced placeholders; real tensors would fix them.
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    # Strides are asserted against the example's otherwise, on every call of every layer.
    with inductor_config.patch(size_asserts=False, alignment_asserts=False):
        compiled: Any = compile_fx(graph, values)
    return cast("Callable[..., Any]", compiled)


class LayerCompiler:
    """Replaces the forward of decoder layers by compiled graphs, compiled on first use.

    A layer that cannot be compiled ends it for all: they run as they are, or, with `is_required`,
    LoadError is raised.
    """

    def __init__(self, layers: Sequence[nn.Module], *, is_required: bool) -> None:
        self._layers = layers
        self._is_required = is_required
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self.is_active = True
        for layer in layers:
            self._install_one(layer)

    def _install_one(self, layer: nn.Module) -> None:
        kind = _plain_attributes(layer)
        # Looked up once: nothing replaces a tensor of a layer that serves, KV tensors included
        # (`allocate` comes before). The module itself is still what is called, so hooks on it run.
        weights = [owner[key] for owner, key in _tensor_slots(layer)]
        # A runner calls its layers the same way every step: the graph is looked up once a layer.
        graph: Callable[..., Any] | None = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal graph
            if graph is None:
                try:
                    graph = self._graph(kind, layer, args, kwargs)
                except Exception as error:
                    self._give_up(layer, error)
                    return layer(*args, **kwargs)
            return graph(*weights, *_row_tensors(args, kwargs))[0]

        layer.forward = forward

    def _give_up(self, layer: nn.Module, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        reason = f"{type(layer).__name__}: {type(error).__name__}: {lines[0] if lines else ''}"
        if self._is_required:
            raise LoadError(
                f"compile_layers: on cannot be had for {reason}; use auto or off"
            ) from error
        logger.warning("layers run eagerly: %s", reason)
        self.is_active = False
        for installed in self._layers:
            installed.__dict__.pop("forward", None)

    def _graph(
        self, kind: Any, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        tensors, consts, spec = _split(args, kwargs)
        # From here on the quick walk decides the order of inputs: it must agree with pytree's.
        fast = _row_tensors(args, kwargs)
        assert len(tensors) == len(fast) and all(map(operator.is_, tensors, fast))
        key = (kind, spec, tuple(consts))
        if key not in self._graphs:
            self._graphs[key] = _trace_and_compile(layer, *_resize_example(args, kwargs))
        return self._graphs[key]


def _row_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among a layer's arguments, in pytree order, without pytree's cost."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [x for x in value if isinstance(x, Tensor)]
    return found


def _resize_example(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs like these, with the sizes of the tracing example.

    The first real call may have one row or one request, and a dimension of size 1 would be taken
    for a constant. Values do not matter: nothing in a layer looks at them while it is traced.

    Row tensors are [1, T, ...] or [T]; the rest is known by name.
    """

    def resize(name: str, x: Tensor) -> Tensor:
        if name == "query_start":
            return x.new_zeros(_EXAMPLE_REQS + 1)
        if name == "seq_lens":
            return x.new_zeros(_EXAMPLE_REQS)
        if name == "block_table":
            return x.new_zeros(_EXAMPLE_REQS, x.shape[1])
        if x.dim() == 1:
            return x.new_zeros(_EXAMPLE_ROWS)
        return x.new_zeros(x.shape[0], _EXAMPLE_ROWS, *x.shape[2:])

    def walk(name: str, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(walk(name, y) for y in x)
        return resize(name, x) if isinstance(x, Tensor) else x

    return tuple(walk("", a) for a in args), {k: walk(k, v) for k, v in kwargs.items()}
