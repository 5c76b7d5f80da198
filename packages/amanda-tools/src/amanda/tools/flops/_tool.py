"""The tool: computes the cost of each op and its backward ops, and counts executions; costs of one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import amanda
from amanda.options import Name, PositiveInt, checked
from amanda.tools.flops._by_shape import (
    RECOMPUTATION,
    AnyContext,
    AnyShapeCount,
    FirstShapeCount,
    ParameterKeys,
    ShapeCounts,
    are_shapes_enough,
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
from amanda.tools.flops._table import BY_SHAPES_ALONE, CONTRACTIONS, COPIES, ELEMENTWISE, MOVES, count_bytes
from amanda.tools.flops._tangents import has_tangents, tangent_op_cost
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
        self, formulas: Mapping[Name, Formula] | None = None, complex_macs: Literal[1, 3, 4] = 4,
        by: Sequence[Literal["phase", "type", "module", "source"]] | None = None,
        depth: PositiveInt | None = None, **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        self._by, self._depth = tuple(by or (KEYS if depth is None else ("module",))), depth
        self._model = OpCostModel(formulas or {}, complex_macs)
        # Equal ops share an OpCost, which counts their calls and bounds memory: a program may create and drop
        # models without end, and without a cache an op is analysed at each execution.
        self._op_cost_by_key: dict[Hashable, OpCost] = {}
        self._counts_by_op: dict[int, dict[Hashable, _Counts]] = {}  # by id of the op; its backward ops too
        self._cost_by_shapes: dict[Hashable, OpCost] = {}  # by type and shapes, whichever op it is
        self._uncounted_ops: dict[Hashable, OpCost] = {}
        self._parameter_keys = ParameterKeys()
        self._modules: dict[str, int] = {}  # in the order in which they ran first
        self._costly_ops = 0  # ops analysed so far that compute
        self._composite_types: set[str] = set()  # types of ops whose own ops, called in Python, are counted
        self.depends_on(
            StandardMapping(), MappingTool([["*", write_default_facts], ["pytorch", write_pytorch_facts]])
        )
        self.add_inst_for_op(self._record_unknown_input_shapes)
        self.add_inst_for_op(self._record_unknown_gradient_shapes, backward=True)
        self.add_inst_for_op(self._analyze_forward, require_outputs=True, guard="read")
        self.add_inst_for_op(self._analyze_backward, backward=True, require_outputs=True)
        select(self, **selection)

    @property
    def result(self) -> FlopsResult:
        """The counts of all executions so far."""
        # Copies: a result does not change while the program goes on, maybe on another thread.
        op_costs = {key: replace(op_cost) for key, op_cost in list(self._op_cost_by_key.items())}
        for counts_by_key in list(self._counts_by_op.values()):
            for counts in list(counts_by_key.values()):
                _add_counts(op_costs, counts)
        executed = [op_cost for op_cost in op_costs.values() if op_cost.calls]
        executed.sort(key=lambda op_cost: self._modules.get(op_cost.module, len(self._modules)))
        numbers: dict[Hashable, int] = {}  # in the order of modules, which is that of other ranks too
        for op_cost in executed:
            op_cost.parameters = tuple(
                (str(numbers.setdefault(parameter, len(numbers))), elements)
                for parameter, elements in op_cost.parameters
            )
        return FlopsResult([*executed, *self._uncounted_ops.values()], self._by, self._depth)._of_tool(self)

    def clear(self) -> None:
        """Reset the counts; analysed ops stay analysed."""
        # The costs stay, as routines of analysed ops hold them.
        for op_cost in self._op_cost_by_key.values():
            op_cost.calls = 0
        for counts_by_key in self._counts_by_op.values():
            for counts in counts_by_key.values():
                counts.clear()

    def op_gone(self, op_id: int) -> None:
        """Keep the counts of an op that the program dropped."""
        # Ids of ops may be used again, and the counters of a dropped op would be added to another op's.
        for counts in self._counts_by_op.pop(op_id, {}).values():
            self._settle_counts(counts)
        self._parameter_keys.forget(op_id)

    def _settle_counts(self, counts: _Counts) -> None:
        """Move the counts of an op by shapes to the calls of costs, and start to count anew."""
        _add_counts(self._op_cost_by_key, counts)
        counts.clear()

    def _shared_counts(self, context: amanda.OpContext, counts: _Counts) -> _Counts:
        # If the op was analysed before with this key, its counts go on.
        return self._counts_by_op.setdefault(context.get_op_id(), {}).setdefault(counts.key, counts)

    def refused(self, action: amanda.Action, reason: str) -> None:
        """Record an op whose routine cannot run, and that has a cost, for the notes of the result."""
        # What the routine that counts was given: with names, the cost is computed as it runs.
        op_cost, names = action.kwargs.get("op_cost"), action.kwargs.get("names")
        if op_cost is None or (op_cost.flops == 0 if names is None else formula_of(names) is no_cost):
            return
        uncounted = replace(op_cost, calls=0, macs=None, flops=None, bytes=0)
        self._uncounted_ops.setdefault((_op_cost_key(uncounted), id(action.kwargs.get("shapes"))), uncounted)

    def _record_unknown_input_shapes(self, context: amanda.OpContext) -> None:
        """Note how many ops cost so far; insert a routine that records the shapes of inputs, if unknown."""
        # Analyses nest as calls do: if the count has grown when the op ends, ops within it were counted.
        context["costly_ops"] = self._costly_ops
        if not are_known(shape_of(value, context["shape"]) for value in context.get_inputs()):
            context.insert_before_op(self._record_shapes, shape=context["extents"], key="inputs")

    def _record_unknown_gradient_shapes(self, context: amanda.OpContext) -> None:
        """Note how many ops cost so far; insert a routine that records shapes of gradients, if unknown."""
        context["costly_ops"] = self._costly_ops
        if context.get("cost") is _COST_AT_EXECUTION:
            key = f"incoming {context.get_backward_op_id()}"
            context.insert_before_backward_op(self._record_shapes, shape=context["extents"], key=key)

    def _analyze_forward(self, context: amanda.OpContext) -> None:
        """Write an op's cost into its context, or leave it to executions; insert the routine that counts."""
        outputs = context.get_outputs() or []
        shapes = shapes_of(context, context.get_inputs(), outputs)
        names = (context.get_forward_op_type(), context["type"])  # the framework's, and the word
        context["parameters"] = self._parameter_keys.keys_and_elements(context)
        context["complex_products"] = self._model.complex_products(context)
        is_eager, is_known = context.is_eager(), has_shapes(names, shapes)
        # The cheapest way: one counter of shapes, and no analysis when shapes change.
        cost = self._cost_by_shapes_alone(context, names, shapes, outputs) if is_eager else None
        if cost is not None:
            self._count_by_shapes(context, names, cost)
            return
        # To read the shapes makes the plan depend on them, so another shape is analysed anew.
        if is_eager and is_known:
            context.get_input_shapes()
        if not is_known:
            self._count_at_execution(context, names, shapes)
            return
        op_cost = self._new_op_cost(context)
        cost = self._model.cost_of_op(names, shapes, op_cost.source, context["complex_products"])
        if cost is None:
            op_cost.estimate = shapes.estimate
            inner_costs = self._model.inner_costs_of(context)
            cost = inner_costs.forward if inner_costs and not inner_costs.unknown else None
        if self._calls_counted_ops(context, context.get_forward_op_type()):
            op_cost.estimate = 0
            # A function in Python whose inner ops are counted costs nothing itself: it would count twice.
            if cost is None or context["is_function"] or any(remarks_on_packed_inputs(context)):
                cost = Cost()
        self._costly_ops += bool(cost and cost.flops)
        op_cost.bytes = bytes_moved(context, names, outputs)
        cost = None if cost is None else Cost(*cost).part(share(outputs))
        op_cost.macs, op_cost.flops = cost or (None, None)
        context["cost"], context["estimate"] = cost, op_cost.estimate
        self._insert_counters(context, op_cost, [context.get_inputs(), outputs])

    def _insert_counters(self, context: amanda.OpContext, sample_cost: OpCost, sides: list[Any]) -> None:
        """Insert routines that count executions, and their tangents; sample_cost: the cost of one sample."""
        op_cost = sample_cost.for_samples(context.get_samples())
        if context.is_eager() and are_shapes_enough(sides, context["shape"]):
            # It counts nothing itself: backward ops build the stand-ins of this op's values by it.
            context["as_analysed"] = ShapeCounts(
                context, sides, lambda *_: op_cost, {}, self._settle_counts, key=_op_cost_key(op_cost)
            )
        context.insert_after_op(self._count_execution, outputs=[], op_cost=self._shared_op_cost(op_cost))
        if context.is_eager() and has_tangents(context.get_input_shapes()):
            tangents = tangent_op_cost(context, sample_cost, [context.get_input_shapes()])
            context.insert_after_op(self._count_execution, outputs=[], op_cost=self._shared_op_cost(tangents))

    def _count_at_execution(self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes) -> None:
        """Insert a routine that computes the cost of an op at each execution, which alone has all shapes."""
        dtypes = (getattr(value, "dtype", None) for value in leaves(context.get_inputs()))
        context["element_type"] = next((dtype for dtype in dtypes if dtype is not None), None)
        context["cost"] = _COST_AT_EXECUTION
        op_cost = self._new_op_cost(context)
        context.insert_after_op(
            self._count_execution_shapes, op_cost=op_cost, names=names, shapes=shapes, context=context
        )

    def _calls_counted_ops(self, context: amanda.OpContext, name: str) -> bool:
        """Return True for a function in Python, forward or backward, whose own ops compute and are counted.

        They are analysed with the first execution, and perhaps not with others: the function is remembered.
        """
        if self._costly_ops > context["costly_ops"]:
            self._composite_types.add(name)
        return name in self._composite_types

    def _new_op_cost(self, context: Any) -> OpCost:
        """Return an OpCost for an op with its parameters, not computed yet; note the order of modules."""
        op_cost = OpCost(context["phase"], context["type"], context.get_scope(), context.get_source())
        self._modules.setdefault(op_cost.module, len(self._modules))
        op_cost.parameters = context["parameters"]
        return op_cost

    def _cost_by_shapes_alone(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> Cost | None:
        """Return an op's cost if shapes and element types decide it, and those of backward ops; else None.

        The context's `is_view` then gives the answer for this execution whatever it is asked.
        """
        # All executions give views, or none does.
        inputs, custom = context.get_inputs(), any(name in self._model.custom for name in names)
        # A formula of the program may read values and attributes.
        if custom or names[1] not in BY_SHAPES_ALONE or self._costly_ops > context["costly_ops"]:
            return None
        if not are_shapes_enough([inputs, outputs], context["shape"]):
            return None
        # Other ops count the bytes of inputs and outputs whether they share memory or not.
        is_view = not MOVES.isdisjoint(names) and context["is_view"](inputs, outputs)
        if not (COPIES.isdisjoint(names) or is_always_or_never_view(names[1], context, is_view)):
            return None
        # Stand-ins have no memory to compare: the answer for these values holds for all.
        context["is_view"] = lambda inputs, outputs: is_view
        return self._model.cost_of_op(names, shapes, context.get_source(), context["complex_products"])

    def _count_by_shapes(self, context: amanda.OpContext, names: tuple[str, str], cost: Cost) -> None:
        """Insert a tally of the op's executions by shapes; cost: at the first shapes, for the context."""
        sides = [context.get_inputs(), context.get_outputs() or []]
        measure, costs = self._op_cost_at_shapes, self._cost_by_shapes
        shape_counts = context["by_shape"] = ShapeCounts(context, sides, measure, costs, self._settle_counts)
        context["cost"], context["estimate"] = cost, 0
        self._costly_ops += bool(cost.flops)
        self._modules.setdefault(context.get_scope(), len(self._modules))
        op_cost = self._op_cost_at_shapes(context) if is_free(context, names) else None
        counts = shape_counts if op_cost is None else AnyShapeCount(op_cost, _op_cost_key(op_cost))
        context.insert_after_op(self._shared_counts(context, counts), outputs=[])

    def _op_cost_at_shapes(self, context: AnyContext, shapes: Any = ()) -> OpCost:
        """Compute the cost of an op at the shapes of a context; return a new OpCost."""
        # `shapes` are those of the context once more, as ShapeCounts passes them to each `measure`.
        outputs = context.get_outputs() or []
        names, op_cost = (context.get_forward_op_type(), context["type"]), self._new_op_cost(context)
        op_shapes = shapes_of(context, context.get_inputs(), outputs)
        cost = self._model.cost_of_op(names, op_shapes, op_cost.source, context["complex_products"])
        op_cost.estimate = 0 if cost else op_shapes.estimate
        op_cost.macs, op_cost.flops = cost or (None, None)
        op_cost.bytes = bytes_moved(context, names, outputs)
        return op_cost

    def _shared_op_cost(self, op_cost: OpCost, shapes: str = "") -> OpCost:
        """Return the OpCost that counts all equal ops at these shapes: the first that was given."""
        return self._op_cost_by_key.setdefault((_op_cost_key(op_cost), shapes), op_cost)

    def _analyze_backward(self, context: amanda.OpContext) -> None:
        """Compute the cost of a backward op, and insert the routine that counts, or costs, its executions."""
        # The forward op did not run: a framework drops ops of which the gradient alone is used.
        if "cost" not in context:
            context["parameters"] = self._parameter_keys.keys_and_elements(context)
            context["complex_products"] = self._model.complex_products(context)
            forward_cost = self._op_cost_at_shapes(context)
            macs, flops = forward_cost.macs or 0, forward_cost.flops
            context["cost"], context["estimate"] = None if flops is None else Cost(macs, flops), 0
        backward_type = context["backward_type"]
        if context["cost"] is _COST_AT_EXECUTION:
            key = f"incoming {context.get_backward_op_id()}"
            context.insert_after_backward_op(
                self._count_gradient_shapes, op_cost=_unknown_gradient_cost(context), context=context, key=key
            )
            return
        is_function = backward_type == f"{context['type']}_backward" and context["is_function"]
        backward_name = f"{context.get_forward_op_type()}_backward"
        context["is_composite"] = is_function and self._calls_counted_ops(context, backward_name)
        forward_counts = context.get("by_shape", context.get("as_analysed"))
        if forward_counts is not None:
            self._count_gradients_by_shapes(context, backward_type, forward_counts)
            return
        op_cost = self._shared_op_cost(self._gradient_op_cost(context))
        context.insert_after_backward_op(self._count_execution, grad_inputs=[], op_cost=op_cost)

    def _gradient_op_cost(self, context: AnyContext, shapes: tuple[Any, ...] = ()) -> OpCost:
        """Return a new OpCost of a backward op at the shapes of a context, which gets its forward `cost`."""
        op_cost = _unknown_gradient_cost(context)
        # The cost of the forward op at these shapes, which gradients of products repeat.
        if shapes and "by_shape" in context:
            forward = context["by_shape"].cost(shapes[:2])
            context["cost"] = None if forward.flops is None else Cost(forward.macs, forward.flops)
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        cost = self._model.cost_of_backward_op(context, op_cost.type, grads)
        if context["is_composite"]:
            cost = Cost()
        op_cost.macs, op_cost.flops = cost or (None, None)
        if cost is None:
            inner_costs = context.get("inner_costs")
            op_cost.estimate = (inner_costs and inner_costs.backward_macs) or 2 * int(context["estimate"])
        op_cost.bytes = gradient_bytes(context, grads)
        return op_cost

    def _count_gradients_by_shapes(self, context: amanda.OpContext, kind: str, forward: ShapeCounts) -> None:
        """Insert a tally of a backward op's executions by the shapes of gradients, which may be absent.

        kind: the backward type.  forward: counts of the forward op.
        Where shapes do not decide the cost, it is known for those of the first execution alone.
        """
        sides = [context.get_grad_outputs() or [], context.get_grad_inputs() or []]
        word = kind.removesuffix("_backward")
        by_elements = word in _TYPES_BY_ELEMENTS or word.removesuffix("_backward") in CONTRACTIONS
        # A formula of the program may read more than shapes.
        by_shapes = (by_elements or context.get_backward_order() > 1) and kind not in self._model.custom
        if by_shapes and are_shapes_enough(sides, context["shape"]):
            measure, costs = self._gradient_op_cost, self._cost_by_shapes
            counts = ShapeCounts(context, sides, measure, costs, self._settle_counts, forward)
            context.insert_after_backward_op(self._shared_counts(context, counts), grad_inputs=[])
            return
        # The cost comes from a run of inner operators at the first shapes, and holds for no others.
        op_cost = self._shared_op_cost(self._gradient_op_cost(context))
        unknown_cost = self._shared_op_cost(_unknown_gradient_cost(context))
        first_shape_count = FirstShapeCount(op_cost, unknown_cost, self._shared_op_cost)
        context.insert_after_backward_op(first_shape_count.count, grad_inputs=[])

    @staticmethod
    @amanda.observer
    def _record_shapes(*values: Any, shape: Any, key: str, run: dict[str, Any], recomputed: bool) -> None:
        run[key] = [shape_of(value, shape) for value in values]

    @amanda.observer
    def _count_execution_shapes(
        self, *outputs: Any, op_cost: OpCost, names: tuple[str, str], shapes: Shapes,
        context: amanda.OpContext, run: dict[str, Any], recomputed: bool,
    ) -> None:  # fmt: skip
        """Count an execution of shapes known only now, at a cost computed once; leave the shapes in `run`."""
        # "inputs" is what `_record_shapes` has put into the run before the op, which may change its inputs.
        shape_pairs = zip(run.pop("inputs", shapes.inputs), shapes.inputs, strict=True)
        inputs = [analysed if executed is None else executed for executed, analysed in shape_pairs]
        output_shapes = [shape_of(value, context["extents"]) for value in outputs]
        key = str((inputs, output_shapes))
        op_cost = self._shared_op_cost(replace(op_cost), key)
        if recomputed:
            op_cost = self._shared_op_cost(replace(op_cost, phase=RECOMPUTATION, calls=0), key)
        op_shapes = replace(shapes, inputs=inputs, outputs=output_shapes)
        if not op_cost.calls:
            cost = self._model.cost_of_op(names, op_shapes, op_cost.source, context["complex_products"])
            op_cost.macs, op_cost.flops = cost or (None, None)
            op_cost.estimate = 0 if cost else op_shapes.estimate
            # Shapes at execution come without element types: float32 is assumed.
            input_bytes, output_bytes = (
                [4 * elements([shape]) for shape in side] for side in (inputs, output_shapes)
            )
            op_cost.bytes = count_bytes(names, input_bytes, output_bytes, in_place=False)
        op_cost.calls += 1
        # For backward ops of this execution, which need the shapes of their forward op.
        run["op"] = names, op_shapes

    @amanda.observer
    def _count_gradient_shapes(
        self, *grads: Any, op_cost: OpCost, context: amanda.OpContext, key: str, run: dict[str, Any]
    ) -> None:
        """Count an execution of a backward op whose shapes are known only now, as its forward op's were."""
        # "op" is what `_count_execution_shapes` has put into the run, unless the forward op did not run.
        outgoing = [shape_of(grad, context["extents"]) for grad in grads]
        names, op_shapes = run.get("op", ((), None))
        incoming = run.pop(key, ())
        op_cost = self._shared_op_cost(replace(op_cost), str((op_shapes, incoming, outgoing)))
        if not op_cost.calls:
            cost = op_shapes and self._model.cost_of_gradients(context, names, op_shapes, incoming, outgoing)
            op_cost.macs, op_cost.flops = cost or (None, None)
            op_cost.bytes = 4 * elements([*incoming, *outgoing])
        op_cost.calls += 1

    @amanda.observer
    def _count_execution(self, op_cost: OpCost, *, recomputed: bool) -> None:
        if recomputed:
            op_cost = self._shared_op_cost(replace(op_cost, phase=RECOMPUTATION, calls=0))
        op_cost.calls += 1


def _unknown_gradient_cost(context: AnyContext) -> OpCost:
    names = context["backward_type"], context.get_scope(), context.get_source()
    return OpCost("backward", *names, macs=None, flops=None)


def _add_counts(op_costs: dict[Hashable, OpCost], counts: _Counts) -> None:
    for op_cost in counts.op_costs():
        op_costs.setdefault((_op_cost_key(op_cost), ""), replace(op_cost, calls=0)).calls += op_cost.calls


def _op_cost_key(op_cost: OpCost) -> Hashable:
    """Return all fields but the calls: ops that agree in them are counted together."""
    return tuple([value for name, value in vars(op_cost).items() if name != "calls"])


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
