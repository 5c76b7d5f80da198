"""Counts of executions by shape: an op is analysed once, and its costs are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import amanda
from amanda.tools.flops._cost import Extents, OpCost
from amanda.tools.flops._table import CONTRACTIONS
from amanda.tools.flops._tangents import TANGENT, has_tangents, tangent_op_cost
from amanda.tools.kit import leaves

MAX_SHAPES = 1024
"""Shapes of one op that are counted apart before their costs are computed."""
MAX_COSTS = 16 * MAX_SHAPES
"""Costs that are remembered, of all ops together."""
RECOMPUTATION = "recomputation"
"""The phase of what a framework runs again in the backward pass, as a checkpoint does."""


class ShapedContext(dict[str, Any]):
    """The context of an op at shapes that it was not analysed with; its tensors have no values."""

    get_inputs: Callable[[], Any]
    get_outputs: Callable[[], Any]
    get_grad_outputs: Callable[[], Any]
    get_grad_inputs: Callable[[], Any]

    def __init__(self, context: amanda.OpContext, sides: Sequence[list[Any]]) -> None:
        super().__init__(context)
        # The costs of inner operators were computed with values, which this context lacks.
        self["inner_costs"] = None
        self._context = context
        inputs, outputs, incoming, outgoing = sides if len(sides) == 4 else (*sides, None, None)
        self.get_inputs, self.get_outputs = lambda: inputs, lambda: outputs
        self.get_grad_outputs, self.get_grad_inputs = lambda: incoming, lambda: outgoing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


AnyContext = ShapedContext | amanda.OpContext


class ShapeCounts(amanda.ShapeTally):
    """Count executions of an op, or of a backward op, by their shapes; compute costs when they are read.

    context: of its analysis.  sides: the values of the analysis: inputs and outputs, or gradients.
    measure: returns the cost of one execution at a `ShapedContext`, as far as shapes decide.
    costs: what `measure` returned for all ops, by everything that decides it.
    settle: adds the counts to the result, where there are many shapes.  forward: of the op of a backward op.
    key: anything else that decides the costs.
    """

    __slots__ = (
        "_builders", "_context", "_costs", "_counts_all_sides", "_counts_by_samples", "_dtype", "_measure",
        "_recomputed", "_settle", "key",
    )  # fmt: skip

    def __init__(
        self, context: amanda.OpContext, sides: Sequence[Sequence[Any]],
        measure: Callable[[ShapedContext, tuple[Any, ...]], OpCost], costs: dict[Hashable, OpCost],
        settle: Callable[[ShapeCounts], None], forward: ShapeCounts | None = None, key: Hashable = None,
    ) -> None:  # fmt: skip
        super().__init__(MAX_SHAPES)
        self._context, self._measure, self._costs, self._settle = context, measure, costs, settle
        self._recomputed: _RecomputationCounts | None = None
        self._counts_by_samples: dict[int, amanda.ShapeTally] = {}  # by the number of samples of a vmap
        # The cost of products is that of the forward op, which may have had samples that the gradients lack.
        is_product = str(context.get("backward_type", "")).removesuffix("_backward") in CONTRACTIONS
        self._counts_all_sides = forward is None or is_product
        # A backward op may have no gradient at its analysis; its tensors then have the element type of the
        # forward op.
        dtypes = [getattr(value, "dtype", None) for value in leaves(sides)]
        forward_dtype = None if forward is None else forward._dtype
        self._dtype: Any = next((dtype for dtype in dtypes if dtype is not None), forward_dtype)
        # A gradient that this pass does not make another pass may.
        type_for_none = None if forward is None else self._dtype
        builders = [[_make_stand_in_builder(value, type_for_none) for value in side] for side in sides]
        # A cost of gradients is decided by the shapes of the forward op as well, so a backward op counts all
        # four sides.
        self._builders: list[list[Callable[[Any], Any]]]
        self._builders = builders if forward is None else [*forward._builders, *builders]
        names = (context.get_forward_op_type(), context["type"], context["in_place"])
        op_key = names if forward is None else forward.key
        node = "" if forward is None else context.get_backward_op().__name__
        is_view = context["is_view"]((), ())
        view_or_type = is_view if forward is None else context["backward_type"]
        # Ops with equal keys share their costs and, at one op id, their counts: whatever decides a cost is in
        # the key.
        self.key: tuple[Hashable, ...] = (
            op_key, context["phase"], measure.__name__, node, view_or_type, context.get_backward_order(),
            context["complex_products"], key, *dtypes,
        )  # fmt: skip

    def __call__(self, *, shapes: tuple[Any, ...]) -> None:
        """Count an execution with these shapes, by its samples; settle the counts where they are too many."""
        # Shapes are those of a sample: under a vmap so many samples are computed at once.
        samples = self.samples(shapes if self._counts_all_sides else shapes[2:])
        if samples == 1:
            super().__call__(shapes=shapes)
        else:
            self._counts_by_samples.setdefault(samples, amanda.ShapeTally())(shapes=shapes)
        # A program with ever new shapes, such as lengths of texts, must not grow without end.
        if len(self) + sum(map(len, self._counts_by_samples.values())) > MAX_SHAPES:
            self._settle(self)

    @property
    def recomputed(self) -> _RecomputationCounts:
        if self._recomputed is None:
            self._recomputed = _RecomputationCounts(self)
        return self._recomputed

    def clear(self) -> None:
        super().clear()
        self._counts_by_samples.clear()
        if self._recomputed is not None:
            self._recomputed.clear()

    def op_costs(self) -> Iterator[OpCost]:
        """Yield a cost with its number of calls for each set of shapes; samples and tangents apart."""
        yield from self._op_costs(self)
        for samples, tally in self._counts_by_samples.items():
            yield from (op_cost.for_samples(samples) for op_cost in self._op_costs(tally))
        for tally in (self, *self._counts_by_samples.values()):
            yield from self._tangent_op_costs(tally)
        if self._recomputed is not None:
            yield from (replace(op_cost, phase=RECOMPUTATION) for op_cost in self._op_costs(self._recomputed))

    def _op_costs(self, tally: amanda.ShapeTally) -> Iterator[OpCost]:
        for shapes, calls in tally.items():
            yield self._count_op_cost(self.cost(shapes), calls)

    def _tangent_op_costs(self, tally: amanda.ShapeTally) -> Iterator[OpCost]:
        """Yield the cost of the tangents, with calls, of each counted set of shapes that has tangents."""
        for shapes, calls in tally.items():
            if has_tangents(shapes):
                op_cost = tangent_op_cost(self._shaped_context(shapes), self.cost(shapes), shapes)
                yield self._count_op_cost(op_cost, calls)

    def _count_op_cost(self, cost: OpCost, calls: int) -> OpCost:
        # Ops with equal keys share their costs, so these may be those of another op.
        module, source = self._context.get_scope(), self._context.get_source()
        parameters = self._context["parameters"] if cost.parameters else ()
        return replace(cost, module=module, source=source, parameters=parameters, calls=calls)

    def _shaped_context(self, shapes: tuple[Any, ...]) -> ShapedContext:
        sides = zip(self._builders, shapes, strict=True)
        return ShapedContext(self._context, [_stand_ins(builders, side) for builders, side in sides])

    def cost(self, shapes: tuple[Any, ...]) -> OpCost:
        """Return the cost of an execution with these shapes, computed once for all ops of this key."""
        key = (self.key, shapes)
        cost = self._costs.get(key)
        if cost is None:
            # Costs can be computed again at any time, so all are dropped rather than the oldest.
            if len(self._costs) >= MAX_COSTS:
                self._costs.clear()
            cost = self._costs[key] = self._measure(self._shaped_context(shapes), shapes)
        return cost


class _RecomputationCounts(amanda.ShapeTally):
    """Recomputations of an op, by their shapes."""

    __slots__ = ("_counts",)

    def __init__(self, counts: ShapeCounts) -> None:
        super().__init__(MAX_SHAPES)
        self._counts = counts

    def __call__(self, *, shapes: tuple[Any, ...]) -> None:
        super().__call__(shapes=shapes)
        if len(self) > MAX_SHAPES:
            self._counts._settle(self._counts)


class AnyShapeCount(amanda.Tally):
    """Count executions of an op whose cost is the same for all shapes."""

    __slots__ = ("_op_cost", "_recomputed", "key")

    def __init__(self, op_cost: OpCost, key: Hashable) -> None:
        super().__init__()
        self._op_cost, self._recomputed, self.key = op_cost, amanda.Tally(), key

    @property
    def recomputed(self) -> amanda.Tally:
        return self._recomputed

    def clear(self) -> None:
        super().clear()
        self._recomputed.clear()

    def op_costs(self) -> Iterator[OpCost]:
        yield replace(self._op_cost, calls=self.calls)
        if self._recomputed.calls:
            yield replace(self._op_cost, phase=RECOMPUTATION, calls=self._recomputed.calls)


class FirstShapeCount:
    """Executions of a backward op whose cost is known for the shapes of its first execution alone.

    first, other: costs, with calls, of executions at those shapes, and at others, where it is unknown.
    share: returns the object that counts the calls of equal ops together.
    """

    __slots__ = ("_first_cost", "_other_cost", "_shapes", "_share_op_cost")

    def __init__(self, first: OpCost, other: OpCost, share: Callable[[OpCost], OpCost]) -> None:
        self._first_cost, self._other_cost, self._share_op_cost = first, other, share
        self._shapes: tuple[Any, ...] | None = None

    @amanda.observer
    def count(self, *, shapes: tuple[Any, ...]) -> None:
        """Count an execution with these shapes, and its tangents; the first call sets shapes and samples."""
        if self._shapes is None:
            self._shapes = shapes
            samples = amanda.ShapeTally.samples(shapes)
            if samples != 1:
                cost = self._first_cost.for_samples(samples)
                self._first_cost = self._share_op_cost(replace(cost, calls=0))
        op_cost = self._first_cost if shapes == self._shapes else self._other_cost
        op_cost.calls += 1
        if has_tangents(shapes):
            self._share_op_cost(replace(self._other_cost, phase=TANGENT, calls=0)).calls += 1


def _stand_ins(builders: Sequence[Callable[[Any], Any]], shapes: Sequence[Any]) -> list[Any]:
    """Return stand-ins of these shapes, by the builders of their positions; the last serves all beyond."""
    # An op with a list of outputs may give more of them than at its analysis.
    return [builders[min(i, len(builders) - 1)](shape) for i, shape in enumerate(shapes)] if builders else []


def _make_stand_in_builder(value: Any, type_for_none: Any) -> Callable[[Any], Any]:
    """Return a function from a shape to a stand-in for a value; what is no tensor stands for itself."""
    # type_for_none: element type of the stand-in where the value is None; None if it stays None.
    if isinstance(value, (list, tuple)):
        element_types = [element.dtype for element in value if _is_tensor(element)]
        if not element_types:
            return lambda shape: value
        return lambda shape: [Extents(*pair) for pair in zip(shape, element_types, strict=True)]
    if not _is_tensor(value) and (value is not None or type_for_none is None):
        return lambda shape: value
    element_type = type_for_none if value is None else value.dtype
    return lambda shape: None if shape is None else Extents(shape, element_type)


def _is_tensor(value: Any) -> bool:
    # By name: PyTorch is not imported here, and the shape of a subclass may say less than its values.
    kind: Any = type(value)  # mypy takes no class for hashable
    return _is_torch_class(kind)


@lru_cache(maxsize=256)
def _is_torch_class(kind: Any) -> bool:
    return kind.__name__ in ("Tensor", "Parameter") and kind.__module__.partition(".")[0] == "torch"


def are_shapes_enough(sides: Sequence[Sequence[Any]], shape: Callable[[Any], Any]) -> bool:
    """Return True if shapes and element types say all that a cost needs to know of values.

    So they do if all tensors are of PyTorch's own classes, of known shape, and none is in a list of lists.
    """
    for value in [value for side in sides for value in side]:
        for element in value if isinstance(value, (list, tuple)) else (value,):
            if _is_tensor(element):
                extents = shape(element)
                if extents is None or None in extents:
                    return False
            elif any(hasattr(type(leaf), "shape") for leaf in leaves([element])):
                return False
    return True


# Types whose result lies in new memory at all shapes; of those not listed, `reshape` for one, strides decide.
_ALWAYS_COPIES = frozenset("""
    cat stack hstack vstack index_select gather embedding index_add index_copy index_fill index_put scatter
    scatter_add scatter_reduce clone masked_fill masked_select take repeat repeat_interleave zeros_like
    ones_like full_like one_hot triu tril roll flip sort argsort nonzero fill zero copy
    to type type_as float half double bfloat16 _to_copy
    """.split())  # fmt: skip
_VIEWS = frozenset(
    "broadcast_to chunk expand expand_as narrow permute select split split_with_sizes t transpose "
    "unbind".split()
)
_VIEW_INDICES = (int, slice, type(...), type(None))


def is_always_or_never_view(kind: str, context: amanda.OpContext, is_view: bool) -> bool:
    """Return True if an op of this type gives a view at all shapes, or at none, as this execution did.

    kind: a type that moves data.  is_view: whether this execution gave a view.  False where that may change.
    """
    if kind in ("index", "getitem"):
        index_parts = leaves(context.get_inputs()[1:])
        # Indexing with tensors gathers, which always copies; with numbers and slices it is a view.  If this
        # execution did otherwise, the rule does not hold for the op.
        if any(map(_is_tensor, index_parts)):
            return not is_view
        return is_view and all(type(part) in _VIEW_INDICES for part in index_parts)
    if kind in _VIEWS:
        return is_view or not context.get_outputs()
    if not any(map(_is_tensor, leaves(context.get_inputs()))):
        return not is_view
    # With a memory format an op copies where strides differ, and returns its input where they do not.
    return kind in _ALWAYS_COPIES and context.get_attrs().get("memory_format") is None


class ParameterKeys:
    """Keys of the parameters that live ops read, by which a result tells parameters apart.

    A model that was dropped and is made again gets the same keys, so a program of many models adds to the
    counts of one: a key is the type, module and line of the op that read the parameter first, and a number.
    """

    def __init__(self) -> None:
        self._key_by_parameter: dict[Hashable, tuple[Hashable, int]] = {}
        self._used_numbers: dict[Hashable, set[int]] = {}  # in use, by the other parts of the keys
        self._parameters_by_first_reader: dict[int, list[Hashable]] = {}  # by the id of the op

    def keys_and_elements(self, context: amanda.OpContext) -> tuple[tuple[Hashable, int], ...]:
        """Return the keys and the elements of the parameters that an op reads."""
        return tuple((self._key(context, read), elements) for read, elements in context["parameters_read"])

    def _key(self, context: amanda.OpContext, parameter: Hashable) -> Hashable:
        """Return the key of a parameter, a new one if no live op has read it before."""
        key = self._key_by_parameter.get(parameter)
        if key is None:
            reading_place = (context["type"], context.get_scope(), context.get_source())
            used_numbers = self._used_numbers.setdefault(reading_place, set())
            # Ops of one place may be many: numbers tell their parameters apart, and may be used again.
            number = next(number for number in count(len(used_numbers)) if number not in used_numbers)
            used_numbers.add(number)
            key = self._key_by_parameter[parameter] = reading_place, number
            self._parameters_by_first_reader.setdefault(context.get_op_id(), []).append(parameter)
        return key

    def forget(self, op_id: int) -> None:
        """Forget the parameters that an op read first, which the program dropped."""
        for parameter in self._parameters_by_first_reader.pop(op_id, ()):
            reading_place, number = self._key_by_parameter.pop(parameter)
            self._used_numbers[reading_place].discard(number)
