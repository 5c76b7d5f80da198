"""Executions of ops of two runs that gave tensors of the same shapes, or pieces of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from amanda.tools.diff._compare import Pair, arranged, array_distance, matched, summary_distance
from amanda.tools.diff._flow import Execution
from amanda.tools.diff._likeness import NEAR, is_telling
from amanda.tools.diff._pieces import joined, shares
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np

INPUT_ROLES = ("input", "weight")


class Match(NamedTuple):
    """Tensors of both runs that are compared with each other.

    executions: those of run a and those of run b; several where a tensor was joined of pieces.
    """

    pairs: Sequence[Pair]
    executions: tuple[Sequence[Execution], Sequence[Execution]]

    @property
    def is_whole(self) -> bool:
        """Return True for one execution of each run."""
        return all(len(side) == 1 for side in self.executions)


class Matching:
    """Pairs the executions of ops of two runs.

    pieces, unlike: ops that one run executed once and the other in pieces, which make up the whole, or do
    not.  left: executions of ops that the other run does not have.
    """

    def __init__(self, runs: tuple[Run, Run]) -> None:
        self._runs = runs
        self.pieces = self.unlike = self.left = 0
        self._has_inputs = all(any(one.role == "input" for one in run.entries) for run in runs)
        sources = [{op.source for op in run.ops} for run in runs]
        self.is_same_code = 2 * len(sources[0] & sources[1]) > min(map(len, sources))

    def of_ops(self, index: int, other_index: int) -> list[Match]:
        """Match two ops that seem to be the same; none where shapes say otherwise."""
        sides = self._executions([index], 0), self._executions([other_index], 1)
        counts = list(map(len, sides))
        whole = [self._whole(*both) for both in zip(*sides, strict=False)]
        fits = all(map(self._is_comparable, whole))
        if fits and (counts[0] == counts[1] or (min(counts) > 1 and self._begins_alike(whole))):
            self.left += abs(counts[0] - counts[1])
            return [one for one in whole if one.pairs]
        if counts[0] == counts[1] and all(self._reads_alike(one, default=False) for one in whole):
            return [one for one in whole if one.pairs]
        if (matches := self._in_pieces(*sides, self.is_same_line(index, other_index))) is not None:
            return matches
        if fits and min(counts) > 1:
            self.left += abs(counts[0] - counts[1])
            return [one for one in whole if one.pairs]
        if counts[0] == counts[1] and not self._has_inputs:
            return [one for one in whole if one.pairs]
        self.unlike += 1
        return []

    def of_groups(self, indices: Sequence[int], others: Sequence[int]) -> list[Match]:
        """Match the ops of two lines where those of one are pieces of those of the other."""
        sides = self._executions(indices, 0), self._executions(others, 1)
        if len(sides[0]) == len(sides[1]) > 1:
            return []
        one, other = self._runs[0].ops[indices[0]], self._runs[1].ops[others[0]]
        return self._in_pieces(*sides, self.is_same_code and one.source == other.source) or []

    def of_results(self, index: int, other_index: int) -> list[Match]:
        """Match the last ops of two runs, of any type, where their tensors have the same shapes."""
        sides = self._executions([index], 0), self._executions([other_index], 1)
        whole = [self._whole(*both) for both in zip(*sides, strict=False)]
        fits = all(self._has_same_shape(pair) for one in whole for pair in one.pairs)
        return [one for one in whole if one.pairs] if fits and len(sides[0]) == len(sides[1]) else []

    def is_same_line(self, index: int, other_index: int) -> bool:
        """Return False for ops of two lines in runs of the same code."""
        one, other = self._runs[0].ops[index], self._runs[1].ops[other_index]
        return not self.is_same_code or one.source == other.source

    def is_near(self, matches: Sequence[Match]) -> bool:
        """Return True for tensors that have about the same values."""
        return all(self._is_near(one.pairs) for one in matches)

    def reads(self, match: Match) -> list[Pair]:
        """Pair what the ops of a match read."""
        sides = [
            [run.read(*execution, *INPUT_ROLES) for execution in side]
            for run, side in zip(self._runs, match.executions, strict=True)
        ]
        if match.is_whole:
            return list(matched(sides[0][0], sides[1][0]))
        return self.joined(*sides)

    def joined(self, ones: Sequence[Sequence[Entry]], others: Sequence[Sequence[Entry]]) -> list[Pair]:
        """Pair what one run has at one execution with what the other has at several, as far as it fits."""
        run, other = self._runs
        if _is_piece(ones, others):
            joints = _joined(other, others[0], run, ones)
            return [(two, one) for one, two in joints]
        return _joined(run, ones[0], other, others)

    def _executions(self, indices: Sequence[int], side: int) -> list[tuple[Execution, list[Entry]]]:
        """Return the executions of some ops, in order, and what they gave."""
        executions = [
            ((index, execution), outputs)
            for index in indices for execution, outputs in self._runs[side].results(index).items()
        ]  # fmt: skip
        return sorted(executions, key=lambda one: (one[1][0].order, one[0]))

    def _whole(self, one: tuple[Execution, list[Entry]], other: tuple[Execution, list[Entry]]) -> Match:
        return Match(list(matched(one[1], other[1])), ([one[0]], [other[0]]))

    def _is_comparable(self, match: Match) -> bool:
        """Return False where shapes say that two executions are not of the same op."""
        if not all(self._has_same_shape(pair) for pair in match.pairs):
            return False
        return self._reads_alike(match, default=True) or self._is_near(match.pairs)

    def _reads_alike(self, match: Match, default: bool) -> bool:
        """Return True if what two executions read has the same shapes; default: of what read nothing."""
        read = self.reads(match)
        return all(map(self._has_same_shape, read)) if read else default

    def _has_same_shape(self, pair: Pair) -> bool:
        if pair[0].shape == pair[1].shape:
            return True
        ops = [run.ops[entry.op] for run, entry in zip(self._runs, pair, strict=True)]
        layouts = [op.weight_layout if "weight" in pair[0].role else op.layout for op in ops]
        stand_in = np.broadcast_to(np.zeros(()), pair[1].shape)
        return any(True for _ in arranged(stand_in, layouts[1], pair[0].shape, layouts[0]))

    def _begins_alike(self, whole: Sequence[Match]) -> bool:
        return all(self._is_near(one.pairs) for one in whole[:2])

    def _in_pieces(
        self,
        ones: Sequence[tuple[Execution, list[Entry]]],
        others: Sequence[tuple[Execution, list[Entry]]],
        is_sure: bool,
    ) -> list[Match] | None:
        """Join pieces; None where they do not fit.  is_sure: the values may differ."""
        swapped = _is_piece([outputs for _, outputs in ones], [outputs for _, outputs in others])
        wholes, parts = (others, ones) if swapped else (ones, others)
        chosen = shares([outputs[0] for _, outputs in wholes], [outputs[0] for _, outputs in parts])
        if chosen is None:
            return None
        matches = []
        for whole, span in zip(wholes, chosen, strict=True):
            pieces = [parts[i] for i in span]
            sides = [whole], pieces
            one, other = sides[::-1] if swapped else sides
            pairs = self.joined([outputs for _, outputs in one], [outputs for _, outputs in other])
            is_cut = len(pieces) == 1 and any(all(self._derived(pair)) for pair in pairs)
            if not pairs or not ((is_sure and not is_cut) or self._is_near(pairs)):
                return None
            matches.append(Match(pairs, ([place for place, _ in one], [place for place, _ in other])))
        is_joined = any(any(self._derived(pair)) for one in matches for pair in one.pairs)
        self.pieces += is_joined
        self.left += 0 if is_joined else abs(len(ones) - len(others))
        return matches

    def _derived(self, pair: Pair) -> list[bool]:
        return [run.is_derived(entry) for run, entry in zip(self._runs, pair, strict=True)]

    def _is_near(self, pairs: Sequence[Pair]) -> bool:
        """Return True if tensors that are neither scalars nor constants have about the same values."""
        telling = [pair for pair in pairs if is_telling(pair[0])]
        return bool(telling) and all(self._distance(pair) <= NEAR for pair in telling)

    def _distance(self, pair: Pair) -> float:
        if pair[0].shape != pair[1].shape:
            return math.inf
        if not any(self._derived(pair)):
            return summary_distance(*pair).relative
        one, other = (run.array(entry) for run, entry in zip(self._runs, pair, strict=True))
        return math.inf if one is None or other is None else array_distance(one, other).relative


def _is_piece(ones: Sequence[Sequence[Entry]], others: Sequence[Sequence[Entry]]) -> bool:
    """Return True if the first are the pieces: there are more of them, or else smaller ones."""
    if len(ones) != len(others):
        return len(ones) > len(others)
    sizes = [
        sum(entry.summary.statistics.elements for outputs in side for entry in outputs)
        for side in (ones, others)
    ]
    return sizes[0] < sizes[1]


def _joined(
    run: Run, entries: Sequence[Entry], other: Run, executions: Sequence[Sequence[Entry]]
) -> list[Pair]:
    matches = [{id(entry): part for entry, part in matched(entries, one)} for one in executions]
    pairs: list[Pair] = []
    for entry in entries:
        parts = [one[id(entry)] for one in matches if id(entry) in one]
        pair = joined(run, entry, other, parts) if len(parts) == len(executions) else None
        pairs += [pair] if pair is not None else []
    return pairs
