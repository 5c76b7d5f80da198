"""`amanda view`: from files to a page."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from amanda.errors import AmandaError
from amanda.tools.view._page import to_page

_DESCRIPTION = """\
Make one self-contained HTML page of saved results: a tree of modules, the graph, tables, the timeline, and
differences between runs. Several files share a page: what they say of one op is joined."""


def main(arguments: Sequence[str]) -> int:
    """Write the page that the arguments ask for, and say where it is; the exit status."""
    chosen = _parser().parse_args(arguments)
    output: Path = chosen.output or _beside(chosen.files[0])
    page = to_page(*chosen.files, title=chosen.title)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise AmandaError(f"cannot write {output}: {error.strerror}") from error
    sys.stdout.write(f"{output}\n")
    if chosen.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amanda view", description=_DESCRIPTION)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="what a result's save() wrote as .json, or a Chrome trace; either may be gzipped",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE",
        help="the page to write; by default that of the first file's name with .view.html, where you are",
    )  # fmt: skip
    parser.add_argument("--title", help="of the page; by default the files' names")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    return parser


def _beside(file: Path) -> Path:
    return Path(f"{file.name.removesuffix('.gz').removesuffix('.json')}.view.html")
