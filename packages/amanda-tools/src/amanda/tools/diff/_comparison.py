"""Comparison of the tensors of two runs, op by op or module by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

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

ComparedPair = tuple[Pair, Comparison]
"""Tensors of run a and run b, and their comparison."""


class ReadAgreement(NamedTuple):
    """Role of a tensor that ops read, its error between the runs, and the error up to which it agrees."""

    role: str
    error: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.bound


class RunComparison:
    """Two runs, the tensors of their ops or modules that are compared, and the errors up to which they agree.

    rtol: the same for all; None for `MARGIN` times what is expected, or by element type if that is unknown.
    """

    def __init__(
        self, run: Run, other_run: Run, rtol: float | None, expected: Expected | None = None
    ) -> None:
        self._runs = (run, other_run)
        self._rtol, self._expected = rtol, expected if rtol is None else None
        self._largest_agreeing_error = 0.0
        """Largest relative error of the ops that agree."""
        self.matcher, self.flows = ExecutionMatcher(self._runs), (DataFlow(run), DataFlow(other_run))
        self.matches: dict[Execution, OpMatch] = {}
        """Matches of ops by their first execution in run a."""
        self.dismissed_count = 0
        """Ops that differ, of two ways to the same results."""
        self._is_one_precision = True
        self.reordered_modules: list[str] = []
        """Modules that end in as many numbers, in an order that is not known."""
        self.unevenly_called: list[str] = []
        """Modules that one run called more often than the other: their last outputs were compared."""

    def sort_by_execution(self, compared_pairs: Iterable[ComparedPair]) -> list[ComparedPair]:
        """Return comparisons in the order in which run a executed; of a graph, in which its ops were met.

        A difference raises later tolerances to its op's.  Raises AmandaError if the runs share no op.
        """
        # Ops of a graph run on several threads: the order of execution would change from run to run.
        is_ordered = self._runs[0].is_in_program_order

        def order_key(compared_pair: ComparedPair) -> tuple[int, int]:
            (entry, _), _ = compared_pair
            return (entry.order if is_ordered else entry.execution), entry.op

        rows: list[ComparedPair] = []
        raised_tolerance = 0.0
        for pair, comparison in sorted(compared_pairs, key=order_key):
            rows.append((pair, replace(comparison, tolerance=max(raised_tolerance, comparison.by_type))))
            # Precision that was lost is lost for what follows, unless a control says what to expect.
            if comparison.relative and self._expected is None:
                raised_tolerance = max(raised_tolerance, comparison.by_type)
        if not rows:
            raise AmandaError("the two runs have no op in common; give a mapping of module names")
        return rows

    def compare_ops(
        self, b_path_by_a_path: Mapping[str, str]
    ) -> tuple[list[ComparedPair], tuple[list[Op], list[Op]]]:
        """Match ops, keep the matches for `explain`, compare each; return also ops of one run alone."""
        op_matches = OpMatches(self._runs, self.flows, self.matcher, b_path_by_a_path)
        matches, self._last_result_matches = op_matches.matches, op_matches.last_result_matches
        self.matches = {match.first_execution: match for match in matches}
        self._is_one_precision = has_same_precision(self._runs, matches)
        matches.sort(key=lambda match: match.pairs[0][0].order)  # as the tensors lie in their files
        sides = zip(self._runs, op_matches.unmatched_ops, strict=True)
        only_a, only_b = ([run.ops[i] for i in indices] for run, indices in sides)
        compared_pairs = []
        for match in matches:
            comparison = self._compare_match(match)
            if not comparison.diverges:  # a fault of an op explains no error of later ones
                self._largest_agreeing_error = max(self._largest_agreeing_error, comparison.relative)
            compared_pairs.append((match.pairs[0], comparison))
        return compared_pairs, (only_a, only_b)

    def compare_modules(self, b_path_by_a_path: Mapping[str, str]) -> Iterator[ComparedPair]:
        """Compare outputs of modules by visit, and weight gradients; list reordered and uneven modules."""
        for name, other_name in b_path_by_a_path.items():
            path_tests = [module_test(run, n) for run, n in zip(self._runs, (name, other_name), strict=True)]
            # A visit: the ops of one call of the module.
            visits_by_run = [[*visits(*side)] for side in zip(self._runs, path_tests, strict=True)]
            if len(visits_by_run[0]) != len(visits_by_run[1]):  # exporters move ops, which cuts a call in two
                # All visits become one; that is exact if both runs have as many products in it.
                visits_by_run = [[[*chain(*run_visits)]] for run_visits in visits_by_run]
                sides = zip(self._runs, visits_by_run, strict=True)
                counts = [sum(is_compute(run.ops[i].type) for i in ops) for run, [ops] in sides]
                if counts[0] != counts[1] or not counts[0]:
                    self.unevenly_called.append(name)
            for visit_pair in zip(*visits_by_run, strict=True):
                yield from self._module_outputs(name, visit_pair)
            gradients = [weight_gradients(*side) for side in zip(self._runs, path_tests, strict=True)]
            for entries, other_entries in zip(*gradients, strict=False):
                for pair in self._pair_entries(entries, other_entries):
                    yield pair, self._make_comparison(pair, *self._measure_distance(pair))

    def _pair_entries(self, entries: Sequence[Entry], other_entries: Sequence[Entry]) -> Sequence[Pair]:
        """Pair the executions of one tensor in both runs; join several where the other run has only one."""
        # The matcher counts tensors that are joined, that cannot be, and that have no partner.
        if min(len(entries), len(other_entries)) == 1 < max(len(entries), len(other_entries)):
            pairs = self.matcher.join([[entry] for entry in entries], [[entry] for entry in other_entries])
            self.matcher.joined_count += bool(pairs)
            self.matcher.unlike_count += not pairs
            return pairs
        self.matcher.unmatched_count += abs(len(entries) - len(other_entries))
        return list(zip(entries, other_entries, strict=False))

    def _compare_match(self, match: OpMatch) -> Comparison:
        """Compare the outputs of a match: by the one furthest off, and by what the op read if they differ."""
        # Where outputs differ, the bound of each depends on how far off is what the op read.
        pairs = match.pairs
        # The gradient of a bias before a normalisation is rounding noise around 0: it is judged by its op's
        # size.
        floor = max(noise_floor(side) for side in zip(*pairs, strict=True))
        measured_pairs = [(*self._measure_distance(pair, floor), pair) for pair in pairs]
        if not any(difference.relative for difference, _, _ in measured_pairs):
            difference, bound, pair = measured_pairs[0]
            return self._make_comparison(pair, difference, bound)
        input_pairs = self.matcher.pair_reads(match)
        type_a, type_b = (run.ops[entry.op].type for run, entry in zip(self._runs, pairs[0], strict=True))
        agreements: list[ReadAgreement] = []
        if type_a != type_b and any(a.shape != b.shape for a, b in input_pairs):
            # Two ops that compute one value of different tensors: their inputs cannot be compared.
            read_error, entries_read = math.inf, self._runs[0].tensors_read(*match.first_execution)
            read_tensors = [(entry, 0.0, True) for entry in entries_read]
        else:
            # Positions mean nothing then: relu reads x, where a condition, 0.1 x, x.
            if type_a != type_b:
                b_entries_read = self._runs[1].tensors_read(*match.executions[1][0])
                input_pairs = [(a, self._nearest_input(a, b, b_entries_read)) for a, b in input_pairs]
            agreements = [self.agreement(pair) for pair in input_pairs]
            read_error = self._read_error(match, agreements)
            input_agreements = zip(input_pairs, agreements, strict=True)
            read_tensors = [(a, read.error, read.agrees) for (a, _), read in input_agreements]
        # A tensor beyond its bound counts more than a larger error within another bound.
        candidates = [(distance, self._bound(pair, read_error), pair) for distance, _, pair in measured_pairs]
        difference, bound, pair = max(candidates, key=lambda c: (c[0].relative > c[1], c[0].relative))
        comparison = self._make_comparison(pair, difference, bound, agreements, read_error)
        return replace(comparison, read=reading_text(read_tensors, self._runs[0].ops[pair[0].op]))

    def _read_error(self, match: OpMatch, agreements: Sequence[ReadAgreement]) -> float:
        """Return the largest relative error of what an op reads; inf where not all of that is known."""
        largest = max((read.error for read in agreements), default=0.0)
        op_index, execution = match.first_execution
        # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
        if self._runs[0].ops[op_index].phase == "backward":
            return max(largest, self._largest_agreeing_error)
        entries = self._runs[0].tensors_read(op_index, execution)
        return largest if match.is_whole and len(agreements) == len(entries) else math.inf

    def _nearest_input(self, entry: Entry, partner: Entry, candidates: Iterable[Entry]) -> Entry:
        candidates_of_kind = [c for c in candidates if (c.role, c.shape) == (entry.role, entry.shape)]
        return min([partner, *candidates_of_kind], key=lambda c: self.agreement((entry, c)).error)

    def explain(self, rows: list[ComparedPair]) -> list[ComparedPair]:
        """Return rows without ops of another way to the same results, and with a cause before its effect.

        rows: as `sort_by_execution` returned them.  Ops that are left out are counted in `dismissed_count`.
        """
        rows = self._leave_out_other_way(rows)
        self._insert_last_result(rows)
        self._insert_cause(rows)
        return rows

    def _leave_out_other_way(self, rows: list[ComparedPair]) -> list[ComparedPair]:
        """Return rows without ops that differ as their inputs do, if the results of both runs agree."""
        # Otherwise all of them.  Counts what is left out in `dismissed_count`.
        if not any(comparison.diverges for _, comparison in rows):
            return rows
        agreements = self._result_agreements(rows)
        if not (agreements and all(agreements)):
            return rows
        # Such ops are steps of another way to the same results.
        remaining_rows = [row for row in rows if not (row[1].diverges and self._is_effect(*row))]
        self.dismissed_count = len(rows) - len(remaining_rows)
        return remaining_rows

    def _insert_cause(self, rows: list[ComparedPair]) -> None:
        """Insert, before the first difference, the op that `find_cause` or `find_backward_cause` returns."""
        row_index = next((i for i, (_, comparison) in enumerate(rows) if comparison.diverges), None)
        # A row of one run `only` is a cause that `_insert_last_result` has inserted.
        if row_index is None or rows[row_index][1].only:
            return
        pair, effect = rows[row_index]
        match, partners = self._match_of(pair), partners_of([*self.matches.values()])
        cause = find_cause(self._runs, self.flows, partners, self._differing_reads(match))
        if cause is None and effect.phase == "backward" and match.is_whole:
            executions = [executions_of_run[0] for executions_of_run in match.executions]
            cause = find_backward_cause(self._runs, partners, executions, effect.relative)
        if cause is not None:
            rows.insert(row_index, self._compare_cause(cause, effect, pair))

    def _match_of(self, pair: Pair) -> OpMatch:
        return self.matches[pair[0].op, pair[0].execution]

    def _result_agreements(self, rows: Sequence[ComparedPair]) -> list[bool]:
        """Return for each output that no op reads, and each gradient of a weight, True if both runs agree."""
        # A gradient has to agree by its element types alone.
        agreements, has_gradients = [], False
        for pair, comparison in rows:
            match = self._match_of(pair)
            if comparison.phase == "backward":
                gradients = [pair for pair in match.pairs if pair[0].role == "weight gradient"]
                has_gradients = has_gradients or bool(gradients)
                floor = max((noise_floor(side) for side in zip(*match.pairs, strict=True)), default=0.0)
                for difference, bound in (self._measure_distance(pair, floor) for pair in gradients):
                    agreements.append(difference.relative <= min(bound, comparison.by_type))
            elif any(
                not flow.is_read(entry)
                for pair in match.pairs for flow, entry in zip(self.flows, pair, strict=True)
            ):  # fmt: skip
                agreements.append(not comparison.diverges)
        # Without gradients of weights, the last gradient is the result of the backward pass.
        backward = [comparison for _, comparison in rows if comparison.phase == "backward"]
        if backward and not has_gradients:
            agreements.append(not backward[-1].diverges)
        return agreements + [not self._compare_match(match).diverges for match in self._last_result_matches]

    def _insert_last_result(self, rows: list[ComparedPair]) -> None:
        """Insert the last result of one run that the other lacks, if it is not what the other comes to."""
        for match in self._last_result_matches:
            comparison, pair = self._compare_match(match), match.pairs[0]
            if not comparison.diverges:
                continue
            is_in_b = any(pair[0].op == op for op, _ in self.matches)
            reason = f"an op of {'b' if is_in_b else 'a'} alone, whose result no op reads"
            entry_a, entry_b = (None, pair[1]) if is_in_b else (pair[0], None)
            cause = Cause(entry_a, entry_b, comparison.relative, reason)
            # At its place in run a, as all rows are in the order of run a.
            later_rows = (i for i, (row_pair, _) in enumerate(rows) if row_pair[0].order > pair[0].order)
            rows.insert(next(later_rows, len(rows)), self._compare_cause(cause, comparison, pair))
            return

    def _is_effect(self, pair: Pair, comparison: Comparison) -> bool:
        """Return True for an op that may differ only as its inputs do; also for backward and unlike ops."""
        if comparison.is_retyped:
            return False
        if comparison.phase == "backward" or comparison.type != comparison.other_type:
            return True
        return any(
            flow.producer(entry) is not None
            for read_pair, *_ in self._differing_reads(self._match_of(pair))
            for flow, entry in zip(self.flows, read_pair, strict=True)
        )  # fmt: skip

    def _differing_reads(self, match: OpMatch) -> list[tuple[Pair, float, float]]:
        agreements = [(pair, self.agreement(pair)) for pair in self.matcher.pair_reads(match)]
        return [(pair, read.error, read.bound) for pair, read in agreements if not read.agrees]

    def _compare_cause(self, cause: Cause, effect: Comparison, effect_pair: Pair) -> ComparedPair:
        """Return the row of the op that is the cause: its tensors, and their comparison.

        For an op that one run alone has, which `only` names, the tensors are those of the effect, and the
        error is that of what the effect reads.
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

    def _module_outputs(self, name: str, visit_pair: Sequence[Sequence[int]]) -> Iterator[ComparedPair]:
        """Compare the outputs of a module at one visit: those at its ends, or behind its last products."""
        # Outputs with as many numbers in an unknown order are not compared: the module is listed instead.
        visit_by_run = list(zip(self._runs, visit_pair, strict=True))
        outputs = [module_outputs(run, visit) for run, visit in visit_by_run]
        entries_by_run = ([e for i in visit for e in run.entries_by_op[i]] for run, visit in visit_by_run)
        weights = [[entry for entry in entries if entry.role == "weight"] for entries in entries_by_run]
        # A graph runs a loop's body in one call, where eager code calls the module again: last outputs
        # correspond.
        executions = [{entry.execution for entry in entries} for entries in outputs]
        if min(map(len, executions)) == 1 < max(map(len, executions)):
            last_outputs = ([e for e in entries if e.op == entries[-1].op] for entries in outputs)
            for pair in self._pair_entries(*last_outputs):
                yield pair, self._make_comparison(pair, *self._measure_distance(pair))
            return
        self.matcher.unmatched_count += len(executions[0] ^ executions[1]) if all(executions) else 0
        for execution in sorted(executions[0]):
            pairs = [(a, b) for a, b in product(*outputs) if a.execution == execution == b.execution]
            if not pairs:
                continue
            # Ends of one type are compared.  Else one module may have an activation at its end and the other
            # not: of all pairs of ends the closest is meant.
            op_types = {run.ops[entry.op].type for run, entry in zip(self._runs, pairs[-1], strict=True)}
            if len(op_types) == 1 and _have_equal_sizes(pairs[-1]):
                pairs = pairs[-1:]
            errors = [(pair, *self._measure_distance(pair)) for pair in pairs]
            weight_agreements = [
                self.agreement((a, b))
                for a, b in zip(*weights, strict=False) if a.execution == execution == b.execution
            ]  # fmt: skip
            pair, closest, bound = min(errors, key=lambda item: item[1].relative)
            # As many numbers in an unknown order of axes cannot be compared, and are reported instead.
            if closest.relative == math.inf and pair[0].shape != pair[1].shape and _have_equal_sizes(pair):
                self.reordered_modules.append(name)
                continue
            yield pair, self._make_comparison(pair, closest, bound, weight_agreements)

    def _measure_distance(self, pair: Pair, floor: float = 0.0) -> tuple[Distance, float]:
        """Return a pair's `distance`, by its floor, and the relative error up to which the tensors agree."""
        runs_and_entries = list(zip(self._runs, pair, strict=True))
        layouts = [run.layout(entry) for run, entry in runs_and_entries]
        arrays = [run.array(entry) for run, entry in runs_and_entries]
        return distance(pair, arrays, layouts, floor), self._bound(pair)

    def _bound(self, pair: Pair, read_error: float = math.inf) -> float:
        """Return the relative error up to which two tensors agree; read_error: as of `Expected.error`."""
        expected = self._expected_error(pair, read_error)
        return tolerance(pair[0].dtype, pair[1].dtype, self._rtol) if expected is None else MARGIN * expected

    def _expected_error(self, pair: Pair, read_error: float) -> float | None:
        return None if self._expected is None else self._expected.error(pair[0], read_error)

    def agreement(self, pair: Pair) -> ReadAgreement:
        """Compare two tensors that ops read; `bound` is at least the tolerance of their element types."""
        difference, bound = self._measure_distance(pair)
        # What an op reads has gone through views and casts, for which no error of a control is known.
        bound = max(bound, tolerance(pair[0].dtype, pair[1].dtype, self._rtol))
        return ReadAgreement(pair[0].role, difference.relative, bound)

    def _make_comparison(
        self, pair: Pair, difference: Distance, bound: float, agreements: Sequence[ReadAgreement] = (),
        read_error: float = math.inf,
    ) -> Comparison:  # fmt: skip
        """Return the comparison of an op by one pair of its tensors; read_error: as of `Expected.error`."""
        # agreements: of what the op reads, empty where that is unknown.
        op, other_op = (run.ops[entry.op] for run, entry in zip(self._runs, pair, strict=True))
        inputs = [read.agrees for read in agreements if read.role == "input"]
        weights = [read.error for read in agreements if read.role == "weight"]
        return Comparison(
            op.phase, op.type, op.module, op.source, other_type=other_op.type, other_module=other_op.module,
            other_source=other_op.source, execution=pair[0].execution, relative=difference.relative,
            cosine=difference.cosine, largest=difference.largest, exact=difference.exact, tolerance=bound,
            by_type=bound, dtypes=(pair[0].dtype, pair[1].dtype), inputs=all(inputs) if inputs else None,
            weight=max(weights) if weights else None, expected=self._expected_error(pair, read_error),
            is_retyped=bool(difference.relative) and self._is_retyped(pair),
        )  # fmt: skip

    def _is_retyped(self, pair: Pair) -> bool:
        """Return True if two runs of one precision, with a control, differ in the element type of this op."""
        # Otherwise the margin of the control would hide the difference.
        op_types = {run.ops[entry.op].type for run, entry in zip(self._runs, pair, strict=True)}
        are_floats = all(entry.dtype in TOLERANCES for entry in pair)
        return (
            self._expected is not None and self._is_one_precision and are_floats
            and len(op_types) == 1 and pair[0].dtype != pair[1].dtype
        )  # fmt: skip


