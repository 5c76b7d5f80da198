"""The tool: a cost for each op and its backward ops, counted at each execution."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

import amanda
from amanda.tools.flops import _onnxruntime, _pytorch, _tensorflow, _words
from amanda.tools.flops._aten import ELEMENTWISE
from amanda.tools.flops._cost import Cost, Formula, Shapes, tensors
from amanda.tools.flops._formulas import attention_backward, no_cost
from amanda.tools.flops._inside import COMPILED, Inside
from amanda.tools.flops._result import FlopsResult, Place
from amanda.tools.flops._traffic import MOVES, traffic
from amanda.tools.flops._words import CONTRACTIONS
from amanda.tools.kit import packed_inputs
from amanda.tools.mapping import MappingTool, StandardMapping, itemsize, local, share

_AT_EXECUTION: Any = object()
"""The cost of an op whose shapes are not known at analysis."""
_UNKNOWN = (None,)
"""The shape of a tensor whose rank is not known."""
_HANDLES = ("resource", "variant")
"""Types of TensorFlow's values that stand for something else, and have no elements."""

logger = logging.getLogger("amanda")

_FORMULAS = {
    **_words.FORMULAS, **_pytorch.FORMULAS, **_tensorflow.FORMULAS, **_onnxruntime.FORMULAS
}  # fmt: skip
_NO_WORK = MOVES | {"accumulate_grad"}


@dataclass
class _Found:
    """An op whose shapes are known at execution alone; there is a place for each that it is executed with."""

    place: Place
    names: tuple[str, str]
    shape: Callable[[Any], Any]


