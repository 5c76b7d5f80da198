"""The weights that a tool has met, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import amanda
from amanda.tools.mapping import SEVERAL_WEIGHTS, Origin, Parts, form_of
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import framework_of
from amanda.tools.prune._left import elements_left
from amanda.tools.prune._options import Options
from amanda.tools.prune._read import Read, misfit, weight_of
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._rows import order_of_axes, row_layout
from amanda.tools.prune._selection import LOOKUPS, Selection
from amanda.tools.prune._weight import Weight

LOOKED_UP = "an embedding reads it too"
ADAPTER = "it is an adapter's, which is masked if `module` selects it"


class Met:
    """Weights by what holds them and which part of it they are, or by the place where they are computed.

    weights: in the order in which they were met.  reasons: why others were left, by their op.
    left: how many elements others have, by what holds them.
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
        self.left: dict[Hashable, int] = {}
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
        if context["type"] in SEVERAL_WEIGHTS and self._selects(context):
            self.leave(context, "it multiplies by several weights in one op")
        if self._selects.leaves_adapter(context):
            self.reasons[_named(context)] = ADAPTER
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
            self.left[id(one)] = one.size
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
            self._meet(context, framework, key, Read(value, holder, held, layout))
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
            read = Read(row, holder, framework.held(holder, row), layout)
            if not any(framework.overlaps(read.part, one.part, whole) for one in others):
                self._take(context, framework, read.held, read, whole)
        for one in others:
            one.readers.add(context.get_op_id())
        self._left.discard(key)
        self._readings[key] = Reading(framework, None, whole, others)

    def _meet(self, context: amanda.OpContext, framework: Any, key: Hashable, read: Read) -> None:
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

    def _take(self, context: amanda.OpContext, framework: Any, key: Hashable, read: Read, whole: Any) -> None:
        is_named = read.held is not None and context.get_variable_path(read.holder) is not None
        reader, suffix = context, ""
        if whole is not None:
            reader, suffix = self._parts.place(context, read.identity, read.part, whole, is_named)

        def keep(name: str, make: Callable[[], Any]) -> Any:
            return self._keep(reader, name + suffix, make, framework.stored, read.variable)

        number = len(self.weights)
        self.weights[key] = weight_of(read, context, framework, whole, self._options, keep, number)
        if read.held is not None:
            self._of.setdefault(read.identity, []).append(self.weights[key])

    def _fits(self, context: amanda.OpContext, value: Any, layout: str | None) -> bool:
        reason = misfit(context, value, layout, self._options.pattern)
        if reason is not None:
            self.leave(context, reason)
        return reason is None

    def leave(self, context: amanda.OpContext, reason: str) -> None:
        """Note why the weight of an op is left as it is."""
        self.reasons[_named(context)] = reason
        self.left.update(elements_left(context))

    def selects(self, context: amanda.OpContext) -> bool:
        """Whether the weight of an op is one to prune."""
        return self._selects(context)


def _named(context: amanda.OpContext) -> str:
    return f"{context['type']} of {context.get_scope() or context.get_source()}"
