"""The tool: a cost for each op and its backward ops, counted at each execution."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import amanda
from amanda.options import Name, checked
from amanda.tools.flops import _pytorch
from amanda.tools.flops._by_shape import (
    RECOMPUTATION,
    At,
    ByShape,
    OfAnyShape,
    Once,
    are_plain,
    is_settled,
)
from amanda.tools.flops._cost import Cost, Formula, Shapes, are_known, elements, shape_of
from amanda.tools.flops._costs import NO_WORK, Costs
from amanda.tools.flops._facts import (
    bytes_moved,
    bytes_of,
    can_tell,
    element_type,
    formula_of,
    is_free,
    roles,
    shapes_of,
)
from amanda.tools.flops._formulas import no_cost
from amanda.tools.flops._result import FlopsResult, OpCost
from amanda.tools.flops._table import BY_SHAPES_ALONE, CONTRACTIONS, COPIES, ELEMENTWISE, traffic
from amanda.tools.kit import remarks_on_packed_inputs
from amanda.tools.mapping import MappingTool, StandardMapping, share

_AT_EXECUTION: Any = object()
"""The cost of an op whose shapes are not known at analysis."""
_BY_ELEMENTS = ELEMENTWISE | NO_WORK | {"scaled_dot_product_attention"}
"""Types of backward ops that cost by shapes, besides those of products."""


class FlopsTool(amanda.Tool):
    """Counts what is executed in its scopes; `result` tells, `clear` starts anew.

    formulas: by the word of StandardMapping or a framework's own name of an op, what it costs; they come
    before those that are built in; "conv2d_backward" is the word of a backward op, whose formula is given
    the gradients that enter and leave it.  complex_macs: multiply-accumulates of real numbers in one of
    complex numbers: 4 by definition, 3 by Gauss' method, or 1, as others count.  Shapes decide: executions
    are counted by their shapes, a formula is evaluated for each when `result` is read, and an op of which no
    formula tells the cost for all shapes is analysed for each.  The `cost` that it writes into the context
    is that of the execution that is analysed: a tool that reads it says `guard="shape"`.
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self, formulas: Mapping[Name, Formula] | None = None, complex_macs: Literal[1, 3, 4] = 4
    ) -> None:
        super().__init__()
        self._formulas = Costs(formulas or {}, complex_macs)
        # Equal ops share one: a program may make and drop models as long as it likes, and without a cache
        # an op is analysed at each execution.
        self._places: dict[Hashable, OpCost] = {}
        self._ops: dict[int, dict[Hashable, ByShape | OfAnyShape]] = {}  # by its id; its backward ops too
        self._costs: dict[Hashable, OpCost] = {}  # by type and shapes, whichever op it is
        self._unseen: dict[Hashable, OpCost] = {}
        self._computing = 0  # ops analysed so far that compute
        self._composite: set[str] = set()  # types of ops whose own ops, called in Python, are counted
        self.depends_on(StandardMapping(), MappingTool([["*", roles], ["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._look_at_inputs)
        self.add_inst_for_op(self._look_at_gradients, backward=True)
        self.add_inst_for_op(self._forward, require_outputs=True, guard="read")
        self.add_inst_for_op(self._backward, backward=True, require_outputs=True)

    @property
    def result(self) -> FlopsResult:
        """The counts of what was executed so far."""
        places = {key: replace(place) for key, place in list(self._places.items())}
        for ops in list(self._ops.values()):
            for op in list(ops.values()):
                _add(places, op)
        executed = [place for place in places.values() if place.calls]
        return FlopsResult([*executed, *self._unseen.values()])

    def clear(self) -> None:
        """Forget what was executed; what was analysed stays."""
        for place in self._places.values():
            place.calls = 0
        for ops in self._ops.values():
            for op in ops.values():
                op.clear()

    def op_gone(self, op_id: int) -> None:
        """Keep what was counted of an op that is gone."""
        for op in self._ops.pop(op_id, {}).values():
            self._settle(op)

    def _settle(self, op: ByShape | OfAnyShape) -> None:
        """Find the costs of what was counted of an op by shape, and count it there."""
        _add(self._places, op)
        op.clear()

    def _tally(self, context: amanda.OpContext, op: ByShape | OfAnyShape) -> ByShape | OfAnyShape:
        """Return what counts executions of ops with this id and key."""
        return self._ops.setdefault(context.get_op_id(), {}).setdefault(op.key, op)

    def refused(self, action: amanda.Action, reason: str) -> None:
        """Keep an op whose executions cannot be counted, for the result to say so."""
        place, names = action.kwargs.get("place"), action.kwargs.get("names")
        if place is None or (place.flops == 0 if names is None else formula_of(names) is no_cost):
            return
        unseen = replace(place, calls=0, macs=None, flops=None, bytes=0)
        self._unseen.setdefault((_key(unseen), id(action.kwargs.get("shapes"))), unseen)

    def _look_at_inputs(self, context: amanda.OpContext) -> None:
        context["computing"] = self._computing
        if not are_known(shape_of(value, context["shape"]) for value in context.get_inputs()):
            context.insert_before_op(self._note_inputs, shape=context["extents"])

    def _look_at_gradients(self, context: amanda.OpContext) -> None:
        context["computing"] = self._computing
        if context.get("cost") is _AT_EXECUTION:
            key = context.get_backward_op_id()
            context.insert_before_backward_op(self._note_gradients, shape=context["extents"], key=key)

    def _forward(self, context: amanda.OpContext) -> None:
        outputs = context.get_outputs() or []
        shapes = shapes_of(context, context.get_inputs(), outputs)
        names = (context.get_op_type(), context["type"])
        context["complex_products"] = self._formulas.complex_products(context)
        is_eager, is_known = context.is_eager(), can_tell(names, shapes)
        if is_eager and self._is_told_by_shapes(context, names, shapes, outputs):
            self._count_by_shapes(context, names, shapes, outputs)
            return
        if is_eager and is_known:
            context.get_input_shapes()
        place = self._new_place(context, names[1])
        if not is_known:
            context["cost"], context["element_type"] = _AT_EXECUTION, element_type(context)
            context.insert_after_op(
                self._count_shapes, place=place, names=names, shapes=shapes, context=context
            )
            return
        cost = self._formulas.of_op(names, shapes, place.source, context["complex_products"])
        if cost is None:
            place.estimate = shapes.estimate
            within = self._formulas.inside(context)
            cost = within.forward if within and not within.unknown else None
        if self._calls_ops(context, context.get_op_type()):
            place.estimate = 0
            is_apart = cost is None or context["is_function"] or any(remarks_on_packed_inputs(context))
            cost = Cost() if is_apart else cost
        self._computing += bool(cost and cost.flops)
        place.bytes = bytes_moved(context, names, outputs)
        cost = None if cost is None else Cost(*cost).part(share(outputs))
        place.macs, place.flops = cost or (None, None)
        context["cost"], context["estimate"] = cost, place.estimate
        if is_eager and are_plain([context.get_inputs(), outputs], context["shape"]):
            sides = [context.get_inputs(), outputs]
            context["as_analysed"] = ByShape(
                context, sides, lambda *_: place, {}, self._settle, key=_key(place)
            )
        context.insert_after_op(self._count, outputs=[], place=self._shared(place))

    def _calls_ops(self, context: amanda.OpContext, name: str) -> bool:
        """Return True for a function in Python, forward or backward, whose own ops compute and are counted.

        They are analysed with the first execution of the function, and perhaps not with others.
        """
        if self._computing > context["computing"]:
            self._composite.add(name)
        return name in self._composite

    def _new_place(self, context: Any, kind: str) -> OpCost:
        place = OpCost(context["phase"], kind, context.get_scope(), context.get_source())
        place.parameters = context["parameters"]
        return place

    def _is_told_by_shapes(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> bool:
        """Return whether shapes and element types say what the op and its backward ops cost."""
        inputs, custom = context.get_inputs(), any(name in self._formulas.custom for name in names)
        if custom or names[1] not in BY_SHAPES_ALONE or self._computing > context["computing"]:
            return False
        if not are_plain([inputs, outputs], context["shape"]):
            return False
        is_view = context["is_view"](inputs, outputs)
        if not (COPIES.isdisjoint(names) or is_settled(names[1], context, is_view)):
            return False
        context["is_view"] = lambda inputs, outputs: is_view
        return self._formulas.of_op(names, shapes, context.get_source()) is not None

    def _count_by_shapes(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> None:
        sides = [context.get_inputs(), outputs]
        op = ByShape(context, sides, self._place_at, self._costs, self._settle)
        context["by_shape"] = op
        place = self._place_of(context, names, shapes)
        context["cost"], context["estimate"] = Cost(place.macs or 0, place.flops or 0), 0
        self._computing += bool(place.flops)
        counted = OfAnyShape(place, _key(place)) if is_free(context, names) else op
        context.insert_after_op(self._tally(context, counted), outputs=[])

    def _place_at(self, context: At, shapes: tuple[Any, ...]) -> OpCost:
        """Return where executions with the shapes of a context are counted."""
        told = shapes_of(context, context.get_inputs(), context.get_outputs())
        return self._place_of(context, (context.get_op_type(), context["type"]), told)

    def _place_of(self, context: At | amanda.OpContext, names: tuple[str, str], shapes: Shapes) -> OpCost:
        """Return where executions of an op that is told by shapes are counted."""
        place = self._new_place(context, names[1])
        known, products = can_tell(names, shapes), context["complex_products"]
        cost = self._formulas.of_op(names, shapes, place.source, products) if known else None
        place.macs, place.flops = cost or (None, None)
        place.estimate = 0 if cost else shapes.estimate
        place.bytes = bytes_moved(context, names, context.get_outputs() or [])
        return place

    def _shared(self, place: OpCost, shapes: str = "") -> OpCost:
        """Return the place that stands for all ops that equal this one, executed with these shapes."""
        return self._places.setdefault((_key(place), shapes), place)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        place = OpCost("backward", kind, context.get_scope(), context.get_source())
        if "cost" not in context:
            context["cost"], context["estimate"] = self._cost_of_absent(context), 0
        if context["cost"] is _AT_EXECUTION:
            place.macs = place.flops = None
            key = context.get_backward_op_id()
            context.insert_after_backward_op(self._count_gradients, place=place, context=context, key=key)
            return
        is_own = kind == f"{context['type']}_backward" and context["is_function"]
        context["is_composite"] = is_own and self._calls_ops(context, f"{context.get_op_type()}_backward")
        of = context.get("by_shape", context.get("as_analysed"))
        if of is not None:
            self._count_gradients_by_shapes(context, kind, of)
            return
        place = self._shared(self._gradients_at(context))
        context.insert_after_backward_op(self._count, grad_inputs=[], place=place)

    def _gradients_at(self, context: At | amanda.OpContext, shapes: tuple[Any, ...] = ()) -> OpCost:
        """Return where executions of a backward op with the shapes of a context are counted."""
        kind = context["backward_type"]
        place = OpCost("backward", kind, context.get_scope(), context.get_source())
        if shapes and "by_shape" in context:
            forward = context["by_shape"].cost(shapes[:2])
            context["cost"] = None if forward.flops is None else Cost(forward.macs, forward.flops)
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        cost = self._formulas.of_backward_op(context, kind, grads)
        if context["is_composite"]:
            cost = Cost()
        place.macs, place.flops = cost or (None, None)
        if cost is None:
            within = context.get("within")
            place.estimate = (within and within.backward_macs) or 2 * int(context["estimate"])
        place.bytes = bytes_of(context, [*(context.get_grad_outputs() or []), *grads])
        return place

    def _count_gradients_by_shapes(self, context: amanda.OpContext, kind: str, of: ByShape) -> None:
        """Count a backward op by the shapes of its gradients, some of which a pass may not make.

        of: the op.
        """
        given = [context.get_grad_outputs() or [], context.get_grad_inputs() or []]
        place = self._shared(self._gradients_at(context))
        if self._is_told_by_gradients(context, kind) and are_plain(given, context["shape"]):
            op = ByShape(context, given, self._gradients_at, self._costs, self._settle, of)
            context.insert_after_backward_op(self._tally(context, op), grad_inputs=[])
            return
        unknown = OpCost("backward", kind, place.module, place.source, macs=None, flops=None)
        context.insert_after_backward_op(Once(place, self._shared(unknown)).count, grad_inputs=[])

    def _is_told_by_gradients(self, context: amanda.OpContext, kind: str) -> bool:
        """Return True if shapes say what a backward op costs, whatever the op calls inside."""
        forward = kind.removesuffix("_backward")
        if kind in self._formulas.custom:
            return False
        is_known = forward in _BY_ELEMENTS or forward.removesuffix("_backward") in CONTRACTIONS
        return is_known or context.get_backward_order() > 1

    def _cost_of_absent(self, context: amanda.OpContext) -> Cost | None:
        """Return the cost of an op that does not run, since nobody asks for its value, only its gradient."""
        shapes = shapes_of(context, context.get_inputs(), context.get_outputs() or [])
        names = (context.get_op_type(), context["type"])
        products = context["complex_products"] = self._formulas.complex_products(context)
        return (
            self._formulas.of_op(names, shapes, context.get_source(), products) if shapes.are_known else None
        )

    @staticmethod
    @amanda.observer
    def _note_inputs(*inputs: Any, shape: Any, run: dict[str, Any], recomputed: bool) -> None:
        run["shapes"] = [shape_of(value, shape) for value in inputs]

    @amanda.observer
    def _count_shapes(
        self, *outputs: Any, place: OpCost, names: tuple[str, str], shapes: Shapes, context: amanda.OpContext,
        run: dict[str, Any], recomputed: bool,
    ) -> None:  # fmt: skip
        told = run.pop("shapes", shapes.inputs)
        inputs = [known if one is None else one for one, known in zip(told, shapes.inputs, strict=True)]
        made = [shape_of(value, context["extents"]) for value in outputs]
        place = self._shared(replace(place), str((inputs, made)))
        place = self._counted(place, recomputed, str((inputs, made)))
        known = replace(shapes, inputs=inputs, outputs=made)
        if not place.calls:
            cost = self._formulas.of_op(names, known, place.source, context["complex_products"])
            place.macs, place.flops = cost or (None, None)
            place.estimate = 0 if cost else known.estimate
            read, written = ([4 * elements([one]) for one in side] for side in (inputs, made))
            place.bytes = traffic(names, read, written, in_place=False)
        place.calls += 1
        run["op"] = names, known

    @staticmethod
    @amanda.observer
    def _note_gradients(*grads: Any, shape: Any, key: int, run: dict[str, Any]) -> None:
        run[f"entering {key}"] = [shape_of(grad, shape) for grad in grads]

    @amanda.observer
    def _count_gradients(
        self, *grads: Any, place: OpCost, context: amanda.OpContext, key: int, run: dict[str, Any]
    ) -> None:
        made = [shape_of(grad, context["extents"]) for grad in grads]
        names, op = run.get("op", ((), None))
        entering = run.pop(f"entering {key}", ())
        place = self._shared(replace(place), str((op, entering, made)))
        if not place.calls:
            cost = None if op is None else self._formulas.of_gradients(context, names, op, entering, made)
            place.macs, place.flops = cost or (None, None)
            place.bytes = 4 * elements([*entering, *made])
        place.calls += 1

    @amanda.observer
    def _count(self, place: OpCost, *, recomputed: bool) -> None:
        self._counted(place, recomputed).calls += 1

    def _counted(self, place: OpCost, recomputed: bool, shapes: str = "") -> OpCost:
        """Return where an execution is counted that is one of a place, or a recomputation of such."""
        return self._shared(replace(place, phase=RECOMPUTATION, calls=0), shapes) if recomputed else place


def _add(places: dict[Hashable, OpCost], op: ByShape | OfAnyShape) -> None:
    """Add what was counted of an op to the places of its costs."""
    for place in op.places():
        places.setdefault((_key(place), ""), replace(place, calls=0)).calls += place.calls


def _key(place: OpCost) -> Hashable:
    """Return the parts that equal ops have in common."""
    return (
        place.phase, place.type, place.module, place.source, place.macs, place.flops, place.parameters,
        place.bytes, place.estimate,
    )  # fmt: skip
