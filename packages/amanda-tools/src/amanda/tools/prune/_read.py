"""What an op reads as its weight, and the weight that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import amanda
from amanda.tools.mapping import in_memory_order
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import Framework
from amanda.tools.prune._layout import canonical_extents
from amanda.tools.prune._options import Options
from amanda.tools.prune._patterns import Pattern
from amanda.tools.prune._weight import NEVER, Weight


@dataclass(frozen=True)
class Read:
    """What an op reads as its weight, and the parameter that holds it; None where it is computed.

    held: identity of the parameter and which part of it is read; None likewise.  layout: of the value.
    """

    value: Any
    holder: Any
    held: Any
    layout: str | None

    @property
    def variable(self) -> Any:
        """The parameter, where it is known which part of it is read."""
        return None if self.held is None else self.holder

    @property
    def identity(self) -> Any:
        """What names it."""
        return None if self.held is None else self.held[0]

    @property
    def part(self) -> Any:
        """Which part of it is read."""
        return None if self.held is None else self.held[1]


def misfit(context: amanda.OpContext, value: Any, layout: str | None, pattern: Pattern) -> str | None:
    """Why what an op reads cannot have masks of a pattern; None where it can."""
    extents = context["shape"](value)
    if extents is None or None in extents or len(extents) < 2:
        return f"its shape is {extents}"
    if 0 in extents:
        return "it has no elements"
    if not str(context["dtype"](value)).startswith(("float", "bfloat")):
        return f"its type is {context['dtype'](value)}"
    if context.is_static() and not _is_in_file(context, context["weight_index"]):
        return "it is computed when the model runs"
    return pattern.misfit(canonical_extents(extents, layout), layout is not None)


def weight_of(
    read: Read,
    context: amanda.OpContext,
    framework: Framework,
    whole: Any,
    options: Options,
    keep: Callable[[str, Callable[[], Any]], Any],
    number: int,
) -> Weight:
    """The weight that an op reads, with its state: arrays that `keep` gives by name, or has made.

    whole: the form of the parameter, where forms are told apart.
    Raises PruneError for arrays that were loaded and have another shape.
    """
    extents = context["shape"](read.value)
    order = None if read.part is None or whole is None else in_memory_order(read.part)
    held_in = extents if order is None else _held_in(read, whole, order)
    state: list[Any] = []

    def array(name: str, start: Any) -> Any:
        state.append(keep(name, lambda: framework.stored(start)))
        return state[-1]

    def elements(name: str, start: Any) -> Any:
        found = array(name, start)
        if tuple(found.shape) != tuple(held_in):
            raise PruneError(
                f"the {name} that was loaded for {context.get_scope()} is of shape {tuple(found.shape)}, "
                f"not {tuple(held_in)} as its weight"
            )
        if order is None:
            return found
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return found.reshape([extents[axis] for axis in order]).permute(inverse)

    kept, updated = elements("mask", np.ones(held_in, bool)), array("updated", np.full(1, NEVER))
    grown = permutation = None
    if options.exchanges:
        dtype = "float64" if context["dtype"](read.value) == "float64" else "float32"
        grown = elements("grown", np.zeros(held_in, dtype))
    if options.permute:
        permutation = array("permutation", np.arange(canonical_extents(extents, read.layout)[1]))
    return Weight(
        context.get_scope(), context["type"], context.get_source(), tuple(extents), read.layout,
        framework, read.identity, read.part, number, kept, updated, grown, permutation,
        state=state,
    )  # fmt: skip


def _held_in(read: Read, whole: Any, order: Sequence[int]) -> Sequence[int]:
    """The shape in which the mask of a form of a parameter is kept, which is one for all of its forms."""
    extents = read.part[0]
    if prod(extents) == prod(whole[0]) and in_memory_order(whole) == tuple(range(len(whole[0]))):
        return tuple(whole[0])
    return tuple(extents[axis] for axis in order)


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Whether an input of an op of a file is known before the model runs."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except amanda.AmandaError:
        return False
