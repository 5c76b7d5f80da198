"""Routines at the operations of control flow of version 1, some of whose values are dead.

What lets a value pass (Enter, NextIteration) has both its routines ahead of it, outside of the frame it
enters. Of a Switch or Merge each value has a node of its own, since one that is dead kills what reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._side import Side, enum

if TYPE_CHECKING:
    import tensorflow as tf
    from amanda.backend import Action, BackwardPlan, Combined, OpFacts

    from ._insertions import Insertions

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


def at_flow(
    insertions: Insertions, op: tf.Operation, plan: Combined | BackwardPlan, inputs: Side, outputs: Side,
    facts: OpFacts,
) -> None:  # fmt: skip
    """Insert what the plan of an operation of control flow asks for; it is never replaced."""
    if plan.replace is not None:
        insertions.rewriting.report(f"the replacement of {op.name}", f"{op.type} is control flow, and stays")
    if op.type in PASSING:
        insertions.insert_all(op, [*plan.before, *plan.after], inputs, facts, "before")
    elif op.type in MERGES:
        once = [i for i, tensor in enumerate(inputs.tensors) if tensor.op.type not in PASSING[2:]]
        _each(insertions, op, plan.before, inputs, facts, once)
        selected = inputs.flat(inputs.selected([action.select for action in plan.before]))
        if any(i not in once for i in selected):
            insertions.rewriting.report(
                f"routines before {op.name}", "they get what enters the loop, not what comes round again"
            )
        insertions.insert_all(op, plan.after, outputs, facts, "after")
    else:
        insertions.insert_all(op, plan.before, inputs, facts, "before")
        _each(insertions, op, plan.after, outputs, facts, range(outputs.count))


def _each(
    insertions: Insertions, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts,
    positions: Sequence[int],
) -> None:  # fmt: skip
    """A node for each value; a routine gets None for the others."""
    if not actions:
        return
    selected = side.selected([action.select for action in actions])
    for i in positions:
        if i in selected:
            gives = side.changeable([i])
            inserted = insertions.node(actions, facts, side.count, [i], [None], gives)
            inserted.dtypes = [side.tensors[k].dtype.base_dtype for k in gives]
            types = [enum(side.tensors[k]) for k in gives]
            name = insertions.add(
                op, inserted, [side.refs[i]], [enum(side.tensors[i])], types,
                ahead=True, instead=True, waits=(),
            )  # fmt: skip
            for k in gives:
                side.refs[k] = insertions.output_of(name, 0)
