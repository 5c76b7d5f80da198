"""Ops of two runs that are compared with each other: like with like, wholes with their pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from amanda.tools.diff._align import dotted, renaming, same_ops
from amanda.tools.diff._executions import Match, Matching
from amanda.tools.diff._flow import Flow
from amanda.tools.diff._run import Run
from amanda.tools.select import Phase

Sides = tuple[list[int], list[int]]
"""Indices of ops of both runs."""


def match_ops(
    runs: tuple[Run, Run], flows: tuple[Flow, Flow], matching: Matching, renamed: Mapping[str, str]
) -> tuple[list[Match], Sides]:
    """Match the ops of two runs; return also those without a counterpart.

    renamed: modules of the first run, and their names in the second.
    """
    found: list[Match] = []
    alone: Sides = ([], [])
    for phase in get_args(Phase):
        paired: tuple[set[int], set[int]] = (set(), set())
        for pair in same_ops(*runs, phase, renamed):
            _take(matching.of_ops(*pair), found, paired)
        _match_lines(runs, matching, renamed, _unpaired(runs, phase, paired), found, paired)
        if phase == "forward":
            last = [one[-1:] for one in _unpaired(runs, phase, paired)]
            if all(last) and all(_is_result(run, flow, one[0]) for run, flow, one in zip(runs, flows, last, strict=True)):
                _take(matching.of_results(last[0][0], last[1][0]), found, paired)
        for side, indices in enumerate(_unpaired(runs, phase, paired)):
            alone[side].extend(indices)
    return found, alone


def _take(matches: Sequence[Match], found: list[Match], paired: tuple[set[int], set[int]]) -> None:
    found.extend(matches)
    for match in matches:
        for side in (0, 1):
            paired[side].update(op for op, _ in match.executions[side])


def _unpaired(runs: tuple[Run, Run], phase: str, paired: tuple[set[int], set[int]]) -> Sides:
    one, other = ([i for i in run.indices(phase) if i not in known] for run, known in zip(runs, paired, strict=True))
    return one, other


def _match_lines(
    runs: tuple[Run, Run], matching: Matching, renamed: Mapping[str, str], unpaired: Sides,
    found: list[Match], paired: tuple[set[int], set[int]],
) -> None:  # fmt: skip
    """Match ops of one line with those of another whose tensors are pieces of theirs."""
    names = renaming(renamed), dotted
    lines: list[dict[tuple[str, str], dict[str, list[int]]]] = [{}, {}]
    for side, run in enumerate(runs):
        for index in unpaired[side]:
            op = run.ops[index]
            key = names[side](op.module), op.type
            lines[side].setdefault(key, {}).setdefault(op.source, []).append(index)
    for key in lines[0].keys() & lines[1].keys():
        waiting = dict(lines[1][key])
        for source, indices in lines[0][key].items():
            for other_source in sorted(waiting, key=lambda one: one != source):
                if matches := matching.of_groups(indices, waiting[other_source]):
                    _take(matches, found, paired)
                    del waiting[other_source]
                    break


def _is_result(run: Run, flow: Flow, index: int) -> bool:
    """Return True for an op at the end of a run: no op reads what it gives."""
    is_last = index == run.indices("forward")[-1]
    return is_last and not any(flow.is_read(entry) for given in run.made(index).values() for entry in given)
