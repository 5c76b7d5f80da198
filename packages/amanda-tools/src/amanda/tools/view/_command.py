"""`amanda view`: from files to a page."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from amanda.files import write_file
from amanda.tools.command import exit_status, limit_option, path_to_write
from amanda.tools.view._page import to_page


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=path_to_write(".html", ".htm"),
    metavar="PAGE",
    help="Page to write; by default the first file's name with .view.html, in the working directory.",
)
@click.option("--title", help="Title of the page; by default the file names.")
@limit_option
@click.option("--open", "shown", is_flag=True, help="Show the page in a browser.")
def _command(files: Sequence[Path], output: Path | None, title: str | None, shown: bool) -> None:
    """Make one self-contained HTML page of saved results.

    The page has a tree of modules, the graph, tables, and differences between runs. FILES are .json files of
    a result's save(), also gzipped. Several files go on one page, which joins their data on each op.
    Chrome traces open in https://ui.perfetto.dev instead.
    """
    page = output or _beside(files[0])
    write_file(page, to_page(*files, title=title))
    sys.stdout.write(f"{page}\n")
    if shown:
        webbrowser.open(page.resolve().as_uri())


def main(arguments: Sequence[str]) -> int:
    """Make one self-contained HTML page of saved results."""
    return exit_status(_command, "amanda view", arguments)


def _beside(file: Path) -> Path:
    return Path(f"{file.name.removesuffix('.gz').removesuffix('.json')}.view.html")
