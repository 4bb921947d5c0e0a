"""What single operators of a traced layer are in C.

`ELEMENTWISE` are forms of an operator's arguments; `RULES` make values of a node by themselves:
views, slices and concatenations move places and cost nothing, reductions ask the writer for a loop.
An operator in neither, or one used in a way that has no code, is `Unsupported`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from actors.model.layer_values import (
    ROW,
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
)

if TYPE_CHECKING:
    from actors.model.layer_code import LayerWriter


def _dim(dim: Any, shape: Shape) -> int:
    return int(dim) % len(shape)


def _same(writer: LayerWriter, node: fx.Node) -> Value:
    return writer.value(args_of(node)[0])


def _view(writer: LayerWriter, node: fx.Node) -> Value:
    source, shape = writer.value(args_of(node)[0]), shape_of(node.meta["val"])
    if shape.count(None) != 1 or source.shape.count(None) != 1:
        raise Unsupported("a view that folds rows into something")

    to, old = shape.index(None), source.shape.index(None)
    before, after = fixed_sizes(shape[:to]), fixed_sizes(shape[to + 1 :])
    old_before, old_after = fixed_sizes(source.shape[:old]), fixed_sizes(source.shape[old + 1 :])
    if math.prod(before) != math.prod(old_before):
        raise Unsupported("a view that moves rows")

    def part(places: Sequence[Place], sizes: list[int], wanted: list[int]) -> list[Place]:
        """Places along `wanted` of what lies at `places` along `sizes`, the same elements."""
        mine = [(p, n) for p, n in zip(places, sizes, strict=True) if n != 1]
        if [n for _, n in mine] == [n for n in wanted if n != 1]:
            rest = iter(mine)
            return [ZERO if n == 1 else next(rest)[0] for n in wanted]
        total = math.prod(sizes)
        linear = sum_code(places, strides_of(sizes))
        found = []
        for stride, n in zip(strides_of(wanted), wanted, strict=True):
            code = f"({linear})" if stride == 1 else f"(({linear}) / {stride})"
            code = code if stride * n == total else f"({code} % {n})"
            found.append(Place(code, 0, 0, n))
        return found

    if source.memory is not None:
        pointer, width = source.memory
        strides = strides_of(fixed_sizes(shape))

        def at_memory(places: Sequence[Place]) -> str:
            writer.used(pointer)
            return f"{pointer}[{linear_code(shape, places, strides, width)}]"

        return Value(shape, at_memory, source.memory, is_light=True)

    def at(places: Sequence[Place]) -> str:
        first = part(places[:to], before, old_before)
        return source.at([*first, ROW, *part(places[to + 1 :], after, old_after)])

    return Value(shape, at, is_light=source.is_light)


def _permuted(writer: LayerWriter, node: fx.Node, order: Sequence[int]) -> Value:
    source = writer.value(args_of(node)[0])
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
    shape = writer.value(args_of(node)[0]).shape
    order = list(range(len(shape)))
    a, b = (_dim(d, shape) for d in args_of(node)[1:3])
    order[a], order[b] = order[b], order[a]
    return _permuted(writer, node, order)


def _permute(writer: LayerWriter, node: fx.Node) -> Value:
    shape = writer.value(args_of(node)[0]).shape
    return _permuted(writer, node, [_dim(d, shape) for d in args_of(node)[1]])


def _unsqueeze(writer: LayerWriter, node: fx.Node) -> Value:
    source, shape = writer.value(args_of(node)[0]), shape_of(node.meta["val"])
    dim = _dim(args_of(node)[1], shape)
    return Value(
        shape,
        lambda places: source.at([*places[:dim], *places[dim + 1 :]]),
        source.memory,
        is_light=source.is_light,
    )


def _expand(writer: LayerWriter, node: fx.Node) -> Value:
    source = writer.value(args_of(node)[0])
    return Value(
        shape_of(node.meta["val"]),
        lambda places: source.at(broadcast(source.shape, places)),
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
    source, shape = writer.value(args_of(node)[0]), shape_of(node.meta["val"])
    if shape == source.shape:
        return source
    given = list(args_of(node))[1:]
    dim, start, _, step = given + [0, 0, None, 1][len(given) :]
    if step != 1 or not isinstance(start, int):
        raise Unsupported("a slice with steps")
    dim = _dim(dim, source.shape)
    size, whole = shape[dim], source.shape[dim]
    if size is None or whole is None:
        raise Unsupported("a part of the rows")
    return _part(source, dim, start % whole if start < 0 else start, size)


def _split(writer: LayerWriter, node: fx.Node) -> list[Value]:
    source = writer.value(args_of(node)[0])
    dim = _dim(
        args_of(node)[2] if len(args_of(node)) > 2 else node.kwargs.get("dim", 0), source.shape
    )
    parts, start = [], 0
    for tensor in node.meta["val"]:
        size = shape_of(tensor)[dim]
        if size is None:
            raise Unsupported("a part of the rows")
        parts.append(_part(source, dim, start, size))
        start += size
    return parts


def _cat(writer: LayerWriter, node: fx.Node) -> Value:
    parts = [writer.value(x) for x in args_of(node)[0]]
    shape = shape_of(node.meta["val"])
    dim = _dim(args_of(node)[1] if len(args_of(node)) > 1 else node.kwargs.get("dim", 0), shape)
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
                raise Split(end - place.offset)
            start = end
        raise AssertionError("a place behind all parts")

    return Value(shape, at)


def _mean(writer: LayerWriter, node: fx.Node) -> Value:
    source = writer.value(args_of(node)[0])
    dims, keep = args_of(node)[1], len(args_of(node)) > 2 and args_of(node)[2]
    if [_dim(d, source.shape) for d in dims] != [len(source.shape) - 1] or not keep:
        raise Unsupported("a mean over another dimension than the last")
    return writer.reduced(source, lambda x: x, f"{{0}} / {number_code(source.shape[-1] or 1)}")


def _layer_norm(writer: LayerWriter, node: fx.Node) -> list[Value]:
    x, sizes, weight, bias, eps = args_of(node)
    source = writer.in_memory(writer.value(x))
    if len(sizes) != 1:
        raise Unsupported("a norm over several dimensions")
    num = number_code(source.shape[-1] or 1)
    mean = writer.reduced(source, lambda v: v, f"{{0}} / {num}")
    centred = Value(
        source.shape,
        lambda p: f"({source.at(p)} - {mean.at(broadcast(mean.shape, p))})",
    )
    scale = writer.reduced(
        centred,
        lambda v: f"{v} * {v}",
        f"1.0f / sqrtf({{0}} / {num} + {number_code(eps)})",
    )
    factors = [None if w is None else writer.value(w) for w in (weight, bias)]

    def at(places: Sequence[Place]) -> str:
        code = f"{centred.at(places)} * {scale.at(broadcast(scale.shape, places))}"
        for sign, factor in zip("*+", factors, strict=True):
            if factor is not None:
                code = f"{code} {sign} {factor.at(broadcast(factor.shape, places))}"
        return f"({code})"

    normed = Value(source.shape, at)
    readers = [user for user in node.users if args_of(user)[1] == 0]
    return [writer.in_memory(normed) if sum(len(r.users) for r in readers) > 1 else normed]


def _power(writer: LayerWriter, node: fx.Node) -> Value:
    exponent = args_of(node)[1]
    if exponent != 2:
        raise Unsupported(f"a power of {exponent}")
    source = writer.value(args_of(node)[0])
    if not source.is_light:
        source = writer.in_memory(source)
    return Value(source.shape, lambda p: f"({source.at(p)} * {source.at(p)})")


RULES: dict[str, Callable[[LayerWriter, fx.Node], Any]] = {
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

ELEMENTWISE = {
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
