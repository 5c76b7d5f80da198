"""The function that compares two runs, and the file that bundles them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import ZipFile

from amanda.errors import AmandaError
from amanda.files import replacing
from amanda.options import NonNegativeFloat, NonNegativeInt, OutputFile, checked
from amanda.tools.diff._alignment import dotted, inside_module, same_modules, unpaired_modules
from amanda.tools.diff._comparing import Expected, RunComparison
from amanda.tools.diff._programs import MAX_BYTES
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Compiled, Run, Source, run_of
from amanda.tools.diff._runs import Control, RecordedRuns
from amanda.tools.dump import Dump
from amanda.tools.results import check_size, parsing, to_json

_RESULT_FILE = "diff.json"
_MEMBER = re.compile(r"(a|b|control)/(index\.json|tensors-\d+\.(safetensors|npz))")


def write_bundle(path: Path, runs: Mapping[str, Run], result: DiffResult) -> None:
    """Write the dumps of runs and a result into one file, which is whole or as it was before.

    runs: by "a", "b" and "control".  Raises AmandaError for statistics, which have no tensors, and FileError.
    """
    for label, run in runs.items():
        if run.dump is None:
            raise AmandaError(f"a bundle holds dumps, and {label} is a file of statistics: {run.name}")
    names = {label: run.name for label, run in runs.items()}
    dumps = {label: run.dump for label, run in runs.items() if run.dump is not None}
    with replacing(path) as part, ZipFile(part, "w") as file:
        file.writestr(_RESULT_FILE, to_json({**result.to_dict(), "runs": names}))
        for label, dump in dumps.items():
            for name in ("index.json", *dump.files):
                file.write(dump.folder / name, f"{label}/{name}")


@contextmanager
def open_bundle(path: Path | str | None) -> Iterator[dict[str, Run]]:
    """Give the runs of a bundle by "a", "b" and "control", while the context is open; none for None.

    Raises AmandaError for another file, and for one that is larger than what is read.
    """
    if path is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        with parsing(path, "bundle of amanda diff"):
            names = _extract_dumps(Path(path), folder)
            runs = {
                label: replace(run_of(Dump(Path(folder) / label)), name=f"{name} of {path}")
                for label, name in names.items() if label in ("a", "b", "control")
            }  # fmt: skip
        yield runs


def _extract_dumps(path: Path, folder: str) -> dict[str, str]:
    """Write the dumps of a bundle into a folder; return the names of its runs."""
    with ZipFile(path) as file:
        check_size(path, sum(member.file_size for member in file.infolist()))
        names = json.loads(file.read(_RESULT_FILE))["runs"]
        if not isinstance(names, dict):
            raise ValueError(f"its runs are {type(names).__name__}, no object")
        for name in file.namelist():
            if _MEMBER.fullmatch(name):
                file.extract(name, folder)
            elif name != _RESULT_FILE:
                raise ValueError(f"it has {name!r} in it, which is no part of a bundle")
    return names


By = Literal["op", "module"]
_MAX_NAMES = 4
"""Modules that a note names."""


@checked
def diff(
    a: Source,
    b: Source,
    *inputs: Any,
    mapping: Mapping[str, str] | None = None,
    rtol: NonNegativeFloat | None = None,
    by: By | None = None,
    max_bytes: NonNegativeInt = MAX_BYTES,
    compiled: Compiled = "eager",
    control: Control | Source | None = None,
    bisect: bool = False,
    bundle: OutputFile | None = None,
) -> DiffResult:
    """Find the first op at which two runs diverge, and how the error grows.

    a, b: functions, commands, dumps or statistics, or paths to dumps or statistics.  `diff` calls a function
    with `inputs`, and keeps all its tensors in a temporary folder of at most `max_bytes`.  A command such as
    `Command("train.py --epochs 1")` runs in a process of its own.  Every run of a function starts from the
    same random state and the same state of all PyTorch modules and optimizers.  mapping: module paths of a
    to module paths of b.

    rtol: largest relative error at which tensors agree.  With None, the control sets the tolerance; without
    a control, the element type does (`TOLERANCES`).  After an op that both runs computed in a less precise
    type, and whose outputs differ, the tolerance of that type holds for later ops too.  control: a further
    run of a, whose distance from a is the expected error of each op: "again" repeats a, "float64" runs a in
    float64 (PyTorch), "auto" tries "float64" and falls back to "again"; or a dump or other source.  Errors
    up to ten times the expected error agree.

    by: "op" compares ops of the same module and type, in order.  "module" compares the outputs of modules
    and the gradients of their weights; without a mapping, modules of equal names are paired, or, if fewer
    than half of the names are shared, modules with weights of the same sizes in order.  The result lists the
    others.  None is "module" for different frameworks, and for TensorFlow's eager mode against its graphs;
    otherwise "op".  The result names the choice.

    compiled: for functions, as in `amanda.apply`.  "eager" runs compiled callables op by op, and the result
    says so.  "instrument" compares the compiled code and the returned values; the result says if a function
    returns other numbers without a tool.

    bisect: run b again with a's value at the first op that diverges; `remaining` compares that run with a.
    bundle: a `.zip` file for the runs and the result; `amanda diff --open` reads it.

    Raises AmandaError if nothing can be compared, or if a module of the mapping executed no op.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = RecordedRuns(Path(folder), a, b, inputs, compiled, max_bytes)
        for name, other_name in (mapping or {}).items():
            _check_module(runs.a, name)
            _check_module(runs.b, other_name)
        criteria = _Criteria(mapping, rtol, by, runs.expected(control))
        result, comparing = _compare_runs(runs.a, runs.b, criteria)
        result.told += tuple(runs.remarks)
        if runs.failure is not None:
            result.fail([pair[1].op for pair in comparing.pairs], *runs.failure)
        elif bisect and result.first is not None:
            again = None
            if not result.modules:
                again = runs.with_value(comparing.pairs[result.comparisons.index(result.first)])
            if again is None:
                result.told += ("What remains of the difference is not known: no op can give a's value in b",)
            else:
                result.remaining, _ = _compare_runs(runs.a, again, criteria)
                result.told += tuple(again.remarks)
        if bundle is not None:
            write_bundle(Path(bundle), runs.recorded, result)
        return result