class FlopsTool(amanda.Tool):
    """Counts what is executed in its scopes; `result` tells, `clear` starts anew.

    formulas: by the word of StandardMapping or a framework's own name of an op, what it costs; they come
    before those that are built in; "conv2d_backward" is the word of a backward op, whose formula is given
    the gradients that enter and leave it.  Shapes decide, so an op is analysed once for each.
    """

    def __init__(self, formulas: Mapping[str, Formula] | None = None) -> None:
        super().__init__()
        self._custom = dict(formulas or {})
        # Equal ops share one: a program may make and drop models as long as it likes, and without a cache
        # an op is analysed at each execution.
        self._places: dict[Hashable, Place] = {}
        self._unseen: dict[Hashable, Place] = {}
        self._products = 0  # ops analysed so far that are products
        self.depends_on(StandardMapping(), MappingTool([["*", roles], ["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._look_at_inputs)
        self.add_inst_for_op(self._forward, require_outputs=True, guard="shape")
        self.add_inst_for_op(self._backward, backward=True, require_outputs=True)

    @property
    def result(self) -> FlopsResult:
        """The counts of what was executed so far."""
        executed = [place for place in self._places.values() if place.calls]
        return FlopsResult([*executed, *self._unseen.values()])

    def clear(self) -> None:
        """Forget what was executed; what was analysed stays."""
        for place in self._places.values():
            place.calls = 0

    def refused(self, action: amanda.Action, reason: str) -> None:
        """Keep an op whose executions cannot be counted, for the result to say so."""
        place, found = action.kwargs.get("place"), action.kwargs.get("found")
        if found is not None and _formula(found.names) is not no_cost:
            place = found.place
        elif place is None or place.flops == 0:
            return
        unseen = replace(place, calls=0, macs=None, flops=None, bytes=0)
        self._unseen.setdefault((_key(unseen), id(action.kwargs.get("shapes"))), unseen)

    def _look_at_inputs(self, context: amanda.OpContext) -> None:
        context["products"] = self._products
        shape = context["shape"]
        if not _are_known(_shape_of(value, shape) for value in context.get_inputs()):
            context.insert_before_op(self._note_inputs, shape=shape)

    def _forward(self, context: amanda.OpContext) -> None:
        outputs = context.get_outputs() or []
        shapes = _shapes(context, context.get_inputs(), outputs)
        names = (context.get_op_type(), context["type"])
        place = Place(context["phase"], names[1], context.get_scope(), context.get_source())
        place.parameters = context["parameters"]
        if not _can_tell(names, shapes):
            context["cost"] = _AT_EXECUTION
            found = _Found(place, names, context["shape"])
            context.insert_after_op(self._count_shapes, found=found, shapes=shapes)
            return
        _fill(place, self._cost(names, shapes, place.source), lambda: shapes.estimate)
        if place.flops is None and (within := self._inside(context)) and not within.unknown:
            place.macs, place.flops = within.forward
        if self._products > context["products"]:
            place.estimate = 0  # a function in Python, whose own ops are counted
            if any(packed_inputs(context)):
                place.macs = place.flops = 0
        self._products += bool(place.macs)
        place.bytes = _moved(context, names, outputs)
        cost = None if place.flops is None else Cost(place.macs or 0, place.flops).part(share(outputs))
        place.macs, place.flops = cost or (place.macs, None)
        context["cost"], context["estimate"] = cost, place.estimate
        place = self._places.setdefault(_key(place), place)
        context.insert_after_op(self._count, outputs=[], place=place)

    def _inside(self, context: amanda.OpContext) -> Inside | None:
        """Return what an op calls, counted once for the op and its backward ops."""
        if "within" not in context:
            context["within"] = context["inside"](context, {**_FORMULAS, **self._custom})
        within: Inside | None = context["within"]
        return within

    def _cost(self, names: tuple[str, str], shapes: Shapes, source: str) -> Cost | None:
        custom = next((self._custom[name] for name in names if name in self._custom), None)
        if custom is not None:
            return custom(shapes) if _can_tell(names, shapes) else None
        formula = _formula(names)
        if formula is None or not (formula is no_cost or _can_tell(names, shapes)):
            return None
        try:
            return formula(shapes)
        except Exception as error:  # an unusual call is not worth the user's program
            logger.warning("no FLOPs for %s at %s: %r", names[0], source, error)
            return None

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        place = Place("backward", kind, context.get_scope(), context.get_source())
        if "cost" not in context:
            context["cost"], context["estimate"] = self._cost_of_absent(context), 0
        if context["cost"] is _AT_EXECUTION:
            found = _Found(place, (kind, kind), context["shape"])
            context.insert_after_backward_op(self._count_gradients, found=found)
            return
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        _fill(place, self._backward_cost(context, kind, grads), lambda: _products_of(context))
        place.bytes = _bytes(context, [*(context.get_grad_outputs() or []), *grads])
        place = self._places.setdefault(_key(place), place)
        context.insert_after_backward_op(self._count, grad_inputs=[], place=place)

    def _cost_of_absent(self, context: amanda.OpContext) -> Cost | None:
        """Return the cost of an op that does not run, since nobody asks for its value, only its gradient."""
        shapes = _shapes(context, context.get_inputs(), context.get_outputs() or [])
        if not _are_known([*shapes.inputs, *shapes.outputs]):
            return None
        return self._cost((context.get_op_type(), context["type"]), shapes, context.get_source())

    def _backward_cost(self, context: amanda.OpContext, kind: str, grads: Sequence[Any]) -> Cost | None:
        forward, shape = kind.removesuffix("_backward"), context["shape"]
        if kind in self._custom:
            return self._custom[kind](_shapes(context, context.get_grad_outputs() or [], grads))
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
            if forward == context["type"] and (context["cost"] is None or forward in _pytorch.FORMULAS):
                return None
        return Cost(0, sum(_size(shape(local(grad))) for grad in grads))

    @staticmethod
    @amanda.observer
    def _note_inputs(*inputs: Any, shape: Any, run: dict[str, Any]) -> None:
        run["shapes"] = [_shape_of(value, shape) for value in inputs]

    @amanda.observer
    def _count_shapes(self, *outputs: Any, found: _Found, shapes: Shapes, run: dict[str, Any]) -> None:
        told = run.pop("shapes", shapes.inputs)
        inputs = [known if one is None else one for one, known in zip(told, shapes.inputs, strict=True)]
        made = [_shape_of(value, found.shape) for value in outputs]
        place = self._same(found, str((inputs, made)))
        if not place.calls:
            known = replace(shapes, inputs=inputs, outputs=made)
            _fill(place, self._cost(found.names, known, place.source), lambda: known.estimate)
            read, written = ([4 * sum(map(_size, tensors([one]))) for one in side] for side in (inputs, made))
            place.bytes = traffic(found.names, read, written, in_place=False)
        place.calls += 1
        run["macs"] = place.macs

    @amanda.observer
    def _count_gradients(self, *grads: Any, found: _Found, run: dict[str, Any]) -> None:
        made = tensors(_shape_of(grad, found.shape) for grad in grads)
        macs, elements = run.get("macs", 0), sum(map(_size, made))
        place = self._same(found, str((macs, made)))
        forward = place.type.removesuffix("_backward")
        if forward in _NO_WORK:
            place.flops = 0
        elif macs is None or not _are_known(made):
            place.macs = place.flops = None
        elif forward in CONTRACTIONS:
            place.macs, place.flops = Cost.of_macs(len(made) * macs)
        else:
            place.flops = elements
        place.bytes = 4 * elements
        place.calls += 1

    def _same(self, found: _Found, key: str) -> Place:
        """Return the place that stands for executions of an op with these shapes."""
        return self._places.setdefault((_key(found.place), key), replace(found.place))

    @staticmethod
    @amanda.observer
    def _count(place: Place) -> None:
        place.calls += 1


def roles(context: amanda.OpContext) -> None:
    """Write `parameters`, `backward_macs`, `inside` and `is_view`, as far as every framework tells them."""
    if "parameters" not in context:
        weight = context["weight_index"]
        context["parameters"] = 0 if weight is None else _size(context["shape"](context.get_inputs()[weight]))
        context["backward_macs"] = _macs_of_each_gradient
        context["inside"] = lambda context, formulas: None
        context["is_view"] = lambda inputs, outputs: False


def _macs_of_each_gradient(context: amanda.OpContext) -> int:
    """Return as many as the op takes, for each gradient that a backward op gives."""
    given = sum(grad is not None for grad in context.get_grad_inputs() or [])
    return given * (context["cost"].macs if context["cost"] else 0)


def _formula(names: tuple[str, str]) -> Formula | None:
    """Return the built-in formula of an op of these names: the framework's, and the vocabulary's."""
    if names[0].startswith(_pytorch.LIBRARIES):
        return no_cost
    if names[0].endswith("Dataset") or "DatasetV" in names[0]:
        return no_cost  # what its functions compute is in no op
    return next((_FORMULAS[name] for name in names if name in _FORMULAS), None)


def _fill(place: Place, cost: Cost | None, estimate: Callable[[], int]) -> None:
    """Write the cost of one execution; without one, the multiply-accumulates that it may have."""
    place.macs, place.flops = cost or (None, None)
    place.estimate = estimate() if cost is None else 0


def _products_of(context: amanda.OpContext) -> int:
    """Return the multiply-accumulates that the gradients of an op may have."""
    within = context.get("within")
    return within.backward_macs if within and within.backward_macs else 2 * int(context["estimate"])


def _key(place: Place) -> Hashable:
    """Return the parts that equal ops have in common."""
    return astuple(replace(place, calls=0))


def _shapes(context: amanda.OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> Shapes:
    shape = context["shape"]
    read = [_shape_of(value, shape) for value in inputs]
    return Shapes(
        context["type"], read, [_shape_of(value, shape) for value in outputs],
        [value for value, known in zip(inputs, read, strict=True) if known in (None, _UNKNOWN)],
        context.get_attrs(), context["weight_index"], context["weight_layout"],
    )  # fmt: skip


def _shape_of(value: Any, shape: Any) -> Any:
    """Return a tensor's shape, `_UNKNOWN` without a rank; a list of shapes; None of what is no tensor."""
    if isinstance(value, (list, tuple)):
        return [extents for one in value if (extents := _extents(one, shape)) is not None] or None
    return _extents(value, shape)


def _extents(value: Any, shape: Any) -> Any:
    extents = shape(value)
    if extents is None and hasattr(type(value), "shape"):
        return None if getattr(getattr(value, "dtype", None), "name", "") in _HANDLES else _UNKNOWN
    return extents


def _are_known(shapes: Iterable[Any]) -> bool:
    """Return True if every extent is known; in graphs some are known at execution alone."""
    return all(None not in one for one in tensors(shapes))


def _can_tell(names: tuple[str, str], shapes: Shapes) -> bool:
    """Return True if a formula has all that it reads."""
    return names[0] in _pytorch.OF_NESTED or _are_known([*shapes.inputs, *shapes.outputs])


def _size(shape: Any) -> int:
    return 0 if shape is None or None in shape else prod(shape)


def _moved(context: amanda.OpContext, names: tuple[str, str], outputs: Sequence[Any]) -> int:
    """Return the bytes that one execution moves."""
    inputs, in_place = context.get_inputs(), context["in_place"]
    if not in_place and names[1] in MOVES and context["is_view"](inputs, outputs):
        return 0
    read, written = ([_bytes(context, [one]) for one in side] for side in (inputs, outputs))
    return traffic(names, read, written, in_place)


def _bytes(context: amanda.OpContext, values: Sequence[Any]) -> int:
    """Return the bytes of tensors, also of those in lists."""
    total = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            total += _bytes(context, value)
        elif (extents := context["shape"](local(value))) is not None and None not in extents:
            total += prod(extents) * (itemsize(context["dtype"](value)) or 4)
    return total
