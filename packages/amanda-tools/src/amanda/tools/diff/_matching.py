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


class OpMatch(NamedTuple):
    """Tensors of both runs that are compared with each other.

    executions: those of run a and those of run b; several where a tensor was joined of pieces.
    """

    pairs: Sequence[Pair]
    executions: tuple[Sequence[Execution], Sequence[Execution]]

    @property
    def is_whole(self) -> bool:
        """Return True for one execution of each run."""
        return all(len(side) == 1 for side in self.executions)


class ExecutionMatcher:
    """Pairs the executions of ops of two runs.

    pieces, unlike: ops that one run executed once and the other in pieces, which make up the whole, or do
    not.  unmatched: executions that the other run does not have.
    """

    def __init__(self, runs: tuple[Run, Run]) -> None:
        self._runs = runs
        self.pieces = self.unlike = self.unmatched = 0
        self._has_inputs = all(any(entry.role == "input" for entry in run.entries) for run in runs)
        sources = [{op.source for op in run.ops} for run in runs]
        # Half of the lines in common: two versions of a program rather than two programs.
        self._is_same_code = 2 * len(sources[0] & sources[1]) > min(map(len, sources))

    def match_ops(self, index: int, other_index: int) -> list[OpMatch]:
        """Match the executions of two ops of equal module and type; none where they are not the same op.

        Shapes decide; where they leave it open, pieces that make up a whole, then values.
        """
        sides = self._executions([index], 0), self._executions([other_index], 1)
        counts = list(map(len, sides))
        in_order = _match_in_order(*sides)
        matches = [match for match in in_order if match.pairs]
        are_comparable = all(map(self._is_comparable, in_order))
        # Executed as often, or a loop of another length that begins alike: executions pair up in order.
        if are_comparable and (
            counts[0] == counts[1]
            or (min(counts) > 1 and all(self.is_near(match.pairs) for match in in_order[:2]))
        ):
            self.unmatched += abs(counts[0] - counts[1])
            return matches
        # Outputs of other shapes from inputs of the same shapes are a difference, not another op.
        if counts[0] == counts[1] and all(self._reads_alike(match, default=False) for match in in_order):
            return matches
        # One run may compute at once what the other computes step by step, as with a cache of keys and
        # values.
        is_sure = not self._is_same_code or self._is_same_line(index, other_index)
        if (pieces := self._match_pieces(*sides, is_sure)) is not None:
            return pieces
        if are_comparable and min(counts) > 1:
            self.unmatched += abs(counts[0] - counts[1])
            return matches
        # Without inputs nothing in the dump speaks against the pair.
        if counts[0] == counts[1] and not self._has_inputs:
            return matches
        self.unlike += 1
        return []

    def match_groups(self, indices: Sequence[int], other_indices: Sequence[int]) -> list[OpMatch]:
        """Match the ops of two lines where those of one are pieces of those of the other."""
        sides = self._executions(indices, 0), self._executions(other_indices, 1)
        # As many on both sides are ops of their own, and not pieces of each other.
        if len(sides[0]) == len(sides[1]) > 1:
            return []
        is_sure = self._is_same_code and self._is_same_line(indices[0], other_indices[0])
        return self._match_pieces(*sides, is_sure) or []

    def match_results(self, index: int, other_index: int) -> list[OpMatch]:
        """Match the last ops of two runs, of any type; none where their tensors have other shapes."""
        sides = self._executions([index], 0), self._executions([other_index], 1)
        in_order = _match_in_order(*sides)
        if len(sides[0]) != len(sides[1]):
            return []
        have_same_shapes = all(self._has_same_shape(pair) for match in in_order for pair in match.pairs)
        return [match for match in in_order if match.pairs] if have_same_shapes else []

    def pair_reads(self, match: OpMatch) -> list[Pair]:
        """Pair what the ops of a match read."""
        sides = [
            [run.read(*execution) for execution in side]
            for run, side in zip(self._runs, match.executions, strict=True)
        ]
        if match.is_whole:
            return list(pair_entries(sides[0][0], sides[1][0]))
        return self.join(*sides)

    def join(
        self, executions: Sequence[Sequence[Entry]], other_executions: Sequence[Sequence[Entry]]
    ) -> list[Pair]:
        """Pair what one run has at one execution with what the other has at several, as far as it fits."""
        run, other_run = self._runs
        if _is_piece(executions, other_executions):
            joints = _join_outputs(other_run, other_executions[0], run, executions)
            return [(a, b) for b, a in joints]
        return _join_outputs(run, executions[0], other_run, other_executions)

    def _is_same_line(self, index: int, other_index: int) -> bool:
        return self._runs[0].ops[index].source == self._runs[1].ops[other_index].source

    def _executions(self, indices: Sequence[int], side: int) -> list[tuple[Execution, list[Entry]]]:
        """Return the executions of some ops, in order, and what they gave."""
        executions = [
            ((index, execution), outputs)
            for index in indices for execution, outputs in self._runs[side].results(index).items()
        ]  # fmt: skip
        return sorted(executions, key=lambda item: (item[1][0].order, item[0]))

    def _is_comparable(self, match: OpMatch) -> bool:
        """Return False where two executions are not of the same op.

        Outputs of other shapes say so; inputs of other shapes do too, unless the outputs' values are near.
        """
        if not all(self._has_same_shape(pair) for pair in match.pairs):
            return False
        return self._reads_alike(match, default=True) or self.is_near(match.pairs)

    def _reads_alike(self, match: OpMatch, default: bool) -> bool:
        read = self.pair_reads(match)
        return all(map(self._has_same_shape, read)) if read else default

    def _has_same_shape(self, pair: Pair) -> bool:
        """Return True for tensors of one shape, or of shapes that some arrangement makes equal."""
        if pair[0].shape == pair[1].shape:
            return True
        layouts = [run.layout(entry) for run, entry in zip(self._runs, pair, strict=True)]
        # Arrangements are decided by shape: a broadcast zero stands in, and no file is read.
        stand_in = np.broadcast_to(np.zeros(()), pair[1].shape)
        return any(True for _ in arrangements(stand_in, layouts[1], pair[0].shape, layouts[0]))

    def _match_pieces(
        self,
        executions: Sequence[tuple[Execution, list[Entry]]],
        other_executions: Sequence[tuple[Execution, list[Entry]]],
        is_sure: bool,
    ) -> list[OpMatch] | None:
        """Join pieces; None where they do not fit.  is_sure: the values may differ."""
        swapped = _is_piece(
            [outputs for _, outputs in executions], [outputs for _, outputs in other_executions]
        )
        wholes, parts = (other_executions, executions) if swapped else (executions, other_executions)
        spans = piece_ranges([outputs[0] for _, outputs in wholes], [outputs[0] for _, outputs in parts])
        if spans is None:
            return None
        matches = []
        for whole, span in zip(wholes, spans, strict=True):
            pieces = [parts[i] for i in span]
            sides = [whole], pieces
            side_a, side_b = sides[::-1] if swapped else sides
            pairs = self.join([outputs for _, outputs in side_a], [outputs for _, outputs in side_b])
            # A single piece was cut out of the whole, which fits many tensors: its values have to be near.
            is_cut = len(pieces) == 1 and any(all(self._are_derived(pair)) for pair in pairs)
            if not pairs or not ((is_sure and not is_cut) or self.is_near(pairs)):
                return None
            matches.append(OpMatch(pairs, ([key for key, _ in side_a], [key for key, _ in side_b])))
        is_joined = any(any(self._are_derived(pair)) for match in matches for pair in match.pairs)
        self.pieces += is_joined
        self.unmatched += 0 if is_joined else abs(len(executions) - len(other_executions))
        return matches

    def _are_derived(self, pair: Pair) -> list[bool]:
        """Return for each tensor of a pair True if it was assembled from, or cut out of, recorded ones."""
        return [run.is_derived(entry) for run, entry in zip(self._runs, pair, strict=True)]

    def is_near(self, pairs: Sequence[Pair]) -> bool:
        """Return True if tensors that are neither scalars nor constants have about the same values."""
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


