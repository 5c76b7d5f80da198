"""Tools of the command line: their options, selected ops and steps, and files for their results."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import AmandaError, FileError, did_you_mean
from amanda.files import check_folder_to_write
from amanda.options import REQUIRED
from amanda.plugins import tool_class
from amanda.tools.command._options import Given, Option, Unreadable, options_of
from amanda.tools.results import Result
from amanda.tools.select import Phase, Selection
from amanda.tools.steps import Steps, Window

SELECTORS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("type", list[str], None), Option("module", list[str], None),
        Option("exclude", list[str], None), Option("phase", Phase | None, None), Option("start", int, 0),
        Option("end", int | None, None), Option("frequency", int, 1), Option("out", Path | None, None),
    )
}  # fmt: skip
"""Options of every tool that has none of that name itself: selected ops and steps, and the file for the
result."""


class SpecError(AmandaError, ValueError):
    """A tool has no such option, or an option cannot take the given value."""


@dataclass
class Tooling:
    """A tool, its name in the output, and the file for its result.

    phase: the selected part of the program; None for all.
    home: the folder that `out` is relative to, even if the program changes its working directory.
    """

    name: str
    tool: amanda.Tool
    out: Path | None
    phase: str | None = None
    home: Path = field(default_factory=lambda: _working_directory() or Path())


def _working_directory() -> Path | None:
    """Return the working directory; None where it has been deleted, and programs run nevertheless."""
    with suppress(FileNotFoundError):
        return Path.cwd()
    return None


@dataclass
class ToolSpec:
    """The registered name of a tool, and values for its options: texts, or values of a configuration file."""

    name: str
    given: dict[str, Given] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ToolSpec:
        """Read `NAME` or `NAME:option=value,option,...`; a value with a comma is put in quotes."""
        name, _, options_text = text.partition(":")
        if not name.strip():
            raise SpecError(f"{text!r} names no tool; give TOOL or TOOL:option=value,...")
        splitter = shlex.shlex(options_text, posix=True)
        splitter.whitespace, splitter.whitespace_split, splitter.commenters = ",", True, ""
        splitter.escape = ""
        try:
            parts = list(splitter)
        except ValueError:
            raise SpecError(f"{text!r} has a quotation mark without its twin") from None
        options: dict[str, Any] = {}
        for part in parts:
            option, equals, value = part.partition("=")
            options.setdefault(option.strip(), []).append(value if equals else "true")
        return cls(name.strip(), options)

    def __str__(self) -> str:
        options = [
            f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in self.given.items()
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name

    def make(self, steps: Steps) -> Tooling:
        """Return a new tool, restricted to its selection.

        Raises UnknownToolError, PluginError, and SpecError, which names the tool, the option, the given and
        the expected value.
        """
        kind = _class(self.name)
        options = options_of(kind)
        values = {name: self._read(name, value, options) for name, value in self.given.items()}
        required = [option for option in options.values() if option.default is REQUIRED]
        missing = [str(option) for option in required if option.name not in values]
        if missing:
            raise SpecError(f"tool {self.name} needs {', '.join(missing)}")
        selectors = {name: values.pop(name) for name in SELECTORS if name in values and name not in options}
        try:
            tool = kind(**values)
            keys = selectors.keys() & {"type", "module", "exclude", "phase"}
            selection = Selection(**{key: selectors[key] for key in keys})
            window = None
            if {"start", "end", "frequency"} & selectors.keys():
                start, frequency = selectors.get("start", 0), selectors.get("frequency", 1)
                window = Window(steps, start, selectors.get("end"), frequency)
        except (AmandaError, ValueError, TypeError, OSError) as error:
            raise SpecError(f"tool {self.name}: {error}") from error
        if not isinstance(tool, amanda.Tool):
            kind = type(tool).__name__
            raise SpecError(f"what is registered as the tool {self.name} makes a {kind}, no tool")
        _check_suffix(self.name, tool, selectors.get("out"))
        selection.let(tool)
        if window is not None:
            window.let(tool)
        return Tooling(self.name, tool, selectors.get("out"), selectors.get("phase"))

    def _read(self, name: str, value: Given, options: Mapping[str, Option]) -> Any:
        option = options.get(name) or SELECTORS.get(name)
        if option is None:
            raise SpecError(f"tool {self.name} has no option {name!r}; {_known_options(name, options)}")
        try:
            return option.read(value)
        except Unreadable as error:
            value_text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            raise SpecError(f"tool {self.name}, option {name}: {error}, was given {value_text!r}") from None


def split_tools(word: str) -> list[str]:
    """Return the specs of `flops,profile`, or of `flops:type=conv2d,profile:kernels`.

    A comma begins a tool where the name of a registered tool, alone or with a colon, follows; elsewhere the
    comma stands between options.
    """
    registered = {plugin.name for plugin in amanda.list_tools()}
    specs: list[str] = []
    for part in word.split(","):
        if specs and ":" in specs[-1] and part.partition(":")[0] not in registered:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def combined(first: Iterable[ToolSpec], second: Iterable[ToolSpec]) -> list[ToolSpec]:
    """Return the specs of both, in order; for a tool in both, options of the second replace the first's."""
    specs = [ToolSpec(spec.name, dict(spec.given)) for spec in first]
    specs_by_name = {spec.name: spec for spec in reversed(specs)}
    for spec in second:
        if spec.name in specs_by_name:
            specs_by_name.pop(spec.name).given.update(spec.given)
        else:
            specs.append(spec)
    return specs


def made(specs: Iterable[ToolSpec]) -> list[Tooling]:
    """Return tools that count the same steps; the second of a kind is named "flops-2".

    Raises what `ToolSpec.make` raises.
    """
    steps, counts = Steps(), Counter[str]()
    toolings = []
    for spec in specs:
        tooling = spec.make(steps)
        counts[spec.name] += 1
        if counts[spec.name] > 1:
            tooling.name = f"{spec.name}-{counts[spec.name]}"
        toolings.append(tooling)
    return toolings


@functools.cache  # a forked process need not look them up again
def _class(name: str) -> Any:
    """Return what a distribution registers as a tool, or the class at an import path."""
    where, dot, kind = name.rpartition(".")
    if not dot:
        return tool_class(name)
    try:
        return getattr(import_module(where), kind)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"tool {name} cannot be imported: {error}") from error


def _check_suffix(name: str, tool: amanda.Tool, out: Path | None) -> None:
    if out is None:
        return
    if not out.is_absolute() and _working_directory() is None:
        raise SpecError(f"tool {name}, option out: {out} is in the working directory, which has been deleted")
    if not hasattr(type(tool), "result"):
        raise SpecError(f"tool {name}, option out: the tool has no result")
    try:
        check_folder_to_write(out.parent)
        if out.is_dir():
            raise FileError(f"{out} is a folder")
    except FileError as error:
        raise SpecError(f"tool {name}, option out: {error}") from error
    result = getattr(tool, "result")  # noqa: B009
    if not isinstance(result, Result) or type(result).save is not Result.save:
        return  # one with a `save` of its own may have other forms
    if out.suffix not in result.suffixes:
        raise SpecError(f"tool {name}, option out: {out} ends in none of {', '.join(result.suffixes)}")


def _known_options(name: str, options: Mapping[str, Option]) -> str:
    return did_you_mean(name, {*(option.name for option in options.values() if option.readable), *SELECTORS})
