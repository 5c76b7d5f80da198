"""The op that causes a difference at a later op: one without a counterpart, or one that wrote in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda.tools.diff._errors import Pair
from amanda.tools.diff._matching import Partners
from amanda.tools.diff._run import DataFlow, Execution, Run
from amanda.tools.dump import Entry, Op
from amanda.tools.kit import place_text


@dataclass(frozen=True)
class Cause:
    """An op that causes a later op to read different values.

    entry_a, entry_b: outputs of the op in a and in b; None for a run that lacks the op.  error: relative
    error of the tensor that is read.  reason: in words.
    """

    entry_a: Entry | None
    entry_b: Entry | None
    error: float
    reason: str


def find_cause(
    runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], partners: Partners,
    read: Sequence[tuple[Pair, float]],
) -> Cause | None:  # fmt: skip
    """Return the op that causes the different inputs of an op; None if that op reads another tensor.

    read: tensors that the op reads and that differ, with relative errors.
    """
    for pair, error in read:
        is_derived = any(run.is_derived(entry) for run, entry in zip(runs, pair, strict=True))
        # of a cast in one run, the op that reads it is named: it has two element types
        if is_derived or (pair[0].shape, pair[0].dtype) != (pair[1].shape, pair[1].dtype):
            continue
        # A dump has no references between tensors: the op that made these numbers last made the tensor.
        producers = [flow.producer(entry) for flow, entry in zip(flows, pair, strict=True)]
        reader = [run.ops[entry.op] for run, entry in zip(runs, pair, strict=True)]
        cause = _unmatched_cause(producers, partners, reader, error) or _overwriting_cause(
            runs, flows, partners, pair, producers, reader, error
        )
        if cause is not None:
            return cause
    return None


def _unmatched_cause(
    producers: Sequence[Entry | None], partners: Partners, reader: Sequence[Op], error: float
) -> Cause | None:
    """Return the ops that produced a tensor if one of them, or both, have no counterpart."""
    producer_a, producer_b = producers
    are_unmatched = [
        producer is not None and (producer.op, producer.execution) not in partners[side]
        for side, producer in enumerate(producers)
    ]
    if all(are_unmatched):
        return Cause(producer_a, producer_b, error, "")
    if are_unmatched[0]:
        return Cause(producer_a, None, error, f"an op of a alone, whose result {_op_place(reader[0])} reads")
    if are_unmatched[1]:
        return Cause(None, producer_b, error, f"an op of b alone, whose result {_op_place(reader[1])} reads")
    return None


def find_backward_cause(
    runs: tuple[Run, Run], partners: Partners, executions: Sequence[Execution], error: float
) -> Cause | None:
    """Return backward ops without a counterpart that ran just before an op of the backward pass.

    A dump does not have the gradients that backward ops read.  executions: of the op in both runs.
    """
    previous_outputs = []
    for run, execution in zip(runs, executions, strict=True):
        order = run.results(execution[0])[execution[1]][0].order
        earlier = [
            entry for index in run.indices("backward") for entry in run.by_op[index] if entry.order < order
        ]
        previous_outputs.append(max(earlier, key=lambda entry: entry.order, default=None))
    reader = [run.ops[index] for run, (index, _) in zip(runs, executions, strict=True)]
    return _unmatched_cause(previous_outputs, partners, reader, error)


def _overwriting_cause(
    runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], partners: Partners, pair: Pair,
    producers: Sequence[Entry | None], reader: Sequence[Op], error: float,
) -> Cause | None:  # fmt: skip
    """Return the op in place that wrote into a tensor, in one run, before another op read the tensor."""
    # Run b first: a is the reference, and a write that b alone has is the more likely fault.
    for side in (1, 0):
        producer = producers[1 - side]
        if producer is None:
            continue
        counterparts = set(partners[1 - side].get((producer.op, producer.execution), ()))
        writer = producers[side]
        if not counterparts or (writer is not None and (writer.op, writer.execution) in counterparts):
            continue
        orders = [
            entry.order for op, execution in counterparts for entry in runs[side].by_op[op]
            if entry.execution == execution
        ]  # fmt: skip
        overwriting = flows[side].last_overwrite(pair[side], max(orders))
        if overwriting is not None:
            entries: list[Entry | None] = [None, None]
            entries[side] = overwriting
            reason = f"in place in {'ab'[side]}, it overwrites what {_op_place(reader[side])} reads later"
            return Cause(entries[0], entries[1], error, reason)
    return None


def _op_place(op: Op) -> str:
    return place_text(op.type, op.module, source=op.source)
