"""`amanda diff`: compares two dumps, two files of statistics, two functions or two programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from amanda.errors import printable
from amanda.options import NonNegativeFloat
from amanda.tools.command import OptionType, SpecError, exit_status, function_of, limit_option, save_option
from amanda.tools.diff._diff import By, diff, open_bundle
from amanda.tools.diff._programs import MAX_BYTES, Command
from amanda.tools.diff._run import Compiled, Run, Source
from amanda.tools.diff._runs import Control
from amanda.tools.results import read_json


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--a", "line_a", metavar="COMMAND", help='A program to run as A: "train.py --epochs 1".')
@click.option("--b", "line_b", metavar="COMMAND", help="A program to run as B.")
@click.option("--python-b", metavar="PYTHON", help="The interpreter that runs the program of --b.")
@click.option("--open", "bundle", metavar="FILE", help="A bundle of --save, whose runs are A and B.")
@click.option(
    "--control",
    metavar="RUN",
    help="Run that sets the expected errors: again or float64 repeats A, auto tries float64 and then "
    "again; or a dump; or none.  The default with --a is auto.",
)
@click.option(
    "--bisect/--no-bisect",
    default=None,
    help="Run B again with A's value at the first op that diverges.  The default with --b.",
)
@click.option(
    "--rtol",
    type=OptionType(NonNegativeFloat),
    help="Relative error up to which tensors agree; by default from the control or the element type.",
)
@click.option(
    "--map",
    "mapped",
    multiple=True,
    metavar="M=N",
    help="A module of A and its name in B, or a JSON file of an object of these; may be repeated.",
)
@click.option(
    "--by",
    type=click.Choice(["op", "module"]),
    help="Compare ops or modules; by default modules across frameworks and ops within one.",
)
@click.option(
    "--compiled",
    type=click.Choice(["eager", "instrument"]),
    help="Run compiled callables of PyTorch op by op (default for functions), or compiled with tools inside "
    "(default for --a and --b).",
)
@save_option(".html", ".json", ".csv", ".txt", ".zip")
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; read the exit status.")
def _command(
    a: str | None,
    b: str | None,
    line_a: str | None,
    line_b: str | None,
    python_b: str | None,
    bundle: str | None,
    control: str | None,
    bisect: bool | None,
    rtol: float | None,
    mapped: Sequence[str],
    by: By | None,
    compiled: Compiled | None,
    files: Sequence[Path],
    quiet: bool,
) -> int:
    """Find the first op at which two runs diverge.

    A and B are folders of dumps, JSON files of statistics, or FILE:FUNCTION, functions of no arguments that
    are run now; --a and --b are programs.  The status is 0 if they agree, 1 if they diverge, 2 if they cannot
    be compared.

    \b
    amanda diff before/ after/
    amanda diff model.py:eager model.py:compiled --compiled instrument
    amanda diff --a train.py --b "train.py --compile"
    amanda diff --a train.py --b train.py --python-b ../older/bin/python --save found.zip
    amanda diff --open found.zip
    """
    if python_b is not None and line_b is None:
        raise SpecError("--python-b is the interpreter of the program of --b, which is not given")
    with open_bundle(bundle) as bundled:
        sides = [
            _side(*sources, "ab"[i], compiled, bundled)
            for i, sources in enumerate([(a, line_a, None), (b, line_b, python_b)])
        ]
        zipped = [path for path in files if path.suffix == ".zip"]
        if len(zipped) > 1:
            raise SpecError("one bundle is written at a time; give one --save FILE.zip")
        result = diff(
            *sides, mapping=_mapping(mapped), rtol=rtol, by=by, compiled=compiled or "eager",
            control=_control(control, isinstance(sides[0], Command), bundled),
            bisect=isinstance(sides[1], Command) if bisect is None else bisect,
            bundle=zipped[0] if zipped else None,
        )  # fmt: skip
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


def _side(
    source: str | None,
    line: str | None,
    python: str | None,
    side: str,
    compiled: Compiled | None,
    bundled: Mapping[str, Run],
) -> Source:
    """Return a path, a function where there is no such path, a program, or a run of a bundle."""
    if line is not None:
        if source is not None:
            raise SpecError(f"{side} is given twice: as {source}, and as --{side} {line!r}")
        return Command(line, compiled or "instrument", MAX_BYTES, python or sys.executable)
    if source is None:
        if side not in bundled:
            raise SpecError(f"{side} is missing; give two runs, or --a and --b")
        return bundled[side]
    path = Path(source)
    return path if path.exists() or ":" not in source else function_of(source)


def _control(option: str | None, is_program: bool, bundled: Mapping[str, Run]) -> Any:
    """Return the control that is asked for, and by default float64 for a program."""
    if option is None:
        return "auto" if is_program else bundled.get("control")
    return None if option == "none" else option if option in get_args(Control) else Path(option)


def _mapping(options: Sequence[str]) -> dict[str, str] | None:
    """Return pairs, and those of files; None where nothing is given."""
    names: dict[str, str] = {}
    for option in options:
        name, equals, other_name = option.partition("=")
        if equals:
            names[name] = other_name
        elif not Path(option).is_file():
            raise SpecError(f"--map {option} is neither M=N nor a JSON file")
        else:
            names.update(read_json(option, "file of module names", _names))
    return names or None


def _names(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise ValueError("it holds no object of module names by module names")
    return content