def _match_in_order(
    executions: Sequence[tuple[Execution, list[Entry]]],
    other_executions: Sequence[tuple[Execution, list[Entry]]],
) -> list[OpMatch]:
    """Match executions of two ops in order, tensor by tensor; those that one op has more are left."""
    return [
        OpMatch(list(pair_entries(outputs, other_outputs)), ([key], [other_key]))
        for (key, outputs), (other_key, other_outputs) in zip(executions, other_executions, strict=False)
    ]


def _is_piece(executions: Sequence[Sequence[Entry]], other_executions: Sequence[Sequence[Entry]]) -> bool:
    """Return True if the first are the pieces: there are more of them, or else smaller ones."""
    if len(executions) != len(other_executions):
        return len(executions) > len(other_executions)
    sizes = [
        sum(entry.summary.statistics.elements for outputs in side for entry in outputs)
        for side in (executions, other_executions)
    ]
    return sizes[0] < sizes[1]


def _join_outputs(
    run: Run, entries: Sequence[Entry], other_run: Run, executions: Sequence[Sequence[Entry]]
) -> list[Pair]:
    """Pair each tensor of one execution with the tensor that several executions give together."""
    # By id: equal entries of two executions are two tensors.
    partners = [{id(entry): part for entry, part in pair_entries(entries, outputs)} for outputs in executions]
    pairs: list[Pair] = []
    for entry in entries:
        parts = [by_id[id(entry)] for by_id in partners if id(entry) in by_id]
        if len(parts) == len(executions) and (pair := join_pieces(run, entry, other_run, parts)):
            pairs.append(pair)
    return pairs


