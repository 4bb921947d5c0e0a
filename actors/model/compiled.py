"""One decoder layer compiled once, to C, and reused for every layer like it.

A layer is traced as a function of (its tensors, its inputs) with the number of rows left symbolic;
`layer_code` writes C for the graph, the machine's C compiler builds it, and each layer runs the
result with its own tensors. All layers of a step run in one call, by one team of threads.

Layers are alike when their classes, tensor shapes and plain attributes agree (the layer index
aside), so a model with sliding and full attention layers gets two functions.

Nothing is guarded: each layer is called from one place, with tensors of the same kinds and the same
constants in every step, and only the sizes that are symbolic change.
"""

from __future__ import annotations

import ctypes
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actors.errors import LoadError
from actors.model.attention_op import GEMM_ROWS
from actors.model.layer_code import LayerWriter, Unsupported
from actors.native import build, products

logger = logging.getLogger(__name__)

# Sizes of the tracing example: rows, requests and requests + 1 are numbers that are no dimension
# of a model, so that symbolic dimensions are told apart by value.
_EXAMPLE_ROWS = 29
_EXAMPLE_REQS = 37

# Up to this many rows a decode step may have; buffers for each number are kept.
_FEW_ROWS = 32

_TensorSlot = tuple[dict[str, Any], str]


# Tracing and the C compiler take two seconds together; below this many parameters a model is fast
# enough without.
_MIN_PARAMETERS = 5_000_000


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
    if products.load() is None:
        if setting == "on":
            raise LoadError(
                "compile_layers: on needs a C compiler; install gcc or clang, or use auto"
            )
        return False
    return True


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


@dataclass(frozen=True)
class _Function:
    """A compiled layer: its address, and what a call of it needs."""

    address: int
    library: ctypes.CDLL
    num_counters: int
    space: int