class _Criteria(NamedTuple):
    """How runs are compared: see `diff`."""

    mapping: Mapping[str, str] | None
    rtol: float | None
    by: By | None
    expected: Expected | None


def _compare_runs(run: Run, other_run: Run, criteria: _Criteria) -> tuple[DiffResult, RunComparison]:
    """Compare two runs, op by op or module by module."""
    mapping, rtol, by, expected = criteria
    notes, comparing = _notes_on_compiled(run, other_run), RunComparison(run, other_run, rtol, expected)
    if by == "op" or (by is None and run.is_like(other_run)):
        compared_ops, alone = comparing.ops(mapping or {})
        compared = comparing.explained(comparing.in_order(compared_ops))
        notes += _notes_on_pieces(comparing)
        return DiffResult(run.name, other_run.name, compared, *alone, told=notes), comparing
    if by is None:
        notes.append(
            f"Modules were compared, not ops: a ran as {_mode(run)}, b as {_mode(other_run)}; "
            'by="op" compares ops'
        )
    names = same_modules(run, other_run) if mapping is None else mapping
    if mapping is None:
        notes += _notes_on_modules(run, other_run, names)
    compared = comparing.in_order(comparing.modules(names))
    if comparing.shaped:
        notes.append(f"Modules whose axes do not match, and were not compared: {_listed(comparing.shaped)}")
    if comparing.uneven:
        notes.append(
            "Modules that one run called more often than the other, of which the last outputs alone were "
            f"compared: {_listed(comparing.uneven)}"
        )
    notes += _notes_on_pieces(comparing)
    return DiffResult(run.name, other_run.name, compared, modules=list(names), told=notes), comparing


def _mode(run: Run) -> str:
    return f"{run.framework or 'statistics'}{'/graph' if run.in_graph else ''}"


def _notes_on_compiled(run: Run, other_run: Run) -> list[str]:
    """Return sentences on compiled callables that ran as eager code."""
    notes = [
        f"Eager code of {name}: {', '.join(side.op_by_op)} ran op by op"
        for name, side in (("a", run), ("b", other_run)) if side.op_by_op
    ]  # fmt: skip
    if notes and not run.in_graph and not other_run.in_graph:
        notes.insert(0, "Eager code was compared with eager code, and nothing that a compiler made")
    if notes:
        notes.append('compiled="instrument" (--compiled instrument) runs compiled code')
    return notes


def _notes_on_modules(run: Run, other_run: Run, names: Mapping[str, str]) -> list[str]:
    """Return a sentence on modules of each run that have no counterpart."""
    notes = []
    for label, side, paired in (("a", run, names), ("b", other_run, names.values())):
        if unpaired := unpaired_modules(side, paired):
            notes.append(f"Modules of {label} that were not compared: {_listed(unpaired)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _notes_on_pieces(comparing: RunComparison) -> list[str]:
    """Return sentences on ops that one run executed once and the other several times."""
    notes, matching = [], comparing.matching
    if matching.pieces:
        notes.append(
            f"{matching.pieces} ops ran once in one run and in pieces in the other: the pieces were joined"
        )
    if matching.unlike:
        notes.append(f"{matching.unlike} ops in pieces do not make up what the other run gave, and were left")
    if matching.unmatched:
        notes.append(
            f"{matching.unmatched} executions of ops that one run has more than the other were not compared"
        )
    if comparing.dismissed:
        notes.append(
            f"{comparing.dismissed} ops differ though the runs come to the same results: they are parts of "
            "two ways to compute these"
        )
    return notes


def _check_module(run: Run, name: str) -> None:
    """Raise AmandaError for a module that no op ran in."""
    inside = inside_module(run, name)
    paths = {dotted(op.module) for op in run.ops if op.module}
    if not any(map(inside, paths)):
        near = get_close_matches(name, paths, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(paths)[:8])}"
        raise AmandaError(f"module {name!r} of the mapping executed nothing in {run.name}; {hint}")
