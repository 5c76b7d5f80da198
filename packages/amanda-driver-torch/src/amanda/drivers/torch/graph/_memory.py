"""Views in a graph: checks for routines whose values lose the memory that a node's value shares.

Memory is named by the id of its storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


def check_views(node_runs: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]) -> None:
    """Raise SharedMemory if a routine may change a view whose memory is seen later through another value.

    That is memory that a node writes after the view is made, if another value in it is read after the write
    or by the caller, and memory in which several inputs and outputs of the graph lie.
    """
    position_by_node = {node: i for i, node in enumerate(node_runs)}
    # The first changed view in a storage is enough: what is written after it is seen through it.
    first_view_by_memory: dict[int, _ChangedView] = {}
    for node, step, memory in _changed_views(node_runs, steps):
        first_view_by_memory.setdefault(memory, _ChangedView(position_by_node[node], step.facts.source))
    if not first_view_by_memory:
        return
    for written_tensor, writer, memory in _written_tensors(node_runs):
        view, write_position = first_view_by_memory.get(memory), position_by_node[writer]
        if view is None or write_position <= view.position:
            continue
        if _is_read_later(node_runs, position_by_node, memory, written_tensor, write_position):
            raise SharedMemory(f"{_target_name(writer)} writes into", view.source)
    for memory, view in first_view_by_memory.items():
        inputs_and_outputs = [
            node
            for node, node_run in node_runs.items()
            if is_input_or_output(node) and memory in _storage_ids(node_run.value)
        ]
        if len(inputs_and_outputs) > 1:
            raise SharedMemory("the graph is given, or gives, more than one value in", view.source)


class _ChangedView(NamedTuple):
    """A view that a routine may change: position of its node in the graph, and the user's line of the op."""

    position: int
    source: str


def observers_of_written_memory(
    node_runs: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]
) -> Iterator[tuple[int, Action]]:
    """Yield each action beside an op, with the op's id, that gets values in memory that the graph writes."""
    written_storages = {memory for _, _, memory in _written_tensors(node_runs)}
    if not written_storages:
        return
    for node, op_steps in steps.items():
        for call, step in zip(node_runs[node].calls, op_steps, strict=True):
            for action in step.actions.inserted:
                values = call.values if action.type.is_after else call.eager_call.inputs
                if action.select is not None:
                    values = [value for i, value in enumerate(values) if i in action.select]
                if not written_storages.isdisjoint(_storage_ids(values)):
                    yield step.facts.op_id, action


class BackwardOpWithRoutines(NamedTuple):
    """Facts of a backward op with routines; is_called_in_graph: whether the graph calls one of them."""

    facts: OpFacts
    is_called_in_graph: bool


def backward_views_unlike_eager(
    node_runs: Mapping[Node, NodeRun],
    backward_op_by_node_id: Mapping[int, BackwardOpWithRoutines],
    by_aot_autograd: bool,
) -> Iterator[tuple[OpFacts, str]]:
    """Yield facts of backward ops of views that do not run as in eager mode, and the reason.

    backward_op_by_node_id: the backward ops with routines, by the id of autograd's node.
    by_aot_autograd: whether AOTAutograd compiles the graph.
    """
    if not backward_op_by_node_id:
        return
    nodes_made_outside = _nodes_of_views_made_outside(node_runs) if by_aot_autograd else ()
    for grad_node in nodes_made_outside:
        backward_op = backward_op_by_node_id.get(id(grad_node))
        if backward_op is not None and backward_op.is_called_in_graph:
            reason = "AOTAutograd makes the view outside of the graph: its routines are not called"
            yield backward_op.facts, reason
    position_by_node = {node: i for i, node in enumerate(node_runs)}
    for written_tensor, writer, _ in _written_tensors(node_runs):
        backward_op = backward_op_by_node_id.get(id(written_tensor.grad_fn))
        if backward_op is None or written_tensor._base is None:
            continue
        readers = [
            user
            for node, node_run in node_runs.items()
            if node_run.value is written_tensor
            for user in node.users
        ]
        # The output node is not a key of `position_by_node`: it comes after all nodes.
        if any(
            position_by_node.get(user, len(position_by_node)) > position_by_node[writer] for user in readers
        ):
            reason = "a view is written and read: eager mode may have another backward op in its place"
            yield backward_op.facts, reason


