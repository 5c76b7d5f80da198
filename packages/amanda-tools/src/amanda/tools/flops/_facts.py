"""Facts of an op that decide its cost: its formula, its shapes, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import amanda
from amanda.tools.flops import _pytorch
from amanda.tools.flops._by_shape import At, Extents
from amanda.tools.flops._cost import Formula, Shapes, size
from amanda.tools.flops._formulas import no_cost
from amanda.tools.flops._table import COPIES, FORMULAS, MOVES, gradients_of_factors, traffic
from amanda.tools.kit import leaves
from amanda.tools.mapping import itemsize, local


def formula_of(names: tuple[str, str]) -> Formula | None:
    """Return the built-in formula of an op of these names: the framework's, and the vocabulary's."""
    if names[0].startswith(_pytorch.LIBRARIES):
        return no_cost
    if names[0].endswith("Dataset") or "DatasetV" in names[0]:
        return no_cost  # what its functions compute is in no op
    return next((FORMULAS[name] for name in names if name in FORMULAS), None)


def is_free(context: amanda.OpContext, names: tuple[str, str]) -> bool:
    """Return whether an op computes nothing and moves no bytes, whatever its shapes are.

    Of an op that may copy, `is_settled` has made sure that it gives a view for all shapes, or for none.
    """
    if context["in_place"] or names[1] not in MOVES or formula_of(names) is not no_cost:
        return False
    return COPIES.isdisjoint(names) or bool(context["is_view"]((), ()))


def shapes_of(context: At | amanda.OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> Shapes:
    """Return the shapes that a formula of the op is given."""
    return Shapes.of(
        context["type"], inputs, outputs, context["shape"], context.get_attrs(),
        context["weight_index"], context["weight_layout"],
    )  # fmt: skip


def element_type(context: amanda.OpContext) -> Any:
    """Return the framework's element type of the first tensor among the inputs; None without one."""
    kinds = (getattr(value, "dtype", None) for value in leaves(context.get_inputs()))
    return next((kind for kind in kinds if kind is not None), None)


def can_tell(names: tuple[str, str], shapes: Shapes) -> bool:
    """Return True if a formula has all that it reads."""
    return names[0] in _pytorch.OF_NESTED or shapes.are_known


def bytes_moved(context: At | amanda.OpContext, names: tuple[str, str], outputs: Sequence[Any]) -> int:
    """Return the bytes that one execution moves."""
    inputs, in_place = context.get_inputs(), context["in_place"]
    if not in_place and names[1] in MOVES and context["is_view"](inputs, outputs):
        return 0
    read, written = ([bytes_of(context, [one]) for one in side] for side in (inputs, outputs))
    return traffic(names, read, written, in_place)


def bytes_of(context: At | amanda.OpContext, values: Iterable[Any]) -> int:
    """Return the bytes of tensors, also of those in lists."""
    sizes = ((value, size(context["shape"](local(value)))) for value in leaves(values))
    return sum(count * (itemsize(_type_name(context, value)) or 4) for value, count in sizes if count)


def _type_name(context: At | amanda.OpContext, value: Any) -> str | None:
    """Return the name of a tensor's element type; that of extents alone is PyTorch's."""
    if isinstance(value, Extents):
        return str(value.dtype).removeprefix("torch.")
    name: str | None = context["dtype"](value)
    return name


def roles(context: amanda.OpContext) -> None:
    """Write `parameters`, `backward_macs` and the like, as any framework tells them."""
    if "parameters" not in context:
        weight = context["weight_index"]
        context["parameters"] = 0 if weight is None else size(context["shape"](context.get_inputs()[weight]))
        context["backward_macs"] = _macs_of_each_gradient
        context["extents"] = context["shape"]
        context["inside"] = None
        context["is_function"] = False
        context["is_view"] = lambda inputs, outputs: False


def _macs_of_each_gradient(context: amanda.OpContext) -> int:
    """Return as many as the op takes, for the gradient of each factor that a backward op gives."""
    kind = context["backward_type"].removesuffix("_backward")
    count = gradients_of_factors(kind, context.get_grad_inputs() or [])
    return count * (context["cost"].macs if context["cost"] else 0)
