"""The op that causes a difference at a later op: one without a counterpart, or one that wrote in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from amanda.tools.diff._errors import TOLERANCES, Pair, array_distance, summary_distance
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
    differing_reads: Sequence[tuple[Pair, float, float]],
) -> Cause | None:  # fmt: skip
    """Find the op that causes the different inputs of an op, by the first of these that leads to one.

    An op without a counterpart that made the input, or else an op in place that wrote into it; else None.
    differing_reads: pairs, with errors and bounds; joined tensors, and pairs of two shapes, are skipped.
    """
    for read_pair, error, bound in differing_reads:
        is_derived = any(run.is_derived(entry) for run, entry in zip(runs, read_pair, strict=True))
        if is_derived or read_pair[0].shape != read_pair[1].shape:
            continue
        reading_ops = [run.ops[entry.op] for run, entry in zip(runs, read_pair, strict=True)]
        dtypes = {entry.dtype for entry in read_pair}
        sides = zip(runs, flows, partners, read_pair, strict=True)
        entry_a, entry_b = (_before_unmatched_ops(*side, bound, dtypes) for side in sides)
        # A dump has no references between tensors: the op that made these numbers last made the tensor.
        producers = [flow.producer(entry) for flow, entry in zip(flows, (entry_a, entry_b), strict=True)]
        cause = _unmatched_cause(producers, partners, reading_ops, error) or _overwriting_cause(
            runs, flows, partners, (entry_a, entry_b), producers, reading_ops, error
        )
        if cause is not None:
            return cause
    return None


def _before_unmatched_ops(
    run: Run, flow: DataFlow, matched: Collection[Execution], entry: Entry, bound: float, dtypes: set[str]
) -> Entry:
    """Return a tensor as it was before ops without a counterpart that changed it by no more than a bound."""
    # dtypes: element types of the tensor in both runs.  Of a cast from one to the other, the op that reads
    # its result is named: it has two element types.
    cast_bound = max(bound, *(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)) if len(dtypes) > 1 else bound
    while (output := flow.producer(entry)) and (output.op, output.execution) not in matched:
        entries = (e for e in run.tensors_read(output.op, output.execution) if e.shape == output.shape)
        bounds = ((e, cast_bound if {e.dtype, output.dtype} == dtypes else bound) for e in entries)
        unchanged_entry = next((e for e, bound in bounds if _change(run, e, output) <= bound), None)
        if unchanged_entry is None:
            break
        entry = unchanged_entry
    return entry


def _change(run: Run, entry: Entry, output: Entry) -> float:
    """Return the relative error of an op's output from a tensor that the op read, element by element."""
    # Not `distance`: a transposed tensor may be the same to it, in another layout.
    before, after = run.array(entry), run.array(output)
    if before is None or after is None:
        return summary_distance(entry, output).relative
    return array_distance(before, after).relative


def _unmatched_cause(
    producers: Sequence[Entry | None], partners: Partners, reading_ops: Sequence[Op], error: float
) -> Cause | None:
    """Return the ops of both runs that produced a tensor, if one or both have no counterpart; else None."""
    # producers, reading_ops: in run a and in run b.
    producer_a, producer_b = producers
    keys = [producer and (producer.op, producer.execution) for producer in producers]
    are_unmatched = [key is not None and key not in partners[side] for side, key in enumerate(keys)]
    if all(are_unmatched):
        return Cause(producer_a, producer_b, error, reason="")
    reader_a, reader_b = map(_op_place, reading_ops)
    if are_unmatched[0]:
        return Cause(producer_a, None, error, f"an op of a alone, whose result {reader_a} reads")
    if are_unmatched[1]:
        return Cause(None, producer_b, error, f"an op of b alone, whose result {reader_b} reads")
    return None


def find_backward_cause(
    runs: tuple[Run, Run], partners: Partners, executions: Sequence[Execution], error: float
) -> Cause | None:
    """Return backward ops without a counterpart that ran just before a backward op; None if they have one.

    A dump does not have the gradients that backward ops read.  executions: of the op in both runs.
    """
    outputs_just_before = []
    for run, (op_index, execution) in zip(runs, executions, strict=True):
        start = run.outputs_by_execution(op_index)[execution][0].order
        entries = (entry for index in run.op_indices("backward") for entry in run.entries_by_op[index])
        outputs_before = [entry for entry in entries if entry.order < start]
        outputs_just_before.append(max(outputs_before, key=lambda entry: entry.order, default=None))
    reading_ops = [run.ops[index] for run, (index, _) in zip(runs, executions, strict=True)]
    return _unmatched_cause(outputs_just_before, partners, reading_ops, error)


def _overwriting_cause(
    runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], partners: Partners, pair: Pair,
    producers: Sequence[Entry | None], reading_ops: Sequence[Op], error: float,
) -> Cause | None:  # fmt: skip
    """Return the op in place that wrote into a tensor, in one run, before another op read the tensor."""
    # pair: the tensor, as the two `reading_ops` read it.  producers: what its makers gave, if known.
    # Run b first: a is the reference, and a write that b alone has is the more likely fault.
    for run_index in (1, 0):
        other_producer = producers[1 - run_index]
        if other_producer is None:
            continue
        # Where the maker's counterpart made the tensor in this run too, nothing overwrote it.
        makers = set(partners[1 - run_index].get((other_producer.op, other_producer.execution), ()))
        producer = producers[run_index]
        if not makers or (producer is not None and (producer.op, producer.execution) in makers):
            continue
        orders_of_making = [
            entry.order for op, execution in makers for entry in runs[run_index].entries_by_op[op]
            if entry.execution == execution
        ]  # fmt: skip
        overwrite = flows[run_index].last_overwrite(pair[run_index], after=max(orders_of_making))
        if overwrite is not None:
            reader = _op_place(reading_ops[run_index])
            reason = f"in place in {'ab'[run_index]}, it overwrites what {reader} reads later"
            entry_a, entry_b = (overwrite, None) if run_index == 0 else (None, overwrite)
            return Cause(entry_a, entry_b, error, reason)
    return None


def _op_place(op: Op) -> str:
    return place_text(op.type, op.module, source=op.source)
