"""Routines at the operations of control flow of version 1, some of whose values are dead.

Routines before and after an Enter or NextIteration are all ahead of it, outside of the frame that it enters.
At a Switch or Merge each tensor has its own node with routines: a node that reads a dead tensor does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._slots import RoutineNode
from ._values import dtype_enum, is_plain, op_side

if TYPE_CHECKING:
    import tensorflow as tf
    from amanda.backend import Action, OpFacts, Side
    from amanda.plan import Actions, Plan

    from ._rewrite import BodyRewriter

FRAME_OPS = ("Enter", "RefEnter", "NextIteration", "RefNextIteration")
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")
MERGES = ("Merge", "RefMerge")
CONTROL_FLOW_OPS = (*FRAME_OPS, *SWITCHES, *MERGES)


def behind_control_flow(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Return the operations of control flow and all that depend on one: they may not run.

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
    entries = {i: tensor.op for i, tensor in enumerate(merge.inputs) if tensor.op.type in FRAME_OPS[:2]}
    return {i: op for i, op in entries.items() if not op.get_attr("is_constant")}


def insert_at_control_flow(
    rewriter: BodyRewriter,
    op: tf.Operation,
    plan: Plan | Actions,
    inputs: Side,
    outputs: Side,
    facts: OpFacts,
) -> None:
    """Put routines at an operation of control flow; report a replacement, which is not done."""
    report = rewriter.rewriting.report
    if plan.replace is not None:
        report(f"the replacement of {op.name}", f"{op.type} is control flow, and stays")
    if op.type in FRAME_OPS:
        rewriter.insert_all([*plan.before, *plan.after], inputs, facts)
    elif op.type in MERGES:
        read_once = [i for i, tensor in enumerate(inputs.symbols) if tensor.op.type not in FRAME_OPS[2:]]
        entering = {
            i: inputs.symbols[i].op for i in read_once if inputs.symbols[i].op in loop_entries(op).values()
        }
        refs = [
            rewriter.read_at(entering[i], 0) if i in entering else ref for i, ref in enumerate(inputs.refs)
        ]
        for i, ref in _insert_by_tensor(rewriter, op, plan.before, inputs, facts, refs, read_once).items():
            # If the Merge read the node with routines, it would run even where its loop does not. So the node
            # is put ahead of the Enter.
            if i in entering:
                rewriter.redirect(entering[i], 0, ref)
            else:
                inputs.refs[i] = ref
        selected = inputs.flat(inputs.selected([action.select for action in plan.before]))
        if any(i not in read_once for i in selected):
            report(f"routines before {op.name}", "they get what enters the loop, not what comes round again")
        rewriter.insert_all(plan.after, outputs, facts)
    else:
        rewriter.insert_all(plan.before, inputs, facts)
        positions = range(len(outputs.refs))
        for i, ref in _insert_by_tensor(
            rewriter, op, plan.after, outputs, facts, outputs.refs, positions
        ).items():
            outputs.refs[i] = ref


def _insert_by_tensor(
    rewriter: BodyRewriter, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts,
    refs: Sequence[str], positions: Iterable[int],
) -> dict[int, str]:  # fmt: skip
    """Add a node for each tensor at these flat positions; return the refs of changed tensors.

    A routine gets None for the other values, and one tensor of a list.  refs: where the tensors are read now.
    """
    insertions, changed_refs = rewriter.insertions, dict[int, str]()
    selected = side.selected([action.select for action in actions]) if actions else ()
    values = {i: value for value in selected for i in side.flat([value]) if i in positions}
    for i, value in values.items():
        # Observers of the same rounds and branches share a node, which costs one call of Python instead of
        # many.
        shares = all(action.observer for action in actions) and insertions.shares_node(op, [side.symbols[i]])
        returned = [value] if is_plain(side.symbols[i]) and not shares else []
        node = RoutineNode(actions, facts, side.count, [value], [None], returned)
        node.depth = rewriter.rewriting.depths.get(facts.op_id, 0)
        node.dtypes = [side.symbols[i].dtype.base_dtype for _ in returned]
        kind = dtype_enum(side.symbols[i])
        if shares:
            insertions.observe(op, node, [refs[i]], [side.symbols[i]], op_side(side).ahead)
            continue
        name = insertions.add(op, node, [refs[i]], [kind], [kind for _ in returned], True, True, ())
        if returned:
            changed_refs[i] = insertions.output_of(name, 0)
    return changed_refs
