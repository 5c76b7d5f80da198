"""Tools of the command line: values of options from text, selected ops and steps, and files for results."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import amanda
from amanda import options
from amanda.errors import AmandaError, FileError, did_you_mean
from amanda.files import check_file_to_write
from amanda.options import REQUIRED, Mismatch, PositiveInt, kind_of, words_of
from amanda.plugins import import_from, tool_class
from amanda.tools.results import Result
from amanda.tools.select import Phase, select
from amanda.tools.steps import Steps

OptionValue = str | Sequence[Any] | int | float | bool | None
"""A value given for an option: text, or a value that a configuration file has already."""

_LISTS = {list, tuple, set, frozenset, Sequence, Iterable, typing.Sequence, typing.Iterable}
_BOOL_BY_TEXT = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}

# A forked process need not look them up again.
_cached_tool_class = functools.cache(tool_class)
_NOT_TEXT = "text cannot express its values: make the tool in Python"


class Unreadable(ValueError):
    """A value is not of the expected type, which the message names."""


@dataclass(frozen=True)
class CommandOption:
    """One option of a tool: its name, the type of its values, its default (`REQUIRED` without one)."""

    name: str
    type: Any
    default: Any

    @property
    def readable(self) -> bool:
        """True if text can be converted to the option's type."""
        return _is_readable(self.type)

    def read(self, value: OptionValue) -> Any:
        """Return the value; raise Unreadable, which names the expected type."""
        return read(value, self.type)

    def __str__(self) -> str:
        """Return name, type and default, as lists of options show them."""
        if not self.readable:
            return f"{self.name}, and {_NOT_TEXT}"
        option = options.Option(self.name, self.type, self.default)
        default = "" if self.default is REQUIRED else f" = {option.default_as_text}"
        return f"{self.name}: {kind_of(self.type).text}{default}"


def options_of(kind: Callable[..., Any]) -> dict[str, CommandOption]:
    """Return the options of a tool's constructor by name."""
    return {
        name: CommandOption(name, _annotation_of(option), option.default)
        for name, option in options.options_of(kind).items()
    }


def read(value: OptionValue, annotation: Any) -> Any:
    """Convert text, or a value of a configuration file, to a type; raise Unreadable for another type."""
    converted, kind = _convert_text(value, annotation), kind_of(annotation)
    try:
        return kind.accept(converted)
    except Mismatch as mismatch:
        raise _unreadable_error(annotation, str(mismatch)) from None


def _convert_text(value: OptionValue, annotation: Any) -> Any:
    """Convert text, also in lists and mappings, to the annotation's type; return other values unchecked.

    A list of one value counts as the value.  Raises Unreadable for other lists, text and types.
    """
    bare_type = _without_range(annotation)
    origin, type_arguments = get_origin(bare_type), get_args(bare_type)
    if origin in (Union, types.UnionType):
        # Text is tried last: 1 and none may be values of another type.
        for member in sorted(type_arguments, key=lambda kind: _without_range(kind) is str):
            with suppress(Unreadable):
                return read(value, member)
        raise _unreadable_error(annotation) if _is_readable(annotation) else Unreadable(_NOT_TEXT)
    if origin is Literal:
        return _read_literal(value, type_arguments, annotation)
    if _is_list(bare_type):
        return _read_list(value, origin or bare_type, type_arguments, annotation)
    if isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: read(item, type_arguments[-1]) for key, item in value.items()}
    # `ToolSpec.parse` gives a list of texts for each option, which is to have one here.
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise Unreadable(f"expected {kind_of(annotation).text}, not several values")
        value = value[0]
    if bare_type not in _READER_BY_TYPE:
        raise Unreadable(_NOT_TEXT)
    if not isinstance(value, str):
        return value
    try:
        return _READER_BY_TYPE[bare_type](value)
    except (ValueError, KeyError):
        raise _unreadable_error(annotation) from None


def _unreadable_error(annotation: Any, why: str = "") -> Unreadable:
    """Return an error that names the expected type, and why a value of it is refused."""
    kind = kind_of(annotation)
    expected = kind.words if kind.words.endswith(kind.text) else kind.text
    return Unreadable(f"expected {expected}" + (f" ({why})" if why else ""))


