"""The weights that a tool has met at the ops that read them, and those that it leaves, with the reasons."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS
from amanda.tools.weights._parameter_slices import ParameterSlice
from amanda.tools.weights._parameters import ParameterStore, parameter_store
from amanda.tools.weights._selection import LOOKUPS
from amanda.tools.weights._shared_state import SharedState
from amanda.tools.weights._views import AliasedWeightView, Find, IndexedRows, order_of_axes, row_layout
from amanda.tools.weights._weight import Weight, WeightView
from amanda.tools.weights._weight_input import WeightInput, WeightReads

if TYPE_CHECKING:
    from amanda.tools.weights._tool import WeightTool

W = TypeVar("W", bound=Weight)

LOOKED_UP = "an embedding reads it too"
CONTRACTED = "an einsum reads it too"
EINSUM = "the operands of an einsum are one list, of which none is changed"
"""Why a tool leaves an einsum that reads a parameter."""
ADAPTER = "it is an adapter's, which is changed if `module` selects it"
SELECTED = "it reads what other ops select out of a parameter, which can be followed in eager PyTorch alone"
INDEXED = "it reads elements of a parameter that an index selects, which are no weights by themselves"


class Weights(Generic[W]):
    """The weights of one tool, by parameter and part, or by the op that reads a computed one.

    found: in the order in which they were met.  reasons: why others were left, by their op.
    left: number of elements of others, by what holds them.
    retracted: weights that were changed until an embedding turned out to read them.
    """

    def __init__(self, tool: WeightTool[W]) -> None:
        self._tool = tool
        self.clear()

    def clear(self) -> None:
        """Forget all weights."""
        self.found: dict[Hashable, W] = {}
        self.reasons: dict[str, str] = {}
        self.left: dict[Hashable, int] = {}
        self.retracted: list[W] = []
        self._left: set[Hashable] = set()
        self._others: dict[Hashable, str] = {}
        self._passed, self._has_passed_by = 0, False
        self._forms: dict[Hashable, AliasedWeightView] = {}
        self._of: dict[Hashable, list[W]] = {}
        self._shared = SharedState()

    def __iter__(self) -> Iterator[W]:
        return iter(self.found.values())

    def has_met(self, identity: Hashable) -> bool:
        """Return True if an op has read a parameter, also one that is left or not selected."""
        return identity in self._of or identity in self._others

    @property
    def passed(self) -> str:
        """A sentence for the case that weights were met, and none of them was selected; or none was met."""
        if self.found or self.reasons or not (self._passed or self._has_passed_by):
            return ""
        if not self._passed:
            return "None of the products that were met reads a parameter that a model holds"
        selection = str(self._tool.selection) or "the default of type"
        return f"{self._passed} weights were met, of which {selection} selects none"

    def pass_by(self, context: amanda.OpContext) -> None:
        """Record a product that reads no weight."""
        self._has_passed_by |= context["phase"] == "forward" and context["type"] in PRODUCTS

    def look_at(self, context: amanda.OpContext) -> set[int]:
        """Record that an op leaves its weights: it looks rows up, has several weights, or is an adapter's.

        What such an op shares with a product is left too, as it would read that unchanged.

        Returns the ids of ops that read a weight which has been taken back for that.
        """
        if context["type"] in SEVERAL_WEIGHTS and self._tool.selection(context):
            self.leave(context, WeightReads.several_weights)
        if self._tool.selection.leaves_adapter(context):
            self.reasons[_named(context)] = ADAPTER
        holder = context.get_variable(0) if context["type"] in LOOKUPS else None
        holders = [] if holder is None else [holder]
        reason = LOOKED_UP
        if context["type"] == "einsum" and context.namespace.matches("pytorch/*/eager"):
            reason, holders = CONTRACTED, _operands(context)
            if holders and self._tool.selection(context):
                self.leave(context, EINSUM)
        again: set[int] = set()
        for one in holders:
            identity = parameter_store(one).identity(one)
            self._others[identity] = reason
            again |= self._retract(context, self._of.pop(identity, []), reason)
        return again

    def at(self, context: amanda.OpContext, read: WeightInput) -> tuple[WeightView | None, Find | None]:
        """Return what an op reads as its weight, None for what is left; and what finds it at each execution.

        The second is None for an op that always reads the same.
        """
        value = context.get_inputs()[read.index]
        if read.is_lost:
            if self._tool.selection(context):
                self.leave(context, SELECTED)
            return None, None
        parts = () if read.holder is None else parameter_store(read.holder).slices(read.holder)
        if parts:
            forms = {one: self._form(context, value, one, read.layout) for one in parts}
            return None, partial(_current, forms, read.holder)
        if not read.is_followed:
            return self._form(context, value, read.holder, read.layout), None
        find = partial(self._find, context, read.layout)
        return find(value, ParameterSlice.of_input(context, read.index)), find

    def _find(
        self, context: amanda.OpContext, layout: str | None, value: Any, origin: ParameterSlice | None
    ) -> WeightView | None:
        if origin is None:
            self.leave(context, WeightReads.unknown_part)
            return None
        if origin.form is None:
            rows = self._rows(context, origin, value, layout)
            return None if rows is None else IndexedRows(rows, origin)
        return self._form(context, origin.holder.detach().as_strided(*origin.form), origin.holder, layout)

    def _form(
        self, context: amanda.OpContext, value: Any, holder: Any, layout: str | None
    ) -> WeightView | None:
        """Return the weight, or another form of a parameter with weights; None for what is left."""
        unread = tensors_of(value).unread(value) if context.is_eager() else None
        if getattr(value, "is_meta", False) or unread is not None:  # it may have numbers later
            if unread is not None and self._tool.selection(context):
                self.leave(context, unread)
            return None
        store = parameter_store(value)
        held = None if holder is None else store.locate(holder, value)
        key: Hashable = self._tool.place(context) if held is None else held
        if held is not None and held[0] in self._others:
            if self._tool.selection(context):
                self.leave(context, self._others[held[0]])
        elif key not in self.found and key not in self._forms and key not in self._left:
            self._meet(context, store, key, _Read(value, holder, held, layout))
        found = self.found.get(key) or self._forms.get(key)
        if isinstance(found, Weight):
            found.readers.add(context.get_op_id())
        return found

    def _meet(self, context: amanda.OpContext, store: ParameterStore, key: Hashable, read: _Read) -> None:
        whole = None if read.held is None else store.whole(read.holder)
        others = [] if read.held is None else self._of.setdefault(read.held[0], [])
        if read.held is not None and any(store.overlaps(read.held[1], one.part, whole) for one in others):
            self._forms[key] = AliasedWeightView(store, read.held[1], whole, others)
        elif not self._tool.selection(context):
            self._left.add(key)
            self._passed += 1
        elif not self._take(context, store, key, read, whole):
            self._left.add(key)

    def _rows(
        self, context: amanda.OpContext, origin: ParameterSlice, value: Any, layout: str | None
    ) -> AliasedWeightView | None:
        """Return all rows of a parameter, of which an op reads some; None for rows that are left."""
        holder, store = origin.holder, parameter_store(value)
        if not value.numel() or holder.is_meta:
            return None
        identity = store.identity(holder)
        key: Hashable = (identity, "rows")
        if identity in self._others:
            if self._tool.selection(context):
                self.leave(context, self._others[identity])
        elif key not in self._forms and key not in self._left:
            self._left.add(key)
            if self._tool.selection(context):
                self._meet_rows(context, store, key, origin, value, layout)
            else:
                self._passed += 1
        return self._forms.get(key)

    def _meet_rows(
        self,
        context: amanda.OpContext,
        store: ParameterStore,
        key: Any,
        origin: ParameterSlice,
        value: Any,
        layout: Any,
    ) -> None:
        holder = origin.holder
        axes = order_of_axes(origin, value) if holder.dim() > 2 else None
        if axes is None or self._tool.leaves_rows:
            self.leave(context, INDEXED if axes is None else self._tool.leaves_rows)
            return
        layout, whole = row_layout(layout, axes), store.whole(holder)
        others = self._of.setdefault(key[0], [])
        for row in holder.detach().unbind():
            read = _Read(row, holder, store.locate(holder, row), layout)
            if any(store.overlaps(read.held[1], one.part, whole) for one in others):
                continue
            if not self._take(context, store, read.held, read, whole):
                return
        for one in others:
            one.readers.add(context.get_op_id())
        self._left.discard(key)
        self._forms[key] = AliasedWeightView(store, None, whole, others)

    def _take(
        self, context: amanda.OpContext, store: ParameterStore, key: Hashable, read: _Read, whole: Any
    ) -> bool:
        """Add a weight, with its state, unless the tool leaves it: then record why."""
        reason = _misfit(context, read.value)
        if reason is None:
            weight = self._made(context, store, read, whole)
            reason = self._tool.on_weight(weight)
        if reason is not None:
            self.leave(context, reason)
            return False
        weight.close()
        self.found[key] = weight
        if read.held is not None:
            self._of.setdefault(read.held[0], []).append(weight)
        return True

    def _made(self, context: amanda.OpContext, store: ParameterStore, read: _Read, whole: Any) -> W:
        path = None if read.held is None else context.get_variable_path(read.holder)
        variable = None if read.held is None else read.holder
        reader, suffix = context, ""
        if whole is not None and read.held is not None:
            identity, part = read.held
            reader, suffix = self._shared.key_for(context, identity, part, whole, path is not None)

        copy = tensors_of(read.value).copy

        def keep(name: str, make: Callable[[], Any]) -> Any:
            return self._tool.keep(reader, name + suffix, make, copy, variable)

        return self._tool.weight_type(
            context, read.value, read.layout, store, read.held, whole, len(self.found), keep,
            self._tool.error, path or ("" if variable is None else store.name(variable)), _weakly(variable),
        )  # fmt: skip

    def leave(self, context: amanda.OpContext, reason: str) -> None:
        """Record why the weight of an op is left as it is, and how many elements it has."""
        self.reasons[_named(context)] = reason
        self.left.update(_elements(context))

    def _retract(self, context: amanda.OpContext, weights: list[W], reason: str) -> set[int]:
        """Leave weights that were changed until an embedding or an einsum turned out to read them."""
        found: set[int] = set()
        for one in weights:
            if context.is_static() and one.is_ready:
                raise self._tool.error(
                    f"{context['type']} of {context.get_scope() or context.get_source()} looks up rows of a "
                    f"weight that {one.type} of {one.module or one.source} reads changed; exclude that"
                )
            one.is_left = True
            self.left[one.holder] = sum(own.size for own in weights)
            self.reasons[f"{one.type} of {one.module or one.source}"] = reason
            found |= one.readers
        self.retracted += weights
        ours = {id(one) for one in weights}
        self.found = {key: one for key, one in self.found.items() if id(one) not in ours}
        self._forms = {key: one for key, one in self._forms.items() if not one.is_of(ours)}
        return found


def _current(
    forms: Mapping[Any, WeightView | None], holder: Any, value: Any, origin: ParameterSlice | None
) -> WeightView | None:
    """Return what is kept for the slice of a stack that the op reads now."""
    return forms.get(parameter_store(holder).current_slice(holder))


class _Read:
    """The weight that an op reads: value, parameter, identity and part, and layout."""

    def __init__(self, value: Any, holder: Any, held: Any, layout: str | None) -> None:
        self.value, self.holder, self.held, self.layout = value, holder, held, layout


def _misfit(context: amanda.OpContext, value: Any) -> str | None:
    """Return why nothing can be kept for what an op reads; None where it can."""
    extents = context["shape"](value)
    if extents is None or None in extents or len(extents) < 2:
        return f"its shape is {extents}"
    if 0 in extents:
        return "it has no elements"
    if not str(context["dtype"](value)).startswith(("float", "bfloat")):
        return f"its type is {context['dtype'](value)}"
    if context.is_static() and not _is_in_file(context, context["weight_index"]):
        return "it is computed when the model runs"
    return None


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Return True if an input of an op of a file is known before the model runs."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except AmandaError:
        return False


def _elements(context: amanda.OpContext) -> Iterator[tuple[Hashable, int]]:
    """Yield the numbers of elements of the weights that an op reads, by holder; nothing for computed ones."""
    try:
        inputs = context.get_inputs()
    except AmandaError:  # the values of its first execution are gone
        return
    weight = context["weight_index"]
    several = context["type"] in SEVERAL_WEIGHTS or context["type"] == "einsum"
    positions = range(len(inputs)) if several else [weight]
    for position in positions:
        if position is None or position >= len(inputs):
            continue
        value = inputs[position]
        if isinstance(value, (list, tuple)):
            holders = [parameter_store(one).owner(one) for one in value]
        else:
            holders = [context.get_variable(position)]
        for holder in holders:
            size = None if holder is None else _size(context, holder, value)
            if size is not None:
                yield parameter_store(holder).identity(holder), size


def _operands(context: amanda.OpContext) -> list[Any]:
    """Return the parameters that an einsum of PyTorch reads, whole or in part."""
    lists = [one for one in context.get_inputs() if isinstance(one, (list, tuple))]
    owners = [parameter_store(one).owner(one) for group in lists for one in group]
    return [one for one in owners if one is not None]


def _size(context: amanda.OpContext, holder: Any, value: Any) -> int | None:
    """Return the number of elements of a holder, or of the value where the holder is a handle."""
    for one in (holder, value):
        extents: Sequence[int] | None = None if isinstance(one, (list, tuple)) else context["shape"](one)
        if extents and None not in extents:
            return prod(extents)
    return None


def _weakly(holder: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: None


def _named(context: amanda.OpContext) -> str:
    return f"{context['type']} of {context.get_scope() or context.get_source()}"
