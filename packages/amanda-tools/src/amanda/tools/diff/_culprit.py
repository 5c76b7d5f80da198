"""The op that parts two runs, where the first op that differs only reads what another op has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda.tools.diff._compare import Pair
from amanda.tools.diff._executions import Match
from amanda.tools.diff._flow import Execution, Flow
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry, Op


@dataclass(frozen=True)
class Culprit:
    """An op that causes a later op to read different values.

    one, other: tensors that ops of a and of b gave; None for a run that lacks the op.  error: relative error
    of what is read.  reason: in words.
    """

    one: Entry | None
    other: Entry | None
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
        """Return what the op of a tensor of run a (side 0) or run b was compared with."""
        return self._partners[side].get((entry.op, entry.execution), [])


def culprit(
    runs: tuple[Run, Run], flows: tuple[Flow, Flow], partners: Partners, read: Sequence[tuple[Pair, float]]
) -> Culprit | None:
    """Return the op that is behind what an op reads; None where the op itself reads another tensor.

    read: tensors that the op reads and that differ, with relative errors.
    """
    for pair, error in read:
        is_derived = any(run.is_derived(entry) for run, entry in zip(runs, pair, strict=True))
        # of a cast in one run, the op that reads it is named: it has two element types
        if is_derived or (pair[0].shape, pair[0].dtype) != (pair[1].shape, pair[1].dtype):
            continue
        makers = [flow.maker(entry) for flow, entry in zip(flows, pair, strict=True)]
        reader = [run.ops[entry.op] for run, entry in zip(runs, pair, strict=True)]
        cause = _alone(makers, partners, reader, error) or _overwritten(
            runs, flows, partners, pair, makers, reader, error
        )
        if cause is not None:
            return cause
    return None


def _alone(
    makers: Sequence[Entry | None], partners: Partners, reader: Sequence[Op], error: float
) -> Culprit | None:
    """Return the ops that made a tensor, of which one run or both have no counterpart."""
    one, other = makers
    lacks = [maker is not None and not partners.of(maker, side) for side, maker in enumerate(makers)]
    if all(lacks):
        return Culprit(one, other, error, "")
    if lacks[0]:
        return Culprit(one, None, error, f"an op of a alone, whose result {place(reader[0])} reads")
    if lacks[1]:
        return Culprit(None, other, error, f"an op of b alone, whose result {place(reader[1])} reads")
    return None


def behind(
    runs: tuple[Run, Run], partners: Partners, executions: Sequence[Execution], error: float
) -> Culprit | None:
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
    return _alone(before, partners, reader, error)


def _overwritten(
    runs: tuple[Run, Run], flows: tuple[Flow, Flow], partners: Partners, pair: Pair,
    makers: Sequence[Entry | None], reader: Sequence[Op], error: float,
) -> Culprit | None:  # fmt: skip
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
            reason = f"in place in {'ab'[side]}, it overwrites what {place(reader[side])} reads later"
            return Culprit(ends[0], ends[1], error, reason)
    return None


def place(op: Op) -> str:
    """Return type, module and line of an op."""
    return ", ".join(filter(None, (" in ".join(filter(None, (op.type, op.module))), op.source)))
