"""Views in a graph: checks for routines whose values lose the memory that a node's value shares."""

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

    from ._instrumented import OpStep
    from ._node_runs import NativeCall, NodeRun


class SharedMemory(AmandaError):
    """Error for a graph that writes, or returns, memory of which a routine changes a view.

    In eager mode writes reach the view and the routine's value; the graph has to run op by op.
    where: the user's line.
    """

    def __init__(self, subject: str, where: str) -> None:
        super().__init__(f"a routine changes a view, and {subject} the memory that it is a view of")
        self.where = where


def check_views(ran: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]) -> None:
    """Raise SharedMemory if a routine may change a view whose memory is seen later through another value.

    That is memory that a node writes after the view is made, if another value in it is read after the write
    or by the caller, and memory in which several inputs and outputs of the graph lie.
    """
    viewed = list(_changed_views(ran, steps))
    if not viewed:
        return
    # Per storage the first changed view is enough: what is written after it is seen through it.
    order = {node: i for i, node in enumerate(ran)}
    first_views: dict[int, tuple[int, OpStep]] = {}
    for node, step, memory in viewed:
        first_views.setdefault(memory, (order[node], step))
    for written, writer, memory in _written_tensors(ran):
        first_view, changed = first_views.get(memory, (len(order), None))
        if (
            changed is not None
            and first_view < order[writer]
            and _is_read_later(ran, order, memory, written, order[writer])
        ):
            raise SharedMemory(f"{_target_name(writer)} writes into", changed.facts.source)
    for memory, (_, step) in first_views.items():
        outside = [
            node
            for node, ran_node in ran.items()
            if memory in _storage_ids(ran_node.value) and is_outside(node)
        ]
        if len(outside) > 1:
            raise SharedMemory("the graph is given, or gives, more than one value in", step.facts.source)


def seen_and_written(
    ran: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]
) -> Iterator[tuple[int, Action]]:
    """Yield ids of ops, and observers there, whose values lie in memory into which the graph writes."""
    written = {memory for _, _, memory in _written_tensors(ran)}
    for node, op_steps in steps.items() if written else ():
        for call, step in zip(ran[node].calls, op_steps, strict=True):
            for action in step.plan.inserted:
                values = call.values if action.type.is_after else call.call.inputs
                if action.select is not None:
                    values = [value for i, value in enumerate(values) if i in action.select]
                if not written.isdisjoint(_storage_ids(values)):
                    yield step.facts.op_id, action


def backward_views_unlike_eager(
    ran: Mapping[Node, NodeRun], sites: Mapping[int, tuple[OpFacts, bool]], by_autograd: bool
) -> Iterator[tuple[OpFacts, str]]:
    """Yield facts of backward ops of views that do not run as in eager mode, and the reason.

    sites: by the id of autograd's node, facts of a backward op with routines, and whether the graph calls
    one of the routines.  by_autograd: whether AOTAutograd compiles the graph.
    """
    for grad_node in _views_made_outside(ran) if by_autograd and sites else ():
        facts, calls = sites.get(id(grad_node), (None, False))
        if facts is not None and calls:
            yield facts, "AOTAutograd makes the view outside of the graph: its routines are not called"
    order = {node: i for i, node in enumerate(ran)}
    for written, writer, _ in _written_tensors(ran) if sites else ():
        facts, _ = sites.get(id(written.grad_fn), (None, False))
        if facts is not None and written._base is not None:
            readers = [
                user for node, ran_node in ran.items() if ran_node.value is written for user in node.users
            ]
            if any(order.get(user, len(order)) > order[writer] for user in readers):
                yield (
                    facts,
                    "a view is written and read: eager mode may have another backward op in its place",
                )


def _views_made_outside(ran: Mapping[Node, NodeRun]) -> Iterator[Any]:
    """Yield autograd's nodes of views that a graph gives beside another value in their memory."""
    outside = [(node, item.value) for node, item in ran.items() if is_outside(node)]
    count = Counter(memory for _, value in outside for memory in set(_storage_ids(value)))
    for node, value in outside:
        view = (
            value
            if isinstance(value, torch.Tensor) and any(item.op == "output" for item in node.users)
            else None
        )
        if view is None or view._base is None or not any(count[memory] > 1 for memory in _storage_ids(view)):
            continue
        # A node for each op by which the view comes from its base.
        grad_node, base = view.grad_fn, view._base.grad_fn
        while grad_node is not None and grad_node is not base:
            yield grad_node
            grad_node = grad_node.next_functions[0][0] if grad_node.next_functions else None


def _changed_views(
    ran: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]
) -> Iterator[tuple[Node, OpStep, int]]:
    """Yield the nodes that make views which routines may change, with the op's step and the storage."""
    for node, op_steps in steps.items():
        for call, step in zip(ran[node].calls, op_steps, strict=True):
            if any(action.select != () and not action.observer for action in step.plan.inserted):
                yield from ((node, step, memory) for memory in _viewed_memory(call))


def _viewed_memory(call: NativeCall) -> set[int]:
    """Return the storages in which both an input of a call lies and an output that is none of its inputs."""
    native = call.call
    input_memory = set(_storage_ids(native.inputs))
    written = {id(native.inputs[i]) for i in native.targets}
    outputs = [output for output in tree_flatten(call.outputs)[0] if id(output) not in written]
    return input_memory & set(_storage_ids(outputs))


def _written_tensors(ran: Mapping[Node, NodeRun]) -> Iterator[tuple[Any, Node, int]]:
    """Yield each tensor that an op of the graph writes, with the node and the tensor's storage."""
    for node, ran_node in ran.items():
        for call in ran_node.calls:
            for i in call.call.mutable:
                yield from (
                    (call.call.inputs[i], node, memory) for memory in _storage_ids(call.call.inputs[i])
                )


def _is_read_later(
    ran: Mapping[Node, NodeRun], order: Mapping[Node, int], memory: int, written: Any, write_index: int
) -> bool:
    """Return whether the memory is read by another value after the write, or by the caller."""
    for node, ran_node in ran.items():
        if ran_node.value is written or memory not in _storage_ids(ran_node.value):
            continue
        # The output node is no key of `order`: it comes after all nodes.
        users = [order.get(user, len(order)) for user in node.users]
        if node.op in ("placeholder", "get_attr") or any(user > write_index for user in users):
            return True
    return False


def is_outside(node: Node) -> bool:
    """Return whether a value is an input or an output of the graph."""
    return node.op in ("placeholder", "get_attr") or any(user.op == "output" for user in node.users)


def _storage_ids(values: Any) -> list[int]:
    tensors = [tensor for tensor in tree_flatten(values)[0] if isinstance(tensor, torch.Tensor)]
    # Tensors without data have storages too, which views share as in a run.
    return [tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided]


def _target_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
