"""Causes of a difference: which op gave a tensor, and which op of it parts the runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amanda.tools.diff._errors import Pair
from amanda.tools.diff._run import OUTPUT_ROLES, Run
from amanda.tools.dump import Entry, Op

if TYPE_CHECKING:
    from amanda.tools.diff._matching import Match

_READ = ("input", "weight")
_NEAR = 1e-5
"""Relative difference of two sums of the same numbers in another order."""
Execution = tuple[int, int]
"""Index of an op, and the number of one of its executions."""


class DataFlow:
    """Makers and readers of the tensors of a run.

    A dump has no references between tensors.  Tensors are the same if shape, type, extremes, zeros and
    samples are equal; sums are not compared, as strided memory is summed in another order.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs: dict[Hashable, list[Entry]] = {}
        self._reads: dict[Hashable, int] = {}
        for entry in sorted(run.entries, key=lambda entry: entry.order):
            if entry.role in OUTPUT_ROLES:
                self._outputs.setdefault(content_key(entry), []).append(entry)
            elif entry.role in _READ and not reads_shape(run.ops[entry.op]):
                self._reads[content_key(entry)] = entry.order

    def maker(self, read: Entry) -> Entry | None:
        """Return the last tensor with these numbers that an op gave before; None for one from elsewhere."""
        outputs = self._outputs.get(content_key(read), [])
        before = bisect_left(outputs, read.order, key=lambda entry: entry.order)
        return outputs[before - 1] if before else None

    def is_read(self, output: Entry) -> bool:
        """Return True if a later op read an output."""
        return self._reads.get(content_key(output), -1) > output.order

    def overwriting(self, read: Entry, after: int) -> Entry | None:
        """Return the output of the last op that overwrote a tensor, maybe through a view, before it was read.

        after: order of the op that produced the tensor.
        """
        exact = self.maker(read)
        if exact is not None:
            return exact if self._run.ops[exact.op].in_place and exact.order > after else None
        writes = [
            entry for entries in self._outputs.values() for entry in entries
            if after < entry.order < read.order
            and self._run.ops[entry.op].in_place and _is_rearranged(entry, read)
        ]  # fmt: skip
        return max(writes, key=lambda entry: entry.order, default=None)


def reads_shape(op: Op) -> bool:
    """Return True for an op that reads the shape of a tensor alone, as `ones_like` of a loss does."""
    return op.type.endswith("_like")


def content_key(entry: Entry) -> Hashable:
    """Return a key that is equal for tensors of one shape with the same numbers."""
    summary = entry.summary
    exact = summary.statistics
    sample = tuple(None if number != number else number for number in summary.sample)
    return entry.shape, entry.dtype, exact.count, exact.nan, exact.zeros, exact.least, exact.most, sample


def _is_rearranged(entry: Entry, other_entry: Entry) -> bool:
    """Return True for two tensors with the same numbers, in any shape."""
    first, second = entry.summary.statistics, other_entry.summary.statistics
    exact = ("count", "nan", "inf", "negative_inf", "zeros", "least", "most")
    if any(getattr(first, name) != getattr(second, name) for name in exact):
        return False
    return abs(first.l2 - second.l2) <= _NEAR * max(first.l2, second.l2)


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


class Partners:
    """Executions of ops of both runs that were compared with each other."""

    def __init__(self, matches: Sequence[Match]) -> None:
        self._partners: tuple[dict[Execution, list[Execution]], dict[Execution, list[Execution]]] = ({}, {})
        for match in matches:
            for side in (0, 1):
                for execution in match.executions[side]:
                    self._partners[side].setdefault(execution, []).extend(match.executions[1 - side])

    def of(self, entry: Entry, side: int) -> list[Execution]:
        """Return the executions that the op of a tensor of run a (side 0) or run b was compared with."""
        return self._partners[side].get((entry.op, entry.execution), [])


def find_cause(
    runs: tuple[Run, Run],
    flows: tuple[DataFlow, DataFlow],
    partners: Partners,
    read: Sequence[tuple[Pair, float]],
) -> Cause | None:
    """Return the op that causes the different inputs of an op; None if that op reads another tensor.

    read: tensors that the op reads and that differ, with relative errors.
    """
    for pair, error in read:
        is_derived = any(run.is_derived(entry) for run, entry in zip(runs, pair, strict=True))
        # of a cast in one run, the op that reads it is named: it has two element types
        if is_derived or (pair[0].shape, pair[0].dtype) != (pair[1].shape, pair[1].dtype):
            continue
        makers = [flow.maker(entry) for flow, entry in zip(flows, pair, strict=True)]
        reader = [run.ops[entry.op] for run, entry in zip(runs, pair, strict=True)]
        cause = _unmatched_cause(makers, partners, reader, error) or _overwriting_cause(
            runs, flows, partners, pair, makers, reader, error
        )
        if cause is not None:
            return cause
    return None


def _unmatched_cause(
    makers: Sequence[Entry | None], partners: Partners, reader: Sequence[Op], error: float
) -> Cause | None:
    """Return the ops that produced a tensor if one of them, or both, have no counterpart."""
    maker_a, maker_b = makers
    lacks = [maker is not None and not partners.of(maker, side) for side, maker in enumerate(makers)]
    if all(lacks):
        return Cause(maker_a, maker_b, error, "")
    if lacks[0]:
        return Cause(maker_a, None, error, f"an op of a alone, whose result {op_place(reader[0])} reads")
    if lacks[1]:
        return Cause(None, maker_b, error, f"an op of b alone, whose result {op_place(reader[1])} reads")
    return None


def find_backward_cause(
    runs: tuple[Run, Run], partners: Partners, executions: Sequence[Execution], error: float
) -> Cause | None:
    """Return backward ops without a counterpart that ran just before an op of the backward pass.

    A dump does not have the gradients that backward ops read.  executions: of the op in both runs.
    """
    before = []
    for run, execution in zip(runs, executions, strict=True):
        order = run.results(execution[0])[execution[1]][0].order
        earlier = [
            entry for index in run.indices("backward") for entry in run.by_op[index] if entry.order < order
        ]
        before.append(max(earlier, key=lambda entry: entry.order, default=None))
    reader = [run.ops[index] for run, (index, _) in zip(runs, executions, strict=True)]
    return _unmatched_cause(before, partners, reader, error)


def _overwriting_cause(
    runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], partners: Partners, pair: Pair,
    makers: Sequence[Entry | None], reader: Sequence[Op], error: float,
) -> Cause | None:  # fmt: skip
    """Return the op in place that wrote into a tensor, in one run, before another op read the tensor."""
    for side in (1, 0):
        maker = makers[1 - side]
        if maker is None:
            continue
        twins = set(partners.of(maker, 1 - side))
        writer = makers[side]
        if not twins or (writer is not None and (writer.op, writer.execution) in twins):
            continue
        orders = [
            entry.order
            for op, execution in twins
            for entry in runs[side].by_op[op]
            if entry.execution == execution
        ]
        overwriting = flows[side].overwriting(pair[side], max(orders))
        if overwriting is not None:
            ends: list[Entry | None] = [None, None]
            ends[side] = overwriting
            reason = f"in place in {'ab'[side]}, it overwrites what {op_place(reader[side])} reads later"
            return Cause(ends[0], ends[1], error, reason)
    return None


def op_place(op: Op) -> str:
    """Return type, module and line of an op."""
    return ", ".join(filter(None, (" in ".join(filter(None, (op.type, op.module))), op.source)))
