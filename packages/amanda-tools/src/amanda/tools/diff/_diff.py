"""The function that compares two runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

from amanda.errors import AmandaError
from amanda.options import NonNegativeFloat, NonNegativeInt, OutputFile, checked
from amanda.tools.diff._align import alone, dotted, same_modules, within
from amanda.tools.diff._bundle import write_bundle
from amanda.tools.diff._comparing import Comparing, Expected
from amanda.tools.diff._programs import MAX_BYTES
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Compiled, Run, Source
from amanda.tools.diff._runs import Control, Runs

By = Literal["op", "module"]
_SHOWN = 4
"""Modules that are told by name."""


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
        runs = Runs(Path(folder), a, b, inputs, compiled, max_bytes)
        for name, other_name in (mapping or {}).items():
            _check_module(runs.a, name)
            _check_module(runs.b, other_name)
        asked = _Asked(mapping, rtol, by, runs.expected(control))
        result, comparing = _compared(runs.a, runs.b, asked)
        result.told += tuple(runs.told)
        if runs.failure is not None:
            result.fail([pair[1].op for pair in comparing.pairs], *runs.failure)
        elif bisect and result.first is not None:
            again = None
            if not result.modules:
                again = runs.with_value(comparing.pairs[result.comparisons.index(result.first)])
            if again is None:
                result.told += ("What remains of the difference is not known: no op can give a's value in b",)
            else:
                result.remaining, _ = _compared(runs.a, again, asked)
                result.told += tuple(again.told)
        if bundle is not None:
            write_bundle(Path(bundle), runs.recorded, result)
        return result


class _Asked(NamedTuple):
    """How runs are compared: see `diff`."""

    mapping: Mapping[str, str] | None
    rtol: float | None
    by: By | None
    expected: Expected | None


def _compared(run: Run, other: Run, asked: _Asked) -> tuple[DiffResult, Comparing]:
    """Compare two runs, op by op or module by module."""
    mapping, rtol, by, expected = asked
    told, comparing = _told_of_compiled(run, other), Comparing(run, other, rtol, expected)
    if by == "op" or (by is None and run.is_like(other)):
        found, alone = comparing.ops(mapping or {})
        compared = comparing.explained(comparing.in_order(found))
        told += _told_of_pieces(comparing)
        return DiffResult(run.name, other.name, compared, *alone, told=told), comparing
    if by is None:
        told.append(
            f"Modules were compared, not ops: a ran as {_mode(run)}, b as {_mode(other)}; "
            'by="op" compares ops'
        )
    names = same_modules(run, other) if mapping is None else mapping
    if mapping is None:
        told += _told_of_modules(run, other, names)
    compared = comparing.in_order(comparing.modules(names))
    if comparing.shaped:
        told.append(f"Modules whose axes do not match, and were not compared: {_listed(comparing.shaped)}")
    if comparing.uneven:
        told.append(
            "Modules that one run called more often than the other, of which the last outputs alone were "
            f"compared: {_listed(comparing.uneven)}"
        )
    told += _told_of_pieces(comparing)
    return DiffResult(run.name, other.name, compared, modules=list(names), told=told), comparing


def _mode(run: Run) -> str:
    return f"{run.framework or 'statistics'}{'/graph' if run.in_graph else ''}"


def _told_of_compiled(run: Run, other: Run) -> list[str]:
    """Return sentences on compiled callables that ran as eager code."""
    told = [
        f"Eager code of {name}: {', '.join(one.op_by_op)} ran op by op"
        for name, one in (("a", run), ("b", other)) if one.op_by_op
    ]  # fmt: skip
    if told and not run.in_graph and not other.in_graph:
        told.insert(0, "Eager code was compared with eager code, and nothing that a compiler made")
    if told:
        told.append('compiled="instrument" (--compiled instrument) runs compiled code')
    return told


def _told_of_modules(run: Run, other: Run, names: Mapping[str, str]) -> list[str]:
    """Return a sentence on modules of each run that have no counterpart."""
    told = []
    for label, one, paired in (("a", run, names), ("b", other, names.values())):
        if left := alone(one, paired):
            told.append(f"Modules of {label} that were not compared: {_listed(left)}")
    return told


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _told_of_pieces(comparing: Comparing) -> list[str]:
    """Return sentences on ops that one run executed once and the other several times."""
    told, matching = [], comparing.matching
    if matching.pieces:
        told.append(
            f"{matching.pieces} ops ran once in one run and in pieces in the other: the pieces were joined"
        )
    if matching.unlike:
        told.append(f"{matching.unlike} ops in pieces do not make up what the other run gave, and were left")
    if matching.left:
        told.append(
            f"{matching.left} executions of ops that one run has more than the other were not compared"
        )
    if comparing.dismissed:
        told.append(
            f"{comparing.dismissed} ops differ though the runs come to the same results: they are parts of "
            "two ways to compute these"
        )
    return told


def _check_module(run: Run, name: str) -> None:
    """Raise AmandaError for a module that no op ran in."""
    inside = within(run, name)
    paths = {dotted(op.module) for op in run.ops if op.module}
    if not any(map(inside, paths)):
        near = get_close_matches(name, paths, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(paths)[:8])}"
        raise AmandaError(f"module {name!r} of the mapping executed nothing in {run.name}; {hint}")
