"""`amanda sweep sparsity|bits FILE:FUNCTION`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any

import click

import amanda.options
import amanda.tools.command
from amanda.errors import AmandaError
from amanda.tools.command import OptionType, SpecError, compiled_option, exit_status, function_of, save_option
from amanda.tools.plots import PlottedResult
from amanda.tools.sweep._result import SweepError
from amanda.tools.sweep._sweep import BitsSweep, SparsitySweep, Sweep

_LOADER_FILES = (
    *(str(Path(file).parent) for file in (__file__, amanda.tools.command.__file__, amanda.options.__file__)),
    "<frozen importlib",
)


def _parse_numbers(text: str) -> list[float]:
    """Return the numbers of a text such as "0.5,0.9"; raise click.BadParameter for another text."""
    numbers = OptionType(float)
    try:
        return [numbers.convert(number, None, None) for number in text.split(",")]
    except click.BadParameter:
        message = f"{text!r} is not numbers with commas between them, such as 0.5,0.9"
        raise click.BadParameter(message) from None


@click.command()
@click.argument("kind", type=click.Choice(["sparsity", "bits"]))
@click.argument("evaluate", metavar="FILE:FUNCTION")
@click.option(
    "--levels", type=_parse_numbers, metavar="N,N,...", help="Sparsities or bits, from mild to harsh."
)
@click.option("--type", "types", multiple=True, help="Sweep only ops of this type; may be repeated.")
@click.option(
    "--budgets", type=_parse_numbers, metavar="N,N,...", help="Budgets of the search, as shares of the cost."
)
@click.option(
    "--cost", type=click.Choice(["size", "flops"]), default="size", help="The cost that budgets limit."
)
@click.option("--metric", default="metric", help="Name of the number in results.")
@click.option("--retries", type=click.IntRange(0), default=0, help="Further runs of a failed point.")
@click.option("--jobs", type=int, help="Processes that evaluate single ops; -1 for one a core.")
@click.option("--resume", metavar="FILE", help="Keep points in a file, and measure those that it lacks.")
@compiled_option
@save_option(".json", ".csv", ".html", ".txt", ".svg", ".png", ".pdf")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def _sweep_command(
    kind: str,
    evaluate: str,
    levels: list[float] | None,
    types: Sequence[str],
    budgets: list[float] | None,
    cost: str,
    metric: str,
    retries: int,
    jobs: int | None,
    resume: str | None,
    compiled: str,
    files: Sequence[Path],
    quiet: bool,
) -> int:
    """Prune or quantise one op at a time, and all together, and evaluate the model each time.

    FILE may also be a module. FUNCTION takes no arguments and returns a number, such as an accuracy. Ctrl-C
    prints and saves the points measured so far. With --budgets, a search chooses a level for each op, so
    that the model's cost is within each budget; --save then writes the result of the search. With --jobs,
    each process runs FILE for itself.

    \b
    amanda sweep sparsity evaluate.py:accuracy --levels 0.5,0.9 --save sweep.svg
    amanda sweep bits evaluate.py:accuracy --levels 8,4,2 --budgets 0.25,0.125 --save front.svg
    """
    status = 0
    sweep_error: SweepError | None = None
    try:
        options = {"metric": metric, "progress": not quiet, "type": types or None, "compiled": compiled}
        sweep = _make_sweep(kind, _ProgramFunction(evaluate), levels, cost=cost, **options)
        results: list[PlottedResult] = []
        try:
            if budgets:
                results.append(sweep.search(budgets, retries, jobs, resume))
            else:
                sweep.run(retries, jobs, resume)
        # Points take minutes: those that are measured are printed and saved.
        except KeyboardInterrupt:
            status = 130  # 128 + SIGINT, as of a program that Ctrl-C ends
        except SweepError as error:
            if not sweep.result.points:
                raise
            sweep_error = error
    except AmandaError:
        raise
    except Exception as error:
        return _report_failure(evaluate, error)
    results.insert(0, sweep.result)
    for path in files:
        # The search is what was asked for; the measurements are printed before it.
        results[-1].save(path)
    sys.stdout.write("\n".join(f"{result}\n" for result in results))
    if sweep_error is not None:
        raise sweep_error
    return status


def command(arguments: Sequence[str]) -> int:
    """Prune or quantise one op at a time, and evaluate the model each time.

    Ctrl-C prints and saves the points measured before, and returns status 130.
    """
    return exit_status(_sweep_command, "amanda sweep", arguments)


class _ProgramFunction:
    """The function of FILE:FUNCTION; each process to which it is pickled imports the file itself."""

    def __init__(self, spec: str) -> None:
        self._function = function_of(spec)
        path, _, name = spec.rpartition(":")
        # A worker may have another working folder.
        self._spec = f"{Path(path).resolve()}:{name}" if Path(path).is_file() else spec
        # Errors name the function, its file and its line.
        update_wrapper(self, self._function)

    def __call__(self) -> Any:
        return self._function()

    def __reduce__(self) -> Any:
        return _ProgramFunction, (self._spec,)


def _make_sweep(
    kind: str, evaluate: Callable[[], Any], levels: Sequence[float] | None, **options: Any
) -> Sweep[Any]:
    """Return the sweep of a kind; raise SpecError for invalid levels."""
    try:
        if kind == "sparsity":
            options |= {"sparsities": levels} if levels else {}
            return SparsitySweep(evaluate, **options)
        if not all(level.is_integer() for level in levels or ()):
            raise SpecError("bits are integers")
        options |= {"bits": [int(level) for level in levels]} if levels else {}
        return BitsSweep(evaluate, **options)
    except AmandaError as error:
        option_text = "" if levels is None else f"--levels {','.join(f'{level:g}' for level in levels)}: "
        raise SpecError(f"{option_text}{error}") from error


def _report_failure(evaluate: str, error: Exception) -> int:
    """Write what the program raised to stderr, from where the frames of the program begin; return 1.

    Raises the exception itself if no frame is of the program.
    """
    trace = error.__traceback__
    # Frames of the loader say nothing about the user's program.
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LOADER_FILES):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):
        raise error
    traceback_text = "".join(traceback.format_exception(type(error), error, trace))
    sys.stderr.write(
        f"{traceback_text}amanda sweep: {evaluate} cannot be evaluated: {type(error).__name__}: {error}\n"
    )
    return 1
