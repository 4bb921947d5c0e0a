"""Values of the generated code of a decoder layer: a tensor is a C expression of a place in it.

A place along a dimension is a C expression with an offset and the range that it can take, so that
views, slices and concatenations are arithmetic of places. The rows of a step are the one dimension
whose size is not known; there is one place along it, `t`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


ZERO = Place("0", 0, 0, 1)
ROW = Place("t", 0, 0, 0)  # the only place along the dimension of rows


class Split(Exception):
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


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Floats from one place to the next along each dimension of `sizes`, contiguous."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def number_code(x: float) -> str:
    """`x` as a C float; one that is not finite is `Unsupported`."""
    if math.isinf(x) or math.isnan(x):
        raise Unsupported(f"the constant {x}")
    return f"{float(x)!r}f" if "e" in repr(float(x)) or "." in repr(float(x)) else f"{x}.0f"


def args_of(node: fx.Node) -> Any:
    """A node's arguments; what they are is its operator's affair, so they are not typed."""
    return node.args


def shape_of(tensor: Tensor) -> Shape:
    """The shape of a traced tensor; its symbolic size is the number of rows."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)  # int or, for the number of rows, SymInt
    return tuple(int(n) if isinstance(n, int) else None for n in sizes)


def sum_code(places: Sequence[Place], strides: Sequence[int]) -> str:
    """Floats from the start of a row to `places` in it, as C."""
    terms = [
        place.code if stride == 1 else f"{place.code} * {stride}"
        for place, stride in zip(places, strides, strict=True)
        if place is not ZERO
    ]
    return " + ".join(terms) or "0"


def linear_code(shape: Shape, places: Sequence[Place], strides: Sequence[int], width: int) -> str:
    """Floats from the start of a tensor to `places`, as C; its rows are `width` floats apart."""
    inner = sum_code([p for p, n in zip(places, shape, strict=True) if n is not None], strides)
    return f"t * {width} + {inner}" if None in shape else inner


def with_rows(shape: Shape, places: Sequence[Place]) -> list[Place]:
    """Places along all dimensions of `shape`, from those along all but the rows."""
    rest = iter(places)
    return [ROW if n is None else next(rest) for n in shape]


def broadcast(shape: Shape, places: Sequence[Place]) -> list[Place]:
    """Places in a tensor of `shape` that was broadcast to that of `places`."""
    mine = places[len(places) - len(shape) :]
    return [ZERO if n == 1 else p for n, p in zip(shape, mine, strict=True)]


def fixed_sizes(shape: Shape) -> list[int]:
    """Sizes but that of the rows."""
    return [n for n in shape if n is not None]