def _nodes_of_views_made_outside(node_runs: Mapping[Node, NodeRun]) -> Iterator[Any]:
    """Yield autograd's nodes of views that a graph returns beside another value in their memory.

    AOTAutograd makes such a view after the graph has run, so that both values share memory.
    """
    inputs_and_outputs = [
        (node, node_run.value) for node, node_run in node_runs.items() if is_input_or_output(node)
    ]
    value_counts = Counter(memory for _, value in inputs_and_outputs for memory in set(_storage_ids(value)))
    for node, value in inputs_and_outputs:
        is_output = any(user.op == "output" for user in node.users)
        if not is_output or not isinstance(value, torch.Tensor) or value._base is None:
            continue
        if not any(value_counts[memory] > 1 for memory in _storage_ids(value)):
            continue
        # From the view's node to that of its base, a node for each op by which the view comes from the base.
        grad_node, base_node = value.grad_fn, value._base.grad_fn
        while grad_node is not None and grad_node is not base_node:
            yield grad_node
            grad_node = grad_node.next_functions[0][0] if grad_node.next_functions else None


def _changed_views(
    node_runs: Mapping[Node, NodeRun], steps: Mapping[Node, Sequence[OpStep]]
) -> Iterator[tuple[Node, OpStep, int]]:
    """Yield the nodes that make views which routines may change, with the op's step and the storage."""
    for node, op_steps in steps.items():
        for call, step in zip(node_runs[node].calls, op_steps, strict=True):
            if any(action.select != () and not action.observer for action in step.actions.inserted):
                yield from ((node, step, memory) for memory in _memory_of_new_views(call))


def _memory_of_new_views(call: NativeCall) -> set[int]:
    """Return the storages in which a call has made a view: an input lies there, and an output that is new."""
    eager_call = call.eager_call
    ids_of_written = {id(eager_call.inputs[i]) for i in eager_call.target_positions}
    new_outputs = [output for output in tree_flatten(call.outputs)[0] if id(output) not in ids_of_written]
    return {*_storage_ids(eager_call.inputs)} & {*_storage_ids(new_outputs)}


def _written_tensors(node_runs: Mapping[Node, NodeRun]) -> Iterator[tuple[Any, Node, int]]:
    """Yield each tensor that an op of the graph writes, with the node and the tensor's storage."""
    for node, node_run in node_runs.items():
        for call in node_run.calls:
            written_inputs = [call.eager_call.inputs[i] for i in call.eager_call.written_positions]
            for written_tensor in written_inputs:
                yield from ((written_tensor, node, memory) for memory in _storage_ids(written_tensor))


def _is_read_later(
    node_runs: Mapping[Node, NodeRun], position_by_node: Mapping[Node, int], memory: int, written_tensor: Any,
    write_position: int,
) -> bool:  # fmt: skip
    """Return True if the memory of a written tensor is read through another one after the write.

    Memory of an input counts as read, by the caller.  write_position: of the node that writes.
    """
    for node, node_run in node_runs.items():
        if node_run.value is written_tensor or memory not in _storage_ids(node_run.value):
            continue
        # The output node is not a key of `position_by_node`: it comes after all nodes.
        user_positions = [position_by_node.get(user, len(position_by_node)) for user in node.users]
        is_input = node.op in ("placeholder", "get_attr")  # whose memory the caller reads
        if is_input or any(position > write_position for position in user_positions):
            return True
    return False


def is_input_or_output(node: Node) -> bool:
    """Return True if the value of a node is an input or an output of the graph."""
    return node.op in ("placeholder", "get_attr") or any(user.op == "output" for user in node.users)


def _storage_ids(values: Any) -> list[int]:
    tensors = [tensor for tensor in tree_flatten(values)[0] if isinstance(tensor, torch.Tensor)]
    # Tensors without data have storages too, which views share as in a run.
    return [tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided]


def _target_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