Sides = tuple[list[int], list[int]]
"""Indices of ops of both runs."""


class OpMatches:
    """The ops of two runs that are compared, and those without a counterpart.

    renamed: modules of the first run, and their names in the second.  ends: the last results of both runs,
    if the result of one run has no counterpart.
    """

    def __init__(
        self, runs: tuple[Run, Run], flows: tuple[DataFlow, DataFlow], matching: ExecutionMatcher,
        renamed: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._runs, self._flows, self._matcher, self._renamed = runs, flows, matching, renamed
        self._paired: tuple[set[int], set[int]] = (set(), set())
        self.matches: list[OpMatch] = []
        self.unmatched_ops: Sides = ([], [])
        self.ends: list[OpMatch] = []
        for phase in get_args(Phase):
            self._match_phase(phase)
            for side, indices in enumerate(self._unpaired(phase)):
                self.unmatched_ops[side].extend(indices)

    def _match_phase(self, phase: str) -> None:
        """Match the ops of a phase: first those that are surely equal, then pieces, then doubtful pairs."""
        if phase == "optimizer":
            # The order of parameters in an optimizer says nothing, so what an op updates decides before its
            # name.
            for pair in by_inputs(self._runs, self._unpaired(phase)):
                self._add_matches(self._matcher.match_ops(*pair))
        postponed = []
        for pair in pair_same_ops(*self._runs, self._unpaired(phase), self._renamed):
            matches = self._matcher.match_ops(*pair)
            are_near = all(self._matcher.is_near(match.pairs) for match in matches)
            if are_near or (len(matches) > 1 and all(match.is_whole for match in matches)):
                self._add_matches(matches)
            else:  # maybe one of several that make up the other
                postponed.append(matches)
        # Pieces before doubtful pairs: an op that is a piece must not be paired with the whole.
        self._match_lines(phase)
        for matches in postponed:
            ops = [(side, op) for match in matches for side in (0, 1) for op, _ in match.executions[side]]
            if not any(op in self._paired[side] for side, op in ops):
                self._add_matches(matches)
        if phase == "forward":
            self._match_ends()

    def _match_ends(self) -> None:
        """Match the last results of both runs: as `ends` if one of them is paired already."""
        last_ops = [_last_result(run, flow) for run, flow in zip(self._runs, self._flows, strict=True)]
        if last_ops[0] is None or last_ops[1] is None:
            return
        # A result may come from an op of another type, which no name pairs.
        are_paired = [index in paired for index, paired in zip(last_ops, self._paired, strict=True)]
        if not all(are_paired):
            matches = self._matcher.match_results(last_ops[0], last_ops[1])
            if any(are_paired):
                self.ends = matches
            else:
                self._add_matches(matches)

    def _match_lines(self, phase: str) -> None:
        """Match ops of one line with those of another whose tensors are pieces of theirs."""
        names = renamer(self._renamed), dotted
        lines: list[dict[tuple[str, str], dict[str, list[int]]]] = [{}, {}]
        for side, indices in enumerate(self._unpaired(phase)):
            for index in indices:
                op = self._runs[side].ops[index]
                key = names[side](op.module), op.type
                lines[side].setdefault(key, {}).setdefault(op.source, []).append(index)
        for key in lines[0].keys() & lines[1].keys():
            waiting = dict(lines[1][key])
            for source, indices in lines[0][key].items():
                # The same line first: False comes before True.
                for other_source in sorted(waiting, key=source.__ne__):
                    if matches := self._matcher.match_groups(indices, waiting[other_source]):
                        self._add_matches(matches)
                        del waiting[other_source]
                        break

    def _add_matches(self, matches: Sequence[OpMatch]) -> None:
        """Add matches, and mark their ops as paired."""
        self.matches.extend(matches)
        for match in matches:
            for side in (0, 1):
                self._paired[side].update(op for op, _ in match.executions[side])

    def _unpaired(self, phase: str) -> Sides:
        """Return the ops of a phase that have no counterpart yet, of both runs."""
        ops_a, ops_b = (
            [i for i in run.indices(phase) if i not in paired]
            for run, paired in zip(self._runs, self._paired, strict=True)
        )
        return ops_a, ops_b


def by_inputs(runs: tuple[Run, Run], sides: Sides) -> list[tuple[int, int]]:
    """Pair ops of an optimizer that first read the same parameter or gradient, in whatever order they ran."""
    waiting: dict[tuple[str, int, Hashable], list[int]] = {}
    for index in sides[1]:
        for key in _first_read(runs[1], index):
            waiting.setdefault(key, []).append(index)
    pairs: dict[int, int] = {}  # by the op of the second run
    for index in sides[0]:
        candidates = (match for key in _first_read(runs[0], index) for match in waiting.get(key, ()))
        partner = next((candidate for candidate in candidates if candidate not in pairs), None)
        if partner is not None:
            pairs[partner] = index
    return [(index, partner) for partner, index in pairs.items()]


def _first_read(run: Run, index: int) -> Iterator[tuple[str, int, Hashable]]:
    """Yield a key for each tensor that an op read first, except for scalars and constants."""
    op = run.ops[index]
    for entry in run.read(index, min(run.results(index))):
        if is_distinctive(entry):
            yield op.type, entry.position, content_key(entry)


def _last_result(run: Run, flow: DataFlow) -> int | None:
    """Return the last op of the forward pass that gives what no other op reads; None without one."""
    for index in reversed(run.indices("forward")):
        outputs = [entry for entries in run.results(index).values() for entry in entries]
        # The backward pass begins by reading the shape of the loss, which is not a use of its value.
        if not reads_shape(run.ops[index]) and not any(map(flow.is_read, outputs)):
            return index
    return None


Partners = Sequence[Mapping[Execution, Sequence[Execution]]]
"""By run, the executions of the other run that an execution was compared with."""


def partners_of(matches: Sequence[OpMatch]) -> Partners:
    """Return the executions of ops of both runs that were compared with each other."""
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
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in products or pairs:
        for count, entry in zip(counts, pair, strict=True):
            count[entry.dtype] += entry.dtype in TOLERANCES
    common_dtypes = [(+count).most_common(1) for count in counts]
    return not all(common_dtypes) or common_dtypes[0][0][0] == common_dtypes[1][0][0]
