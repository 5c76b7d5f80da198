"""The tool: a cost for each op and its backward ops, counted at each execution."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import amanda
from amanda.tools.flops import _pytorch
from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import FORMULAS, MOVES
from amanda.tools.flops._result import FlopsResult, Place
from amanda.tools.mapping import MappingTool, StandardMapping

logger = logging.getLogger("amanda")

_FORMULAS = {**FORMULAS, **_pytorch.FORMULAS}
_CONTRACTIONS = frozenset(
    {"linear", "matmul", "addmm", "addmv", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
     "conv_transpose2d", "conv_transpose3d", "depthwise_conv2d", "lstm", "gru", "rnn_tanh", "rnn_relu"}
)  # fmt: skip
"""Ops each of whose gradients takes as many multiply-accumulates as the op itself."""


class FlopsTool(amanda.Tool):
    """Counts what is executed in its scopes; `result` tells, `clear` starts anew.

    formulas: by the word of StandardMapping or a framework's own name of an op, what it costs; they come
    before those that are built in; "conv2d_backward" is the word of a backward op, whose formula is given
    the gradients that enter and leave it.  Shapes decide, so an op is analysed once for each.
    """

    def __init__(self, formulas: Mapping[str, Formula] | None = None) -> None:
        super().__init__()
        self._custom = dict(formulas or {})
        self._places: list[Place] = []
        self.depends_on(StandardMapping(), MappingTool([["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._forward, require_outputs=True, guard="shape")
        self.add_inst_for_op(self._backward, backward=True, require_outputs=True)

    @property
    def result(self) -> FlopsResult:
        """What was executed so far."""
        return FlopsResult(self._places)

    def clear(self) -> None:
        """Forget what was executed; what was analysed stays."""
        for place in self._places:
            place.calls = 0

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        outputs = context.get_outputs() or []
        inputs = context.get_inputs()
        cost = self._cost(context, inputs, outputs)
        kind = context["type"]
        place = Place(
            context["phase"], kind, context.get_scope(), context.get_source(), 0,
            None if cost is None else cost.macs, None if cost is None else cost.flops,
            parameters=context["parameters"],
            bytes=0 if kind in MOVES and kind != "cat" else _bytes(context, [*inputs, *outputs]),
        )  # fmt: skip
        context["cost"] = cost
        self._places.append(place)
        context.insert_after_op(self._count, outputs=[], place=place)

    def _cost(self, context: amanda.OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> Cost | None:
        names = (context.get_op_type(), context["type"])
        custom = next((self._custom[name] for name in names if name in self._custom), None)
        if custom is not None:
            return custom(_shapes(context, inputs, outputs))
        formula = next((_FORMULAS[name] for name in names if name in _FORMULAS), None)
        if formula is None:
            return None
        try:
            return formula(_shapes(context, inputs, outputs))
        except Exception as error:  # an unusual call is not worth the user's program
            logger.warning("no FLOPs for %s at %s: %r", names[0], context.get_source(), error)
            return None

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        grads = [grad for grad in context.get_grad_inputs() or [] if grad is not None]
        entering = [grad for grad in context.get_grad_outputs() or [] if grad is not None]
        cost = self._backward_cost(context, kind, grads)
        place = Place(
            "backward", kind, context.get_scope(), context.get_source(), 0,
            None if cost is None else cost.macs, None if cost is None else cost.flops,
            bytes=_bytes(context, [*entering, *grads]),
        )  # fmt: skip
        self._places.append(place)
        context.insert_after_backward_op(self._count, grad_inputs=[], place=place)

    def _backward_cost(self, context: amanda.OpContext, kind: str, grads: Sequence[Any]) -> Cost | None:
        forward = kind.removesuffix("_backward")
        if kind in self._custom:
            return self._custom[kind](_shapes(context, context.get_grad_outputs() or [], grads))
        if "cost" in context and context["cost"] is None and forward == context["type"]:
            return None
        shape = context["shape"]
        elements = sum(prod(shape(grad)) for grad in grads if shape(grad) is not None)
        if forward == "scaled_dot_product_attention" and context["cost"]:
            return _attention_backward(context)
        if forward in _CONTRACTIONS:
            return Cost.of_macs(context["backward_macs"](context))
        if forward in MOVES or forward == "accumulate_grad":
            return Cost()
        return Cost(0, elements)

    @staticmethod
    def _count(place: Place) -> None:
        place.calls += 1


def _attention_backward(context: amanda.OpContext) -> Cost:
    """The scores once more, then the gradients of values, scores, queries and keys."""
    q, k, v = (context["shape"](one) for one in context.get_inputs()[:3])
    return Cost.of_macs(prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1]), prod(q[:-1]) * k[-2] * 6)


def _shapes(context: amanda.OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> Shapes:
    shape = context["shape"]

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(shape(one) is not None for one in value):
            return [shape(one) for one in value if shape(one) is not None]
        return shape(value)

    read = [of(value) for value in inputs]
    return Shapes(
        context["type"], read, [of(value) for value in outputs],
        [value for value, known in zip(inputs, read, strict=True) if known is None],
        context.get_attrs(), context["weight_index"], context["weight_layout"],
    )  # fmt: skip


def _bytes(context: amanda.OpContext, values: Sequence[Any]) -> int:
    """Bytes of tensors, also of those in lists."""
    total = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            total += _bytes(context, value)
        elif (extents := context["shape"](value)) is not None and None not in extents:
            total += prod(extents) * _WIDTHS.get(context["dtype"](value), 4)
    return total


_WIDTHS = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2,
    "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
