"""`amanda sweep sparsity|bits FILE:FUNCTION`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import amanda.options
import amanda.tools.command
from amanda.errors import AmandaError
from amanda.tools.command import OptionType, SpecError, compiled_option, exit_status, function_of, save_option
from amanda.tools.results import PlottedResult
from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._kinds import BitsSweep, SparsitySweep
from amanda.tools.sweep._sweep import Sweep

_BEFORE = (
    *(str(Path(file).parent) for file in (__file__, amanda.tools.command.__file__, amanda.options.__file__)),
    "<frozen importlib",
)


def _numbers(text: str) -> list[float]:
    numbers = OptionType(float)
    try:
        return [numbers.convert(one, None, None) for one in text.split(",")]
    except click.BadParameter:
        told = f"{text!r} is not numbers with commas between them, such as 0.5,0.9"
        raise click.BadParameter(told) from None


@click.command()
@click.argument("kind", type=click.Choice(["sparsity", "bits"]))
@click.argument("evaluate", metavar="FILE:FUNCTION")
@click.option("--levels", type=_numbers, metavar="N,N,...", help="Sparsities or bits, from mild to harsh.")
@click.option("--type", "types", multiple=True, help="Only ops of this type; may be repeated.")
@click.option("--budgets", type=_numbers, metavar="N,N,...", help="Shares of the cost to search levels for.")
@click.option("--cost", type=click.Choice(["size", "flops"]), default="size", help="What budgets are of.")
@click.option("--metric", default="metric", help="What the number is called.")
@click.option("--retries", type=click.IntRange(0), default=0, help="How often a failed point is run again.")
@compiled_option
@save_option(".json", ".csv", ".html", ".txt", ".svg", ".png", ".pdf")
@click.option("-q", "--quiet", is_flag=True, help="Do not tell on stderr how far it is.")
def _command(
    kind: str,
    evaluate: str,
    levels: list[float] | None,
    types: Sequence[str],
    budgets: list[float] | None,
    cost: str,
    metric: str,
    retries: int,
    compiled: str,
    files: Sequence[Path],
    quiet: bool,
) -> int:
    """Prune or quantise one op at a time, and all together, and evaluate the model each time.

    FUNCTION, of a FILE or a module, takes no arguments and gives a number, such as an accuracy. After Ctrl-C
    what was measured is printed and saved. With budgets each op gets a level of its own, such that the model
    costs no more than each budget, and that search is what is saved.

    \b
    amanda sweep sparsity evaluate.py:accuracy --levels 0.5,0.9 --save sweep.svg
    amanda sweep bits evaluate.py:accuracy --levels 8,4,2 --budgets 0.25,0.125 --save front.svg
    """
    status = 0
    failed: SweepError | None = None
    try:
        options = {"metric": metric, "progress": not quiet, "type": types or None, "compiled": compiled}
        sweep = _sweep(kind, function_of(evaluate), levels, cost=cost, **options)
        results: list[PlottedResult] = []
        try:
            if budgets:
                results.append(sweep.search(budgets, retries))
            else:
                sweep.run(retries)
        except KeyboardInterrupt:
            status = 130
        except SweepError as error:
            if not sweep.result.points:
                raise
            failed = error
    except AmandaError:
        raise
    except Exception as error:
        return _failed(evaluate, error)
    results.insert(0, sweep.result)
    for path in files:
        results[-1].save(path)
    sys.stdout.write("\n".join(f"{result}\n" for result in results))
    if failed is not None:
        raise failed
    return status


def command(arguments: Sequence[str]) -> int:
    """Prune or quantise one op at a time, and evaluate the model each time.

    After Ctrl-C it prints and saves what was measured, and the status is 130.
    """
    return exit_status(_command, "amanda sweep", arguments)


def _sweep(
    kind: str, evaluate: Callable[[], Any], levels: Sequence[float] | None, **options: Any
) -> Sweep[Any]:
    try:
        if kind == "sparsity":
            options |= {"sparsities": levels} if levels else {}
            return SparsitySweep(evaluate, **options)
        if not all(level.is_integer() for level in levels or ()):
            raise SpecError("bits are whole numbers")
        options |= {"bits": [int(level) for level in levels]} if levels else {}
        return BitsSweep(evaluate, **options)
    except AmandaError as error:
        given = "" if levels is None else f"--levels {','.join(f'{level:g}' for level in levels)}: "
        raise SpecError(f"{given}{error}") from error


def _failed(evaluate: str, error: Exception) -> int:
    """Write what the program raised to stderr, from where the frames of the program begin."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_BEFORE):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):
        raise error
    told = "".join(traceback.format_exception(type(error), error, trace))
    sys.stderr.write(f"{told}amanda sweep: {evaluate} cannot be evaluated: {type(error).__name__}: {error}\n")
    return 1
