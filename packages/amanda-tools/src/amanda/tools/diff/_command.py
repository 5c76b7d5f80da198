"""`amanda diff A B`: compares two dumps or two files of statistics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from amanda.errors import AmandaError
from amanda.tools.diff._diff import diff


def command(arguments: Sequence[str]) -> int:
    """Print where two runs diverge; 0 if they do not, 1 if they do, 2 if they cannot be compared."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        result = diff(options.a, options.b, mapping=_mapping(options.map), rtol=options.rtol, by=options.by)
        for path in options.files:
            result.save(path)
    except (AmandaError, OSError) as error:
        sys.stderr.write(f"amanda diff: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(f"{result}\n")
    return 1 if result else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amanda diff",
        description="Find the first op at which two runs diverge.",
        epilog="The status is 0 if they agree, 1 if they diverge, 2 if they cannot be compared.",
    )
    parser.add_argument("a", type=Path, help="folder of a dump, or JSON file of statistics")
    parser.add_argument("b", type=Path, help="the same of the other run")
    parser.add_argument("--rtol", type=float, help="relative error up to which tensors agree; else by dtype")
    parser.add_argument(
        "--map", action="append", default=[], metavar="A=B",
        help="a module of a and its name in b, or a JSON file of an object of these; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--by",
        choices=["op", "module"],
        help="what is compared; else modules across frameworks, and ops within",
    )
    parser.add_argument(
        "--save",
        dest="files",  # NNsight gives every object a `save`, which argparse would take for one that is set
        action="append",
        default=[],
        type=Path,
        help="write .html, .json, .csv or .txt",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, the status tells")
    return parser


def _mapping(given: Sequence[str]) -> dict[str, str] | None:
    """Pairs, and those of files; None where nothing is given."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, other = one.partition("=")
        if equals:
            found[name] = other
            continue
        try:
            read = json.loads(Path(one).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise AmandaError(
                f"--map {one} is neither A=B nor a JSON file that can be read: {error}"
            ) from error
        if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
            raise AmandaError(f"{one} has no JSON object of module names by module names")
        found.update(read)
    return found or None
