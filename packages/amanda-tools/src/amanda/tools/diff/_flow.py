"""Which op of a run gave the tensor that another op read, by the numbers in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

from amanda.tools.diff._run import OUTPUT_ROLES, Run
from amanda.tools.dump import Entry, Op

_READ = ("input", "weight")
_NEAR = 1e-5
"""Relative difference of two sums of the same numbers in another order."""
Execution = tuple[int, int]
"""Index of an op, and the number of one of its executions."""


class Flow:
    """Makers and readers of the tensors of a run.

    A dump has no references between tensors.  Tensors are the same if shape, type, extremes, zeros and
    samples are equal; sums are not compared, as strided memory is summed in another order.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs: dict[Hashable, list[Entry]] = {}
        self._reads: dict[Hashable, int] = {}
        for entry in sorted(run.entries, key=lambda one: one.order):
            if entry.role in OUTPUT_ROLES:
                self._outputs.setdefault(key_of(entry), []).append(entry)
            elif entry.role in _READ and not reads_shape(run.ops[entry.op]):
                self._reads[key_of(entry)] = entry.order

    def maker(self, read: Entry) -> Entry | None:
        """Return the last tensor with these numbers that an op gave before; None for one from elsewhere."""
        outputs = self._outputs.get(key_of(read), [])
        before = bisect_left(outputs, read.order, key=lambda one: one.order)
        return outputs[before - 1] if before else None

    def is_read(self, output: Entry) -> bool:
        """Return True if a later op read what an op gave."""
        return self._reads.get(key_of(output), -1) > output.order

    def overwriting(self, read: Entry, after: int) -> Entry | None:
        """Return what the last op gave that overwrote a tensor before it was read, maybe through a view.

        after: order of the op that had given the tensor.
        """
        exact = self.maker(read)
        if exact is not None:
            return exact if self._run.ops[exact.op].in_place and exact.order > after else None
        writes = [
            entry for entries in self._outputs.values() for entry in entries
            if after < entry.order < read.order
            and self._run.ops[entry.op].in_place and _is_rearranged(entry, read)
        ]  # fmt: skip
        return max(writes, key=lambda one: one.order, default=None)


def reads_shape(op: Op) -> bool:
    """Return True for an op that reads the shape of a tensor alone, as `ones_like` of a loss does."""
    return op.type.endswith("_like")


def key_of(entry: Entry) -> Hashable:
    """Return what is equal for tensors with the same numbers in the same shape."""
    summary = entry.summary
    exact = summary.statistics
    sample = tuple(None if one != one else one for one in summary.sample)
    return entry.shape, entry.dtype, exact.count, exact.nan, exact.zeros, exact.least, exact.most, sample


def _is_rearranged(one: Entry, other: Entry) -> bool:
    """Return True for two tensors with the same numbers, in any shape."""
    first, second = one.summary.statistics, other.summary.statistics
    exact = ("count", "nan", "inf", "negative_inf", "zeros", "least", "most")
    if any(getattr(first, name) != getattr(second, name) for name in exact):
        return False
    return abs(first.l2 - second.l2) <= _NEAR * max(first.l2, second.l2)
