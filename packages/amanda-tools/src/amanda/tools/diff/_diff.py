"""The function that compares two runs, and its command line, `amanda diff`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from amanda.errors import AmandaError, printable
from amanda.options import NonNegativeFloat, NonNegativeInt, OutputFile, checked
from amanda.tools.command import OptionType, SpecError, exit_status, function_of, limit_option, save_option
from amanda.tools.diff._alignment import dotted, module_paths, module_test, pair_same_modules
from amanda.tools.diff._comparison import RunComparison
from amanda.tools.diff._errors import Expected, Pair
from amanda.tools.diff._recording import MAX_BYTES, Command, Control, RecordedRuns
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Compiled, Run, Source, open_bundle, write_bundle
from amanda.tools.results import read_json

By = Literal["op", "module"]
_MAX_NAMES = 4
"""Modules that a note names."""


@checked
def diff(
    a: Source, b: Source, *inputs: Any, mapping: Mapping[str, str] | None = None,
    rtol: NonNegativeFloat | None = None, by: By | None = None, max_bytes: NonNegativeInt = MAX_BYTES,
    compiled: Compiled | None = None, control: Control | Source | None = None, bisect: bool = False,
    bundle: OutputFile | None = None,
) -> DiffResult:  # fmt: skip
    """Find the first op at which two runs diverge, and how the error grows.

    Args:
        a: A function, a command, a dump or statistics, or the path of a dump or statistics.  A command such
            as `Command("train.py --epochs 1")` runs in a process of its own.  Every run of a function starts
            from the same random state and the same state of all PyTorch modules and optimizers.
        b: See `a`.
        *inputs: Arguments of the functions.
        mapping: Module paths of a to module paths of b.
        rtol: Largest relative error at which tensors agree.  With None, the control sets the tolerance;
            without a control, the element type does (`TOLERANCES`).  After an op that both runs computed in a
            less precise type, and whose outputs differ, the tolerance of that type holds for later ops too.
        by: "op" compares ops of the same module and type, in order.  "module" compares the outputs of modules
            and the gradients of their weights; without a mapping, modules of equal names are paired, or, if
            fewer than half of the names are shared, modules with weights of the same sizes in order.  The
            result lists the others.  None is "module" for different frameworks, and for TensorFlow's eager
            mode against its graphs; otherwise "op".  The result names the choice.
        max_bytes: Limit of the temporary folder that keeps the tensors of a function.
        compiled: For functions, as in `amanda.apply`.  "instrument" compares compiled code and returned
            values; the result says if a function returns other numbers without a tool.  "eager" runs compiled
            callables op by op, and the result says so.  None is "instrument" where a function calls any.
        control: A further run of a, whose distance from a is the expected error of each op: "again" repeats
            a, "float64" runs a in float64 (PyTorch), "auto" tries "float64" and falls back to "again"; or a
            dump or other source.  Errors up to ten times the expected error agree.
        bisect: Run b again with a's value at the first op that diverges; `remaining` compares it with a.
        bundle: A `.zip` file for the runs and the result; `amanda diff --open` reads it.

    Raises:
        AmandaError: If nothing can be compared, or if a module of the mapping executed no op.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = RecordedRuns(Path(folder), a, b, inputs, compiled, max_bytes)
        for name, other_name in (mapping or {}).items():
            _check_module(runs.a, name)
            _check_module(runs.b, other_name)
        # The control is compared first: it runs a again, before b's value is replaced.
        expected = runs.measure_expected(control)
        compare_with_a = partial(_compare_runs, runs.a, mapping=mapping, rtol=rtol, by=by, expected=expected)
        result, compared_pairs = compare_with_a(runs.b)
        result.told += tuple(runs.remarks)
        if runs.failure is not None:
            result.fail([entry.op for _, entry in compared_pairs], *runs.failure)
        elif bisect and result.first is not None:
            rerun = None
            if not result.modules:  # a value can be put in the place of an op's output alone
                rerun = runs.rerun_with_value(compared_pairs[result.comparisons.index(result.first)])
            if rerun is None:
                result.told += ("What remains of the difference is not known: no op can give a's value in b",)
            else:
                result.remaining, _ = compare_with_a(rerun)
                result.told += tuple(rerun.remarks)
        if bundle is not None:
            write_bundle(Path(bundle), runs.recorded, result)
        return result


