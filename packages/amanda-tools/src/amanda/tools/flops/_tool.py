"""The tool: a cost for each op and its backward ops, counted at each execution."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import amanda
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
from amanda.tools.flops._cost import Cost, Formula, Shapes, are_known, shape_of, size, tensors
from amanda.tools.flops._facts import bytes_moved, bytes_of, can_tell, formula_of, is_free, shapes_of
from amanda.tools.flops._formulas import attention_backward, no_cost
from amanda.tools.flops._inside import COMPILED, Inside
from amanda.tools.flops._result import FlopsResult, OpCost
from amanda.tools.flops._table import (
    BY_SHAPES_ALONE,
    CONTRACTIONS,
    COPIES,
    ELEMENTWISE,
    FORMULAS,
    MOVES,
    traffic,
)
from amanda.tools.kit import packed_inputs
from amanda.tools.mapping import MappingTool, StandardMapping, local, share

_AT_EXECUTION: Any = object()
"""The cost of an op whose shapes are not known at analysis."""

logger = logging.getLogger("amanda")

_NO_WORK = MOVES | {"accumulate_grad"}


class FlopsTool(amanda.Tool):
    """Counts what is executed in its scopes; `result` tells, `clear` starts anew.

    formulas: by the word of StandardMapping or a framework's own name of an op, what it costs; they come
    before those that are built in; "conv2d_backward" is the word of a backward op, whose formula is given
    the gradients that enter and leave it.  Shapes decide: executions are counted by their shapes, a formula
    is evaluated for each when `result` is read, and an op of which no formula tells the cost for all shapes
    is analysed for each.  The `cost` that it writes into the context is that of the execution that is
    analysed: a tool that reads it says `guard="shape"`.
    """

    is_copied_when_used = False

    def __init__(self, formulas: Mapping[str, Formula] | None = None) -> None:
        super().__init__()
        self._custom = dict(formulas or {})
        # Equal ops share one: a program may make and drop models as long as it likes, and without a cache
        # an op is analysed at each execution.
        self._places: dict[Hashable, OpCost] = {}
        self._ops: dict[int, dict[Hashable, ByShape | OfAnyShape]] = {}  # by its id; its backward ops too
        self._costs: dict[Hashable, OpCost] = {}  # by type and shapes, whichever op it is
        self._unseen: dict[Hashable, OpCost] = {}
        self._products = 0  # ops analysed so far that are products
        self.depends_on(StandardMapping(), MappingTool([["*", roles], ["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._look_at_inputs)
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
        context["products"] = self._products
        shape = context["shape"]
        if not are_known(shape_of(value, shape) for value in context.get_inputs()):
            context.insert_before_op(self._note_inputs, shape=shape)

    def _forward(self, context: amanda.OpContext) -> None:
        outputs = context.get_outputs() or []
        shapes = shapes_of(context, context.get_inputs(), outputs)
        names = (context.get_op_type(), context["type"])
        if context.is_eager():
            if self._is_told_by_shapes(context, names, shapes, outputs):
                self._count_by_shapes(context, names, shapes, outputs)
                return
            context.get_input_shapes()
        place = self._new_place(context, names[1])
        if not can_tell(names, shapes):
            context["cost"] = _AT_EXECUTION
            context.insert_after_op(
                self._count_shapes, place=place, names=names, shapes=shapes, shape=context["shape"]
            )
            return
        cost = self._cost(names, shapes, place.source)
        if cost is None:
            place.estimate = shapes.estimate
            within = self._inside(context)
            cost = within.forward if within and not within.unknown else None
        if self._products > context["products"]:
            place.estimate = 0  # a function in Python, whose own ops are counted
            cost = Cost() if any(packed_inputs(context)) else cost
        self._products += bool(cost and cost[0])
        place.bytes = bytes_moved(context, names, outputs)
        cost = None if cost is None else Cost(*cost).part(share(outputs))
        place.macs, place.flops = cost or (None, None)
        context["cost"], context["estimate"] = cost, place.estimate
        context.insert_after_op(self._count, outputs=[], place=self._shared(place))

    def _new_place(self, context: Any, kind: str) -> OpCost:
        place = OpCost(context["phase"], kind, context.get_scope(), context.get_source())
        place.parameters = context["parameters"]
        return place

    def _is_told_by_shapes(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> bool:
        """Return whether shapes and element types say what the op and its backward ops cost."""
        inputs, custom = context.get_inputs(), any(name in self._custom for name in names)
        if custom or names[1] not in BY_SHAPES_ALONE or self._products > context["products"]:
            return False
        if not are_plain([inputs, outputs], context["shape"]):
            return False
        is_view = context["is_view"](inputs, outputs)
        if not (COPIES.isdisjoint(names) or is_settled(names[1], context, is_view)):
            return False
        context["is_view"] = lambda inputs, outputs: is_view
        return self._cost(names, shapes, context.get_source()) is not None

    def _count_by_shapes(
        self, context: amanda.OpContext, names: tuple[str, str], shapes: Shapes, outputs: Sequence[Any]
    ) -> None:
        sides = [context.get_inputs(), outputs]
        op = ByShape(context, sides, self._place_at, self._costs, self._settle)
        context["by_shape"] = op
        place = self._place_of(context, names, shapes)
        context["cost"], context["estimate"] = Cost(place.macs or 0, place.flops or 0), 0
        self._products += bool(place.macs)
        counted = OfAnyShape(place, _key(place)) if is_free(context, names) else op
        context.insert_after_op(self._tally(context, counted), outputs=[])

    def _place_at(self, context: At, shapes: tuple[Any, ...]) -> OpCost:
        """Return where executions with the shapes of a context are counted."""
        told = shapes_of(context, context.get_inputs(), context.get_outputs())
        return self._place_of(context, (context.get_op_type(), context["type"]), told)

    def _place_of(self, context: At | amanda.OpContext, names: tuple[str, str], shapes: Shapes) -> OpCost:
        """Return where executions of an op that is told by shapes are counted."""
        place = self._new_place(context, names[1])
        cost = self._cost(names, shapes, place.source) if can_tell(names, shapes) else None
        place.macs, place.flops = cost or (None, None)
        place.estimate = 0 if cost else shapes.estimate
        place.bytes = bytes_moved(context, names, context.get_outputs() or [])
        return place

    def _shared(self, place: OpCost, shapes: str = "") -> OpCost:
        """Return the place that stands for all ops that equal this one, executed with these shapes."""
        return self._places.setdefault((_key(place), shapes), place)

    def _inside(self, context: At | amanda.OpContext) -> Inside | None:
        """Return what an op calls, counted once for the op and its backward ops."""
        if "within" not in context:
            inside = context["inside"]
            context["within"] = inside and inside(context, {**FORMULAS, **self._custom})
        within: Inside | None = context["within"]
        return within

    def _cost(self, names: tuple[str, str], shapes: Shapes, source: str) -> Cost | None:
        custom = next((self._custom[name] for name in names if name in self._custom), None)
        formula = custom or formula_of(names)
        if formula is None or not (formula is no_cost or can_tell(names, shapes)):
            return None
        try:
            return formula(shapes)
        except Exception as error:  # an unusual call is not worth the user's program
            if custom is not None:
                raise
            logger.warning("no FLOPs for %s at %s: %r", names[0], source, error)
            return None

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        place = OpCost("backward", kind, context.get_scope(), context.get_source())
        if "cost" not in context:
            context["cost"], context["estimate"] = self._cost_of_absent(context), 0
        if context["cost"] is _AT_EXECUTION:
            context.insert_after_backward_op(
                self._count_gradients, place=place, names=(kind, kind), shape=context["shape"]
            )
            return
        if "by_shape" in context:
            self._count_gradients_by_shapes(context, kind)
            return
        place = self._shared(self._gradients_at(context))
        context.insert_after_backward_op(self._count, grad_inputs=[], place=place)

    def _gradients_at(self, context: At | amanda.OpContext, shapes: tuple[Any, ...] = ()) -> OpCost:
        """Return where executions of a backward op with the shapes of a context are counted."""
        kind = context["backward_type"]
        place = OpCost("backward", kind, context.get_scope(), context.get_source())
        if shapes:
            forward = context["by_shape"].cost(shapes[:2])
            context["cost"] = None if forward.flops is None else Cost(forward.macs, forward.flops)
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        cost = self._backward_cost(context, kind, grads)
        place.macs, place.flops = cost or (None, None)
        if cost is None:
            within = context.get("within")
            place.estimate = (within and within.backward_macs) or 2 * int(context["estimate"])
        place.bytes = bytes_of(context, [*(context.get_grad_outputs() or []), *grads])
        return place

    def _count_gradients_by_shapes(self, context: amanda.OpContext, kind: str) -> None:
        """Count a backward op of an op that is told by shapes, which it is mostly, too."""
        forward = kind.removesuffix("_backward")
        given = [context.get_grad_outputs() or [], context.get_grad_inputs() or []]
        is_told = forward in BY_SHAPES_ALONE or forward.removesuffix("_backward") in CONTRACTIONS
        is_told = is_told or forward in _NO_WORK or context.get_backward_order() > 1
        is_told = is_told and kind not in self._custom and are_plain(given, context["shape"])
        place = self._shared(self._gradients_at(context))
        if is_told:
            of = context["by_shape"]
            op = ByShape(context, given, self._gradients_at, self._costs, self._settle, of)
            context.insert_after_backward_op(self._tally(context, op), grad_inputs=[])
            return
        unknown = OpCost("backward", kind, place.module, place.source, macs=None, flops=None)
        context.insert_after_backward_op(Once(place, self._shared(unknown)).count, grad_inputs=[])

    def _cost_of_absent(self, context: amanda.OpContext) -> Cost | None:
        """Return the cost of an op that does not run, since nobody asks for its value, only its gradient."""
        shapes = shapes_of(context, context.get_inputs(), context.get_outputs() or [])
        names = (context.get_op_type(), context["type"])
        return self._cost(names, shapes, context.get_source()) if shapes.are_known else None

    def _backward_cost(self, context: At | amanda.OpContext, kind: str, grads: Sequence[Any]) -> Cost | None:
        forward, shape = kind.removesuffix("_backward"), context["shape"]
        if kind in self._custom:
            return self._custom[kind](shapes_of(context, context.get_grad_outputs() or [], grads))
        if forward == "scaled_dot_product_attention":
            read = [shape(one) for one in context.get_inputs()[:3]]
            return attention_backward(Shapes(forward, read, ()), 0).part(share(grads))
        if forward.removesuffix("_backward") in CONTRACTIONS:
            return Cost.of_macs(context["backward_macs"](context))
        if forward in _NO_WORK:
            return Cost()
        if forward not in ELEMENTWISE and context.get_backward_order() == 1:
            within = self._inside(context)
            node = context.get_backward_op().__name__
            cost = within.next_of(node) if within else None
            if cost is not None:
                return cost
            if within and node == COMPILED and within.backward_macs:
                return None  # how many of its products there are, torch does not tell
            is_known = context["cost"] is not None and not (context["inside"] and forward in FORMULAS)
            if forward == context["type"] and not is_known:
                return None
        return Cost(0, sum(size(shape(local(grad))) for grad in grads))

    @staticmethod
    @amanda.observer
    def _note_inputs(*inputs: Any, shape: Any, run: dict[str, Any], recomputed: bool) -> None:
        run["shapes"] = [shape_of(value, shape) for value in inputs]

    @amanda.observer
    def _count_shapes(
        self, *outputs: Any, place: OpCost, names: tuple[str, str], shapes: Shapes, shape: Any,
        run: dict[str, Any], recomputed: bool,
    ) -> None:  # fmt: skip
        told = run.pop("shapes", shapes.inputs)
        inputs = [known if one is None else one for one, known in zip(told, shapes.inputs, strict=True)]
        made = [shape_of(value, shape) for value in outputs]
        place = self._shared(replace(place), str((inputs, made)))
        place = self._counted(place, recomputed, str((inputs, made)))
        if not place.calls:
            known = replace(shapes, inputs=inputs, outputs=made)
            cost = self._cost(names, known, place.source)
            place.macs, place.flops = cost or (None, None)
            place.estimate = 0 if cost else known.estimate
            read, written = ([4 * sum(map(size, tensors([one]))) for one in side] for side in (inputs, made))
            place.bytes = traffic(names, read, written, in_place=False)
        place.calls += 1
        run["macs"] = place.macs

    @amanda.observer
    def _count_gradients(
        self, *grads: Any, place: OpCost, names: tuple[str, str], shape: Any, run: dict[str, Any]
    ) -> None:
        made = tensors(shape_of(grad, shape) for grad in grads)
        macs, elements = run.get("macs", 0), sum(map(size, made))
        place = self._shared(replace(place), str((macs, made)))
        forward = names[1].removesuffix("_backward")
        if forward in _NO_WORK:
            place.flops = 0
        elif macs is None or not are_known(made):
            place.macs = place.flops = None
        elif forward in CONTRACTIONS:
            place.macs, place.flops = Cost.of_macs(len(made) * macs)
        else:
            place.flops = elements
        place.bytes = 4 * elements
        place.calls += 1

    @amanda.observer
    def _count(self, place: OpCost, *, recomputed: bool) -> None:
        self._counted(place, recomputed).calls += 1

    def _counted(self, place: OpCost, recomputed: bool, shapes: str = "") -> OpCost:
        """Return where an execution is counted that is one of a place, or a recomputation of such."""
        return self._shared(replace(place, phase=RECOMPUTATION, calls=0), shapes) if recomputed else place


def roles(context: amanda.OpContext) -> None:
    """Write `parameters`, `backward_macs`, `inside` and `is_view`, as far as every framework tells them."""
    if "parameters" not in context:
        weight = context["weight_index"]
        context["parameters"] = 0 if weight is None else size(context["shape"](context.get_inputs()[weight]))
        context["backward_macs"] = _macs_of_each_gradient
        context["inside"] = None
        context["is_view"] = lambda inputs, outputs: False


def _macs_of_each_gradient(context: amanda.OpContext) -> int:
    """Return as many as the op takes, for each gradient that a backward op gives."""
    given = sum(grad is not None for grad in context.get_grad_inputs() or [])
    return given * (context["cost"].macs if context["cost"] else 0)


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
