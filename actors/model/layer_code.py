"""C code of one decoder layer, from the graph that tracing its forward gave.

Everything but products and attention is done row by row: an operator's result is an expression of
(row, place in the row) (`layer_values`, `layer_operators`), and loops over it are written where
somebody needs it in memory. That is where it is used twice, reduced, multiplied with a weight,
attended with, or handed out.

What the generator cannot say raises `Unsupported`; the layer then runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from actors.model.layer_operators import ELEMENTWISE, RULES
from actors.model.layer_values import (
    ZERO,
    Place,
    Shape,
    Split,
    Unsupported,
    Value,
    args_of,
    broadcast,
    fixed_sizes,
    linear_code,
    number_code,
    shape_of,
    strides_of,
    sum_code,
    with_rows,
)


@dataclass
class Space:
    """A buffer of `width` floats a row, alive from step `first` to step `last`."""

    name: str
    width: int
    first: int
    last: int


@dataclass
class LayerCode:
    """`source` defines `layer`; `num_counters` counters and `space` floats a row are its needs."""

    source: str
    num_counters: int
    space: int


@dataclass
class _Writer:
    """Code so far, as steps between which all threads meet."""

    lines: list[str] = field(default_factory=list)
    spaces: dict[str, Space] = field(default_factory=dict)
    step: int = 0
    num_counters: int = 0
    _in_rows: bool = False

    def in_rows(self, line: str) -> None:
        if not self._in_rows:
            self.lines.append("ROWS(t) {")
            self._in_rows = True
        self.lines.append(line)

    def meet(self) -> None:
        """End the loop over rows; what it wrote can be read by all from here on."""
        if self._in_rows:
            self.lines += ["}", "meet(member);"]
            self._in_rows = False
            self.step += 1

    def together(self, line: str) -> None:
        """What the threads share out among them."""
        self.meet()
        self.lines += [line, "meet(member);"]
        self.step += 1

    def new_space(self, width: int) -> Space:
        space = Space(f"b{len(self.spaces)}", width, self.step, self.step)
        self.spaces[space.name] = space
        return space

    def used(self, name: str) -> None:
        if name in self.spaces:
            self.spaces[name].last = self.step

    def laid_out(self) -> tuple[list[str], int]:
        """Declarations of the buffers, those that are never alive together in the same place."""
        placed: list[tuple[int, Space]] = []
        for space in self.spaces.values():
            taken = sorted(
                (start, start + other.width)
                for start, other in placed
                if other.first <= space.last and space.first <= other.last
            )
            start = 0
            for low, end in taken:
                if low - start >= space.width:
                    break
                start = max(start, end)
            placed.append((start, space))
        lines = [
            f"float *const {s.name} = step->space + step->num_rows * {at};" for at, s in placed
        ]
        return lines, max((at + s.width for at, s in placed), default=0)


class LayerWriter:
    """Writes one graph.

    Args:
        graph: As make_fx gave it: placeholders are `num_weights` tensors of the layer, then those
            of the call, the first of which are the states.
    """

    def __init__(self, graph: fx.Graph, num_weights: int) -> None:
        self._graph = graph
        self._num_weights = num_weights
        self._writer = _Writer()
        self._values: dict[fx.Node, Any] = {}
        self._pointers: dict[fx.Node, str] = {}
        self._attention: tuple[int, int] | None = None

    def write(self) -> LayerCode:
        writer = self._writer
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._values[node] = self._call(node)
            elif node.op == "output":
                self._output(node)
            else:
                raise Unsupported(f"a graph node of kind {node.op}")
        writer.meet()
        declarations, space = writer.laid_out()
        head_dim, block = self._attention or (8, 16)
        source = "\n".join(
            [
                f"#define HEAD_DIM {head_dim}",
                f"#define BLOCK {block}",
                '#include "layer.h"',
                "int layer(const Step *step, Member member, void *const *weights, "
                "const float *states, void *const *rows, float *out, int64_t *next) {",
                *declarations,
                *writer.lines,
                "return 0;",
                "}",
                "",
            ]
        )
        return LayerCode(source, writer.num_counters, space)

    # --- what goes in and out ---------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        number = len(self._pointers)
        is_weight = number < self._num_weights
        array = f"weights[{number}]"
        if not is_weight:
            place = number - self._num_weights
            array = "states" if place == 0 else f"rows[{place - 1}]"
        self._pointers[node] = array
        tensor = node.meta["val"]
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            return
        shape = shape_of(tensor)
        sizes = fixed_sizes(shape)
        if is_weight and None in shape:
            return  # of a size that is not known: of no use to an expression
        strides, width = strides_of(sizes), math.prod(sizes)
        pointer = f"((const float *){array})"

        def at(places: Sequence[Place]) -> str:
            return f"{pointer}[{linear_code(shape, places, strides, width)}]"

        memory = (pointer, width) if shape.count(None) == 1 else None
        self._values[node] = Value(shape, at, memory, is_light=True)

    def _output(self, node: fx.Node) -> None:
        states = self._values[args_of(node)[0][0]]
        self._store(states, "out", math.prod(states.row))

    # --- one operator -----------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name == "aten.sym_size.int":
            return None
        if name == "paceline.packed_linear.default":
            return self._product(node)
        if name == "paceline.paged_attention.default":
            return self._attend(node)
        if name == "<built-in function getitem>":
            return self._values[args_of(node)[0]][args_of(node)[1]]
        tensor = node.meta["val"]
        if isinstance(tensor, Tensor) and tensor.dtype != torch.float32:
            raise Unsupported(f"{name} of {tensor.dtype}")
        rule = RULES.get(name)
        if rule is not None:
            value = rule(self, node)
        elif name in ELEMENTWISE:
            value = self._elementwise(node, ELEMENTWISE[name])
        else:
            raise Unsupported(name)
        if isinstance(value, Value) and not value.is_light and len(node.users) > 1:
            return self.in_memory(value)
        return value

    def value(self, x: Any) -> Value:
        """An operator's argument: a tensor or a number."""
        if isinstance(x, fx.Node):
            found = self._values.get(x)
            if not isinstance(found, Value):
                raise Unsupported(f"{x} as a number")
            return found
        if isinstance(x, (int, float)):
            code = number_code(x)
            return Value((), lambda _: code, is_light=True)
        raise Unsupported(f"an argument of type {type(x).__name__}")

    def used(self, name: str) -> None:
        """The code written next reads what lies at `name`."""
        self._writer.used(name)

    def _elementwise(self, node: fx.Node, form: str) -> Value:
        if set(node.kwargs) - {"approximate", "memory_format"} or (
            len(args_of(node)) < form.count("{")
        ):
            raise Unsupported(f"{node.target} with {dict(node.kwargs)}")
        if node.kwargs.get("approximate") == "tanh":
            form = "f_gelu_tanh({0})"
        parts = [self.value(a) for a in args_of(node)[: max(1, form.count("{"))]]
        shape = shape_of(node.meta["val"])

        def at(places: Sequence[Place]) -> str:
            return "(" + form.format(*(p.at(broadcast(p.shape, places)) for p in parts)) + ")"

        return Value(shape, at)

    def in_memory(self, value: Value) -> Value:
        """`value`, computed and kept a row at a time; itself where it lies in memory already."""
        if value.memory is not None:
            return value
        if value.shape.count(None) != 1:
            raise Unsupported("a result without rows")
        sizes = value.row
        width = math.prod(sizes)
        space = self._writer.new_space(width)
        self._store(value, space.name, width)
        return self._kept(space, value.shape)

    def _kept(self, space: Space, shape: Shape) -> Value:
        strides = strides_of(fixed_sizes(shape))

        def at(places: Sequence[Place]) -> str:
            self._writer.used(space.name)
            return f"{space.name}[{linear_code(shape, places, strides, space.width)}]"

        return Value(shape, at, (space.name, space.width), is_light=True)

    def _store(self, value: Value, name: str, width: int) -> None:
        strides = strides_of(value.row)
        self._loops(
            value.row,
            lambda where: (
                f"{name}[t * {width} + {sum_code(where, strides)}] = "
                f"{value.at(with_rows(value.shape, where))};"
            ),
        )

    def _loops(self, sizes: Sequence[int], body: Callable[[list[Place]], str]) -> None:
        """Nested loops over `sizes`, the innermost cut where an expression changes its form."""
        outer = [Place(f"i{k}", 0, 0, n) for k, n in enumerate(sizes[:-1])]
        last = sizes[-1] if sizes else 1
        pending, inner = [(0, last)], []
        while pending:
            low, end = pending.pop(0)
            try:
                line = body([*outer, Place("j", 0, low, end)][: max(len(sizes), 0)])
            except Split as split:
                assert low < split.at < end
                pending = [(low, split.at), (split.at, end), *pending]
                continue
            inner.append(f"SIMD for (int64_t j = {low}; j < {end}; j++) {line}")
        for k, n in enumerate(sizes[:-1]):
            self._writer.in_rows(f"for (int64_t i{k} = 0; i{k} < {n}; i{k}++)")
        self._writer.in_rows("{ " + "\n".join(inner) + " }")

    def reduced(self, value: Value, terms: Callable[[str], str], result: str) -> Value:
        """Sum of `terms` of the last dimension, [..., 1]: `result` is a form of the sum {0}."""
        shape: Shape = (*value.shape[:-1], 1)
        size = value.shape[-1]
        if size is None:
            raise Unsupported("a sum over rows")
        sizes = fixed_sizes(shape)
        width = math.prod(sizes)
        space = self._writer.new_space(width)
        strides = strides_of(sizes)
        outer = [Place(f"i{k}", 0, 0, n) for k, n in enumerate(sizes[:-1])]
        pending, inner = [(0, size)], []
        while pending:
            low, end = pending.pop(0)
            where = [*outer, Place("j", 0, low, end)]
            try:
                term = terms(value.at(with_rows(value.shape, where)))
            except Split as split:
                pending = [(low, split.at), (split.at, end), *pending]
                continue
            inner.append(
                f'_Pragma("omp simd reduction(+:sum)") '
                f"for (int64_t j = {low}; j < {end}; j++) sum += {term};"
            )
        for k, n in enumerate(sizes[:-1]):
            self._writer.in_rows(f"for (int64_t i{k} = 0; i{k} < {n}; i{k}++)")
        target = f"{space.name}[t * {width} + {sum_code([*outer, ZERO], strides)}]"
        self._writer.in_rows(
            "{ float sum = 0.0f; " + " ".join(inner) + f" {target} = {result.format('sum')}; }}"
        )
        return self._kept(space, shape)

    # --- what the team does -----------------------------------------------------------------------

    def _product(self, node: fx.Node) -> Value:
        x, panels, bias, out_features, format = (*args_of(node), None)[:5]
        if isinstance(out_features, fx.Node) or not isinstance(format, int) or format < 0:
            raise Unsupported("a product that is not the kernel's")
        source = self.in_memory(self.value(x))
        assert source.memory is not None
        pointer, width = source.memory
        writer = self._writer
        writer.meet()
        writer.used(pointer)
        space = writer.new_space(int(out_features))
        bias_code = "0" if bias is None else self._pointers[bias]
        writer.together(
            f"product(step, member, next + {writer.num_counters}, {self._pointers[panels]}, "
            f"{format}, {bias_code}, {out_features}, {width}, {pointer}, {width}, {space.name});"
        )
        writer.num_counters += 1
        return self._kept(space, shape_of(node.meta["val"]))

    def _attend(self, node: fx.Node) -> Value:
        query, key, value, k_cache, v_cache, query_start, seq_lens, table, slots = args_of(node)[:9]
        scale, softcap, window, causal, _, sinks = (*args_of(node)[9:], None)[:6]
        cache = k_cache.meta["val"]
        _, num_kv_heads, head_dim, block = (int(n) for n in cache.shape)
        if head_dim % 8 or self._attention not in (None, (head_dim, block)):
            raise Unsupported("attention without a kernel")
        self._attention = (head_dim, block)
        num_heads = int(query.meta["val"].shape[1])
        q = self._heads(query)
        keys = [self._heads(x) for x in (key, value) if x is not None]
        writer = self._writer
        if keys:
            (k, kw), (v, vw) = keys
            # Rows are independent: a thread writes those that it computed.
            writer.in_rows(
                f"write_kv({k} + t * {kw}, {v} + t * {vw}, {self._pointers[k_cache]}, "
                f"{self._pointers[v_cache]}, (const int64_t *){self._pointers[slots]} + t, 1, "
                f"{num_kv_heads}, {kw}, {head_dim}, {vw}, {head_dim});"
            )
        writer.meet()
        writer.used(q[0])
        space = writer.new_space(num_heads * head_dim)
        sinks_code = "0" if sinks is None else self._pointers[sinks]
        writer.together(
            "{ Attention a = {"
            f"{q[0]}, {self._pointers[k_cache]}, {self._pointers[v_cache]}, {sinks_code}, "
            f"{space.name}, {self._pointers[table]}, {self._pointers[query_start]}, "
            f"{self._pointers[seq_lens]}, step->num_reqs, step->max_blocks, {num_heads}, "
            f"{num_kv_heads}, {q[1]}, {head_dim}, {int(window)}, {number_code(scale)}, "
            f"{number_code(softcap)}, {int(bool(causal))}}}; "
            f"if (attend_together(&a, member, next + {writer.num_counters})) return -1; }}",
        )
        writer.num_counters += 2
        return self._kept(space, shape_of(node.meta["val"]))

    def _heads(self, node: Any) -> tuple[str, int]:
        """[1, heads, T, head_dim] in memory as rows of heads: (pointer, floats a row)."""
        value = self.value(node)
        rows_first = Value(
            (None, value.shape[1], value.shape[3]),
            lambda p: value.at([ZERO, p[1], p[0], p[2]]),
        )
        kept = self.in_memory(rows_first)
        assert kept.memory is not None
        self._writer.used(kept.memory[0])
        return kept.memory
