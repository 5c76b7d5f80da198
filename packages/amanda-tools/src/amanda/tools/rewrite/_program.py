"""The ops of a program, and which op made what each is given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import TensorMap
from amanda.tools.rewrite._pattern import Op


class Origin(NamedTuple):
    """The source of an input: the id of the op that made it, None from outside; the tensor's key."""

    producer: int | None
    key: Hashable


@dataclass(eq=False)
class Node:
    """One op as it was analysed: a place in the program.

    order: of the first analysis.  fits: the ops of patterns that it is of the type of.
    readers: ids of the ops that read its output.  compute: what computes it, in a graph; values: there, weak
    references to the symbols that it is given.
    """

    id: int
    order: int
    type: str
    name: str
    module: str
    source: str
    framework: str
    is_eager: bool
    in_place: bool
    attributes: dict[str, Any]
    op: Any
    compute: Callable[[Sequence[Any]], Any] | None = None
    values: list[Any] = field(default_factory=list)
    inputs: tuple[Origin, ...] = ()
    fits: frozenset[Op] = frozenset()
    readers: set[int] = field(default_factory=set)


class Program:
    """The ops that were analysed, and the tensors between them."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self._makers = TensorMap[int]()

    def enter(self, context: amanda.OpContext, patterns: Iterable[Op]) -> Node:
        """Take an op that is about to be analysed."""
        node = self._node(context)
        node.inputs = tuple(self._origin(context, value) for value in context.get_inputs())
        node.fits = frozenset(op for op in patterns if op.fits(context))
        if node.fits and not node.is_eager:
            node.compute = context.get_computation()
            node.values = [_weakly(value) for value in context.get_inputs()]
        for origin in node.inputs:
            producer = None if origin.producer is None else self.nodes.get(origin.producer)
            if producer is not None:
                producer.readers.add(node.id)
        return node

    def leave(self, context: amanda.OpContext) -> None:
        """Take the outputs of an op that has run."""
        for value in context.get_outputs() or ():
            if context["dtype"](value) is not None:
                self._makers[value] = context.get_op_id()

    def stand_for(self, tensor: Any, op_id: int) -> None:
        """Take a tensor for the output of an op."""
        self._makers[tensor] = op_id

    def _node(self, context: amanda.OpContext) -> Node:
        op_id = context.get_op_id()
        known = self.nodes.get(op_id)
        if known is None:
            known = self.nodes[op_id] = Node(
                op_id, len(self.nodes), context["type"], context.get_op_type(), context.get_scope(),
                context.get_source(), context.namespace[0], context.is_eager(),
                context["in_place"], {}, context.get_op(),
            )  # fmt: skip
        known.attributes, known.op = context.get_attrs(), context.get_op()
        return known

    def _origin(self, context: amanda.OpContext, value: Any) -> Origin:
        if context["dtype"](value) is None:
            return Origin(None, None)
        return Origin(self._makers.get(value), TensorMap.key(value))


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
