"""C code of one decoder layer, from the graph that tracing its forward gave.

Everything but products and attention is done row by row: an operator's result is an expression of
(row, place in the row), and loops over it are written where somebody needs it in memory. That is
where it is used twice, reduced, multiplied with a weight, attended with, or handed out. Views,
slices and concatenations are arithmetic of places and cost nothing.

What the generator cannot say raises `Unsupported`; the layer then runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx


class Unsupported(Exception):
    """The graph holds something that this generator has no code for."""


@dataclass(frozen=True)
class Place:
    """A place along one dimension: `base` + `offset`, `base` a C expression in [low, end)."""

    base: str
    offset: int
    low: int
    end: int

    @property
    def code(self) -> str:
        return f"({self.base}{self.offset:+d})" if self.offset else self.base

    def moved(self, by: int) -> Place:
        return Place(self.base, self.offset + by, self.low, self.end)


_ZERO = Place("0", 0, 0, 1)
_ROW = Place("t", 0, 0, 0)  # the only place along the dimension of rows


class _Split(Exception):
    """An expression has two forms over the range of its innermost place: before and from `at`."""

    def __init__(self, at: int) -> None:
        self.at = at


# A dimension's size; None: the number of rows.
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Value:
    """A tensor as an expression. `memory`: where its row lies contiguously, as a C pointer to row 0
    and the floats from row to row, if it lies so."""

    shape: Shape
    at: Callable[[Sequence[Place]], str]
    memory: tuple[str, int] | None = None
    # Reading it costs a load and nothing else.
    is_light: bool = False

    @property
    def row(self) -> tuple[int, ...]:
        """Sizes besides the rows."""
        return tuple(n for n in self.shape if n is not None)


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


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _number(x: float) -> str:
    if math.isinf(x) or math.isnan(x):
        raise Unsupported(f"the constant {x}")
    return f"{float(x)!r}f" if "e" in repr(float(x)) or "." in repr(float(x)) else f"{x}.0f"


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
        shape = _shape(tensor)
        sizes = _fixed(shape)
        if is_weight and None in shape:
            return  # of a size that is not known: of no use to an expression
        strides, width = _strides(sizes), math.prod(sizes)
        pointer = f"((const float *){array})"

        def at(places: Sequence[Place]) -> str:
            return f"{pointer}[{_linear(shape, places, strides, width)}]"

        memory = (pointer, width) if shape.count(None) == 1 else None
        self._values[node] = Value(shape, at, memory, is_light=True)

    def _output(self, node: fx.Node) -> None:
        states = self._values[_args(node)[0][0]]
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
            return self._values[_args(node)[0]][_args(node)[1]]
        tensor = node.meta["val"]
        if isinstance(tensor, Tensor) and tensor.dtype != torch.float32:
            raise Unsupported(f"{name} of {tensor.dtype}")
        rule = _RULES.get(name)
        if rule is not None:
            value = rule(self, node)
        elif name in _ELEMENTWISE:
            value = self._elementwise(node, _ELEMENTWISE[name])
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
            code = _number(x)
            return Value((), lambda _: code, is_light=True)
        raise Unsupported(f"an argument of type {type(x).__name__}")

    def _elementwise(self, node: fx.Node, form: str) -> Value:
        if set(node.kwargs) - {"approximate", "memory_format"} or (
            len(_args(node)) < form.count("{")
        ):
            raise Unsupported(f"{node.target} with {dict(node.kwargs)}")
        if node.kwargs.get("approximate") == "tanh":
            form = "f_gelu_tanh({0})"
        parts = [self.value(a) for a in _args(node)[: max(1, form.count("{"))]]
        shape = _shape(node.meta["val"])

        def at(places: Sequence[Place]) -> str:
            return "(" + form.format(*(p.at(_broadcast(p.shape, places)) for p in parts)) + ")"

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
        strides = _strides(_fixed(shape))

        def at(places: Sequence[Place]) -> str:
            self._writer.used(space.name)
            return f"{space.name}[{_linear(shape, places, strides, space.width)}]"

        return Value(shape, at, (space.name, space.width), is_light=True)

    def _store(self, value: Value, name: str, width: int) -> None:
        strides = _strides(value.row)
        self._loops(
            value.row,
            lambda where: (
                f"{name}[t * {width} + {_sum(where, strides)}] = "
                f"{value.at(_with_rows(value.shape, where))};"
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
            except _Split as split:
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
        sizes = _fixed(shape)
        width = math.prod(sizes)
        space = self._writer.new_space(width)
        strides = _strides(sizes)
        outer = [Place(f"i{k}", 0, 0, n) for k, n in enumerate(sizes[:-1])]
        pending, inner = [(0, size)], []
        while pending:
            low, end = pending.pop(0)
            where = [*outer, Place("j", 0, low, end)]
            try:
                term = terms(value.at(_with_rows(value.shape, where)))
            except _Split as split:
                pending = [(low, split.at), (split.at, end), *pending]
                continue
            inner.append(
                f'_Pragma("omp simd reduction(+:sum)") '
                f"for (int64_t j = {low}; j < {end}; j++) sum += {term};"
            )
        for k, n in enumerate(sizes[:-1]):
            self._writer.in_rows(f"for (int64_t i{k} = 0; i{k} < {n}; i{k}++)")
        target = f"{space.name}[t * {width} + {_sum([*outer, _ZERO], strides)}]"
        self._writer.in_rows(
            "{ float sum = 0.0f; " + " ".join(inner) + f" {target} = {result.format('sum')}; }}"
        )
        return self._kept(space, shape)

    # --- what the team does -----------------------------------------------------------------------

    def _product(self, node: fx.Node) -> Value:
        x, panels, bias, out_features, format = (*_args(node), None)[:5]
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
        return self._kept(space, _shape(node.meta["val"]))

    def _attend(self, node: fx.Node) -> Value:
        query, key, value, k_cache, v_cache, query_start, seq_lens, table, slots = _args(node)[:9]
        scale, softcap, window, causal, _, sinks = (*_args(node)[9:], None)[:6]
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
            f"{num_kv_heads}, {q[1]}, {head_dim}, {int(window)}, {_number(scale)}, "
            f"{_number(softcap)}, {int(bool(causal))}}}; "
            f"if (attend_together(&a, member, next + {writer.num_counters})) return -1; }}",
        )
        writer.num_counters += 2
        return self._kept(space, _shape(node.meta["val"]))

    def _heads(self, node: Any) -> tuple[str, int]:
        """[1, heads, T, head_dim] in memory as rows of heads: (pointer, floats a row)."""
        value = self.value(node)
        rows_first = Value(
            (None, value.shape[1], value.shape[3]),
            lambda p: value.at([_ZERO, p[1], p[0], p[2]]),
        )
        kept = self.in_memory(rows_first)
        assert kept.memory is not None
        self._writer.used(kept.memory[0])
        return kept.memory


def _args(node: fx.Node) -> Any:
    return node.args


# --- places ---------------------------------------------------------------------------------------


def _shape(tensor: Tensor) -> Shape:
    sizes: tuple[Any, ...] = tuple(tensor.shape)  # int or, for the number of rows, SymInt
    return tuple(int(n) if isinstance(n, int) else None for n in sizes)


def _sum(places: Sequence[Place], strides: Sequence[int]) -> str:
    terms = [
        place.code if stride == 1 else f"{place.code} * {stride}"
        for place, stride in zip(places, strides, strict=True)
        if place is not _ZERO
    ]
    return " + ".join(terms) or "0"


def _linear(shape: Shape, places: Sequence[Place], strides: Sequence[int], width: int) -> str:
    inner = _sum([p for p, n in zip(places, shape, strict=True) if n is not None], strides)
    return f"t * {width} + {inner}" if None in shape else inner


def _with_rows(shape: Shape, places: Sequence[Place]) -> list[Place]:
    rest = iter(places)
    return [_ROW if n is None else next(rest) for n in shape]


def _broadcast(shape: Shape, places: Sequence[Place]) -> list[Place]:
    """Places in a tensor of `shape` that was broadcast to that of `places`."""
    mine = places[len(places) - len(shape) :]
    return [_ZERO if n == 1 else p for n, p in zip(shape, mine, strict=True)]


def _fixed(shape: Shape) -> list[int]:
    """Sizes but that of the rows."""
    return [n for n in shape if n is not None]


def _dim(dim: Any, shape: Shape) -> int:
    return int(dim) % len(shape)


# --- rules of single operators --------------------------------------------------------------------


def _same(writer: LayerWriter, node: fx.Node) -> Value:
    return writer.value(_args(node)[0])


def _view(writer: LayerWriter, node: fx.Node) -> Value:
    source, shape = writer.value(_args(node)[0]), _shape(node.meta["val"])
    if shape.count(None) != 1 or source.shape.count(None) != 1:
        raise Unsupported("a view that folds rows into something")

    to, old = shape.index(None), source.shape.index(None)
    before, after = _fixed(shape[:to]), _fixed(shape[to + 1 :])
    old_before, old_after = _fixed(source.shape[:old]), _fixed(source.shape[old + 1 :])
    if math.prod(before) != math.prod(old_before):
        raise Unsupported("a view that moves rows")

    def part(places: Sequence[Place], sizes: list[int], wanted: list[int]) -> list[Place]:
        """Places along `wanted` of what lies at `places` along `sizes`, the same elements."""
        mine = [(p, n) for p, n in zip(places, sizes, strict=True) if n != 1]
        if [n for _, n in mine] == [n for n in wanted if n != 1]:
            rest = iter(mine)
            return [_ZERO if n == 1 else next(rest)[0] for n in wanted]
        total = math.prod(sizes)
        linear = _sum(places, _strides(sizes))
        found = []
        for stride, n in zip(_strides(wanted), wanted, strict=True):
            code = f"({linear})" if stride == 1 else f"(({linear}) / {stride})"
            code = code if stride * n == total else f"({code} % {n})"
            found.append(Place(code, 0, 0, n))
        return found

    if source.memory is not None:
        pointer, width = source.memory
        strides = _strides(_fixed(shape))

        def at_memory(places: Sequence[Place]) -> str:
            writer._writer.used(pointer)
            return f"{pointer}[{_linear(shape, places, strides, width)}]"

        return Value(shape, at_memory, source.memory, is_light=True)

    def at(places: Sequence[Place]) -> str:
        first = part(places[:to], before, old_before)
        return source.at([*first, _ROW, *part(places[to + 1 :], after, old_after)])

    return Value(shape, at, is_light=source.is_light)


def _permuted(writer: LayerWriter, node: fx.Node, order: Sequence[int]) -> Value:
    source = writer.value(_args(node)[0])
    back = [order.index(i) for i in range(len(order))]
    kept = [n for n in order if source.shape[n] not in (None, 1)]
    # Where only the rows and dimensions of one move, what is in memory stays what it is.
    memory = source.memory if kept == sorted(kept) else None
    return Value(
        tuple(source.shape[i] for i in order),
        lambda places: source.at([places[i] for i in back]),
        memory,
        is_light=source.is_light,
    )


def _transpose(writer: LayerWriter, node: fx.Node) -> Value:
    shape = writer.value(_args(node)[0]).shape
    order = list(range(len(shape)))
    a, b = (_dim(d, shape) for d in _args(node)[1:3])
    order[a], order[b] = order[b], order[a]
    return _permuted(writer, node, order)


def _permute(writer: LayerWriter, node: fx.Node) -> Value:
    shape = writer.value(_args(node)[0]).shape
    return _permuted(writer, node, [_dim(d, shape) for d in _args(node)[1]])


def _unsqueeze(writer: LayerWriter, node: fx.Node) -> Value:
    source, shape = writer.value(_args(node)[0]), _shape(node.meta["val"])
    dim = _dim(_args(node)[1], shape)
    return Value(
        shape,
        lambda places: source.at([*places[:dim], *places[dim + 1 :]]),
        source.memory,
        is_light=source.is_light,
    )


def _expand(writer: LayerWriter, node: fx.Node) -> Value:
    source = writer.value(_args(node)[0])
    return Value(
        _shape(node.meta["val"]),
        lambda places: source.at(_broadcast(source.shape, places)),
        is_light=source.is_light,
    )


def _part(source: Value, dim: int, start: int, size: int) -> Value:
    shape = (*source.shape[:dim], size, *source.shape[dim + 1 :])
    if source.shape[dim] is None:
        raise Unsupported("a part of the rows")
    return Value(
        shape,
        lambda places: source.at([*places[:dim], places[dim].moved(start), *places[dim + 1 :]]),
        is_light=source.is_light,
    )


def _slice(writer: LayerWriter, node: fx.Node) -> Value:
    source, shape = writer.value(_args(node)[0]), _shape(node.meta["val"])
    if shape == source.shape:
        return source
    given = list(_args(node))[1:]
    dim, start, _, step = given + [0, 0, None, 1][len(given) :]
    if step != 1 or not isinstance(start, int):
        raise Unsupported("a slice with steps")
    dim = _dim(dim, source.shape)
    size, whole = shape[dim], source.shape[dim]
    if size is None or whole is None:
        raise Unsupported("a part of the rows")
    return _part(source, dim, start % whole if start < 0 else start, size)


def _split(writer: LayerWriter, node: fx.Node) -> list[Value]:
    source = writer.value(_args(node)[0])
    dim = _dim(_args(node)[2] if len(_args(node)) > 2 else node.kwargs.get("dim", 0), source.shape)
    parts, start = [], 0
    for tensor in node.meta["val"]:
        size = _shape(tensor)[dim]
        if size is None:
            raise Unsupported("a part of the rows")
        parts.append(_part(source, dim, start, size))
        start += size
    return parts


def _cat(writer: LayerWriter, node: fx.Node) -> Value:
    parts = [writer.value(x) for x in _args(node)[0]]
    shape = _shape(node.meta["val"])
    dim = _dim(_args(node)[1] if len(_args(node)) > 1 else node.kwargs.get("dim", 0), shape)
    if dim != len(shape) - 1 or shape[dim] is None:
        raise Unsupported("joining along another dimension than the last")

    def at(places: Sequence[Place]) -> str:
        place, start = places[dim], 0
        for part in parts:
            size = part.shape[dim]
            assert size is not None
            end = start + size
            low, high = place.low + place.offset, place.end + place.offset
            if start <= low and high <= end:
                return part.at([*places[:dim], place.moved(-start)])
            if start <= low < end:
                if place.base != "j":
                    raise Unsupported("joined parts read out of order")
                raise _Split(end - place.offset)
            start = end
        raise AssertionError("a place behind all parts")

    return Value(shape, at)


def _mean(writer: LayerWriter, node: fx.Node) -> Value:
    source = writer.value(_args(node)[0])
    dims, keep = _args(node)[1], len(_args(node)) > 2 and _args(node)[2]
    if [_dim(d, source.shape) for d in dims] != [len(source.shape) - 1] or not keep:
        raise Unsupported("a mean over another dimension than the last")
    return writer.reduced(source, lambda x: x, f"{{0}} / {_number(source.shape[-1] or 1)}")


def _layer_norm(writer: LayerWriter, node: fx.Node) -> list[Value]:
    x, sizes, weight, bias, eps = _args(node)
    source = writer.in_memory(writer.value(x))
    if len(sizes) != 1:
        raise Unsupported("a norm over several dimensions")
    num = _number(source.shape[-1] or 1)
    mean = writer.reduced(source, lambda v: v, f"{{0}} / {num}")
    centred = Value(
        source.shape,
        lambda p: f"({source.at(p)} - {mean.at(_broadcast(mean.shape, p))})",
    )
    scale = writer.reduced(
        centred,
        lambda v: f"{v} * {v}",
        f"1.0f / sqrtf({{0}} / {num} + {_number(eps)})",
    )
    factors = [None if w is None else writer.value(w) for w in (weight, bias)]

    def at(places: Sequence[Place]) -> str:
        code = f"{centred.at(places)} * {scale.at(_broadcast(scale.shape, places))}"
        for sign, factor in zip("*+", factors, strict=True):
            if factor is not None:
                code = f"{code} {sign} {factor.at(_broadcast(factor.shape, places))}"
        return f"({code})"

    normed = Value(source.shape, at)
    readers = [user for user in node.users if _args(user)[1] == 0]
    return [writer.in_memory(normed) if sum(len(r.users) for r in readers) > 1 else normed]


def _power(writer: LayerWriter, node: fx.Node) -> Value:
    exponent = _args(node)[1]
    if exponent != 2:
        raise Unsupported(f"a power of {exponent}")
    source = writer.value(_args(node)[0])
    if not source.is_light:
        source = writer.in_memory(source)
    return Value(source.shape, lambda p: f"({source.at(p)} * {source.at(p)})")


_RULES: dict[str, Callable[[LayerWriter, fx.Node], Any]] = {
    "aten.view.default": _view,
    "aten.reshape.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.clone.default": _same,
    "aten.alias.default": _same,
    "aten.detach.default": _same,
    "aten.contiguous.default": _same,
    "aten._to_copy.default": _same,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.cat.default": _cat,
    "aten.mean.dim": _mean,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.pow.Tensor_Scalar": _power,
}

_ELEMENTWISE = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.div.Tensor": "{0} / {1}",
    "aten.neg.default": "-{0}",
    "aten.rsqrt.default": "1.0f / sqrtf({0})",
    "aten.sqrt.default": "sqrtf({0})",
    "aten.reciprocal.default": "1.0f / {0}",
    "aten.silu.default": "f_silu({0})",
    "aten.sigmoid.default": "f_sigmoid({0})",
    "aten.tanh.default": "f_tanh({0})",
    "aten.gelu.default": "f_gelu({0})",
    "aten.relu.default": "f_relu({0})",
    "aten.exp.default": "f_exp({0})",
}
