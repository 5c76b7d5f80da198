"""Comparison of the tensors of two runs, op by op or module by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

from amanda.errors import AmandaError
from amanda.tools.diff._alignment import is_compute, module_outputs, module_test, weight_gradients
from amanda.tools.diff._cause import Cause, find_backward_cause, find_cause
from amanda.tools.diff._errors import (
    LARGEST,
    MARGIN,
    TOLERANCES,
    Comparison,
    Distance,
    Expected,
    Pair,
    array_distance,
    distance,
    explained_error,
    noise_floor,
    tolerance,
)
from amanda.tools.diff._matching import ExecutionMatcher, OpMatch, OpMatches, has_same_precision, partners_of
from amanda.tools.diff._result import reading_text
from amanda.tools.diff._run import DataFlow, Execution, Run, visits
from amanda.tools.dump import Entry, Op
from amanda.tools.libraries import numpy as np

Compared = tuple[Pair, Comparison]
Read = tuple[str, float, bool]
"""Role of what an op read, its relative error, and whether it agrees."""


class RunComparison:
    """Two runs, and the relative error up to which their tensors agree.

    rtol: the same for all; None for `MARGIN` times what is expected, and where that is not known for one by
    element type.
    """

    def __init__(
        self, run: Run, other_run: Run, rtol: float | None, expected: Expected | None = None
    ) -> None:
        self._runs = (run, other_run)
        self._rtol, self._expected = rtol, expected if rtol is None else None
        self._largest = 0.0
        """Largest relative error of the ops that agree."""
        self.matcher = ExecutionMatcher(self._runs)
        self.flows = DataFlow(run), DataFlow(other_run)
        self.matches: dict[Execution, OpMatch] = {}
        """Matches of ops by their first execution in run a."""
        self.dismissed = 0
        """Ops that differ, of two ways to the same results."""
        self._is_one_precision = True
        self.reordered_modules: list[str] = []
        """Modules that end in as many numbers, in an order that is not known."""
        self.unevenly_called: list[str] = []
        """Modules that one run called more often than the other: their last outputs were compared."""

    def in_execution_order(self, compared: Iterable[Compared]) -> list[Compared]:
        """Return comparisons as run a executed; where a graph leaves that open, as its ops were met.

        A difference raises later tolerances to its op's.  Raises AmandaError if the runs share no op.
        """
        # Ops of a graph run on several threads: the order of execution would change from run to run.
        ordered = self._runs[0].is_in_program_order

        def order_key(item: Compared) -> tuple[int, int]:
            entry = item[0][0]
            return (entry.order if ordered else entry.execution), entry.op

        rows: list[Compared] = []
        limit = 0.0
        for pair, comparison in sorted(compared, key=order_key):
            rows.append((pair, replace(comparison, tolerance=max(limit, comparison.by_type))))
            # Precision that was lost is lost for what follows, unless a control says what to expect.
            if comparison.relative and self._expected is None:
                limit = max(limit, comparison.by_type)
        if not rows:
            raise AmandaError("the two runs have no op in common; give a mapping of module names")
        return rows

    def compare_ops(self, renamed: Mapping[str, str]) -> tuple[list[Compared], tuple[list[Op], list[Op]]]:
        """Compare ops one by one; return also the ops of each run that the other does not have."""
        pairing = OpMatches(self._runs, self.flows, self.matcher, renamed)
        matches, self._ends = pairing.matches, pairing.ends
        self.matches = {match.executions[0][0]: match for match in matches}
        self._is_one_precision = has_same_precision(self._runs, matches)
        matches.sort(key=lambda match: match.pairs[0][0].order)  # as the tensors lie in their files
        only_a, only_b = (
            [run.ops[i] for i in indices]
            for run, indices in zip(self._runs, pairing.unmatched_ops, strict=True)
        )
        compared = []
        for match in matches:
            comparison = self._compare_match(match)
            if not comparison.diverges:  # what is no expected error explains none
                self._largest = max(self._largest, comparison.relative)
            compared.append((match.pairs[0], comparison))
        return compared, (only_a, only_b)

    def compare_modules(self, names: Mapping[str, str]) -> Iterator[Compared]:
        """Compare what modules give, and the gradients of their weights."""
        for name, other_name in names.items():
            tests = [module_test(run, n) for run, n in zip(self._runs, (name, other_name), strict=True)]
            calls = [[*visits(run, is_inside)] for run, is_inside in zip(self._runs, tests, strict=True)]
            if len(calls[0]) != len(calls[1]):  # exporters move ops, which cuts a call in two
                products = [
                    sum(is_compute(run.ops[i].type) for i in chain(*side))
                    for run, side in zip(self._runs, calls, strict=True)
                ]
                if products[0] != products[1] or not products[0]:
                    self.unevenly_called.append(name)
                calls = [[[*chain(*side)]] for side in calls]
            for visit_pair in zip(*calls, strict=True):
                yield from self._module_outputs(name, visit_pair)
            gradients = [weight_gradients(*side) for side in zip(self._runs, tests, strict=True)]
            for entries, other_entries in zip(*gradients, strict=False):
                for pair in self._pair_entries(entries, other_entries):
                    yield pair, self._comparison(pair, *self._measure(pair))

    def _pair_entries(self, entries: Sequence[Entry], other_entries: Sequence[Entry]) -> Sequence[Pair]:
        """Pair one tensor of all executions of both runs; where one run has several for one, join them."""
        if min(len(entries), len(other_entries)) == 1 < max(len(entries), len(other_entries)):
            pairs = self.matcher.join([[entry] for entry in entries], [[entry] for entry in other_entries])
            self.matcher.pieces += bool(pairs)
            self.matcher.unlike += not pairs
            return pairs
        self.matcher.unmatched += abs(len(entries) - len(other_entries))
        return list(zip(entries, other_entries, strict=False))

    def _compare_match(self, match: OpMatch) -> Comparison:
        """Compare by the tensor that is furthest off; by what the op read too if they differ."""
        pairs = match.pairs
        # The gradient of a bias before a normalisation is rounding noise around 0: it is judged by its op's
        # size.
        floor = max(noise_floor(side) for side in zip(*pairs, strict=True))
        errors = [(*self._measure(pair, floor), pair) for pair in pairs]
        if not any(difference.relative for difference, _, _ in errors):
            return self._comparison(pairs[0], *errors[0][:2])
        inputs = self.matcher.pair_reads(match)
        op_types = [run.ops[entry.op].type for run, entry in zip(self._runs, pairs[0], strict=True)]
        read: list[Read] = []
        if op_types[0] != op_types[1] and any(a.shape != b.shape for a, b in inputs):
            read_error = math.inf
            entries = self._runs[0].read(*match.executions[0][0])
            text_parts = [(entry, 0.0, True) for entry in entries]
        else:
            # Positions mean nothing then: relu reads x, where a condition, 0.1 x, x.
            if op_types[0] != op_types[1]:
                candidates = self._runs[1].read(*match.executions[1][0])
                inputs = [(a, self._nearest(a, b, candidates)) for a, b in inputs]
            read = [self.agreement(pair) for pair in inputs]
            read_error = self._read_error(match, read)
            text_parts = [(pair[0], *agreed[1:]) for pair, agreed in zip(inputs, read, strict=True)]
        errors = [(difference, self._bound(pair, read_error), pair) for difference, _, pair in errors]
        # A tensor beyond its limit counts more than a larger error within another limit.
        worst, limit, furthest = max(errors, key=lambda item: (item[0].relative > item[1], item[0].relative))
        comparison = self._comparison(furthest, worst, limit, read, read_error)
        return replace(comparison, read=reading_text(text_parts, self._runs[0].ops[furthest[0].op]))

    def _read_error(self, match: OpMatch, read: Sequence[Read]) -> float:
        """Return the largest relative error of what an op reads; inf where not all of that is known."""
        largest = max((error for _, error, _ in read), default=0.0)
        # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
        if self._runs[0].ops[match.executions[0][0][0]].phase == "backward":
            return max(largest, self._largest)
        entries = self._runs[0].read(*match.executions[0][0])
        return largest if match.is_whole and len(read) == len(entries) else math.inf

    def _nearest(self, entry: Entry, partner: Entry, candidates: Iterable[Entry]) -> Entry:
        candidates_of_kind = [c for c in candidates if (c.role, c.shape) == (entry.role, entry.shape)]
        return min([partner, *candidates_of_kind], key=lambda c: self.agreement((entry, c))[1])

    def explain(self, rows: list[Compared]) -> list[Compared]:
        """Return rows without ops of another way to the same results, and with a cause before its effect.

        rows: what `in_execution_order` returned of ops.  Counts the ops that are left out in `dismissed`.
        """
        rows = self._leave_out_other_way(rows)
        self._insert_last_result(rows)
        self._insert_cause(rows)
        return rows

    def _leave_out_other_way(self, rows: list[Compared]) -> list[Compared]:
        """Return rows without ops that differ as their inputs do, if the results of both runs agree."""
        if not any(comparison.diverges for _, comparison in rows):
            return rows
        agreements = self._result_agreements(rows)
        if not (agreements and all(agreements)):
            return rows
        # Such ops are steps of another way to the same results.
        remaining = [row for row in rows if not (row[1].diverges and self._is_effect(*row))]
        self.dismissed = len(rows) - len(remaining)
        return remaining

    def _insert_cause(self, rows: list[Compared]) -> None:
        """Insert the op that causes the first difference, if the op that differs only reads its output."""
        index = next((i for i, (_, comparison) in enumerate(rows) if comparison.diverges), None)
        if index is None or rows[index][1].only:
            return
        pair, effect = rows[index]
        match, partners = self._match_of(pair), partners_of([*self.matches.values()])
        cause = find_cause(self._runs, self.flows, partners, self._differing_reads(match))
        if cause is None and effect.phase == "backward" and match.is_whole:
            executions = [side[0] for side in match.executions]
            cause = find_backward_cause(self._runs, partners, executions, effect.relative)
        if cause is not None:
            rows.insert(index, self._compare_cause(cause, effect, pair))

    def _match_of(self, pair: Pair) -> OpMatch:
        return self.matches[pair[0].op, pair[0].execution]

    def _result_agreements(self, rows: Sequence[Compared]) -> list[bool]:
        """Return for each result, and for each gradient of a weight, True if both runs agree."""
        agreements, has_gradients = [], False
        for pair, comparison in rows:
            match = self._match_of(pair)
            if comparison.phase == "backward":
                gradients = [pair for pair in match.pairs if pair[0].role == "weight gradient"]
                has_gradients = has_gradients or bool(gradients)
                floor = max((noise_floor(side) for side in zip(*match.pairs, strict=True)), default=0.0)
                errors = (self._measure(pair, floor) for pair in gradients)
                agreements += [
                    distance.relative <= min(limit, comparison.by_type) for distance, limit in errors
                ]
            elif any(
                not flow.is_read(entry)
                for pair in match.pairs for flow, entry in zip(self.flows, pair, strict=True)
            ):  # fmt: skip
                agreements.append(not comparison.diverges)
        # Without gradients of weights, the last gradient is the result of the backward pass.
        backward = [comparison for _, comparison in rows if comparison.phase == "backward"]
        if backward and not has_gradients:
            agreements.append(not backward[-1].diverges)
        return agreements + [not self._compare_match(match).diverges for match in self._ends]

    def _insert_last_result(self, rows: list[Compared]) -> None:
        """Insert the last result of a run that the other lacks, if it is not what the other comes to."""
        for match in self._ends:
            comparison, pair = self._compare_match(match), match.pairs[0]
            if not comparison.diverges:
                continue
            is_in_b = any(pair[0].op == op for op, _ in self.matches)
            reason = f"an op of {'b' if is_in_b else 'a'} alone, whose result no op reads"
            in_a, in_b = (None, pair[1]) if is_in_b else (pair[0], None)
            cause = Cause(in_a, in_b, comparison.relative, reason)
            # Where run a had it, as all rows are in the order of run a.
            later_rows = (i for i, (placed, _) in enumerate(rows) if placed[0].order > pair[0].order)
            rows.insert(next(later_rows, len(rows)), self._compare_cause(cause, comparison, pair))
            return

    def _is_effect(self, pair: Pair, comparison: Comparison) -> bool:
        """Return True for an op that may differ only because what it reads does."""
        if comparison.is_retyped:
            return False
        if comparison.phase == "backward" or comparison.type != comparison.other_type:
            return True
        return any(
            flow.producer(entry) is not None
            for read, _ in self._differing_reads(self._match_of(pair))
            for flow, entry in zip(self.flows, read, strict=True)
        )  # fmt: skip

    def _differing_reads(self, match: OpMatch) -> list[tuple[Pair, float]]:
        read = [(pair, self.agreement(pair)) for pair in self.matcher.pair_reads(match)]
        return [(pair, error) for pair, (_, error, agrees) in read if not agrees]

    def _compare_cause(self, cause: Cause, effect: Comparison, effect_pair: Pair) -> Compared:
        """Return the tensors and a comparison of the op that is the cause.

        Of an op that a run lacks, the error and the tensors are those of what the next op, the effect, reads
        of it.
        """
        if cause.entry_a is not None and cause.entry_b is not None:
            pair = cause.entry_a, cause.entry_b
            execution_a, execution_b = [(entry.op, entry.execution) for entry in pair]
            return pair, self._compare_match(OpMatch([pair], ([execution_a], [execution_b])))
        run_index = 0 if cause.entry_a is not None else 1
        entry = cause.entry_a or cause.entry_b
        assert entry is not None
        op = self._runs[run_index].ops[entry.op]
        comparison = Comparison(
            op.phase, op.type, op.module, op.source, other_type="", other_module="", other_source="",
            execution=entry.execution, relative=cause.error, cosine=None,
            largest=entry.summary.statistics.largest, exact=effect.exact, tolerance=effect.tolerance,
            by_type=effect.by_type, dtypes=(entry.dtype, entry.dtype), expected=effect.expected,
            only="ab"[run_index], reason=cause.reason,
        )  # fmt: skip
        return effect_pair, comparison

    def _module_outputs(self, name: str, visit_pair: Sequence[Sequence[int]]) -> Iterator[Compared]:
        """Compare what a module gave: at its end, or behind its product where the other has more in it."""
        calls = list(zip(self._runs, visit_pair, strict=True))
        outputs = [module_outputs(run, visit) for run, visit in calls]
        weights = [
            [entry for i in visit for entry in run.by_op[i] if entry.role == "weight"] for run, visit in calls
        ]
        # A graph runs a loop's body in one call, where eager code calls the module again: last outputs
        # correspond.
        executions = [{entry.execution for entry in side} for side in outputs]
        if min(map(len, executions)) == 1 < max(map(len, executions)):
            last_outputs = ([entry for entry in side if entry.op == side[-1].op] for side in outputs)
            for pair in self._pair_entries(*last_outputs):
                yield pair, self._comparison(pair, *self._measure(pair))
            return
        self.matcher.unmatched += len(executions[0] ^ executions[1]) if all(executions) else 0
        for execution in sorted(executions[0]):
            pairs = [(a, b) for a, b in product(*outputs) if a.execution == execution == b.execution]
            if not pairs:
                continue
            # Else one module may have an activation at its end and the other not: the closest ends are meant.
            types = {run.ops[entry.op].type for run, entry in zip(self._runs, pairs[-1], strict=True)}
            if len(types) == 1 and _have_equal_sizes(pairs[-1]):
                pairs = pairs[-1:]
            errors = [(pair, *self._measure(pair)) for pair in pairs]
            read = [
                self.agreement((a, b))
                for a, b in zip(*weights, strict=False) if a.execution == execution == b.execution
            ]  # fmt: skip
            pair, closest, limit = min(errors, key=lambda item: item[1].relative)
            # As many numbers in an unknown order of axes cannot be compared, and are reported instead.
            if closest.relative == math.inf and pair[0].shape != pair[1].shape and _have_equal_sizes(pair):
                self.reordered_modules.append(name)
                continue
            yield pair, self._comparison(pair, closest, limit, read)

    def _measure(self, pair: Pair, floor: float = 0.0) -> tuple[Distance, float]:
        """Return a pair's `distance`, by its floor, and the relative error up to which the tensors agree."""
        sides = list(zip(self._runs, pair, strict=True))
        layouts = [run.layout(entry) for run, entry in sides]
        arrays = [run.array(entry) for run, entry in sides]
        return distance(pair, arrays, layouts, floor), self._bound(pair)

    def _bound(self, pair: Pair, read_error: float = math.inf) -> float:
        """Return the relative error up to which two tensors agree; read_error: as of `Expected.error`."""
        expected = self._expected_error(pair, read_error)
        return tolerance(pair[0].dtype, pair[1].dtype, self._rtol) if expected is None else MARGIN * expected

    def _expected_error(self, pair: Pair, read_error: float) -> float | None:
        return None if self._expected is None else self._expected.error(pair[0], read_error)

    def agreement(self, pair: Pair) -> Read:
        """Return the role of two tensors that ops read, their relative error, and True if they agree."""
        difference, bound = self._measure(pair)
        # What an op reads has gone through views and casts, for which no error of a control is known.
        bound = max(bound, tolerance(pair[0].dtype, pair[1].dtype, self._rtol))
        return pair[0].role, difference.relative, difference.relative <= bound

    def _comparison(
        self, pair: Pair, difference: Distance, limit: float, read: Sequence[Read] = (),
        read_error: float = math.inf,
    ) -> Comparison:  # fmt: skip
        """Return the comparison of an op by one pair of its tensors; read_error: as of `Expected.error`."""
        op, other_op = (run.ops[entry.op] for run, entry in zip(self._runs, pair, strict=True))
        inputs = [agree for role, _, agree in read if role == "input"]
        weights = [relative for role, relative, _ in read if role == "weight"]
        return Comparison(
            op.phase, op.type, op.module, op.source, other_type=other_op.type, other_module=other_op.module,
            other_source=other_op.source, execution=pair[0].execution, relative=difference.relative,
            cosine=difference.cosine, largest=difference.largest, exact=difference.exact, tolerance=limit,
            by_type=limit, dtypes=(pair[0].dtype, pair[1].dtype), inputs=all(inputs) if inputs else None,
            weight=max(weights) if weights else None,
            expected=self._expected_error(pair, read_error),
            is_retyped=bool(difference.relative) and self._is_retyped(pair),
        )  # fmt: skip

    def _is_retyped(self, pair: Pair) -> bool:
        """Return True for two element types at one op, which the margin of a control would hide."""
        types = {run.ops[entry.op].type for run, entry in zip(self._runs, pair, strict=True)}
        floats = all(entry.dtype in TOLERANCES for entry in pair)
        return (
            self._expected is not None and self._is_one_precision and floats
            and len(types) == 1 and pair[0].dtype != pair[1].dtype
        )  # fmt: skip