def _have_equal_sizes(pair: Pair) -> bool:
    return math.prod(pair[0].shape) == math.prod(pair[1].shape)


def expected_errors(run: Run, control: Run) -> Expected:
    """Compare a run with its control; return the relative error of each op that this explains."""
    # A control in a wider type, such as float64, shows the rounding of the run, and also a fault that comes
    # with its precision, such as angles of a rotary embedding in bfloat16.  So with it an op is expected to
    # err at most as much as what it reads, or as its element type rounds, even where the distance is larger.
    runs = run, control
    compared_runs = RunComparison(*runs, None)
    compared_pairs, _ = compared_runs.compare_ops({})
    is_wider = any(comparison.dtypes[0] != comparison.dtypes[1] for _, comparison in compared_pairs)
    error_by_execution: dict[tuple[int, int], float] = {}
    largest_before = 0.0
    for pair, comparison in compared_pairs:
        execution = pair[0].op, pair[0].execution
        match = compared_runs.matches[execution]
        error = _error_from_control(runs, match, comparison)
        # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
        read_error = largest_before
        if comparison.phase != "backward":
            agreements = map(compared_runs.agreement, compared_runs.matcher.pair_reads(match))
            read_error = max((read.error for read in agreements), default=0.0)
        explained = explained_error(error, comparison.dtypes[0], read_error) if is_wider else error
        error_by_execution[execution] = explained
        largest_before = max(largest_before, error)
    return Expected(error_by_execution, is_wider)


def _error_from_control(runs: tuple[Run, Run], match: OpMatch, comparison: Comparison) -> float:
    """Return the relative error of an op from its control, of finite numbers alone; `LARGEST` without any."""
    # An overflow of the run says nothing of the numbers beside it.
    if math.isfinite(comparison.relative):
        return min(comparison.relative, LARGEST)
    errors = []
    for pair in match.pairs:
        a, b = (run.array(entry) for run, entry in zip(runs, pair, strict=True))
        if a is None or b is None or a.shape != b.shape:
            return LARGEST
        are_finite = np.isfinite(a) & np.isfinite(b)
        errors.append(array_distance(a[are_finite], b[are_finite]).relative)
    return min(max(errors), LARGEST)