def _read_literal(value: OptionValue, choices: Sequence[Any], annotation: Any) -> Any:
    """Return the choice that a value, or a list of one, equals, also as text; raise Unreadable for none."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    for member in choices:
        if value == member or (isinstance(value, str) and value == str(member)):
            return member
    close_texts = get_close_matches(str(value), list(map(str, choices)), n=1)
    expected = f"expected {kind_of(annotation).text}"
    raise Unreadable(expected + (f"; did you mean {close_texts[0]}?" if close_texts else ""))


def _read_list(value: OptionValue, kind: Any, element_types: Sequence[Any], annotation: Any) -> Any:
    """Return the collection of "a+b", of a list of such texts, or of one value; else raise Unreadable."""
    # tuple[int, ...] has Ellipsis among its arguments, list has none.
    element_type = next((member for member in element_types if member is not Ellipsis), str)
    parts: list[Any] = []
    for part in [value] if isinstance(value, str) or not isinstance(value, Sequence) else value:
        # 1e+5 is one number.
        pattern = r"(?<![eE])\+" if _without_range(element_type) is float else r"\+"
        parts += re.split(pattern, part) if isinstance(part, str) else [part]
    try:
        # "a+" ends in an empty text, which is not a value.
        values = [read(part, element_type) for part in parts if part != ""]
    except Unreadable:
        raise Unreadable(f"expected {kind_of(annotation).text} (a+b)") from None
    container = kind if kind in (list, tuple, set, frozenset) else list  # Sequence cannot be called
    return container(values)


_READER_BY_TYPE: Mapping[Any, Callable[[str], Any]] = {
    bool: lambda text: _BOOL_BY_TEXT[text.lower()],
    int: lambda text: int(text, 0),  # "0x10" is read as Python reads it
    float: float, str: str, Any: str,
    Path: lambda text: Path(text).expanduser() if text else "",  # Path("") would be the working directory
    type(None): lambda text: {"none": None}[text.lower()],
}  # fmt: skip
"""Functions that convert text to a type; they raise ValueError or KeyError for other text."""


def _without_range(annotation: Any) -> Any:
    """Return the type that an annotation states, without the range that `Annotated` may add."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_readable(annotation: Any) -> bool:
    """Return True if text can be converted to the type of an annotation: no mapping, and no list of lists."""
    bare_type = _without_range(annotation)
    origin, type_arguments = get_origin(bare_type), get_args(bare_type)
    if origin in (Union, types.UnionType):
        return any(_is_readable(member) for member in type_arguments if member is not type(None))
    if _is_list(bare_type):
        elements = [member for member in type_arguments if member is not Ellipsis]
        return all(_is_readable(element) and not _is_list(_without_range(element)) for element in elements)
    return origin is Literal or bare_type in _READER_BY_TYPE


def _is_list(bare_type: Any) -> bool:
    return bare_type in _LISTS or get_origin(bare_type) in _LISTS


def _annotation_of(option: options.Option) -> Any:
    """Return an option's annotation; without one, its default's type if text can express it, else str."""
    if option.annotation is not inspect.Parameter.empty:
        return option.annotation
    kind = type(option.default)
    return kind if kind in _READER_BY_TYPE and option.default is not None else str


SELECTORS: Mapping[str, CommandOption] = {
    name: CommandOption(name, annotation, default)
    for name, annotation, default in (
        ("type", list[str], None), ("module", list[str], None), ("exclude", list[str], None),
        ("phase", Phase | None, None), ("start", int, 0), ("end", int | None, None), ("frequency", int, 1),
        ("out", Path | None, None), ("log", str | None, None), ("every", PositiveInt, 50),
    )
}  # fmt: skip
"""Options of every tool that has none of that name itself: selected ops and steps, and the file for the
result, and the writer to which it is logged at each so many-th step."""


class SpecError(AmandaError, ValueError, module="amanda.tools.command"):
    """A tool has no such option, or an option cannot take the given value."""


