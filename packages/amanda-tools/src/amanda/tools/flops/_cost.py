"""Costs of ops, and the shapes that formulas read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]
UNKNOWN = (None,)
"""The shape of a tensor whose rank is not known."""
_HANDLES = ("resource", "variant")
"""Types of TensorFlow's values that stand for something else, and have no elements."""


class Cost(NamedTuple):
    """Multiply-accumulates of convolutions, matrix products and attention; all floating-point operations.

    A multiply-accumulate is two operations, and those are in `flops` too.
    """

    macs: int = 0
    flops: int = 0

    @classmethod
    def of_macs(cls, macs: int, more: int = 0) -> Cost:
        """Return the cost of so many multiply-accumulates, and of `more` operations besides."""
        return cls(macs, 2 * macs + more)

    def with_complex(self, products: int) -> Cost:
        """Return the cost if each multiply-accumulate takes `products` of real numbers."""
        more = (products - 1) * self.macs
        return Cost(self.macs + more, self.flops + 2 * more)

    def part(self, share: float) -> Cost:
        """Return the part of the cost that one process pays of an op that several compute together."""
        return self if share == 1.0 else Cost(round(self.macs * share), round(self.flops * share))


class Components(tuple[Shape, ...]):
    """Shapes of the tensors that a nested tensor consists of."""

    __slots__ = ()


@dataclass(frozen=True)
class Shapes:
    """One execution of an op, without its values.

    type: the word of StandardMapping.  inputs, outputs: for each value a shape, a list of shapes where it
    is a list of tensors, or None where it is none.  values: the inputs that are no tensors, as they are.
    A formula is given an op on nested tensors component by component.
    weight, weight_layout: index of the weight among the inputs, and its axes.
    """

    type: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    values: Sequence[Any] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    weight: int | None = None
    weight_layout: str | None = None

    @classmethod
    def of(
        cls, type: str, inputs: Sequence[Any], outputs: Sequence[Any], shape: Callable[[Any], Any], *more: Any
    ) -> Shapes:
        """Return the shapes of values.  shape: as in StandardMapping.  more: attributes, and the weight."""
        read = [shape_of(value, shape) for value in inputs]
        values = [value for value, extents in zip(inputs, read, strict=True) if extents in (None, UNKNOWN)]
        return cls(type, read, [shape_of(value, shape) for value in outputs], values, *more)

    @property
    def out(self) -> Shape:
        """Shape of the first output."""
        first = tensors(self.outputs)
        return first[0] if first else ()

    @property
    def elements(self) -> int:
        """Elements of the largest input or output: those that an elementwise op or a reduction visits."""
        everything = tensors([*self.inputs, *self.outputs])
        lists = [shapes for shapes in self.inputs if isinstance(shapes, list)]
        sizes = [*map(prod, everything), *(sum(map(prod, shapes)) for shapes in lists)]
        return max(sizes, default=0)

    @property
    def are_known(self) -> bool:
        """True if every extent is known; in graphs some are known at execution alone."""
        return are_known([*self.inputs, *self.outputs])

    def by_component(self) -> Iterator[tuple[Shapes, int]]:
        """Yield the op as it is on each component of its nested tensors, and on how many it is the same."""
        for (inputs, outputs), count in components([self.inputs, self.outputs]):
            yield replace(self, inputs=inputs, outputs=outputs), count

    @property
    def estimate(self) -> int:
        """Multiply-accumulates if this is the product of its two largest inputs; 0 with fewer than two.

        (n, k) by (k, m) gives (n, m), and n k m is the root of the product of the three sizes.
        """
        is_nested = any(isinstance(shape, Components) for shape in (*self.inputs, *self.outputs))
        if is_nested or not self.are_known:
            return 0
        factors = sorted(prod(shape) for shape in tensors(self.inputs) if len(shape) > 1)[-2:]
        results = [prod(shape) for shape in tensors(self.outputs)]
        return isqrt(prod(factors) * max(results)) if len(factors) == 2 and results else 0


Formula = Callable[[Shapes], Cost]
"""A formula of an op: the cost of one execution, by the shapes of its tensors."""


def table(*entries: tuple[Formula, str]) -> dict[str, Formula]:
    """Return formulas by the names, separated by spaces, that each comes with."""
    return {name: formula for formula, names in entries for name in names.split()}


def tensors(shapes: Iterable[Any]) -> list[Shape]:
    """Return the shapes of tensors, those in lists too."""
    lists = (group if isinstance(group, list) else [group] for group in shapes)
    return [shape for group in lists for shape in group if shape is not None]


def are_known(shapes: Iterable[Any]) -> bool:
    """Return True if every extent is known."""
    return all(None not in shape for shape in tensors(shapes))


def components(sides: Sequence[Sequence[Any]]) -> list[tuple[list[list[Any]], int]]:
    """Return the shapes on each side for one component of nested tensors, and how many components have them.

    A tensor of the nested tensors' rank has a matrix for each component.
    """
    everything: list[Any] = [shape for side in sides for shape in tensors(side)]
    nested = [shape for shape in everything if isinstance(shape, Components)]
    if not nested:
        return [([list(side) for side in sides], 1)]
    number, rank = len(nested[0]), 1 + max((len(shape[0]) for shape in nested if shape), default=0)

    def part(shape: Any, i: int) -> Any:
        if isinstance(shape, list):
            return [part(inner, i) for inner in shape]
        if isinstance(shape, Components):
            return shape[i]
        is_batch = isinstance(shape, tuple) and len(shape) == rank and shape[0] == number
        return shape[1:] if is_batch else shape

    parts = [[[part(shape, i) for shape in side] for side in sides] for i in range(number)]
    counts = Counter(map(str, parts))
    return [(part, counts[text]) for text, part in {str(part): part for part in parts}.items()]


def size(shape: Any) -> int:
    """Return the elements of a tensor; 0 where the shape is None, or not known."""
    if isinstance(shape, Components):
        return sum(map(prod, shape))
    return 0 if shape is None or None in shape else prod(shape)


def elements(shapes: Iterable[Any]) -> int:
    """Return the elements of tensors, those in lists too, whose shapes are known."""
    return sum(map(size, tensors(shapes)))


def shape_of(value: Any, shape: Callable[[Any], Any]) -> Any:
    """Return a tensor's shape; a list of those in a list; None of what is no tensor.

    shape: as StandardMapping gives it.
    """
    if isinstance(value, (list, tuple)):
        return [extents for element in value if (extents := _extents(element, shape)) is not None] or None
    return _extents(value, shape)


def _extents(value: Any, shape: Callable[[Any], Any]) -> Any:
    extents = shape(value)
    if extents is None and hasattr(type(value), "shape"):
        return None if getattr(getattr(value, "dtype", None), "name", "") in _HANDLES else UNKNOWN
    return extents
