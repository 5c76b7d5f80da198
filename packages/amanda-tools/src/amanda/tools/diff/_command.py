"""`amanda diff A B`: compares two dumps or two files of statistics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from amanda.errors import printable
from amanda.tools.command import (
    SpecError,
    compiled_option,
    exit_status,
    function_of,
    limit_option,
    save_option,
)
from amanda.tools.diff._diff import By, diff
from amanda.tools.diff._run import Compiled, Source
from amanda.tools.results import read_json


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Relative error up to which tensors agree; else by dtype.",
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
    help="What is compared; else modules across frameworks, and ops within.",
)
@compiled_option
@save_option(".html", ".json", ".csv", ".txt")
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, the status tells.")
def _command(
    a: str,
    b: str,
    rtol: float | None,
    mapped: Sequence[str],
    by: By | None,
    compiled: Compiled,
    files: Sequence[Path],
    quiet: bool,
) -> int:
    """Find the first op at which two runs diverge.

    A and B are folders of dumps, JSON files of statistics, or FILE:FUNCTION, functions of no arguments that
    are run now. The status is 0 if they agree, 1 if they diverge, 2 if they cannot be compared.

    \b
    amanda diff before/ after/
    amanda diff model.py:eager model.py:compiled --compiled instrument
    """
    result = diff(_source(a), _source(b), mapping=_mapping(mapped), rtol=rtol, by=by, compiled=compiled)
    for path in files:
        result.save(path)
    if not quiet:
        sys.stdout.write(f"{printable(str(result))}\n")
    return 1 if result else 0


def command(arguments: Sequence[str]) -> int:
    """Find the first op at which two runs diverge.

    The status is 0 if they do not, 1 if they do, 2 if they cannot be compared.
    """
    return exit_status(_command, "amanda diff", arguments, failure=2)


def _source(given: str) -> Source:
    """Return a path, or a function where there is no such path."""
    path = Path(given)
    return path if path.exists() or ":" not in given else function_of(given)


def _mapping(given: Sequence[str]) -> dict[str, str] | None:
    """Return pairs, and those of files; None where nothing is given."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, other = one.partition("=")
        if equals:
            found[name] = other
        elif not Path(one).is_file():
            raise SpecError(f"--map {one} is neither M=N nor a JSON file")
        else:
            found.update(read_json(one, "file of module names", _names))
    return found or None


def _names(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("it holds no object of module names by module names")
    return found
