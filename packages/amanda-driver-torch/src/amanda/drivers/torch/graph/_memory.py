"""Views in a graph: where a routine's value would no longer share the memory that its node's value shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from amanda.errors import AmandaError
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from amanda.backend import Action, OpFacts
    from torch.fx import Node

    from ._instrumented import Step
    from ._record import NativeCall, Ran


class SharedMemory(AmandaError):
    """A graph writes into memory, or hands it on, of which a routine changes a view.

    In eager mode writes reach both; a graph has to be left to it.  where: the user's line.
    """

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"a routine changes a view, and {what} the memory that it is a view of")
        self.where = where


def check_views(ran: Mapping[Node, Ran], steps: Mapping[Node, Sequence[Step]]) -> None:
    """Raise SharedMemory where a routine may change a view whose memory others see later.

    That is memory that a node writes after the view is made, where another value in it is read later or by
    the caller, and memory that several of the graph's inputs and outputs lie in.
    """
    viewed = list(_changed_views(ran, steps))
    if not viewed:
        return
    order = {node: i for i, node in enumerate(ran)}
    first: dict[int, tuple[int, Step]] = {}
    for node, step, memory in viewed:
        first.setdefault(memory, (order[node], step))
    for written, at, memory in _writes(ran):
        made, changed = first.get(memory, (len(order), None))
        if changed is not None and made < order[at] and _seen_later(ran, order, memory, written, order[at]):
            raise SharedMemory(f"{_name(at)} writes into", changed.facts.source)
    for memory, (_, step) in first.items():
        outside = [node for node, one in ran.items() if memory in _memories(one.value) and is_outside(node)]
        if len(outside) > 1:
            raise SharedMemory("the graph is given, or gives, more than one value in", step.facts.source)


def seen_and_written(
    ran: Mapping[Node, Ran], steps: Mapping[Node, Sequence[Step]]
) -> Iterator[tuple[int, Action]]:
    """Yield ids of ops, and observers there, whose values lie in memory into which the graph writes."""
    written = {memory for _, _, memory in _writes(ran)}
    for node, each in steps.items() if written else ():
        for call, step in zip(ran[node].calls, each, strict=True):
            for action in step.plan.inserted:
                values = call.values if action.type.is_after else call.call.inputs
                if action.select is not None:
                    values = [one for i, one in enumerate(values) if i in action.select]
                if not written.isdisjoint(_memories(values)):
                    yield step.facts.op_id, action


def unlike_eager(
    ran: Mapping[Node, Ran], sites: Mapping[int, tuple[OpFacts, bool]], by_autograd: bool
) -> Iterator[tuple[OpFacts, str]]:
    """Yield backward ops of views that do not run as in eager mode, and why.

    sites: backward ops with routines by the id of autograd's node; whether the graph calls one of these.
    by_autograd: whether AOTAutograd compiles the graph.
    """
    for made in _views_made_outside(ran) if by_autograd and sites else ():
        facts, calls = sites.get(id(made), (None, False))
        if facts is not None and calls:
            yield facts, "AOTAutograd makes the view outside of the graph: its routines are not called"
    order = {node: i for i, node in enumerate(ran)}
    for written, at, _ in _writes(ran) if sites else ():
        facts, _ = sites.get(id(written.grad_fn), (None, False))
        if facts is not None and written._base is not None:
            readers = [user for node, one in ran.items() if one.value is written for user in node.users]
            if any(order.get(user, len(order)) > order[at] for user in readers):
                yield (
                    facts,
                    "a view is written and read: eager mode may have another backward op in its place",
                )


def _views_made_outside(ran: Mapping[Node, Ran]) -> Iterator[Any]:
    """Yield autograd's nodes of views that a graph gives beside another value in their memory."""
    outside = [(node, one.value) for node, one in ran.items() if is_outside(node)]
    count = Counter(memory for _, value in outside for memory in set(_memories(value)))
    for node, value in outside:
        given = (
            value
            if isinstance(value, torch.Tensor) and any(one.op == "output" for one in node.users)
            else None
        )
        if given is None or given._base is None or not any(count[memory] > 1 for memory in _memories(given)):
            continue
        made, base = given.grad_fn, given._base.grad_fn
        while made is not None and made is not base:
            yield made
            made = made.next_functions[0][0] if made.next_functions else None


def _changed_views(
    ran: Mapping[Node, Ran], steps: Mapping[Node, Sequence[Step]]
) -> Iterator[tuple[Node, Step, int]]:
    for node, each in steps.items():
        for call, step in zip(ran[node].calls, each, strict=True):
            if any(action.select != () and not action.observer for action in step.plan.inserted):
                yield from ((node, step, memory) for memory in _views(call))


def _views(call: NativeCall) -> set[int]:
    """Memory in which both an input of a call lies and an output that is none of its inputs."""
    native = call.call
    given = set(_memories(native.inputs))
    written = {id(native.inputs[i]) for i in native.targets}
    made = [one for one in tree_flatten(call.outputs)[0] if id(one) not in written]
    return given & set(_memories(made))


def _writes(ran: Mapping[Node, Ran]) -> Iterator[tuple[Any, Node, int]]:
    for node, one in ran.items():
        for call in one.calls:
            for i in call.call.mutable:
                yield from ((call.call.inputs[i], node, memory) for memory in _memories(call.call.inputs[i]))


def _seen_later(
    ran: Mapping[Node, Ran], order: Mapping[Node, int], memory: int, written: Any, at: int
) -> bool:
    """Return whether the memory is read by another value after the write, or by the caller."""
    for node, one in ran.items():
        if one.value is written or memory not in _memories(one.value):
            continue
        users = [order.get(user, len(order)) for user in node.users]
        if node.op in ("placeholder", "get_attr") or any(user > at for user in users):
            return True
    return False


def is_outside(node: Node) -> bool:
    """Return whether a value is an input or an output of the graph."""
    return node.op in ("placeholder", "get_attr") or any(user.op == "output" for user in node.users)


def _memories(values: Any) -> list[int]:
    tensors = [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor)]
    return [one.untyped_storage()._cdata for one in tensors if one.layout is torch.strided]


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
