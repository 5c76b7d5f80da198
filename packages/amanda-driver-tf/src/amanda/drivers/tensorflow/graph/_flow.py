"""Routines at the operations of control flow of version 1, some of whose values are dead.

What lets a value pass (Enter, NextIteration) has both its routines ahead of it, outside of the frame it
enters. Of a Switch or Merge each value has a node of its own, since one that is dead kills what reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._side import at, enum, is_plain
from ._slots import Node

if TYPE_CHECKING:
    import tensorflow as tf
    from amanda.backend import Action, OpFacts, Side
    from amanda.plan import Actions, Plan

    from ._rewrite import Rewriter

PASSING = ("Enter", "RefEnter", "NextIteration", "RefNextIteration")
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")
MERGES = ("Merge", "RefMerge")
FLOW = (*PASSING, *SWITCHES, *MERGES)


def behind_flow(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Of operations in order, those of control flow and those that depend on one: they may be left out."""
    found: set[tf.Operation] = set()
    for op in ops:
        before = (*(tensor.op for tensor in op.inputs), *op.control_inputs)
        if op.type in FLOW or not found.isdisjoint(before):
            found.add(op)
    return found


def enters(merge: tf.Operation) -> dict[int, tf.Operation]:
    """By the position of an input of a loop's Merge, the operation by which a value enters the loop."""
    found = {i: tensor.op for i, tensor in enumerate(merge.inputs) if tensor.op.type in PASSING[:2]}
    return {i: op for i, op in found.items() if not op.get_attr("is_constant")}


def at_flow(
    rewriter: Rewriter, op: tf.Operation, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts
) -> None:
    """Put routines at an operation of control flow, which is never replaced."""
    report = rewriter.rewriting.report
    if plan.replace is not None:
        report(f"the replacement of {op.name}", f"{op.type} is control flow, and stays")
    if op.type in PASSING:
        rewriter.insert_all([*plan.before, *plan.after], inputs, facts)
    elif op.type in MERGES:
        once = [i for i, tensor in enumerate(inputs.symbols) if tensor.op.type not in PASSING[2:]]
        entering = {i: inputs.symbols[i].op for i in once if inputs.symbols[i].op in enters(op).values()}
        refs = [
            rewriter.read_at(entering[i], 0) if i in entering else ref for i, ref in enumerate(inputs.refs)
        ]
        for i, ref in _each(rewriter, op, plan.before, inputs, facts, refs, once).items():
            if i in entering:  # a Merge is left out with its loop only where it reads what enters this itself
                rewriter.redirect(entering[i], 0, ref)
            else:
                inputs.refs[i] = ref
        selected = inputs.flat(inputs.selected([action.select for action in plan.before]))
        if any(i not in once for i in selected):
            report(f"routines before {op.name}", "they get what enters the loop, not what comes round again")
        rewriter.insert_all(plan.after, outputs, facts)
    else:
        rewriter.insert_all(plan.before, inputs, facts)
        every = range(len(outputs.refs))
        for i, ref in _each(rewriter, op, plan.after, outputs, facts, outputs.refs, every).items():
            outputs.refs[i] = ref


def _each(
    rewriter: Rewriter, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts,
    refs: Sequence[str], positions: Iterable[int],
) -> dict[int, str]:  # fmt: skip
    """A node for each tensor at these flat positions; how what it gives is read.

    A routine gets None for the other values; of a list only the one tensor.  refs: how they are read so far.
    """
    insertions, found = rewriter.insertions, dict[int, str]()
    selected = side.selected([action.select for action in actions]) if actions else ()
    values = {i: value for value in selected for i in side.flat([value]) if i in positions}
    for i, value in values.items():
        shares = all(one.observer for one in actions) and insertions.shares(op, [side.symbols[i]])
        gives = [value] if is_plain(side.symbols[i]) and not shares else []
        place = Node(actions, facts, side.count, [value], [None], gives)
        place.depth = rewriter.rewriting.depths.get(facts.op_id, 0)
        place.dtypes = [side.symbols[i].dtype.base_dtype for _ in gives]
        kind = enum(side.symbols[i])
        if shares:
            insertions.observe(op, place, [refs[i]], [side.symbols[i]], at(side).ahead)
            continue
        name = insertions.add(op, place, [refs[i]], [kind], [kind for _ in gives], True, True, ())
        if gives:
            found[i] = insertions.output_of(name, 0)
    return found