def _trace_and_compile(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Function:
    from torch._functorch.compile_utils import fx_graph_cse
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
            if not isinstance(out, Tensor):
                raise Unsupported("a layer that returns more than its states")
            return (out,)
        finally:
            for (owner, key), tensor in zip(slots, saved, strict=True):
                owner[key] = tensor

    # A fresh environment for each graph: sizes of one must not be tied to those of another.
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dynamic_sizes = {_EXAMPLE_ROWS, _EXAMPLE_REQS, _EXAMPLE_REQS + 1}

    def fake(tensor: Tensor, *, symbolic: bool) -> Tensor:
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
    graph.graph.eliminate_dead_code()
    code = LayerWriter(graph.graph, len(weights)).write()
    library = build.load_text("layer", code.source, "layers")
    if library is None:
        raise LoadError("the C compiler failed")
    address = ctypes.cast(library.layer, ctypes.c_void_p).value
    assert address is not None
    return _Function(address, library, code.num_counters, code.space)


@dataclass
class _Installed:
    """One layer that runs compiled. `address`: of `weights`, which are the addresses of `kept`."""

    function: _Function
    address: int
    weights: ctypes.Array[ctypes.c_void_p]
    kept: list[Tensor]


@dataclass(slots=True)
class _Call:
    """Layer `index` is to read `states` and to write `out`."""

    index: int
    states: Tensor
    out: Tensor
    batch: _Batch


_Pointers = ctypes.Array[ctypes.c_void_p]


@dataclass(slots=True)
class _Stack:
    """Layers that run in one call, an item each, as `run_layers` of linear.c takes them. `batch`:
    of the first. `most_counters`, `space`: what the one that needs most needs."""

    batch: _Batch
    layers: _Pointers
    weights: _Pointers
    ins: _Pointers
    rows: _Pointers
    outs: _Pointers
    most_counters: int
    space: int


class LayerCompiler:
    """Replaces the forward of decoder layers by compiled code, compiled on first use.

    A layer that cannot be compiled ends it for all: they run as they are, or, with `is_required`,
    LoadError is raised.

    Once a forward has shown that the decoder hands each layer what the one before returned, and
    where nobody looks at it in between, a layer's call only notes what is to be done; the last one
    runs them all. Where moreover all layers are called alike, one module takes their place.

    Args:
        layers: The decoder's own list, changed in place.
        exact: False lets many rows run eagerly, on the faster attention whose bits depend on how
            many they are.
    """

    def __init__(self, layers: nn.ModuleList, *, is_required: bool, exact: bool = True) -> None:
        self._list = layers
        self._layers = list(layers)
        self._is_required = is_required
        self._exact = exact
        self._functions: dict[Any, _Function] = {}
        self._installed: list[_Installed | None] = [None] * len(layers)
        self.is_active = True
        # By layer: whether something besides the next one reads its states.
        self._is_read = [
            bool(layer._forward_hooks) or bool(following._forward_pre_hooks)
            for layer, following in pairwise(self._layers)
        ]
        self._is_read.append(True)
        # Whether a forward has shown that the decoder itself does not.
        self._is_chain: bool | None = None
        self._is_unchained = False
        self._last: Tensor | None = None
        self._batch: _Batch | None = None
        self._num_batches = 0
        self._pending: list[_Call] = []
        self._space = torch.empty(0)
        self._between: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacks: dict[int, _Stack] = {}  # of all layers, by the rows of a decode step
        for index, layer in enumerate(self._layers):
            self._install_one(index, layer)

    def _install_one(self, index: int, layer: nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._is_eager(args[0]):
                return type(layer).forward(layer, *args, **kwargs)
            if self._installed[index] is None:
                try:
                    self._compile(index, layer, args, kwargs)
                except Exception as error:
                    self._give_up(layer, error)
                    return layer(*args, **kwargs)
            return self._run(index, args[0], args[1:], kwargs)

        layer.forward = forward

    def _is_eager(self, states: Tensor) -> bool:
        return not self._exact and states.shape[1] >= GEMM_ROWS

    def _run(
        self, index: int, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        if index == 0:
            self._pending.clear()
            self._num_batches = 0
        elif states is not self._last and not self._pending:
            self._is_unchained = True
        batch = self._batch
        if index == 0 or batch is None or not batch.is_of(args, kwargs):
            batch = self._batch = _Batch(args, kwargs)
            self._num_batches += 1
        waits = self._is_chain is True and not self._is_read[index]
        out = self._states_between(states)[index % 2] if waits else torch.empty_like(states)
        self._pending.append(_Call(index, states, out, batch))
        if not waits:
            self._run_pending()
        self._last = out
        if index == len(self._layers) - 1 and self._is_chain is None:
            self._is_chain = not self._is_unchained
        return out

    def settle(self) -> None:
        """Between two forwards: where the last one has shown that it may, let one module run all
        layers."""
        if self._is_chain and self._num_batches == 1 and not any(self._is_read[:-1]):
            self._is_chain = False  # nothing is left to learn
            del self._list[1:]
            self._list[0] = _AllLayers(self, self._layers)

    def run_all(self, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """All layers over `states`; the other arguments are as each of them gets."""
        if self._is_eager(states):
            for layer in self._layers:
                states = type(layer).forward(layer, states, *args, **kwargs)
            return states
        num_rows = states.shape[1]
        stack = self._stacks.get(num_rows)
        if stack is None:
            stack = self._stack(states, _Batch(args, kwargs))
            if num_rows <= _FEW_ROWS:
                self._stacks[num_rows] = stack
        else:
            stack.batch.take(args, kwargs)
        out = torch.empty_like(states)
        stack.ins[0], stack.outs[-1] = states.data_ptr(), out.data_ptr()
        self._run_stack(stack, num_rows)
        return out

    def _stack(self, states: Tensor, batch: _Batch) -> _Stack:
        """All layers over states of this shape, each reading what the one before wrote."""
        between = self._states_between(states)
        outs = [between[index % 2] for index in range(len(self._layers))]
        calls = [
            _Call(index, before, out, batch)
            for index, (before, out) in enumerate(zip([states, *outs], outs, strict=False))
        ]
        return self._stack_of(calls)

    def _states_between(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Where a layer's states lie until the next one has read them, by turns."""
        num_rows = states.shape[1]
        if num_rows not in self._between:
            # Those of many rows are kept for this step only.
            self._between = {n: p for n, p in self._between.items() if n <= _FEW_ROWS}
            self._between[num_rows] = (torch.empty_like(states), torch.empty_like(states))
        return self._between[num_rows]

    def _run_pending(self) -> None:
        calls, self._pending = self._pending, []
        self._run_stack(self._stack_of(calls), calls[0].states.shape[1])

    def _stack_of(self, calls: list[_Call]) -> _Stack:
        count = len(calls)
        layers, weights, ins, rows, outs = ((ctypes.c_void_p * count)() for _ in range(5))
        most_counters = space = 0
        for i, call in enumerate(calls):
            installed = self._installed[call.index]
            assert installed is not None
            layers[i] = installed.function.address
            weights[i] = installed.address
            ins[i], outs[i] = call.states.data_ptr(), call.out.data_ptr()
            rows[i] = call.batch.address
            most_counters = max(most_counters, installed.function.num_counters)
            space = max(space, installed.function.space)
        return _Stack(calls[0].batch, layers, weights, ins, rows, outs, most_counters, space)

    def _run_stack(self, stack: _Stack, num_rows: int) -> None:
        lib = products.load()
        assert lib is not None
        if len(self._space) < num_rows * stack.space:
            self._space = torch.empty(num_rows * stack.space)
        count, batch = len(stack.layers), stack.batch
        counters = (ctypes.c_int64 * (count * stack.most_counters))()
        failed = lib.run_layers(
            count, stack.layers, stack.weights, stack.ins, stack.rows, stack.outs, counters,
            stack.most_counters, num_rows, batch.num_reqs, batch.max_blocks,
            self._space.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("paged attention: no scratch memory")

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

    def _compile(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensors, consts, spec = _split(args, kwargs)
        # From here on the quick walk decides the order of inputs: it must agree with pytree's.
        fast = _row_tensors(args, kwargs)
        assert len(tensors) == len(fast) and all(a is b for a, b in zip(tensors, fast, strict=True))
        key = (_plain_attributes(layer), spec, tuple(consts))
        if key not in self._functions:
            self._functions[key] = _trace_and_compile(layer, *_resize_example(args, kwargs))
        # Looked up once: nothing replaces a tensor of a layer that serves, KV tensors included
        # (`allocate` comes before). The module itself is still what is called, so hooks on it run.
        kept = [owner[key].contiguous() for owner, key in _tensor_slots(layer)]
        weights = (ctypes.c_void_p * len(kept))(*(x.data_ptr() for x in kept))
        self._installed[index] = _Installed(
            self._functions[key], ctypes.addressof(weights), weights, kept
        )


class _AllLayers(nn.Module):
    """Stands in a decoder's list for all of its layers."""

    def __init__(self, compiler: LayerCompiler, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._compiler = compiler

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._compiler.run_all(states, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What decoders ask of a layer: its type, which is the same for all."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layers"][0], name)  # type: ignore[index]


class _Batch:
    """What a step's layers are called with besides their states; layers with the same share it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pointers = (ctypes.c_void_p * len(_row_tensors(args, kwargs)))()
        self.address = ctypes.addressof(self._pointers)
        self.take(args, kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Be what layers are called with now; `address` stays."""
        self._args, self._kwargs = args, kwargs
        self._kept = [x.contiguous() for x in _row_tensors(args, kwargs)]
        self._pointers[:] = [x.data_ptr() for x in self._kept]
        self.num_reqs: int = kwargs["seq_lens"].shape[0]
        self.max_blocks: int = kwargs["block_table"].shape[1]

    def is_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == len(self._args)
            and all(map(operator.is_, args, self._args))
            and kwargs.keys() == self._kwargs.keys()
            and all(map(operator.is_, kwargs.values(), self._kwargs.values()))
        )


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