def _have_equal_sizes(pair: Pair) -> bool:
    return math.prod(pair[0].shape) == math.prod(pair[1].shape)


def expected_errors(run: Run, control: Run) -> Expected:
    """Return the relative error of each op of a run that another run of the program explains.

    The control of a run in a less precise type is the run in float64.  A fault of the run that comes with its
    precision, such as angles of a rotary embedding in bfloat16, is in the distance of the two as well.  So an
    op is expected to err at most as much as what it reads, or as its element type rounds, even where the
    distance is larger.
    """
    runs = run, control
    comparing = RunComparison(*runs, None)
    compared, _ = comparing.compare_ops({})
    is_wider = any(comparison.dtypes[0] != comparison.dtypes[1] for _, comparison in compared)
    errors: dict[tuple[int, int], float] = {}
    largest = 0.0
    for pair, comparison in compared:
        match = comparing.matches[pair[0].op, pair[0].execution]
        error = _error_from_control(runs, match, comparison)
        # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
        read = largest
        if comparison.phase != "backward":
            agreements = map(comparing.agreement, comparing.matcher.pair_reads(match))
            read = max((read_error for _, read_error, _ in agreements), default=0.0)
        errors[pair[0].op, pair[0].execution] = (
            explained_error(error, comparison.dtypes[0], read) if is_wider else error
        )
        largest = max(largest, error)
    return Expected(errors, is_wider)


def _error_from_control(runs: tuple[Run, Run], match: OpMatch, comparison: Comparison) -> float:
    """Return the relative error of an op from its control, of finite numbers alone.

    An overflow of the run says nothing of the numbers beside it.
    """
    if math.isfinite(comparison.relative):
        return min(comparison.relative, LARGEST)
    errors = []
    for pair in match.pairs:
        a, b = (run.array(entry) for run, entry in zip(runs, pair, strict=True))
        if a is None or b is None or a.shape != b.shape:
            return LARGEST
        finite = np.isfinite(a) & np.isfinite(b)
        errors.append(array_distance(a[finite], b[finite]).relative)
    return min(max(errors), LARGEST)