@dataclass
class Tooling:
    """A tool, its name in the output, and the absolute path of the file for its result.

    phase: the selected part of the program; None for all.
    """

    name: str
    tool: amanda.Tool
    out: Path | None
    phase: str | None = None


@dataclass
class ToolSpec:
    """The registered name of a tool, and values for its options: texts, or values of a configuration file."""

    name: str
    options: dict[str, OptionValue] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ToolSpec:
        """Read `NAME` or `NAME:option=value,option,...`; a value with a comma is put in quotes.

        Each option has a list of texts, several for one that is repeated; "true" for one without a value.
        Raises SpecError for a text without a name, and for a quotation mark without its twin.
        """
        name, _, options_text = text.partition(":")
        if not name.strip():
            raise SpecError(f"{text!r} names no tool; give TOOL or TOOL:option=value,...")
        splitter = shlex.shlex(options_text, posix=True)
        splitter.whitespace, splitter.whitespace_split, splitter.commenters = ",", True, ""
        # Backslashes stay: paths of Windows, and patterns, have them.
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
        """Return `NAME:option=value,...`, or the name alone."""
        options = [
            f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in self.options.items()
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name

    def make(self, steps: Steps, alone: bool = False) -> Tooling:
        """Return a new tool, restricted to its selection, which logs its values if the option `log` is given.

        Args:
            steps: Counter of steps, which tools share.
            alone: True where no program calls the tool's methods, so that its options have to do without.

        Raises:
            UnknownToolError: For a name that no distribution registers, and an import path without a class.
            PluginError: For a registered tool that cannot be used.
            SpecError: Names the tool, the option, the given and the expected value.
        """
        constructor: Any = _cached_tool_class(self.name)
        options = options_of(constructor)
        values = {name: self._read(name, value, options) for name, value in self.options.items()}
        required_options = [option for option in options.values() if option.default is REQUIRED]
        missing_options = [str(option) for option in required_options if option.name not in values]
        if missing_options:
            raise SpecError(f"tool {self.name} needs {', '.join(missing_options)}")
        # A selector of a name that the tool has as an option itself is the tool's; `every` belongs to `log`.
        tool_options = options.keys() - ({"every"} if "log" in values else set())
        selectors = {name: values.pop(name) for name in SELECTORS if name in values.keys() - tool_options}
        log, every = selectors.pop("log", None), selectors.pop("every", 50)
        if log is None and "every" in self.options and "every" not in tool_options:
            raise SpecError(f"tool {self.name}, option every: it is for log, as in log=tensorboard,every=50")
        if log is not None and not {"start", "end", "frequency"}.isdisjoint(self.options):
            raise SpecError(f"tool {self.name}, option log: it has every, and no start, end or frequency")
        out, phase = selectors.pop("out", None), values.get("phase", selectors.get("phase"))
        # All tools count the same steps, also those that take start, end and frequency as options themselves.
        if "steps" in options and options["steps"].type == Steps | None:
            values["steps"] = steps
        try:
            # Hooks of the tool's class change its options: `command_options` where nobody calls its methods,
            # `log_options` where its values are logged.  A function that makes a tool has neither.
            arguments = getattr(constructor, "command_options", dict)(values) if alone else values
            if log is not None:
                arguments = getattr(constructor, "log_options", dict)(arguments)
            tool = constructor(**arguments)
            if isinstance(tool, amanda.Tool):
                select(tool, **selectors, steps=steps)
                if log is not None:
                    tool = import_from("amanda.tools.live", "log_tool")(tool, log, every)
        except (AmandaError, ImportError, ValueError, TypeError, OSError) as error:
            raise SpecError(f"tool {self.name}: {error}") from error
        if not isinstance(tool, amanda.Tool):
            raise SpecError(f"what is registered as tool {self.name} makes a {type(tool).__name__}, no tool")
        return Tooling(self.name, tool, out and _check_result_path(self.name, tool, out), phase)

    def _read(self, name: str, value: OptionValue, options: Mapping[str, CommandOption]) -> Any:
        """Return the value of an option or selector, read; raise SpecError for no such option or value."""
        option = options.get(name) or SELECTORS.get(name)
        value_text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if option is None:
            choices = [choice for choice in {**SELECTORS, **options}.values() if choice.readable]
            words_by_name = {choice.name: words_of(choice.type) for choice in choices}
            hint = did_you_mean(name, words_by_name)
            # A word of another option tells more than a name that is only similar.
            close_words = get_close_matches(value_text, chain(*words_by_name.values()), n=1, cutoff=0.8)
            if close_words:
                names = [choice for choice in words_by_name if close_words[0] in words_by_name[choice]]
                close_name = get_close_matches(name, names, n=1, cutoff=0)[0]
                hint = f"did you mean {close_name}={close_words[0]}?"
            raise SpecError(f"tool {self.name} has no option {name!r}; {hint}")
        try:
            return option.read(value)
        except Unreadable as error:
            raise SpecError(f"tool {self.name}, option {name}: {error}, was given {value_text!r}") from None


def split_tools(word: str) -> list[str]:
    """Return the specs of `flops,profile`, or of `flops:type=conv2d,profile:kernels`.

    A comma begins a tool where the name of a registered tool, alone or with a colon, follows, and behind a
    tool without options; elsewhere the comma stands between options.
    """
    registered_names = {plugin.name for plugin in amanda.list_tools()}
    specs: list[str] = []
    for part in word.split(","):
        if specs and ":" in specs[-1] and part.partition(":")[0] not in registered_names:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def merge_specs(first: Iterable[ToolSpec], second: Iterable[ToolSpec]) -> list[ToolSpec]:
    """Return the specs of both, in order; for a tool in both, options of the second replace the first's."""
    specs = [ToolSpec(spec.name, dict(spec.options)) for spec in first]
    # The first of several with one name is the one to be overridden: reversed, it is entered last.
    spec_by_name = {spec.name: spec for spec in reversed(specs)}
    for spec in second:
        if spec.name in spec_by_name:
            spec_by_name.pop(spec.name).options.update(spec.options)
        else:
            specs.append(spec)
    return specs


def make_tools(specs: Iterable[ToolSpec], alone: bool = False, folders: Sequence[str] = ()) -> list[Tooling]:
    """Return tools that count the same steps; the second of a kind is named "flops-2".

    Args:
        specs: In the order of the tools.
        alone: As of `ToolSpec.make`.
        folders: Appended to `sys.path`, for tools by import path.

    Raises:
        SpecError: For a tool that is given twice; `ToolSpec.make` has further reasons and errors.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
    # One counter for all tools, or each would watch every op for its own.
    steps, count_by_name, specs = Steps(), Counter[str](), list(specs)
    toolings = []
    for number, spec in enumerate(specs):
        if spec in specs[:number]:
            raise SpecError(f"tool {spec} is given twice; give it once, or with other options")
        tooling = spec.make(steps, alone)
        count_by_name[spec.name] += 1
        if count_by_name[spec.name] > 1:
            tooling.name = f"{spec.name}-{count_by_name[spec.name]}"
        toolings.append(tooling)
    return toolings


def _check_result_path(name: str, tool: amanda.Tool, out: Path) -> Path:
    """Return the absolute path of the option `out`; raise SpecError if no result can be written there."""
    result: Any = getattr(tool, "result", None)
    # One with a `save` of its own may write other forms.
    has_known_suffixes = isinstance(result, Result) and type(result).save is Result.save
    try:
        if not hasattr(type(tool), "result"):
            raise FileError("the tool has no result")
        path = out.absolute()
        check_file_to_write(path)
        if has_known_suffixes and out.suffix not in result._suffixes:
            raise FileError(f"{out} ends in none of {', '.join(result._suffixes)}")
        return path
    except FileError as error:
        raise SpecError(f"tool {name}, option out: {error}") from error
    except FileNotFoundError as error:
        reason = f"{out} is in the working directory, which has been deleted"
        raise SpecError(f"tool {name}, option out: {reason}") from error
