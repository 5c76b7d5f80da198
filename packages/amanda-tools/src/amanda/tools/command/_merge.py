"""`amanda merge`: merges results that ranks or processes saved, also after a run that was killed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from amanda.errors import AmandaError
from amanda.files import naming
from amanda.tools.command._line import PATH, exit_status, limit_option
from amanda.tools.command._processes import by_number, missing_ranks
from amanda.tools.results import Result, by_rank, load
from amanda.tools.results import merge as as_one

_OF_PROCESS = re.compile(r"((?:(?:main|rank\d+|process\d+|restart\d+)\.)+)(.+)\.json")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PATH)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="Where to save it, in the form that the suffix names; a folder for those of a folder.",
)
@click.option("--per-rank", is_flag=True, help="Keep the rows of each, under a column `rank`.")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="How many there were, to tell which are missing."
)
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def _command(
    files: Sequence[Path], output: Path | None, per_rank: bool, ranks: int | None, quiet: bool
) -> None:
    """Put results of several ranks, processes or runs together.

    FILES are of one tool, as .json; or a folder of `amanda run -o`, where the files of each tool's processes
    become TOOL.json.
    """
    for tool, result in _merged(files, ranks, per_rank).items():
        path = _path(files, output, tool)
        if path is not None:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            result.save(path)
        if not quiet:
            sys.stdout.write(f"{result}\n")


def merge(arguments: Sequence[str]) -> int:
    """Put results of several ranks, processes or runs together."""
    return exit_status(_command, "amanda merge", arguments)


def _merged(files: Sequence[Path], ranks: int | None, per_rank: bool) -> dict[str, Result]:
    """Return a merged result for each tool, by the tool's name; "" for files that were named one by one."""
    is_folder = len(files) == 1 and files[0].is_dir()
    results_by_tool = _of_folder(files[0]) if is_folder else {"": _of_files(files)}
    merged_results: dict[str, Result] = {}
    for tool, results in results_by_tool.items():
        missing = missing_ranks(results, ranks)
        merged_results[tool] = by_rank(results) if per_rank else as_one(results, missing)
        if per_rank and missing:
            merged_results[tool].remarks = [f"There is no result of {', '.join(missing)}."]
    return merged_results


def _of_folder(folder: Path) -> dict[str, dict[str, Result]]:
    results_by_tool: dict[str, dict[str, Result]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: by_number(path.name)):
        if (named := _OF_PROCESS.fullmatch(path.name)) is not None:
            results_by_tool.setdefault(named[2], {})[named[1].rstrip(".")] = load(path)
    if not results_by_tool:
        raise AmandaError(f"{folder} has no results of processes, such as rank0.flops.json")
    return results_by_tool


def _of_files(files: Sequence[Path]) -> dict[str, Result]:
    """Return results by the process in the file's name, or by path if two names have the same process."""
    named = [_OF_PROCESS.fullmatch(path.name) for path in files]
    labels = [
        path.stem if name is None else name[1].rstrip(".") for path, name in zip(files, named, strict=True)
    ]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in files]
    return {label: load(path) for label, path in zip(labels, files, strict=True)}


def _path(files: Sequence[Path], output: Path | None, tool: str) -> Path | None:
    return output if not tool else (output or files[0]) / f"{tool}.json"
