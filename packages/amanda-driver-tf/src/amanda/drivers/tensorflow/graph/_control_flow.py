"""Routines at Switch, Merge, Enter, ...: control flow of TensorFlow 1, some of whose values are dead.

Routines before and after an Enter or NextIteration are all ahead of it, outside of the frame that it enters.
At a Switch or Merge each tensor has its own node with routines: a node that reads a dead tensor does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._sides import dtype_enum, is_plain, op_side
from ._slots import RoutineNode

if TYPE_CHECKING:
    import tensorflow as tf
    from amanda.backend import Action, OpFacts, Side
    from amanda.plan import Actions, Plan

    from ._rewrite import BodyRewriter

_ENTERS = ("Enter", "RefEnter")
_NEXT_ITERATIONS = ("NextIteration", "RefNextIteration")
FRAME_OPS = (*_ENTERS, *_NEXT_ITERATIONS)
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")
MERGES = ("Merge", "RefMerge")
CONTROL_FLOW_OPS = (*FRAME_OPS, *SWITCHES, *MERGES)


def behind_control_flow(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Return the operations of control flow of version 1 and all that depend on one: they may not run.

    ops: in topological order.
    """
    dependents: set[tf.Operation] = set()
    for op in ops:
        sources = (*(tensor.op for tensor in op.inputs), *op.control_inputs)
        if op.type in CONTROL_FLOW_OPS or not dependents.isdisjoint(sources):
            dependents.add(op)
    return dependents


def loop_entries(merge: tf.Operation) -> dict[int, tf.Operation]:
    """Return the Enter operations among the inputs of a loop's Merge, by position; none for another Merge."""
    entries = {i: tensor.op for i, tensor in enumerate(merge.inputs) if tensor.op.type in _ENTERS}
    return {i: op for i, op in entries.items() if not op.get_attr("is_constant")}


def insert_at_control_flow(
    rewriter: BodyRewriter, op: tf.Operation, plan: Plan | Actions, inputs: Side, outputs: Side,
    facts: OpFacts,
) -> None:  # fmt: skip
    """Put routines at an operation of control flow; report a replacement, which is not done."""
    report = rewriter.rewriting.report
    if plan.replace is not None:
        report(f"the replacement of {op.name}", f"{op.type} is control flow, and stays")
    if op.type in FRAME_OPS:
        rewriter.insert_all([*plan.before, *plan.after], inputs, facts)
    elif op.type in MERGES:  # one input is alive, and so is the output
        _insert_before_merge(rewriter, op, plan.before, inputs, facts)
        rewriter.insert_all(plan.after, outputs, facts)
    else:  # a Switch: one output is alive
        rewriter.insert_all(plan.before, inputs, facts)
        positions = range(len(outputs.refs))
        changed_refs = _insert_by_tensor(rewriter, op, plan.after, outputs, facts, outputs.refs, positions)
        for i, ref in changed_refs.items():
            outputs.refs[i] = ref


def _insert_before_merge(
    rewriter: BodyRewriter, merge: tf.Operation, actions: Sequence[Action], inputs: Side, facts: OpFacts
) -> None:
    """Put routines at the inputs of a Merge, but for values that come round a loop, which are reported."""
    positions = [i for i, tensor in enumerate(inputs.symbols) if tensor.op.type not in _NEXT_ITERATIONS]
    enter_by_position = loop_entries(merge)
    # If the Merge of a loop read the node with routines, it would run even where its loop does not. So the
    # node is put ahead of the Enter.
    refs = [
        rewriter.refs.of_input(enter_by_position[i], 0) if i in enter_by_position else ref
        for i, ref in enumerate(inputs.refs)
    ]
    changed_refs = _insert_by_tensor(rewriter, merge, actions, inputs, facts, refs, positions)
    for i, ref in changed_refs.items():
        if i in enter_by_position:
            rewriter.refs.redirect(enter_by_position[i], 0, ref)
        else:
            inputs.refs[i] = ref
    selected_values = inputs.selected_positions([action.select for action in actions])
    if any(i not in positions for i in inputs.flat_positions(selected_values)):
        rewriter.rewriting.report(
            f"routines before {merge.name}", "they get what enters the loop, not what comes round again"
        )


def _insert_by_tensor(
    rewriter: BodyRewriter, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts,
    refs: Sequence[str], positions: Iterable[int],
) -> dict[int, str]:  # fmt: skip
    """Add a node for each selected tensor at these flat positions; return the refs of changed tensors.

    A routine gets None for the other values, and one tensor of a list.  Observers may share their node with
    those of other operations.  refs: where the tensors are read now.
    """
    insertions, changed_refs = rewriter.insertions, dict[int, str]()
    selected_values = side.selected_positions([action.select for action in actions]) if actions else ()
    are_observers = all(action.observer for action in actions)
    for value_position in selected_values:
        for i in side.flat_positions([value_position]):
            if i not in positions:
                continue
            tensor, dtype = side.symbols[i], dtype_enum(side.symbols[i])
            # Observers of the same rounds and branches share a node, which costs one call of Python instead
            # of many.
            shares_node = are_observers and insertions.can_share_node(op, [tensor])
            is_returned = is_plain(tensor) and not shares_node
            routine_node = RoutineNode(
                actions, facts, side.count, [value_position], [None], [value_position] if is_returned else []
            )
            routine_node.loop_depth = rewriter.rewriting.loop_depth_by_op_id.get(facts.op_id, 0)
            routine_node.dtypes = [tensor.dtype.base_dtype] if is_returned else []
            if shares_node:
                insertions.observe(op, routine_node, [refs[i]], [tensor], op_side(side).ahead)
                continue
            name = insertions.add_slot_call(
                op, routine_node, [refs[i]], [dtype], [dtype] if is_returned else [], ahead=True,
                is_unawaited=True, control_inputs=(),
            )  # fmt: skip
            if is_returned:
                changed_refs[i] = insertions.output_of(name, 0)
    return changed_refs
