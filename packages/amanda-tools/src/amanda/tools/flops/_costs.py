"""Costs of ops and of their backward ops, by formulas and by what an op calls inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import amanda
from amanda.tools.flops._by_shape import At, Extents
from amanda.tools.flops._cost import Cost, Formula, Shapes, are_known, components, size
from amanda.tools.flops._facts import can_tell, formula_of, shapes_of
from amanda.tools.flops._formulas import attention_backward, no_cost
from amanda.tools.flops._inside import COMPILED, Inside
from amanda.tools.flops._table import CONTRACTIONS, ELEMENTWISE, FORMULAS, MOVES
from amanda.tools.kit import leaves
from amanda.tools.mapping import local, share

NO_WORK = MOVES | {"accumulate_grad"}

logger = logging.getLogger("amanda")


class Costs:
    """Costs by a program's own formulas and by those that are built in.

    custom: by a word, or a framework's name of an op.  complex_macs: multiply-accumulates of real numbers in
    one of complex numbers.
    """

    def __init__(self, custom: Mapping[str, Formula], complex_macs: int) -> None:
        self.custom = dict(custom)
        self._complex_macs = complex_macs

    def complex_products(self, context: At | amanda.OpContext) -> int:
        """Return how many multiply-accumulates of real numbers is one of the op's."""
        names = [str(context["dtype"](one)) for one in leaves(context.get_inputs())]
        kinds = [
            name.startswith("complex") for name in names if name.startswith(("complex", "float", "bfloat"))
        ]
        if not any(kinds):
            return 1
        return self._complex_macs if all(kinds) else min(self._complex_macs, 2)

    def of_op(self, names: tuple[str, str], shapes: Shapes, source: str, products: int = 1) -> Cost | None:
        """Return the cost by a formula; None where there is none.

        products: as `complex_products` gives them.
        """
        custom = next((self.custom[name] for name in names if name in self.custom), None)
        formula = custom or formula_of(names)
        if formula is no_cost:
            return Cost()
        if formula is None or not can_tell(names, shapes):
            return None
        try:
            costs = [(formula(part), count) for part, count in shapes.by_component()]
        except Exception as error:  # an unusual call is not worth the user's program
            if custom is not None:
                raise
            logger.warning("no FLOPs for %s at %s: %r", names[0], source, error)
            return None
        total = costs[0][0] if len(costs) == 1 and costs[0][1] == 1 else _sum(costs)
        return total if custom or products == 1 else total.with_complex(products)

    def inside(self, context: At | amanda.OpContext) -> Inside | None:
        """Return what an op calls, counted once for the op and its backward ops."""
        if "within" not in context:
            run = context["inside"]
            context["within"] = run and run(context, {**FORMULAS, **self.custom}, self._complex_macs)
        within: Inside | None = context["within"]
        return within

    def of_backward_op(self, context: At | amanda.OpContext, kind: str, grads: Sequence[Any]) -> Cost | None:
        """Return the cost of a backward op of a type that gives these gradients."""
        forward, shape = kind.removesuffix("_backward"), context["shape"]
        if kind in self.custom:
            return self.custom[kind](shapes_of(context, context.get_grad_outputs() or [], grads))
        if forward == "scaled_dot_product_attention":
            return _attention_backward(context, share(grads))
        if forward.removesuffix("_backward") in CONTRACTIONS:
            return Cost.of_macs(context["backward_macs"](context))
        if forward in NO_WORK:
            return Cost()
        if forward not in ELEMENTWISE and context.get_backward_order() == 1:
            within = self.inside(context)
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

    def of_gradients(
        self, context: amanda.OpContext, names: tuple[str, str], op: Shapes, *sides: Sequence[Any]
    ) -> Cost | None:
        """Return the cost of a backward op by shapes that are known as it runs; None where they are not.

        op: the shapes of its op.  sides: those of the gradients that enter and leave it.
        """
        if not are_known([*op.inputs, *op.outputs, *sides[0], *sides[1]]):
            return None
        costs = []
        kind = context["element_type"]
        for (inputs, outputs, *grads), count in components([op.inputs, op.outputs, *sides]):
            forward = replace(op, inputs=inputs, outputs=outputs)
            at = At(context, [[_extents(one, kind) for one in side] for side in (inputs, outputs, *grads)])
            at["cost"] = self.of_op(names, forward, "", context["complex_products"])
            made = [one for one in at.get_grad_inputs() if one is not None]
            cost = self.of_backward_op(at, context["backward_type"], made)
            if cost is None:
                return None
            costs.append((cost, count))
        return _sum(costs)


def _sum(costs: Sequence[tuple[Cost, int]]) -> Cost:
    """Return the sum of costs, each of which comes so often."""
    return Cost(sum(one.macs * count for one, count in costs), sum(one.flops * count for one, count in costs))


def _extents(shape: Any, kind: Any) -> Any:
    """Return what stands for a tensor of a shape and an element type, or for a list of tensors."""
    if isinstance(shape, list):
        return [_extents(one, kind) for one in shape]
    return None if shape is None else Extents(shape, kind)


def _attention_backward(context: At | amanda.OpContext, part: float) -> Cost | None:
    """Return the cost of a fused kernel, whose gradients are those of queries, keys and values."""
    entering = next((one for one in context.get_grad_outputs() or [] if one is not None), None)
    if entering is None:
        return Cost()
    is_own = context["type"] == "scaled_dot_product_attention"
    inputs = context.get_inputs()[:3] if is_own else [None] * 3
    grads = [*(context.get_grad_inputs() or []), None, None, None]
    read = [grad if value is None else value for value, grad in zip(inputs, grads, strict=False)]
    if any(one is None for one in read):
        return None
    shapes = [context["shape"](one) for one in (entering, *read)]
    return attention_backward(Shapes("", shapes, ())).part(part)
