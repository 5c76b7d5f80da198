"""Ops of two runs that are compared with each other: like with like, wholes with their pieces."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import get_args

from amanda.tools.diff._align import dotted, renaming, same_ops
from amanda.tools.diff._executions import Match, Matching
from amanda.tools.diff._flow import Flow, key_of, reads_shape
from amanda.tools.diff._likeness import is_telling
from amanda.tools.diff._run import Run
from amanda.tools.select import Phase

Sides = tuple[list[int], list[int]]
"""Indices of ops of both runs."""


class OpMatches:
    """The ops of two runs that are compared, and those without a counterpart.

    renamed: modules of the first run, and their names in the second.  ends: the last results of both runs,
    if the result of one run has no counterpart.
    """

    def __init__(
        self, runs: tuple[Run, Run], flows: tuple[Flow, Flow], matching: Matching, renamed: Mapping[str, str]
    ) -> None:
        self._runs, self._flows, self._matching, self._renamed = runs, flows, matching, renamed
        self._paired: tuple[set[int], set[int]] = (set(), set())
        self.matches: list[Match] = []
        self.alone: Sides = ([], [])
        self.ends: list[Match] = []
        for phase in get_args(Phase):
            self._match(phase)
            for side, indices in enumerate(self._unpaired(phase)):
                self.alone[side].extend(indices)

    def _match(self, phase: str) -> None:
        if phase == "optimizer":
            for pair in by_inputs(self._runs, self._unpaired(phase)):
                self._take(self._matching.of_ops(*pair))
        postponed = []
        for pair in same_ops(*self._runs, self._unpaired(phase), self._renamed):
            matches = self._matching.of_ops(*pair)
            if self._matching.is_near(matches) or all(one.is_whole and len(matches) > 1 for one in matches):
                self._take(matches)
            else:  # maybe one of several that make up the other
                postponed.append(matches)
        self._match_lines(phase)
        for matches in postponed:
            if not any(
                op in self._paired[side]
                for one in matches
                for side in (0, 1)
                for op, _ in one.executions[side]
            ):
                self._take(matches)
        if phase == "forward":
            self._match_ends()

    def _match_ends(self) -> None:
        """Match the last results of both runs."""
        last = [_last_result(run, flow) for run, flow in zip(self._runs, self._flows, strict=True)]
        if last[0] is None or last[1] is None:
            return
        are_paired = [index in paired for index, paired in zip(last, self._paired, strict=True)]
        if not all(are_paired):
            matches = self._matching.of_results(last[0], last[1])
            if any(are_paired):
                self.ends = matches
            else:
                self._take(matches)

    def _match_lines(self, phase: str) -> None:
        """Match ops of one line with those of another whose tensors are pieces of theirs."""
        names = renaming(self._renamed), dotted
        lines: list[dict[tuple[str, str], dict[str, list[int]]]] = [{}, {}]
        for side, indices in enumerate(self._unpaired(phase)):
            for index in indices:
                op = self._runs[side].ops[index]
                key = names[side](op.module), op.type
                lines[side].setdefault(key, {}).setdefault(op.source, []).append(index)
        for key in lines[0].keys() & lines[1].keys():
            waiting = dict(lines[1][key])
            for source, indices in lines[0][key].items():
                for other_source in sorted(waiting, key=source.__ne__):
                    if matches := self._matching.of_groups(indices, waiting[other_source]):
                        self._take(matches)
                        del waiting[other_source]
                        break

    def _take(self, matches: Sequence[Match]) -> None:
        self.matches.extend(matches)
        for match in matches:
            for side in (0, 1):
                self._paired[side].update(op for op, _ in match.executions[side])

    def _unpaired(self, phase: str) -> Sides:
        one, other = (
            [i for i in run.indices(phase) if i not in paired]
            for run, paired in zip(self._runs, self._paired, strict=True)
        )
        return one, other


def by_inputs(runs: tuple[Run, Run], sides: Sides) -> list[tuple[int, int]]:
    """Pair ops of an optimizer that first read the same parameter or gradient, in whatever order they ran."""
    waiting: dict[tuple[str, int, Hashable], list[int]] = {}
    for index in sides[1]:
        for key in _first_read(runs[1], index):
            waiting.setdefault(key, []).append(index)
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for index in sides[0]:
        for key in _first_read(runs[0], index):
            free = [one for one in waiting.get(key, ()) if one not in taken]
            if free:
                taken.add(free[0])
                pairs.append((index, free[0]))
                break
    return pairs


def _first_read(run: Run, index: int) -> Iterator[tuple[str, int, Hashable]]:
    """Yield a key for each tensor that an op read first, except for scalars and constants."""
    op = run.ops[index]
    for entry in run.read(index, min(run.results(index)), "input", "weight"):
        if is_telling(entry):
            yield op.type, entry.position, key_of(entry)


def _last_result(run: Run, flow: Flow) -> int | None:
    """Return the last op of the forward pass that gives what no other op reads; None without one."""
    for index in reversed(run.indices("forward")):
        outputs = [entry for one in run.results(index).values() for entry in one]
        if not reads_shape(run.ops[index]) and not any(map(flow.is_read, outputs)):
            return index
    return None
