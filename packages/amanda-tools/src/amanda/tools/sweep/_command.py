"""`amanda sweep sparsity|bits FILE:FUNCTION`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.sweep._kinds import BitsSweep, SparsitySweep
from amanda.tools.sweep._sweep import Sweep, SweepError


def command(arguments: Sequence[str]) -> int:
    """Print what a function gives when ops are pruned or quantised; 0, or 2 if it cannot be swept.

    After Ctrl-C it prints and saves what was measured, and the status is 130.
    """
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    status = 0
    try:
        sweep = _sweep(options)
        try:
            sweep.run()
        except KeyboardInterrupt:
            status = 130
        for path in options.files:
            sweep.result.save(path)
    except (AmandaError, OSError) as error:
        sys.stderr.write(f"amanda sweep: {error}\n")
        return 2
    sys.stdout.write(f"{sweep.result}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amanda sweep",
        description="Prune or quantise one op at a time, and all together, and evaluate the model each time.",
    )
    parser.add_argument("kind", choices=["sparsity", "bits"])
    parser.add_argument(
        "evaluate", metavar="FILE:FUNCTION", help="or MODULE:FUNCTION; without arguments, it gives a number"
    )
    parser.add_argument(
        "--levels", type=_numbers, help="numbers with commas between them, from mild to harsh"
    )
    parser.add_argument("--type", action="append", help="only ops of this type; may be repeated")
    parser.add_argument("--metric", default="metric", help="what the number is called")
    parser.add_argument(
        "--save",
        dest="files",  # NNsight gives every object a `save`, which argparse would take for one that is set
        action="append",
        default=[],
        type=Path,
        help="write .json, .csv, .html, .txt, .svg, .png, .pdf",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not tell on stderr how far it is")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _sweep(options: argparse.Namespace) -> Sweep[Any]:
    evaluate = _function(options.evaluate)
    given: dict[str, Any] = {"metric": options.metric, "progress": not options.quiet}
    if options.kind == "sparsity":
        given.update({"sparsities": options.levels} if options.levels else {})
        return SparsitySweep(evaluate, **given, type=options.type)
    given.update({"bits": [int(level) for level in options.levels]} if options.levels else {})
    return BitsSweep(evaluate, **given, type=options.type)


def _function(named: str) -> Callable[[], Any]:
    """The function of FILE:FUNCTION or MODULE:FUNCTION."""
    where, _, name = named.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            sys.path.insert(0, str(Path(where).parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found: Callable[[], Any] = getattr(module, name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise SweepError(f"{named!r} names no function, as in evaluate.py:accuracy: {error}") from error
    return found