def _compare_runs(
    run: Run, other_run: Run, mapping: Mapping[str, str] | None, rtol: float | None, by: By | None,
    expected: Expected | None,
) -> tuple[DiffResult, list[Pair]]:  # fmt: skip
    """Compare two runs by ops or modules, as `diff` chooses; return also the tensors of each comparison."""
    notes, run_comparison = _notes_on_compiled(run, other_run), RunComparison(run, other_run, rtol, expected)
    # Ops of two frameworks have no names in common, modules mostly have.
    if by == "op" or (by is None and run.has_same_kind_of_ops(other_run)):
        compared_ops, unmatched_ops = run_comparison.compare_ops(mapping or {})
        rows = run_comparison.explain(run_comparison.sort_by_execution(compared_ops))
        notes += _notes_on_pieces(run_comparison)
        result = DiffResult(run.name, other_run.name, [row for _, row in rows], *unmatched_ops, told=notes)
        return result, [pair for pair, _ in rows]
    if by is None:
        modes = f"a ran as {_mode(run)}, b as {_mode(other_run)}"
        notes.append(f'Modules were compared, not ops: {modes}; by="op" compares ops')
    b_path_by_a_path = mapping
    if b_path_by_a_path is None:
        b_path_by_a_path = pair_same_modules(run, other_run)
        paths_by_run = ("a", run, set(b_path_by_a_path)), ("b", other_run, set(b_path_by_a_path.values()))
        for label, run_of_label, paired_paths in paths_by_run:
            if unpaired := [path for path in module_paths(run_of_label) if path not in paired_paths]:
                notes.append(f"Modules of {label} that were not compared: {_listed(unpaired)}")
    rows = run_comparison.sort_by_execution(run_comparison.compare_modules(b_path_by_a_path))
    notes += [*_notes_on_modules(run_comparison), *_notes_on_pieces(run_comparison)]
    comparisons = [comparison for _, comparison in rows]
    result = DiffResult(run.name, other_run.name, comparisons, modules=list(b_path_by_a_path), told=notes)
    return result, [pair for pair, _ in rows]


def _mode(run: Run) -> str:
    return f"{run.framework or 'statistics'}{'/graph' if run.in_graph else ''}"


def _notes_on_compiled(run: Run, other_run: Run) -> list[str]:
    """Return sentences on compiled callables that ran as eager code; none if all ran compiled."""
    notes = [
        f"Eager code of {name}: {', '.join(side.op_by_op)} ran op by op"
        for name, side in (("a", run), ("b", other_run)) if side.op_by_op
    ]  # fmt: skip
    # Where one run is of compiled code, that much was compared.
    if notes and not run.in_graph and not other_run.in_graph:
        notes.insert(0, "Eager code was compared with eager code, and nothing that a compiler made")
    if notes:
        notes.append('compiled="instrument" (--compiled instrument) runs compiled code')
    return notes


