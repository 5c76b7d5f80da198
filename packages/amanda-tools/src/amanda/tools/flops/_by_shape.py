"""Ops whose cost a formula tells for any shape: analysed once, and evaluated once for each new shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import amanda
from amanda.tools.flops._cost import are_known, shape_of
from amanda.tools.flops._result import OpCost
from amanda.tools.kit import leaves

KNOWN = 1024
"""Shapes of one op that are remembered; more of them are evaluated anew."""


class Extents:
    """A tensor of which the shape and the element type are known, and nothing else."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype

    def dim(self) -> int:
        """Return the rank."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


class At(dict[str, Any]):
    """The context of an op at shapes that it was not analysed with: tensors have no values."""

    def __init__(self, context: amanda.OpContext, sides: Sequence[list[Any]]) -> None:
        super().__init__(context)
        self["within"] = None
        self._context = context
        self._sides = (*sides, None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def get_inputs(self) -> Any:
        """Return the inputs."""
        return self._sides[0]

    def get_outputs(self) -> Any:
        """Return the outputs."""
        return self._sides[1]

    def get_grad_outputs(self) -> Any:
        """Return the gradients that enter."""
        return self._sides[2]

    def get_grad_inputs(self) -> Any:
        """Return the gradients that leave."""
        return self._sides[3]


class ByShape:
    """The costs of an op, or of a backward op, for each combination of shapes that it is executed with.

    context: of its analysis.  sides: the values of the analysis: inputs and outputs, or gradients.
    measure: gives the place of an `At`, as far as shapes decide.
    costs: of all ops: what shapes decide, by all that decides it.  shared: gives the place to count in.
    of: the op of a backward op.  first: place of the execution that is analysed, where nothing tells others.

    shapes, place: of the last execution; native code gives the same tuple as long as shapes stay.
    """

    def __init__(
        self,
        context: amanda.OpContext,
        sides: Sequence[Sequence[Any]],
        measure: Callable[[At, tuple[Any, ...]], OpCost],
        costs: dict[Hashable, OpCost],
        shared: Callable[[OpCost], OpCost],
        of: ByShape | None = None,
        first: OpCost | None = None,
    ) -> None:
        self.shapes: tuple[Any, ...] | None = None
        self.place: OpCost = OpCost("", "", "", "")
        self._known: dict[Hashable, OpCost] = {}
        self._context = context
        self._measure = measure
        self._costs = costs
        self._shared = shared
        self._first = first
        own = [[_form(value) for value in side] for side in sides]
        self._forms: list[list[Callable[[Any], Any]]] = [*(of._forms if of else ()), *own]
        kinds = [getattr(one, "dtype", None) for one in leaves(sides)]
        forward = of._alike if of else (context.get_op_type(), context["type"], context["in_place"])
        node = getattr(context.get_backward_op(), "__name__", "")
        is_view = context["is_view"]((), ())
        self._alike: tuple[Hashable, ...] = (
            forward, context["phase"], measure.__name__, node, context["backward_type"] if of else is_view,
            context.get_backward_order(), context["parameters"], *kinds,
        )  # fmt: skip

    def turn_to(self, shapes: tuple[Any, ...]) -> None:
        """Find the cost that an execution with these shapes adds to; keep it as `place`."""
        self.shapes, self.place = shapes, self.of(shapes)

    def of(self, shapes: tuple[Any, ...]) -> OpCost:
        """Return the cost that an execution with these shapes adds to."""
        place = self._known.get(shapes)
        if place is None:
            place, self._first = self._first or self._shared(self._measured(shapes)), None
            put(self._known, shapes, place)
        return place

    def _measured(self, shapes: tuple[Any, ...]) -> OpCost:
        key = (self._alike, shapes)
        known = self._costs.get(key)
        if known is None:
            sides = zip(self._forms, shapes, strict=True)
            context = At(self._context, [_formed(forms, side) for forms, side in sides])
            known = self._measure(context, shapes)
            put(self._costs, key, known)
        scope, source = self._context.get_scope(), self._context.get_source()
        return OpCost(
            known.phase, known.type, scope, source, 0, known.macs, known.flops, known.parameters, known.bytes,
            known.estimate,
        )  # fmt: skip


def put(known: dict[Hashable, OpCost], key: Hashable, place: OpCost) -> None:
    """Remember a place; forget the others where there are many."""
    if len(known) >= KNOWN:
        known.clear()
    known[key] = place


def _formed(forms: Sequence[Callable[[Any], Any]], shapes: Sequence[Any]) -> list[Any]:
    """Return values of these shapes; where there are more than were analysed, they are of one kind."""
    return [forms[min(i, len(forms) - 1)](shape) for i, shape in enumerate(shapes)] if forms else []


def _form(value: Any) -> Callable[[Any], Any]:
    """Return what makes, of the shape of a value, one that stands for it."""
    if isinstance(value, (list, tuple)):
        kinds = [one.dtype for one in value if _is_tensor(one)]
        if not kinds:
            return lambda shape: value
        return lambda shape: [Extents(*pair) for pair in zip(shape, kinds, strict=True)]
    if not _is_tensor(value):
        return lambda shape: value
    kind = value.dtype
    return lambda shape: None if shape is None else Extents(shape, kind)


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in ("Tensor", "Parameter") and kind.__module__.partition(".")[0] == "torch"


def are_plain(sides: Sequence[Sequence[Any]], shape: Callable[[Any], Any]) -> bool:
    """Return whether shapes and element types say all about values: PyTorch's own, none in lists of lists."""
    tensors = [one for side in sides for one in leaves(side) if hasattr(type(one), "shape")]
    shallow = [
        one for side in sides for value in side
        for one in (value if isinstance(value, (list, tuple)) else [value]) if _is_tensor(one)
    ]  # fmt: skip
    return len(tensors) == len(shallow) and are_known(shape_of(one, shape) for one in tensors)


_NEW_MEMORY = """
    cat stack hstack vstack index_select gather embedding index_add index_copy index_fill index_put scatter
    scatter_add scatter_reduce clone masked_fill masked_select take repeat repeat_interleave zeros_like
    ones_like full_like one_hot triu tril roll flip sort argsort nonzero fill zero copy
"""
_BY_DTYPE = "to type type_as float half double bfloat16 _to_copy"
_SETTLED = frozenset(f"{_NEW_MEMORY} {_BY_DTYPE}".split())
_VIEWS = frozenset(
    """
    chunk expand expand_as broadcast_to narrow permute select split split_with_sizes t transpose unbind
    """.split()
)
_OF_A_VIEW = (int, slice, type(...), type(None))


def is_settled(kind: str, context: amanda.OpContext, is_view: bool) -> bool:
    """Return whether an op of this type, which moves data, gives a view for all shapes or none, as here."""
    if kind in ("index", "getitem"):
        index = list(leaves(context.get_inputs()[1:]))
        if any(map(_is_tensor, index)):
            return not is_view
        return is_view and all(type(one) in _OF_A_VIEW for one in index)
    if kind in _VIEWS:
        return is_view or not context.get_outputs()
    if not any(map(_is_tensor, leaves(context.get_inputs()))):
        return not is_view
    return kind in _SETTLED and context.get_attrs().get("memory_format") is None
