"""The weights that a tool has met, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import amanda
from amanda.tools.mapping import Origin, Parts, form_of, in_memory_order
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import framework_of
from amanda.tools.prune._layout import canonical_extents
from amanda.tools.prune._options import Options
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._rows import order_of_axes, row_layout
from amanda.tools.prune._selection import LOOKUPS, WITHIN, Selection
from amanda.tools.prune._weight import NEVER, Weight

LOOKED_UP = "an embedding reads it too"


@dataclass(frozen=True)
class _Read:
    """What an op reads as its weight, and the parameter that holds it; None where it is computed.

    held: identity of the parameter and which part of it is read; None likewise.  layout: of the value.
    """

    value: Any
    holder: Any
    held: Any
    layout: str | None

    @property
    def identity(self) -> Any:
        return None if self.held is None else self.held[0]

    @property
    def part(self) -> Any:
        return None if self.held is None else self.held[1]


class Met:
    """Weights by what holds them and which part of it they are, or by the place where they are computed.

    weights: in the order in which they were met.  reasons: why others were left, by their op.
    retracted: those of them that were weights until an embedding turned out to read them.
    keep, place: of the tool.
    """

    def __init__(
        self,
        options: Options,
        selects: Selection,
        keep: Callable[..., Any],
        place: Callable[[amanda.OpContext], str],
    ) -> None:
        self._options, self._selects, self._keep, self._place = options, selects, keep, place
        self.clear()

    def clear(self) -> None:
        """Forget them all."""
        self.weights: dict[Hashable, Weight] = {}
        self.reasons: dict[str, str] = {}
        self.retracted: list[Weight] = []
        self._left: set[Hashable] = set()
        self._passed = 0
        self._readings: dict[Hashable, Reading] = {}
        self._of: dict[Hashable, list[Weight]] = {}
        self._parts = Parts()

    @property
    def passed(self) -> str:
        """What is said where there were weights, and none was selected."""
        if self.weights or self.reasons or not self._passed:
            return ""
        selection = str(self._selects) or "the default of type"
        return f"{self._passed} weights were met, of which {selection} selects none"

    def look_at(self, context: amanda.OpContext) -> set[int]:
        """Note what an op says of weights that are left: it looks rows up, or has several weights.

        Gives the ids of ops that had masks of it, since they were met before: they have none any more.
        """
        if context["type"] in WITHIN and self._selects(context):
            self.leave(context, "it multiplies by several weights in one op")
        holder = context.get_variable(0) if context["type"] in LOOKUPS else None
        if holder is None:
            return set()
        identity = framework_of(holder).identity(holder)
        self._left.add(identity)
        return self._retract(context, self._of.pop(identity, []))

    def _retract(self, context: amanda.OpContext, weights: list[Weight]) -> set[int]:
        """Leave weights that were pruned until an embedding turned out to read them."""
        found: set[int] = set()
        for one in weights:
            if context.is_static() and one.is_masked:
                raise PruneError(
                    f"{context['type']} of {context.get_scope() or context.get_source()} looks up rows of a "
                    f"weight for which {one.type} of {one.module or one.source} has a mask; exclude that"
                )
            one.is_left = True
            self.reasons[f"{one.type} of {one.module or one.source}"] = LOOKED_UP
            found |= one.readers
        self.retracted += weights
        ours = {id(one) for one in weights}
        self.weights = {key: one for key, one in self.weights.items() if id(one) not in ours}
        self._readings = {key: one for key, one in self._readings.items() if not one.is_of(ours)}
        return found

    def __call__(
        self, context: amanda.OpContext, value: Any, holder: Any, layout: str | None
    ) -> Weight | Reading | None:
        """The weight of an op; None of one that is not pruned, here or where it was met first."""
        if getattr(value, "is_meta", False):  # it has no numbers yet
            return None
        framework = framework_of(value)
        held = None if holder is None else framework.held(holder, value)
        key: Hashable = self._place(context) if held is None else held
        if held is not None and held[0] in self._left:
            if self._selects(context):
                self.leave(context, LOOKED_UP)
        elif key not in self.weights and key not in self._readings and key not in self._left:
            self._meet(context, framework, key, _Read(value, holder, held, layout))
        found = self.weights.get(key) or self._readings.get(key)
        if isinstance(found, Weight):
            found.readers.add(context.get_op_id())
        return found

    def rows(
        self, context: amanda.OpContext, origin: Origin, value: Any, layout: str | None
    ) -> Reading | None:
        """The rows of a parameter, of which an op reads some that were selected; None of those that are left.

        layout: of one row as the op reads it.
        """
        holder, framework = origin.holder, framework_of(value)
        if not value.numel() or holder.is_meta:
            return None
        identity = framework.identity(holder)
        key: Hashable = (identity, "rows")
        if identity in self._left:
            if self._selects(context):
                self.leave(context, LOOKED_UP)
        elif key not in self._readings and key not in self._left:
            self._meet_rows(context, framework, key, origin, value, layout)
        return self._readings.get(key)

    def _meet_rows(
        self, context: amanda.OpContext, framework: Any, key: Any, origin: Origin, value: Any, layout: Any
    ) -> None:
        holder = origin.holder
        self._left.add(key)
        if not self._selects(context):
            self._passed += 1
            return
        axes = order_of_axes(origin, value) if holder.dim() > 2 else None
        if axes is None or self._options.regrow == "gradient":
            reason = (
                "it reads elements of a parameter that an index selects, which are no weights by themselves"
            )
            self.leave(
                context, "regrow of gradients does not follow rows that an index selects" if axes else reason
            )
            return
        layout, rows = row_layout(layout, axes), holder.detach().unbind()
        if not self._fits(context, rows[0], layout):
            return
        whole, others = form_of(holder), self._of.setdefault(key[0], [])
        for row in rows:
            read = _Read(row, holder, framework.held(holder, row), layout)
            if not any(framework.overlaps(read.part, one.part, whole) for one in others):
                self._take(context, framework, read.held, read, whole)
        for one in others:
            one.readers.add(context.get_op_id())
        self._left.discard(key)
        self._readings[key] = Reading(framework, None, whole, others)

    def _meet(self, context: amanda.OpContext, framework: Any, key: Hashable, read: _Read) -> None:
        """Take a weight, or a form of a parameter, that was not met before."""
        is_form = context.namespace.matches("pytorch/*/*") and read.held is not None
        whole = form_of(read.holder) if is_form else None
        others: list[Weight] = [] if read.held is None else self._of.setdefault(read.identity, [])
        if read.held is not None and any(framework.overlaps(read.part, one.part, whole) for one in others):
            self._readings[key] = Reading(framework, read.part, whole, others)
        elif not self._selects(context):
            self._left.add(key)
            self._passed += 1
        elif not self._fits(context, read.value, read.layout):
            self._left.add(key)
        else:
            self._take(context, framework, key, read, whole)

    def _take(
        self, context: amanda.OpContext, framework: Any, key: Hashable, read: _Read, whole: Any
    ) -> None:
        is_named = read.held is not None and context.get_variable_path(read.holder) is not None
        place = (context, "")
        if whole is not None:
            place = self._parts.place(context, read.identity, read.part, whole, is_named)
        self.weights[key] = self._made(context, framework, read, whole, *place)
        if read.held is not None:
            self._of.setdefault(read.identity, []).append(self.weights[key])

    def _fits(self, context: amanda.OpContext, value: Any, layout: str | None) -> bool:
        extents = context["shape"](value)
        if extents is None or None in extents or len(extents) < 2:
            reason: str | None = f"its shape is {extents}"
        elif 0 in extents:
            reason = "it has no elements"
        elif "float" not in str(context["dtype"](value)):
            reason = f"its type is {context['dtype'](value)}"
        elif context.is_static() and not _is_in_file(context, context["weight_index"]):
            reason = "it is computed when the model runs"
        else:
            reason = self._options.pattern.misfit(canonical_extents(extents, layout), layout is not None)
        if reason is not None:
            self.leave(context, reason)
        return reason is None

    def leave(self, context: amanda.OpContext, reason: str) -> None:
        """Note why the weight of an op is left as it is."""
        self.reasons[f"{context['type']} of {context.get_scope() or context.get_source()}"] = reason

    def selects(self, context: amanda.OpContext) -> bool:
        """Whether the weight of an op is one to prune."""
        return self._selects(context)

    def _made(
        self, context: amanda.OpContext, framework: Any, read: _Read, whole: Any, reader: amanda.OpContext,
        suffix: str,
    ) -> Weight:  # fmt: skip
        """A weight with its state, which is the parameter's, or that of the op that read it first."""
        extents = context["shape"](read.value)
        variable = None if read.held is None else read.holder
        order = None if read.part is None or whole is None else in_memory_order(read.part)
        held_in = extents if order is None else _held_in(read, whole, order)
        state: list[Any] = []

        def keep(name: str, start: Any) -> Any:
            def make() -> Any:
                return framework.stored(start)

            state.append(self._keep(reader, name + suffix, make, framework.stored, variable))
            return state[-1]

        def keep_elements(name: str, start: Any) -> Any:
            found = keep(name, start)
            if tuple(found.shape) != tuple(held_in):
                raise PruneError(
                    f"the {name} that was loaded for {context.get_scope()} is of shape {tuple(found.shape)}, "
                    f"not {tuple(held_in)} as its weight"
                )
            if order is None:
                return found
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return found.reshape([extents[axis] for axis in order]).permute(inverse)

        kept, updated = keep_elements("mask", np.ones(held_in, bool)), keep("updated", np.full(1, NEVER))
        grown = permutation = None
        if self._options.exchanges:
            dtype = "float64" if context["dtype"](read.value) == "float64" else "float32"
            grown = keep_elements("grown", np.zeros(held_in, dtype))
        if self._options.permute:
            channels = np.arange(canonical_extents(extents, read.layout)[1])
            permutation = keep("permutation", channels)
        return Weight(
            context.get_scope(), context["type"], context.get_source(), tuple(extents), read.layout,
            framework, read.identity, read.part, len(self.weights), kept, updated, grown, permutation,
            state=state,
        )  # fmt: skip


def _held_in(read: _Read, whole: Any, order: Sequence[int]) -> Sequence[int]:
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
