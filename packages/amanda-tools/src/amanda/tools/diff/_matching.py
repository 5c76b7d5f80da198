"""Pairs of executions of ops of two runs: like with like, and whole tensors with their pieces."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from amanda.tools.diff._alignment import NEAR, dotted, is_compute, is_distinctive, pair_same_ops, renamer
from amanda.tools.diff._errors import (
    TOLERANCES,
    Pair,
    arrangements,
    array_distance,
    join_pieces,
    pair_entries,
    piece_ranges,
    summary_distance,
)
from amanda.tools.diff._run import DataFlow, Execution, Run, content_key, reads_shape
from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np
from amanda.tools.select import Phase

ExecutedOp = tuple[Execution, list[Entry]]
"""An execution of an op, and what it gave."""


class OpMatch(NamedTuple):
    """Outputs of an op, or of several that are pieces of one, in run a and in run b, to be compared in pairs.

    executions: those of run a and those of run b; several where a tensor was joined of pieces.
    """

    pairs: Sequence[Pair]
    executions: tuple[Sequence[Execution], Sequence[Execution]]

    @property
    def first_execution(self) -> Execution:
        """Index of the op, and number of its execution, that is the first in run a."""
        return self.executions[0][0]

    @property
    def is_whole(self) -> bool:
        """Return True for one execution of each run."""
        return all(len(side) == 1 for side in self.executions)


class ExecutionMatcher:
    """Pairs the executions of ops of two runs, by shapes, values and the pieces that make up a whole.

    joined_count, unlike_count: ops that one run executed once and the other in pieces, which make up the
    whole, or do not.  unmatched_count: executions that the other run does not have.
    """

    def __init__(self, runs: tuple[Run, Run]) -> None:
        self._runs = runs
        self.joined_count = self.unlike_count = self.unmatched_count = 0
        self._has_inputs = all(any(entry.role == "input" for entry in run.entries) for run in runs)
        sources = [{op.source for op in run.ops} for run in runs]
        # Half of the lines in common: two versions of a program rather than two programs.
        self._is_same_code = 2 * len(sources[0] & sources[1]) > min(map(len, sources))

    def match_ops(self, index: int, other_index: int) -> list[OpMatch]:
        """Match the executions of two ops of equal module and type; [] where they are not the same op.

        Shapes decide; where they leave it open, pieces that make up a whole, then values.  Executions that
        have no partner are counted, and two ops that are not the same too.
        """
        executions = self._executions([index], 0), self._executions([other_index], 1)
        counts, in_order = list(map(len, executions)), _match_in_order(*executions)
        # An op without outputs that correspond has no pairs to compare.
        matches = [match for match in in_order if match.pairs]
        are_comparable = all(map(self._is_comparable, in_order))
        # Executed as often, or a loop of another length that begins alike: executions pair up in order.
        if are_comparable and (
            counts[0] == counts[1]
            or (min(counts) > 1 and all(self.is_near(match.pairs) for match in in_order[:2]))
        ):
            self.unmatched_count += abs(counts[0] - counts[1])
            return matches
        # Outputs of other shapes from inputs of the same shapes are a difference, not another op.
        if counts[0] == counts[1] and all(self._reads_alike(match, default=False) for match in in_order):
            return matches
        # One run may compute at once what the other computes step by step, as with a cache of keys and
        # values.  Of one program, an op of another line is another op unless the values are near.
        may_differ = not self._is_same_code or self._is_same_line(index, other_index)
        if (piece_matches := self._match_pieces(*executions, may_differ)) is not None:
            return piece_matches
        if are_comparable and min(counts) > 1:
            self.unmatched_count += abs(counts[0] - counts[1])
            return matches
        # Without inputs nothing in the dump speaks against the pair.
        if counts[0] == counts[1] and not self._has_inputs:
            return matches
        self.unlike_count += 1
        return []

    def match_groups(self, indices: Sequence[int], other_indices: Sequence[int]) -> list[OpMatch]:
        """Match the ops of two lines where those of one are pieces of those of the other; else []."""
        executions = self._executions(indices, 0), self._executions(other_indices, 1)
        # As many on both sides are ops of their own, and not pieces of each other.
        if len(executions[0]) == len(executions[1]) > 1:
            return []
        may_differ = self._is_same_code and self._is_same_line(indices[0], other_indices[0])
        return self._match_pieces(*executions, may_differ) or []

    def match_results(self, index: int, other_index: int) -> list[OpMatch]:
        """Match the last ops of two runs, of any type; [] where shapes or numbers of executions differ."""
        executions = self._executions([index], 0), self._executions([other_index], 1)
        matches = _match_in_order(*executions)
        if len(executions[0]) != len(executions[1]):
            return []
        have_same_shapes = all(self._has_same_shape(pair) for match in matches for pair in match.pairs)
        return [match for match in matches if match.pairs] if have_same_shapes else []

    def pair_reads(self, match: OpMatch) -> list[Pair]:
        """Pair what the ops of a match read; where one read in pieces, with the pieces joined."""
        executions_a, executions_b = match.executions
        reads_a = [self._runs[0].tensors_read(*execution) for execution in executions_a]
        reads_b = [self._runs[1].tensors_read(*execution) for execution in executions_b]
        return list(pair_entries(reads_a[0], reads_b[0])) if match.is_whole else self.join(reads_a, reads_b)

    def join(
        self, executions: Sequence[Sequence[Entry]], other_executions: Sequence[Sequence[Entry]]
    ) -> list[Pair]:
        """Pair what one run has at one execution with what the other has at several, as far as it fits."""
        # Either run may be the one with the pieces.
        run, other_run = self._runs
        if _are_pieces(executions, other_executions):
            swapped_pairs = _join_outputs(other_run, other_executions[0], run, executions)
            return [(a, b) for b, a in swapped_pairs]
        return _join_outputs(run, executions[0], other_run, other_executions)

    def _is_same_line(self, index: int, other_index: int) -> bool:
        return self._runs[0].ops[index].source == self._runs[1].ops[other_index].source

    def _executions(self, indices: Sequence[int], run_index: int) -> list[ExecutedOp]:
        """Return the executions of some ops of a run, with what they gave, in order."""
        executed: list[ExecutedOp] = []
        for index in indices:
            outputs_by_execution = self._runs[run_index].outputs_by_execution(index)
            executed += [((index, execution), outputs) for execution, outputs in outputs_by_execution.items()]
        return sorted(executed, key=lambda executed_op: (executed_op[1][0].order, executed_op[0]))

    def _is_comparable(self, match: OpMatch) -> bool:
        """Return False where two executions are not of the same op."""
        # Outputs of other shapes say so; inputs of other shapes do too, unless the outputs' values are near.
        if not all(self._has_same_shape(pair) for pair in match.pairs):
            return False
        return self._reads_alike(match, default=True) or self.is_near(match.pairs)

    def _reads_alike(self, match: OpMatch, default: bool) -> bool:
        read_pairs = self.pair_reads(match)
        return all(map(self._has_same_shape, read_pairs)) if read_pairs else default

    def _has_same_shape(self, pair: Pair) -> bool:
        """Return True for tensors of one shape, or of shapes that some arrangement makes equal."""
        if pair[0].shape == pair[1].shape:
            return True
        layouts = [run.layout(entry) for run, entry in zip(self._runs, pair, strict=True)]
        # Arrangements are decided by shape: a broadcast zero stands in, and no file is read.
        stand_in = np.broadcast_to(np.zeros(()), pair[1].shape)
        return any(True for _ in arrangements(stand_in, layouts[1], pair[0].shape, layouts[0]))

    def _match_pieces(
        self, executed: Sequence[ExecutedOp], other_executed: Sequence[ExecutedOp], may_differ: bool
    ) -> list[OpMatch] | None:
        """Match and count executions of one run and pieces of them in the other; None if these do not fit."""
        # may_differ: the values of a whole and of its pieces need not be near.
        outputs_a, outputs_b = ([outputs for _, outputs in side] for side in (executed, other_executed))
        is_swapped = _are_pieces(outputs_a, outputs_b)
        wholes, parts = (other_executed, executed) if is_swapped else (executed, other_executed)
        ranges = piece_ranges([outputs[0] for _, outputs in wholes], [outputs[0] for _, outputs in parts])
        if ranges is None:
            return None
        matches = []
        for whole, part_range in zip(wholes, ranges, strict=True):
            pieces = [parts[i] for i in part_range]
            executed_a, executed_b = (pieces, [whole]) if is_swapped else ([whole], pieces)
            pairs = self.join([outputs for _, outputs in executed_a], [outputs for _, outputs in executed_b])
            # A single piece was cut out of the whole, which fits many tensors: its values have to be near.
            is_cut = len(pieces) == 1 and any(all(self._are_derived(pair)) for pair in pairs)
            if not pairs or not ((may_differ and not is_cut) or self.is_near(pairs)):
                return None
            executions_a, executions_b = [key for key, _ in executed_a], [key for key, _ in executed_b]
            matches.append(OpMatch(pairs, (executions_a, executions_b)))
        is_joined = any(any(self._are_derived(pair)) for match in matches for pair in match.pairs)
        self.joined_count += is_joined
        self.unmatched_count += 0 if is_joined else abs(len(executed) - len(other_executed))
        return matches

    def _are_derived(self, pair: Pair) -> list[bool]:
        """Return for each tensor of a pair True if it was assembled from, or cut out of, recorded ones."""
        return [run.is_derived(entry) for run, entry in zip(self._runs, pair, strict=True)]

    def is_near(self, pairs: Sequence[Pair]) -> bool:
        """Return True if pairs of no scalars or constants have about the same values; False without any."""
        # Scalars and constants are near to those of any op.
        distinctive_pairs = [pair for pair in pairs if is_distinctive(pair[0])]
        return bool(distinctive_pairs) and all(self._distance(pair) <= NEAR for pair in distinctive_pairs)

    def _distance(self, pair: Pair) -> float:
        """Return the relative error of two tensors: by numbers if one was assembled, else by summaries."""
        if pair[0].shape != pair[1].shape:
            return math.inf
        if not any(self._are_derived(pair)):
            return summary_distance(*pair).relative
        a, b = (run.array(entry) for run, entry in zip(self._runs, pair, strict=True))
        return math.inf if a is None or b is None else array_distance(a, b).relative


def _match_in_order(executed: Sequence[ExecutedOp], other_executed: Sequence[ExecutedOp]) -> list[OpMatch]:
    """Match executions of two ops in order, tensor by tensor; those that one op has more are left."""
    matches = []
    for (execution, outputs), (other_execution, b_outputs) in zip(executed, other_executed, strict=False):
        pairs = list(pair_entries(outputs, b_outputs))
        matches.append(OpMatch(pairs, ([execution], [other_execution])))
    return matches


def _are_pieces(executions: Sequence[Sequence[Entry]], other_executions: Sequence[Sequence[Entry]]) -> bool:
    """Return True if the first are the pieces: there are more of them, or else smaller ones."""
    if len(executions) != len(other_executions):
        return len(executions) > len(other_executions)
    sides = executions, other_executions
    sizes = [sum(e.summary.statistics.elements for outputs in side for e in outputs) for side in sides]
    return sizes[0] < sizes[1]


def _join_outputs(
    run: Run, entries: Sequence[Entry], other_run: Run, executions: Sequence[Sequence[Entry]]
) -> list[Pair]:
    """Pair each tensor of one execution with what several executions give together, if they fit together."""
    # By id: equal entries of two executions are two tensors.
    parts_by_id: dict[int, list[Entry]] = {}
    for outputs in executions:
        for entry, part in pair_entries(entries, outputs):
            parts_by_id.setdefault(id(entry), []).append(part)
    pairs: list[Pair] = []
    for entry in entries:
        parts = parts_by_id.get(id(entry), [])
        if len(parts) == len(executions) and (pair := join_pieces(run, entry, other_run, parts)):
            pairs.append(pair)
    return pairs


Sides = tuple[list[int], list[int]]
"""Indices of ops of both runs."""


class OpMatches:
    """The ops of two runs that are compared, and those without a counterpart.

    b_path_by_a_path: modules of the first run, and their names in the second.
    last_result_matches: the last results of both runs, if that of one run has no counterpart.
    """

    def __init__(
        self, runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], matcher: ExecutionMatcher,
        b_path_by_a_path: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._runs, self._flows, self._matcher = runs, flows, matcher
        self._b_path_by_a_path = b_path_by_a_path
        self._paired: tuple[set[int], set[int]] = (set(), set())
        self.matches: list[OpMatch] = []
        self.unmatched_ops: Sides = ([], [])
        self.last_result_matches: list[OpMatch] = []
        for phase in get_args(Phase):
            self._match_phase(phase)
            for side, indices in enumerate(self._unpaired_ops(phase)):
                self.unmatched_ops[side].extend(indices)

    def _match_phase(self, phase: str) -> None:
        """Add the matches of a phase: first ops that are surely equal, then pieces, then doubtful pairs."""
        if phase == "optimizer":
            # The order of parameters in an optimizer says nothing, so what an op updates decides before its
            # name.
            for pair in pair_by_inputs(self._runs, self._unpaired_ops(phase)):
                self._add_matches(self._matcher.match_ops(*pair))
        doubtful_matches = []
        for pair in pair_same_ops(*self._runs, self._unpaired_ops(phase), self._b_path_by_a_path):
            matches = self._matcher.match_ops(*pair)
            are_near = all(self._matcher.is_near(match.pairs) for match in matches)
            if are_near or (len(matches) > 1 and all(match.is_whole for match in matches)):
                self._add_matches(matches)
            else:  # maybe one of several that make up the other
                doubtful_matches.append(matches)  # of one pair of ops
        # Pieces before doubtful pairs: an op that is a piece must not be paired with the whole.
        self._match_lines(phase)
        for matches in doubtful_matches:
            ops_a = [op for match in matches for op, _ in match.executions[0]]
            ops_b = [op for match in matches for op, _ in match.executions[1]]
            if self._paired[0].isdisjoint(ops_a) and self._paired[1].isdisjoint(ops_b):
                self._add_matches(matches)
        if phase == "forward":
            self._match_last_results()

    def _match_last_results(self) -> None:
        """Match the last results of both runs, as `last_result_matches` if one of them is paired already."""
        last_ops = [_last_result(run, flow) for run, flow in zip(self._runs, self._flows, strict=True)]
        if last_ops[0] is None or last_ops[1] is None:
            return
        # A result may come from an op of another type, which no name pairs.
        are_paired = [index in paired for index, paired in zip(last_ops, self._paired, strict=True)]
        if not all(are_paired):
            matches = self._matcher.match_results(last_ops[0], last_ops[1])
            if any(are_paired):
                self.last_result_matches = matches
            else:
                self._add_matches(matches)

    def _match_lines(self, phase: str) -> None:
        """Match the unpaired ops of a line of run a with those of a line of run b, as wholes and pieces."""
        path_in_b = renamer(self._b_path_by_a_path), dotted
        # For each run, by module and type: the ops of each source line.
        lines_by_key: list[dict[tuple[str, str], dict[str, list[int]]]] = [{}, {}]
        for run_index, indices in enumerate(self._unpaired_ops(phase)):
            for index in indices:
                op = self._runs[run_index].ops[index]
                key = path_in_b[run_index](op.module), op.type
                lines_by_key[run_index].setdefault(key, {}).setdefault(op.source, []).append(index)
        for key in lines_by_key[0].keys() & lines_by_key[1].keys():
            unmatched_lines = dict(lines_by_key[1][key])
            for source, indices in lines_by_key[0][key].items():
                # The same line first: False comes before True.
                for other_source in sorted(unmatched_lines, key=lambda other: other != source):
                    if matches := self._matcher.match_groups(indices, unmatched_lines[other_source]):
                        self._add_matches(matches)
                        del unmatched_lines[other_source]
                        break

    def _add_matches(self, matches: Sequence[OpMatch]) -> None:
        """Add matches, and mark their ops as paired."""
        self.matches.extend(matches)
        for match in matches:
            for run_index in (0, 1):
                self._paired[run_index].update(op for op, _ in match.executions[run_index])

    def _unpaired_ops(self, phase: str) -> Sides:
        """Return the ops of a phase that have no counterpart yet, of both runs."""
        sides = zip(self._runs, self._paired, strict=True)
        ops_a, ops_b = ([i for i in run.op_indices(phase) if i not in paired] for run, paired in sides)
        return ops_a, ops_b


def pair_by_inputs(runs: tuple[Run, Run], sides: Sides) -> list[tuple[int, int]]:
    """Pair ops of an optimizer that first read the same parameter or gradient, in whatever order they ran."""
    b_indices_by_key: dict[tuple[str, int, Hashable], list[int]] = {}
    for b_index in sides[1]:
        for key in _first_read(runs[1], b_index):
            b_indices_by_key.setdefault(key, []).append(b_index)
    a_index_by_b_index: dict[int, int] = {}
    for a_index in sides[0]:
        candidates = (i for key in _first_read(runs[0], a_index) for i in b_indices_by_key.get(key, ()))
        unpaired = (i for i in candidates if i not in a_index_by_b_index)
        if (partner := next(unpaired, None)) is not None:
            a_index_by_b_index[partner] = a_index
    return [(a_index, b_index) for b_index, a_index in a_index_by_b_index.items()]


def _first_read(run: Run, op_index: int) -> Iterator[tuple[str, int, Hashable]]:
    """Yield a key of each tensor that an op read at its first execution, except for scalars and constants."""
    op = run.ops[op_index]
    for entry in run.tensors_read(op_index, min(run.outputs_by_execution(op_index))):
        if is_distinctive(entry):
            yield op.type, entry.position, content_key(entry)


def _last_result(run: Run, flow: DataFlow) -> int | None:
    """Return the index of the last forward op that gives what no other op reads; None without one."""
    for index in reversed(run.op_indices("forward")):
        outputs = [entry for entries in run.outputs_by_execution(index).values() for entry in entries]
        # The backward pass begins by reading the shape of the loss, which is not a use of its value.
        if not reads_shape(run.ops[index]) and not any(map(flow.is_read, outputs)):
            return index
    return None


Partners = Sequence[Mapping[Execution, Sequence[Execution]]]
"""By run, the executions of the other run that an execution was compared with."""


def partners_of(matches: Sequence[OpMatch]) -> Partners:
    """Return for each run the executions of the other one that each of its executions was compared with."""
    return [
        {execution: match.executions[1 - side] for match in matches for execution in match.executions[side]}
        for side in (0, 1)
    ]


def has_same_precision(runs: tuple[Run, Run], matches: Sequence[OpMatch]) -> bool:
    """Return False for two runs whose products are mostly of other element types, as under autocast.

    Runs without products are compared by all ops of floating types.
    """
    pairs = [match.pairs[0] for match in matches]
    products = [pair for pair in pairs if is_compute(runs[0].ops[pair[0].op].type)]
    counts_by_run: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in products or pairs:
        for dtype_count, entry in zip(counts_by_run, pair, strict=True):
            if entry.dtype in TOLERANCES:
                dtype_count[entry.dtype] += 1
    if not all(counts_by_run):  # a run without floating types
        return True
    most_common_dtypes = [dtype_count.most_common(1)[0][0] for dtype_count in counts_by_run]
    return most_common_dtypes[0] == most_common_dtypes[1]
