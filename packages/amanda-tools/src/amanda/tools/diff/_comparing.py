"""Comparing the tensors of two runs: op by op, or, across frameworks, module by module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import get_args

from amanda.errors import AmandaError
from amanda.tools.diff._align import is_compute, same_ops, within
from amanda.tools.diff._compare import Distance, Pair, distance, matched, scale, tolerance
from amanda.tools.diff._comparison import Comparison
from amanda.tools.diff._heads import heads
from amanda.tools.diff._pieces import joined
from amanda.tools.diff._run import Run, visits
from amanda.tools.diff._told import reading
from amanda.tools.dump import Entry, Op
from amanda.tools.select import Phase

Found = tuple[Pair, Comparison]
Expected = Mapping[tuple[int, int], float]
"""Relative error that is expected of an execution of an op of run a, by the op's index and the execution."""
MARGIN = 10.0
"""How many times the expected error agrees: another order of summation may round a few times as much."""
Read = tuple[str, float, bool]
"""Role of what an op read, its relative error, and whether it agrees."""


class Comparing:
    """Two runs, and the relative error up to which their tensors agree.

    rtol: the same for all; None for `MARGIN` times what is expected, and where that is not known for one by
    element type.  pairs: the tensors of each comparison that `in_order` returned.
    """

    def __init__(self, run: Run, other: Run, rtol: float | None, expected: Expected | None = None) -> None:
        self._runs = (run, other)
        self._rtol, self._expected = rtol, {} if expected is None else expected
        self.pairs: list[Pair] = []
        self.pieces = self.unlike = self.left = 0
        """Ops that one run executed once and the other in pieces, which make up the whole, or do not;
        executions of ops that the other run does not have."""
        self.shaped: list[str] = []
        """Modules that end in as many numbers, in an order that is not known."""
        self.uneven: list[str] = []
        """Modules that one run called more often than the other: their last outputs were compared."""

    def in_order(self, compared: Iterable[Found]) -> list[Comparison]:
        """Return comparisons as run a executed; where a graph leaves that open, as its ops were met."""
        ordered = self._runs[0].ordered

        def place(one: Found) -> tuple[int, int]:
            entry = one[0][0]
            return (entry.order if ordered else entry.execution), entry.op

        found: list[Comparison] = []
        limit = 0.0
        for pair, comparison in sorted(compared, key=place):
            self.pairs.append(pair)
            found.append(replace(comparison, tolerance=max(limit, comparison.by_type)))
            if comparison.relative and not self._expected:  # precision that was lost is lost for what follows
                limit = max(limit, comparison.by_type)
        if not found:
            raise AmandaError("the two runs have no op in common; give a mapping of module names")
        return found

    def ops(self, renamed: Mapping[str, str]) -> tuple[list[Found], tuple[list[Op], list[Op]]]:
        """Compare ops one by one; return also the ops of each run that the other does not have."""
        made: list[list[Pair]] = []
        alone: tuple[list[Op], list[Op]] = ([], [])
        for phase in get_args(Phase):
            same = same_ops(*self._runs, phase, renamed)
            made += [pairs for one in same for pairs in self._executions(*one)]
            for side, run in enumerate(self._runs):
                paired = {one[side] for one in same}
                alone[side].extend(run.ops[i] for i in run.indices(phase) if i not in paired)
        made.sort(key=lambda pairs: pairs[0][0].order)  # as the tensors lie in their files
        return [(pairs[0], self._compared(pairs)) for pairs in made], alone

    def modules(self, names: Mapping[str, str]) -> Iterator[Found]:
        """Compare what modules give, and the gradients of their weights."""
        for name, other_name in names.items():
            inside = [within(run, n) for run, n in zip(self._runs, (name, other_name), strict=True)]
            calls = [[*visits(run, one)] for run, one in zip(self._runs, inside, strict=True)]
            if len(calls[0]) != len(calls[1]):  # exporters move ops, which cuts a call in two
                products = [self._products(run, one) for run, one in zip(self._runs, calls, strict=True)]
                if products[0] != products[1] or not products[0]:
                    self.uneven.append(name)
                calls = [[[*chain(*one)]] for one in calls]
            for both in zip(*calls, strict=True):
                yield from self._module_outputs(name, both)
            gradients = [_weight_gradients(run, one) for run, one in zip(self._runs, inside, strict=True)]
            for ones, others in zip(*gradients, strict=False):
                for pair in self._paired(ones, others):
                    yield pair, self._comparison(pair, *self._judged(pair))

    def _products(self, run: Run, calls: Sequence[Sequence[int]]) -> int:
        """Return how many products and convolutions some calls of a module have."""
        return sum(is_compute(run.ops[i].type) for i in chain(*calls))

    def _paired(self, ones: Sequence[Entry], others: Sequence[Entry]) -> Sequence[Pair]:
        """Pair one tensor of all executions of both runs; where one run has several for one, join them."""
        if min(len(ones), len(others)) == 1 < max(len(ones), len(others)):
            pairs = self._in_pieces([[one] for one in ones], [[one] for one in others])
            self.pieces, self.unlike = self.pieces + bool(pairs), self.unlike + (not pairs)
            return pairs
        self.left += abs(len(ones) - len(others))
        return list(zip(ones, others, strict=False))

    def _executions(self, index: int, other_index: int) -> Iterator[list[Pair]]:
        """Pair the tensors that an op gave at each execution that both runs have."""
        ones, others = self._runs[0].made(index), self._runs[1].made(other_index)
        if min(len(ones), len(others)) == 1 < max(len(ones), len(others)):
            fits = self._is_one_line(index, other_index)
            if fits and (pairs := self._in_pieces([*ones.values()], [*others.values()])):
                joined = any(self._is_derived(pair) for pair in pairs)
                self.pieces += joined
                self.left += 0 if joined else abs(len(ones) - len(others))
                yield pairs
            else:
                self.unlike += 1
            return
        self.left += abs(len(ones) - len(others))
        for execution, other_execution in zip(sorted(ones), sorted(others), strict=False):
            if pairs := list(matched(ones[execution], others[other_execution])):
                yield pairs

    def _is_derived(self, pair: Pair) -> bool:
        return any(run.is_derived(entry) for run, entry in zip(self._runs, pair, strict=True))

    def _is_one_line(self, index: int, other_index: int) -> bool:
        """Return False for ops of two lines in runs of the same code, where a line is known in both."""
        sources = [{op.source for op in run.ops} for run in self._runs]
        shared = 2 * len(sources[0] & sources[1]) > min(map(len, sources))
        return not shared or self._runs[0].ops[index].source == self._runs[1].ops[other_index].source

    def _in_pieces(self, ones: Sequence[Sequence[Entry]], others: Sequence[Sequence[Entry]]) -> list[Pair]:
        """Pair what one run has at one execution with what the other has at several, as far as it fits."""
        run, other = self._runs
        if len(others) == 1:
            found = self._joined(other, others[0], run, ones)
            return [(two, one) for one, two in found]
        return self._joined(run, ones[0], other, others)

    def _joined(
        self, run: Run, entries: Sequence[Entry], other: Run, executions: Sequence[Sequence[Entry]]
    ) -> list[Pair]:
        matches = [{id(entry): part for entry, part in matched(entries, one)} for one in executions]
        found = []
        for entry in entries:
            parts = [one[id(entry)] for one in matches if id(entry) in one]
            pair = joined(run, entry, other, parts) if len(parts) == len(executions) else None
            found += [pair] if pair is not None else []
        return found

    def _compared(self, pairs: Sequence[Pair]) -> Comparison:
        """Compare by the tensor that is furthest off; by what the op read too if they differ."""
        floor = max(scale(side) for side in zip(*pairs, strict=True))
        judged = [(*self._judged(pair, floor), pair) for pair in pairs]
        worst, limit, furthest = max(judged, key=lambda one: (one[0].relative > one[1], one[0].relative))
        if not worst.relative:
            return self._comparison(furthest, worst, limit)
        sides = [
            run.read(entry.op, entry.execution, "input", "weight")
            for run, entry in zip(self._runs, pairs[0], strict=True)
        ]
        given = list(matched(*sides))
        if any(map(self._is_derived, pairs)):
            given = self._in_pieces(
                *(
                    [run.read(entry.op, i, "input", "weight") for i in sorted(run.made(entry.op))]
                    for run, entry in zip(self._runs, pairs[0], strict=True)
                )
            )
        types = [run.ops[entry.op].type for run, entry in zip(self._runs, pairs[0], strict=True)]
        if types[0] != types[1] and any(one.shape != other.shape for one, other in given):
            return replace(
                self._comparison(furthest, worst, limit), read=reading((one, 0.0, True) for one in sides[0])
            )
        read = [self._agreement(pair) for pair in given]
        told = reading((pair[0], *one[1:]) for pair, one in zip(given, read, strict=True))
        return replace(self._comparison(furthest, worst, limit, read), read=told)

    def _module_outputs(self, name: str, both: Sequence[Sequence[int]]) -> Iterator[Found]:
        """Compare what a module gave: at its end, or behind its product where the other has more in it."""
        calls = list(zip(self._runs, both, strict=True))
        ends = [heads(run, visit) for run, visit in calls]
        weights = [
            [one for i in visit for one in run.by_op[i] if one.role == "weight"] for run, visit in calls
        ]
        executions = [{entry.execution for entry in one} for one in ends]
        if min(map(len, executions)) == 1 < max(map(len, executions)):
            last = ([entry for entry in one if entry.op == one[-1].op] for one in ends)
            for pair in self._paired(*last):
                yield pair, self._comparison(pair, *self._judged(pair))
            return
        self.left += len(executions[0] ^ executions[1]) if all(executions) else 0
        for execution in sorted(executions[0]):
            pairs = [(a, b) for a, b in product(*ends) if a.execution == execution == b.execution]
            if not pairs:
                continue
            if self._is_alike(pairs[-1]):
                pairs = pairs[-1:]
            judged = [(pair, *self._judged(pair)) for pair in pairs]
            read = [
                self._agreement((a, b))
                for a, b in zip(*weights, strict=False) if a.execution == execution == b.execution
            ]  # fmt: skip
            pair, found, limit = min(judged, key=lambda one: one[1].relative)
            if found.relative == math.inf and pair[0].shape != pair[1].shape and _is_as_large(pair):
                self.shaped.append(name)
                continue
            yield pair, self._comparison(pair, found, limit, read)

    def _is_alike(self, pair: Pair) -> bool:
        """Return True for tensors of ops of one type that have as many elements."""
        types = {run.ops[entry.op].type for run, entry in zip(self._runs, pair, strict=True)}
        return len(types) == 1 and _is_as_large(pair)

    def _judged(self, pair: Pair, floor: float = 0.0) -> tuple[Distance, float]:
        """Return a distance, and how far may be."""
        ops = (run.ops[entry.op] for run, entry in zip(self._runs, pair, strict=True))
        layouts = [
            op.weight_layout if "weight" in entry.role else op.layout
            for op, entry in zip(ops, pair, strict=True)
        ]
        arrays = [run.array(entry) for run, entry in zip(self._runs, pair, strict=True)]
        return distance(pair, arrays, layouts, floor), self._bound(pair)

    def _bound(self, pair: Pair) -> float:
        """Return the relative error up to which two tensors agree."""
        known = self._error(pair[0]) if self._rtol is None else None
        if known is None:
            return tolerance(pair[0].dtype, pair[1].dtype, self._rtol)
        return MARGIN * known

    def _error(self, entry: Entry) -> float | None:
        return self._expected.get((entry.op, entry.execution))

    def _agreement(self, pair: Pair) -> Read:
        """Return the role, the relative error, and True if two tensors agree."""
        found, bound = self._judged(pair)
        bound = max(bound, tolerance(pair[0].dtype, pair[1].dtype, self._rtol))
        return pair[0].role, found.relative, found.relative <= bound

    def _comparison(self, pair: Pair, found: Distance, limit: float, read: Sequence[Read] = ()) -> Comparison:
        op, other = (run.ops[entry.op] for run, entry in zip(self._runs, pair, strict=True))
        inputs = [agree for role, _, agree in read if role == "input"]
        weights = [relative for role, relative, _ in read if role == "weight"]
        return Comparison(
            op.phase, op.type, op.module, op.source, other.type, other.module, other.source,
            pair[0].execution, found.relative, found.cosine, found.largest, found.exact, limit, limit,
            (pair[0].dtype, pair[1].dtype),
            all(inputs) if inputs else None, max(weights) if weights else None, self._error(pair[0]),
        )  # fmt: skip


def _is_as_large(pair: Pair) -> bool:
    return math.prod(pair[0].shape) == math.prod(pair[1].shape)


def _weight_gradients(run: Run, inside: Callable[[str], bool]) -> list[list[Entry]]:
    """Return the gradients of weights of the ops in a module: for each tensor those of all executions."""
    found: dict[tuple[int, int], list[Entry]] = {}
    for index in run.indices("backward"):
        for entry in run.by_op[index] if inside(run.ops[index].module) else ():
            if entry.role == "weight gradient":
                found.setdefault((index, entry.position), []).append(entry)
    return list(found.values())
