"""The weights that a tool has met, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

import amanda
from amanda.tools.mapping import Parts, form_of
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import framework_of
from amanda.tools.prune._layout import canonical_extents
from amanda.tools.prune._options import Options
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._selection import LOOKUPS, WITHIN, Selection
from amanda.tools.prune._weight import NEVER, Weight


class Met:
    """Weights by what holds them and which part of it they are, or by the place where they are computed.

    weights: in the order in which they were met.  reasons: why others were left, by their op.
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

    def look_at(self, context: amanda.OpContext) -> None:
        """Note what an op says of weights that are left: it looks rows up, or has several weights."""
        if context["type"] in LOOKUPS and (holder := context.get_variable(0)) is not None:
            self._left.add(framework_of(holder).identity(holder))
        if context["type"] in WITHIN and self._selects(context):
            self._leave(context, "it multiplies by several weights in one op")

    def __call__(self, context: amanda.OpContext, value: Any, holder: Any) -> Weight | Reading | None:
        """The weight of an op; None of one that is not pruned, here or where it was met first."""
        if getattr(value, "is_meta", False):  # it has no numbers yet
            return None
        framework = framework_of(value)
        held = None if holder is None else framework.held(holder, value)
        key: Hashable = self._place(context) if held is None else held
        if held is not None and held[0] in self._left:
            if self._selects(context):
                self._leave(context, "an embedding reads it too")
        elif key not in self.weights and key not in self._readings and key not in self._left:
            self._meet(context, framework, key, held, value, holder)
        return self.weights.get(key) or self._readings.get(key)

    def _meet(
        self, context: amanda.OpContext, framework: Any, key: Hashable, held: Any, value: Any, holder: Any
    ) -> None:
        """Take a weight, or a form of a parameter, that was not met before."""
        identity, part = held or (None, None)
        whole = form_of(holder) if context.namespace.matches("pytorch/*/*") and held is not None else None
        others: list[Weight] = [] if held is None else self._of.setdefault(identity, [])
        extents = context["shape"](value)
        if held is not None and any(framework.overlaps(part, one.part, whole) for one in others):
            self._readings[key] = Reading(framework, part, whole, others)
        elif not self._selects(context):
            self._left.add(key)
            self._passed += 1
        elif not self._fits(context, extents, value):
            self._left.add(key)
        else:
            is_named = context.get_variable_path(holder) is not None
            place = (context, "")
            if whole is not None:
                place = self._parts.place(context, identity, part, whole, is_named)
            variable = None if held is None else holder
            self.weights[key] = self._made(context, framework, held, extents, value, variable, *place)
            others.append(self.weights[key])

    def _fits(self, context: amanda.OpContext, extents: Any, value: Any) -> bool:
        layout = context["weight_layout"]
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
            self._leave(context, reason)
        return reason is None

    def _leave(self, context: amanda.OpContext, reason: str) -> None:
        self.reasons[f"{context['type']} of {context.get_scope() or context.get_source()}"] = reason

    def _made(
        self, context: amanda.OpContext, framework: Any, held: Any, extents: Any, value: Any, variable: Any,
        reader: amanda.OpContext, suffix: str,
    ) -> Weight:  # fmt: skip
        """A weight with its state, which is the parameter's, or that of the op that read it first."""
        layout = context["weight_layout"]

        def state(name: str, start: Any) -> Any:
            def make() -> Any:
                return framework.stored(start)

            return self._keep(reader, name + suffix, make, framework.stored, variable)

        kept, updated = state("mask", np.ones(extents, bool)), state("updated", np.full(1, NEVER))
        grown = permutation = None
        holder, part = held or (None, None)
        if self._options.exchanges:
            start = np.zeros(extents, "float64" if context["dtype"](value) == "float64" else "float32")
            grown = state("grown", start)
        if self._options.permute:
            channels = np.arange(canonical_extents(extents, layout)[1])
            permutation = state("permutation", channels)
        if tuple(kept.shape) != tuple(extents):
            raise PruneError(
                f"the mask that was loaded for {context.get_scope()} is of shape {tuple(kept.shape)}, "
                f"its weight of shape {tuple(extents)}"
            )
        return Weight(
            context.get_scope(), context["type"], context.get_source(), tuple(extents), layout, framework,
            holder, part, len(self.weights), kept, updated, grown, permutation,
        )  # fmt: skip


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Whether an input of an op of a file is known before the model runs."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except amanda.AmandaError:
        return False
