"""What subcommands have in common: how they end, and options that several have."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from amanda.errors import AmandaError, UnknownToolError, printable
from amanda.tools.command._spec import SpecError
from amanda.tools.results import reading

_HELP: Any = {"help_option_names": ["-h", "--help"]}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?")
_USAGE = (SpecError, UnknownToolError)


def exit_status(command: click.Command, name: str, arguments: Sequence[str], failure: int = 1) -> int:
    """Run a subcommand; its exit status, 2 where it is used wrongly.

    name: "amanda view".  failure: the status where what is asked for cannot be done, as AmandaError and
    OSError tell.  What is wrong is written to standard error.
    """
    try:
        return int(command.main(list(arguments), name, standalone_mode=False, **_HELP) or 0)
    except click.Abort:  # what click makes of KeyboardInterrupt
        return _said(name, "interrupted", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AmandaError as error:
        return _said(name, str(error), 2 if isinstance(error, _USAGE) else failure, error)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        if error.filename is None and isinstance(error, FileNotFoundError):
            where = "the working directory has been deleted: "
        return _said(name, f"{where}{error.strerror or error}", failure)
    except Exception as error:
        if not _notes(error):  # it is of no tool
            raise
        return _said(name, f"{type(error).__name__}: {error}", failure, error)


def save_option(*forms: str) -> Callable[[Any], Any]:
    """The option `--save FILE`, given as the argument `files`: paths that end in one of some suffixes."""
    return click.option(
        "--save", "files", multiple=True, type=path_to_write(*forms), metavar="FILE",
        help=f"Write the result, as {', '.join(forms)}; may be repeated.",
    )  # fmt: skip


def compiled_option(command: Any) -> Any:
    """Add the option `--compiled`, given as the argument `compiled`, to a command."""
    return click.option(
        "--compiled", type=click.Choice(["eager", "instrument"]), default="eager",
        help="Run compiled callables of PyTorch op by op, as eager code, or compiled with tools in them.",
    )(command)  # fmt: skip


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no size such as 500MB or 4GB", param, ctx)
        return int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " "))


def limit_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--limit SIZE`, up to which the command reads files."""

    @functools.wraps(command)
    def limited(limit: int | None, **given: Any) -> Any:
        with reading(limit):
            return command(**given)

    return click.option(
        "--limit", type=_Size(), metavar="SIZE",
        help="Read files of up to this size, uncompressed, such as 4GB.",
    )(limited)  # fmt: skip


def path_to_write(*forms: str) -> Callable[[str], Path]:
    """For an option of a file to be written: its path, with one of some suffixes, in a folder."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix not in forms:
            raise click.BadParameter(f"{path} ends in none of {', '.join(forms)}")
        if path.is_dir():
            raise click.BadParameter(f"{path} is a folder")
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.parent} for {path.name}")
        return path

    return read


def _said(name: str, text: str, status: int, error: BaseException | None = None) -> int:
    sys.stderr.write(printable("\n".join([f"{name}: {text}", *_notes(error), ""])))
    return status


def _notes(error: BaseException | None) -> list[str]:
    """At which op, and in which tool, it was raised."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("[amanda]")]
