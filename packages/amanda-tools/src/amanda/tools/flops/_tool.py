"""The tool: computes the cost of each op and its backward ops, and counts executions; costs of one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import amanda
from amanda.options import Name, PositiveInt, checked
from amanda.tools.flops._by_shape import (
    RECOMPUTATION,
    AnyShapeCount,
    FirstShapeCount,
    ParameterKeys,
    ShapeCounts,
    ShapedContext,
    are_plain,
    is_always_or_never_view,
)
from amanda.tools.flops._cost import (
    KEYS,
    Cost,
    FlopsResult,
    Formula,
    OpCost,
    Shapes,
    are_known,
    elements,
    shape_of,
)
from amanda.tools.flops._cost_model import (
    NO_WORK,
    OpCostModel,
    bytes_moved,
    formula_of,
    gradient_bytes,
    has_shapes,
    is_free,
    shapes_of,
    write_default_facts,
    write_pytorch_facts,
)
from amanda.tools.flops._formulas import no_cost
from amanda.tools.flops._table import BY_SHAPES_ALONE, CONTRACTIONS, COPIES, ELEMENTWISE, traffic
from amanda.tools.flops._tangents import has_tangents, tangent_place
from amanda.tools.kit import leaves, remarks_on_packed_inputs
from amanda.tools.mapping import MappingTool, StandardMapping, share
from amanda.tools.results import Result
from amanda.tools.select import SelectOptions, select

if TYPE_CHECKING:
    from typing_extensions import Unpack

_COST_AT_EXECUTION: Any = object()
"""The cost of an op whose shapes are not known at analysis."""
_TYPES_BY_ELEMENTS = ELEMENTWISE | NO_WORK | {"scaled_dot_product_attention"}
"""Types of backward ops that cost by shapes, besides those of products."""

_Counts = ShapeCounts | AnyShapeCount


class FlopsTool(amanda.Tool):
    """Count FLOPs, MACs, parameters and bytes of every op, forward and backward.

    Each gradient that an elementwise op, an activation, a normalisation or a reduction gives counts one FLOP
    for each element, whatever the op counts in the forward pass.
    A formula is evaluated once for each set of shapes, when `result` is read; an op without a formula for
    all shapes is analysed for each set.  The `cost` in the context is that of the execution that is
    analysed: a tool that reads `cost` inserts its routine with `guard="shape"`.

    Args:
        formulas: Functions from `Shapes` to `Cost` by the type of an op ("conv2d", "conv2d_backward"), or a
            framework's own name of it; each overrides the built-in formula.
        complex_macs: Real multiply-accumulates in one of complex numbers: 4 by definition, 3 by Gauss'
            method, 1 as some counters have it.
        by: What a row of `result` stands for: "phase", "type", "module", "source", or several; all by
            default.
        depth: Levels of the tree in which rows by module are printed; `by` is then "module" by default.
        **selection: Options of `select`, such as module="layer4".
    """

    purpose = "look"
    is_copied_when_used = False

    @checked
    def __init__(
        self,
        formulas: Mapping[Name, Formula] | None = None,
        complex_macs: Literal[1, 3, 4] = 4,
        by: Sequence[Literal["phase", "type", "module", "source"]] | None = None,
        depth: PositiveInt | None = None,
        **selection: Unpack[SelectOptions],
    ) -> None:
        super().__init__()
        self._by, self._depth = tuple(by or (KEYS if depth is None else ("module",))), depth
        self._model = OpCostModel(formulas or {}, complex_macs)
        # Equal ops share a place, which bounds memory: a program may create and drop models without end,
        # and without a cache an op is analysed at each execution.
        self._places: dict[Hashable, OpCost] = {}
        self._ops: dict[int, dict[Hashable, _Counts]] = {}  # by id of the op; its backward ops too
        self._costs: dict[Hashable, OpCost] = {}  # by type and shapes, whichever op it is
        self._uncounted: dict[Hashable, OpCost] = {}
        self._parameters = ParameterKeys()
        self._modules: dict[str, int] = {}  # in the order in which they ran first
        self._computing_ops = 0  # ops analysed so far that compute
        self._composite_types: set[str] = set()  # types of ops whose own ops, called in Python, are counted
        self.depends_on(
            StandardMapping(), MappingTool([["*", write_default_facts], ["pytorch", write_pytorch_facts]])
        )
        self.add_inst_for_op(self._note_unknown_inputs)
        self.add_inst_for_op(self._note_unknown_gradients, backward=True)
        self.add_inst_for_op(self._analyze_forward, require_outputs=True, guard="read")
        self.add_inst_for_op(self._analyze_backward, backward=True, require_outputs=True)
        select(self, **selection)

    @property
    def result(self) -> FlopsResult:
        """The counts of all executions so far."""
        # Copies: a result does not change while the program goes on, maybe on another thread.
        places = {key: replace(place) for key, place in list(self._places.items())}
        for ops in list(self._ops.values()):
            for op in list(ops.values()):
                _add_counts(places, op)
        executed = [place for place in places.values() if place.calls]
        executed.sort(key=lambda place: self._modules.get(place.module, len(self._modules)))
        numbers: dict[Hashable, int] = {}  # in the order of modules, which is that of other ranks too
        for place in executed:
            place.parameters = tuple(
                (str(numbers.setdefault(parameter, len(numbers))), elements)
                for parameter, elements in place.parameters
            )
        return FlopsResult([*executed, *self._uncounted.values()], self._by, self._depth)

    def clear(self) -> None:
        """Reset the counts; analysed ops stay analysed."""
        # Places stay, as routines of analysed ops hold them.
        for place in self._places.values():
            place.calls = 0
        for ops in self._ops.values():
            for op in ops.values():
                op.clear()

    def op_gone(self, op_id: int) -> None:
        """Keep the counts of an op that the program dropped."""
        # Ids of ops may be used again, and the counters of a dropped op would be added to another op's.
        for op in self._ops.pop(op_id, {}).values():
            self._settle_counts(op)
        self._parameters.forget(op_id)

    def _settle_counts(self, op: _Counts) -> None:
        """Move the counts of an op to the places of their costs."""
        _add_counts(self._places, op)
        op.clear()

    def _shared_counts(self, context: amanda.OpContext, op: _Counts) -> _Counts:
        # Counts of an earlier analysis with this id and key go on.
        return self._ops.setdefault(context.get_op_id(), {}).setdefault(op.key, op)

    def refused(self, action: amanda.Action, reason: str) -> None:
        """Record an op whose executions cannot be counted, for the notes of the result."""
        place, names = action.kwargs.get("place"), action.kwargs.get("names")
        if place is None or (place.flops == 0 if names is None else formula_of(names) is no_cost):
            return
        uncounted = replace(place, calls=0, macs=None, flops=None, bytes=0)
        self._uncounted.setdefault((_place_key(uncounted), id(action.kwargs.get("shapes"))), uncounted)

    def _note_unknown_inputs(self, context: amanda.OpContext) -> None:
        """Record the shapes of inputs at each execution, if analysis does not know them."""
        # Analyses nest as calls do: if the number has grown when the op ends, ops within it were counted.
        context["computing"] = self._computing_ops
        if not are_known(shape_of(value, context["shape"]) for value in context.get_inputs()):
            context.insert_before_op(self._record_shapes, shape=context["extents"], key="inputs")

    def _note_unknown_gradients(self, context: amanda.OpContext) -> None:
        """Record the shapes of incoming gradients at each execution, if analysis does not know them."""
        context["computing"] = self._computing_ops
        if context.get("cost") is _COST_AT_EXECUTION:
            key = f"incoming {context.get_backward_op_id()}"
            context.insert_before_backward_op(self._record_shapes, shape=context["extents"], key=key)

    def _analyze_forward(self, context: amanda.OpContext) -> None:
        """Compute the cost of an op, and insert the routine that counts its executions."""
        outputs = context.get_outputs() or []
        shapes = shapes_of(context, context.get_inputs(), outputs)
        names = (context.get_forward_op_type(), context["type"])
        context["parameters"] = self._parameters.keyed(context)
        context["complex_products"] = self._model.complex_products(context)
        is_eager, is_known = context.is_eager(), has_shapes(names, shapes)
        # The cheapest way: one counter of shapes, and no analysis when shapes change.
        if is_eager and self._depends_on_shapes_alone(context, names, shapes, outputs):
            self._count_by_shapes(context, names)
            return
        # To read the shapes makes the plan depend on them, so another shape is analysed anew.
        if is_eager and is_known:
            context.get_input_shapes()
        if not is_known:
            self._count_at_execution(context, names, shapes)
            return
        place = self._new_place(context)
        cost = self._model.cost_of_op(names, shapes, place.source, context["complex_products"])
        if cost is None:
            place.estimate = shapes.estimate
            inner_costs = self._model.inner_costs_of(context)
            cost = inner_costs.forward if inner_costs and not inner_costs.unknown else None
        if self._calls_counted_ops(context, context.get_forward_op_type()):
            place.estimate = 0
            # A function in Python whose inner ops are counted costs nothing itself: it would count twice.
            is_apart = cost is None or context["is_function"] or any(remarks_on_packed_inputs(context))
            cost = Cost() if is_apart else cost
        self._computing_ops += bool(cost and cost.flops)
        place.bytes = bytes_moved(context, names, outputs)
        cost = None if cost is None else Cost(*cost).part(share(outputs))
        place.macs, place.flops = cost or (None, None)
        context["cost"], context["estimate"] = cost, place.estimate
        self._insert_counters(context, place, [context.get_inputs(), outputs])

    def _insert_counters(self, context: amanda.OpContext, sample_place: OpCost, sides: list[Any]) -> None:
        """Count executions and tangents at the analysed shapes; sample_place: the cost of one sample."""
        place = sample_place.for_samples(context.get_samples())
        if context.is_eager() and are_plain(sides, context["shape"]):
            # Not counted by itself; backward ops build their stand-ins from its values.
            context["as_analysed"] = ShapeCounts(
                context, sides, lambda *_: place, {}, self._settle_counts, key=_place_key(place)
            )
        context.insert_after_op(self._count_execution, outputs=[], place=self._shared_place(place))
        if context.is_eager() and has_tangents(context.get_input_shapes()):
            tangents = tangent_place(context, sample_place, [context.get_input_shapes()])
            context.insert_after_op(self._count_execution, outputs=[], place=self._shared_place(tangents))

    def _count_at_execution(self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes) -> None:
        """Compute the cost of an op at each execution, which alone has all shapes."""
        dtypes = (getattr(value, "dtype", None) for value in leaves(context.get_inputs()))
        context["element_type"] = next((dtype for dtype in dtypes if dtype is not None), None)
        context["cost"] = _COST_AT_EXECUTION
        place = self._new_place(context)
        context.insert_after_op(
            self._count_execution_shapes, place=place, names=names, shapes=shapes, context=context
        )

    def _calls_counted_ops(self, context: amanda.OpContext, name: str) -> bool:
        """Return True for a function in Python, forward or backward, whose own ops compute and are counted.

        They are analysed with the first execution of the function, and perhaps not with others.
        """
        if self._computing_ops > context["computing"]:
            self._composite_types.add(name)
        return name in self._composite_types

    def _new_place(self, context: Any) -> OpCost:
        """Return a place for an op with its parameters, and no cost yet."""
        place = OpCost(context["phase"], context["type"], context.get_scope(), context.get_source())
        self._modules.setdefault(place.module, len(self._modules))
        place.parameters = context["parameters"]
        return place

    def _depends_on_shapes_alone(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> bool:
        """Return True if shapes and element types decide the costs of an op and its backward ops."""
        inputs, custom = context.get_inputs(), any(name in self._model.custom for name in names)
        # A formula of the program may read values and attributes.
        if custom or names[1] not in BY_SHAPES_ALONE or self._computing_ops > context["computing"]:
            return False
        if not are_plain([inputs, outputs], context["shape"]):
            return False
        is_view = context["is_view"](inputs, outputs)
        if not (COPIES.isdisjoint(names) or is_always_or_never_view(names[1], context, is_view)):
            return False
        # Stand-ins have no memory to compare: the answer for these values holds for all.
        context["is_view"] = lambda inputs, outputs: is_view
        return self._model.cost_of_op(names, shapes, context.get_source()) is not None

    def _count_by_shapes(self, context: amanda.OpContext, names: tuple[str, str]) -> None:
        """Count the executions of an op by their shapes."""
        sides = [context.get_inputs(), context.get_outputs() or []]
        op = ShapeCounts(context, sides, self._place_at_shapes, self._costs, self._settle_counts)
        context["by_shape"] = op
        place = self._place_at_shapes(context)
        context["cost"], context["estimate"] = Cost(place.macs or 0, place.flops or 0), 0
        self._computing_ops += bool(place.flops)
        counted = AnyShapeCount(place, _place_key(place)) if is_free(context, names) else op
        context.insert_after_op(self._shared_counts(context, counted), outputs=[])

    def _place_at_shapes(
        self, context: ShapedContext | amanda.OpContext, shapes: tuple[Any, ...] = ()
    ) -> OpCost:
        """Return the place that counts executions with the shapes of a context, which decide the cost."""
        outputs = context.get_outputs() or []
        names = (context.get_forward_op_type(), context["type"])
        op = shapes_of(context, context.get_inputs(), outputs)
        place = self._new_place(context)
        cost = self._model.cost_of_op(names, op, place.source, context["complex_products"])
        place.macs, place.flops = cost or (None, None)
        place.estimate = 0 if cost else op.estimate
        place.bytes = bytes_moved(context, names, outputs)
        return place

    def _shared_place(self, place: OpCost, shapes: str = "") -> OpCost:
        """Return the place that all equal ops share at these shapes."""
        return self._places.setdefault((_place_key(place), shapes), place)

    def _analyze_backward(self, context: amanda.OpContext) -> None:
        """Compute the cost of a backward op, and insert the routine that counts its executions."""
        # The forward op did not run: a framework drops ops of which the gradient alone is used.
        if "cost" not in context:
            context["parameters"] = self._parameters.keyed(context)
            context["complex_products"] = self._model.complex_products(context)
            skipped = self._place_at_shapes(context)
            context["cost"] = None if skipped.flops is None else Cost(skipped.macs or 0, skipped.flops)
            context["estimate"] = 0
        kind = context["backward_type"]
        if context["cost"] is _COST_AT_EXECUTION:
            key = f"incoming {context.get_backward_op_id()}"
            context.insert_after_backward_op(
                self._count_gradient_shapes, place=_place_without_cost(context), context=context, key=key
            )
            return
        is_function = kind == f"{context['type']}_backward" and context["is_function"]
        name = f"{context.get_forward_op_type()}_backward"
        context["is_composite"] = is_function and self._calls_counted_ops(context, name)
        forward = context.get("by_shape", context.get("as_analysed"))
        if forward is not None:
            self._count_gradients_by_shapes(context, kind, forward)
            return
        place = self._shared_place(self._gradient_place(context))
        context.insert_after_backward_op(self._count_execution, grad_inputs=[], place=place)

    def _gradient_place(
        self, context: ShapedContext | amanda.OpContext, shapes: tuple[Any, ...] = ()
    ) -> OpCost:
        """Return the place that counts executions of a backward op with the shapes of a context."""
        place = _place_without_cost(context)
        # The cost of the forward op at these shapes, which gradients of products repeat.
        if shapes and "by_shape" in context:
            forward = context["by_shape"].cost(shapes[:2])
            context["cost"] = None if forward.flops is None else Cost(forward.macs, forward.flops)
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        cost = self._model.cost_of_backward_op(context, place.type, grads)
        if context["is_composite"]:
            cost = Cost()
        place.macs, place.flops = cost or (None, None)
        if cost is None:
            inner_costs = context.get("inner_costs")
            place.estimate = (inner_costs and inner_costs.backward_macs) or 2 * int(context["estimate"])
        place.bytes = gradient_bytes(context, grads)
        return place

    def _count_gradients_by_shapes(self, context: amanda.OpContext, kind: str, forward: ShapeCounts) -> None:
        """Count a backward op by the shapes of its gradients, some of which a pass may not make.

        forward: counts of the forward op.
        """
        sides = [context.get_grad_outputs() or [], context.get_grad_inputs() or []]
        place = self._shared_place(self._gradient_place(context))
        word = kind.removesuffix("_backward")
        by_elements = word in _TYPES_BY_ELEMENTS or word.removesuffix("_backward") in CONTRACTIONS
        # A formula of the program may read more than shapes.
        by_shapes = (by_elements or context.get_backward_order() > 1) and kind not in self._model.custom
        if by_shapes and are_plain(sides, context["shape"]):
            op = ShapeCounts(context, sides, self._gradient_place, self._costs, self._settle_counts, forward)
            context.insert_after_backward_op(self._shared_counts(context, op), grad_inputs=[])
            return
        # The cost came from a run of inner operators at the first shapes, and holds for no others.
        unknown = self._shared_place(_place_without_cost(context))
        counter = FirstShapeCount(place, unknown, self._shared_place)
        context.insert_after_backward_op(counter.count, grad_inputs=[])

    @staticmethod
    @amanda.observer
    def _record_shapes(*values: Any, shape: Any, key: str, run: dict[str, Any], recomputed: bool) -> None:
        run[key] = [shape_of(value, shape) for value in values]

    @amanda.observer
    def _count_execution_shapes(
        self, *outputs: Any, place: OpCost, names: tuple[str, str], shapes: Shapes, context: amanda.OpContext,
        run: dict[str, Any], recomputed: bool,
    ) -> None:  # fmt: skip
        """Count an execution whose shapes are known only now."""
        pairs = zip(run.pop("inputs", shapes.inputs), shapes.inputs, strict=True)
        inputs = [analysed if executed is None else executed for executed, analysed in pairs]
        output_shapes = [shape_of(value, context["extents"]) for value in outputs]
        key = str((inputs, output_shapes))
        place = self._shared_place(replace(place), key)
        if recomputed:
            place = self._shared_place(replace(place, phase=RECOMPUTATION, calls=0), key)
        op = replace(shapes, inputs=inputs, outputs=output_shapes)
        if not place.calls:
            cost = self._model.cost_of_op(names, op, place.source, context["complex_products"])
            place.macs, place.flops = cost or (None, None)
            place.estimate = 0 if cost else op.estimate
            # Shapes at execution come without element types: float32 is assumed.
            input_bytes, output_bytes = (
                [4 * elements([shape]) for shape in side] for side in (inputs, output_shapes)
            )
            place.bytes = traffic(names, input_bytes, output_bytes, in_place=False)
        place.calls += 1
        # For backward ops of this execution, which need the shapes of their forward op.
        run["op"] = names, op

    @amanda.observer
    def _count_gradient_shapes(
        self, *grads: Any, place: OpCost, context: amanda.OpContext, key: str, run: dict[str, Any]
    ) -> None:
        """Count an execution of a backward op whose shapes are known only now."""
        outgoing = [shape_of(grad, context["extents"]) for grad in grads]
        names, op = run.get("op", ((), None))
        incoming = run.pop(key, ())
        place = self._shared_place(replace(place), str((op, incoming, outgoing)))
        if not place.calls:
            cost = op and self._model.cost_of_gradients(context, names, op, incoming, outgoing)
            place.macs, place.flops = cost or (None, None)
            place.bytes = 4 * elements([*incoming, *outgoing])
        place.calls += 1

    @amanda.observer
    def _count_execution(self, place: OpCost, *, recomputed: bool) -> None:
        if recomputed:
            place = self._shared_place(replace(place, phase=RECOMPUTATION, calls=0))
        place.calls += 1


def _place_without_cost(context: ShapedContext | amanda.OpContext) -> OpCost:
    names = context["backward_type"], context.get_scope(), context.get_source()
    return OpCost("backward", *names, macs=None, flops=None)


def _add_counts(places: dict[Hashable, OpCost], op: _Counts) -> None:
    for place in op.places():
        places.setdefault((_place_key(place), ""), replace(place, calls=0)).calls += place.calls


def _place_key(place: OpCost) -> Hashable:
    """Return all fields of a place but the calls: ops that agree in them share a place."""
    return tuple(value for name, value in vars(place).items() if name != "calls")


@checked
def count_flops(model: Callable[..., Any], /, *inputs: Any, **keywords: Any) -> FlopsResult:
    """Return the FLOPs, MACs, parameters and bytes of each op of one call of a model.

    Args:
        model: Model, or a function; a backward pass in the function is counted with it.
        *inputs: Positional arguments of the call.
        **keywords: Arguments by name.

    count_flops(model, x).total()
    """
    flops = FlopsTool()
    with amanda.apply(flops):
        model(*inputs, **keywords)
    return flops.result


@checked
def summary(
    model: Callable[..., Any], /, *inputs: Any, depth: PositiveInt | None = None, **keywords: Any
) -> Result:
    """Return the parameters, MACs, FLOPs and share of each module in one call of a model, as a tree.

    Args:
        model: Model, or a function that runs it.
        *inputs: Positional arguments of the call.
        depth: Levels of modules below the model; None for as many as a screen shows.
        **keywords: Arguments by name.

    print(summary(model, x, depth=2))
    """
    tree = count_flops(model, *inputs, **keywords).tree(depth)
    tree.title = type(model).__name__
    return tree