def _listed(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{suffix}"


def _notes_on_modules(run_comparison: RunComparison) -> list[str]:
    """Return sentences on modules that were not compared, or by their last outputs alone."""
    notes = []
    if run_comparison.reordered_modules:
        module_names = _listed(run_comparison.reordered_modules)
        notes.append(f"Modules whose axes do not match, and were not compared: {module_names}")
    if run_comparison.unevenly_called:
        notes.append(
            "Modules that one run called more often than the other, of which the last outputs alone were "
            f"compared: {_listed(run_comparison.unevenly_called)}"
        )
    return notes


def _notes_on_pieces(run_comparison: RunComparison) -> list[str]:
    """Return sentences on how many ops were joined from pieces, left out, or differ without consequence."""
    matcher = run_comparison.matcher
    count_by_sentence = {
        "ops ran once in one run and in pieces in the other: the pieces were joined": matcher.joined_count,
        "ops in pieces do not make up what the other run gave, and were left": matcher.unlike_count,
        "executions of ops that one run has more than the other were not compared": matcher.unmatched_count,
        "ops differ though the runs come to the same results: they are parts of two ways to compute these":
            run_comparison.dismissed_count,
    }  # fmt: skip
    return [f"{count} {text}" for text, count in count_by_sentence.items() if count]


def _check_module(run: Run, name: str) -> None:
    """Raise AmandaError for a module that no op ran in."""
    is_inside = module_test(run, name)
    paths = {dotted(op.module) for op in run.ops if op.module}
    if not any(map(is_inside, paths)):
        candidates = get_close_matches(name, paths, n=1)
        hint = f"did you mean {candidates[0]!r}?" if candidates else f"it has {', '.join(sorted(paths)[:8])}"
        raise AmandaError(f"module {name!r} of the mapping executed nothing in {run.name}; {hint}")


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--a", "line_a", metavar="COMMAND", help='A program to run as A: "train.py --epochs 1".')
@click.option("--b", "line_b", metavar="COMMAND", help="A program to run as B.")
@click.option("--python-b", metavar="PYTHON", help="The interpreter that runs the program of --b.")
@click.option("--open", "bundle", metavar="FILE", help="A bundle that --save FILE.zip wrote, with A and B.")
@click.option(
    "--control", metavar="RUN",
    help="Run that measures expected errors: again (A once more), float64 (A in float64), auto (float64, "
    "else again), a dump, or none.  The default with --a is auto.",
)  # fmt: skip
@click.option(
    "--bisect/--no-bisect", default=None,
    help="Rerun B with A's output at the first op that diverges.  The default with --b.",
)  # fmt: skip
@click.option(
    "--rtol", type=OptionType(NonNegativeFloat),
    help="Relative error up to which tensors agree; by default from --control or the dtype.",
)  # fmt: skip
@click.option(
    "--map", "mappings", multiple=True, metavar="M=N",
    help="Compare module M of A with N of B; or a JSON file of {M: N, ...}; may be repeated.",
)  # fmt: skip
@click.option(
    "--by", type=click.Choice(["op", "module"]),
    help="Compare ops or modules; by default modules across frameworks and ops within one.",
)  # fmt: skip
@click.option(
    "--compiled", type=click.Choice(["eager", "instrument"]),
    help="Run compiled callables of PyTorch as compiled code with tools inside (instrument, the default), "
    "or op by op (eager).",
)  # fmt: skip
@save_option(".html", ".json", ".csv", ".txt", ".zip")
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only return the exit status.")
def _command(
    a: str | None, b: str | None, line_a: str | None, line_b: str | None, python_b: str | None,
    bundle: str | None, control: str | None, bisect: bool | None, rtol: float | None, mappings: Sequence[str],
    by: By | None, compiled: Compiled | None, files: Sequence[Path], quiet: bool,
) -> int:  # fmt: skip
    """Find the first op at which two runs diverge.

    A and B are folders of dumps, JSON files of statistics, or FILE:FUNCTION, a function without arguments to
    run; --a and --b are programs.  The exit status is 0 if the runs agree, 1 if they diverge, 2 if they
    cannot be compared.

    \b
    amanda diff before/ after/
    amanda diff model.py:eager model.py:compiled
    amanda diff --a train.py --b "train.py --compile"
    amanda diff --a train.py --b train.py --python-b ../older/bin/python --save found.zip
    amanda diff --open found.zip
    """
    if python_b is not None and line_b is None:
        raise SpecError("--python-b is the interpreter of the program of --b, which is not given")
    with open_bundle(bundle) as run_by_label:
        source_a = _find_source(a, line_a, None, "a", compiled, run_by_label)
        source_b = _find_source(b, line_b, python_b, "b", compiled, run_by_label)
        bundle_paths = [path for path in files if path.suffix == ".zip"]
        if len(bundle_paths) > 1:
            raise SpecError("one bundle is written at a time; give one --save FILE.zip")
        default_control: Any = "auto" if isinstance(source_a, Command) else run_by_label.get("control")
        result = diff(
            source_a, source_b, mapping=_read_mapping(mappings), rtol=rtol, by=by, compiled=compiled,
            control=None if control == "none" else control or default_control,
            bisect=isinstance(source_b, Command) if bisect is None else bisect,
            bundle=bundle_paths[0] if bundle_paths else None,
        )  # fmt: skip
    # The bundle is written by `diff`, while the folder of the dumps exists.
    for path in files:
        if path.suffix != ".zip":
            result.save(path)
    if not quiet:
        sys.stdout.write(f"{printable(str(result))}\n")
    return 1 if result else 0


def command(arguments: Sequence[str]) -> int:
    """Find the first op at which two runs diverge.

    The status is 0 if they do not, 1 if they do, 2 if they cannot be compared.
    """
    return exit_status(_command, "amanda diff", arguments, failure=2)


def _find_source(
    source: str | None, command_line: str | None, interpreter: str | None, label: str,
    compiled: Compiled | None, run_by_label: Mapping[str, Run],
) -> Source:  # fmt: skip
    """Return run a or b as the command line gives it; raise SpecError for none or several.

    A program for `--a COMMAND`, a run of the bundle without an argument, else a path or FILE:FUNCTION.
    """
    if command_line is not None:
        if source is not None:
            raise SpecError(f"{label} is given twice: as {source}, and as --{label} {command_line!r}")
        return Command(command_line, compiled or "instrument", MAX_BYTES, interpreter or sys.executable)
    if source is None:
        if label not in run_by_label:
            raise SpecError(f"{label} is missing; give two runs, or --a and --b")
        return run_by_label[label]
    path = Path(source)
    if path.suffix == ".py" and path.is_file():
        raise SpecError(f"{source} is a program; give {source}:FUNCTION, or --{label} {source}")
    return path if path.exists() or ":" not in source else function_of(source)


def _read_mapping(texts: Sequence[str]) -> dict[str, str] | None:
    """Return modules of B by those of A, of M=N or JSON files; None without any; raise SpecError else."""
    b_module_by_a_module: dict[str, str] = {}
    for text in texts:
        name, equals, other_name = text.partition("=")
        if equals:
            b_module_by_a_module[name] = other_name
        elif not Path(text).is_file():
            raise SpecError(f"--map {text} is neither M=N nor a JSON file")
        else:
            b_module_by_a_module.update(read_json(text, "file of module names", _check_names))
    return b_module_by_a_module or None


def _check_names(content: Any) -> dict[str, str]:
    """Return names of modules by names, as a file has them; raise ValueError for another content."""
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise ValueError("it holds no object of module names by module names")
    return content
