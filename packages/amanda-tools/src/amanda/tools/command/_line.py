"""Parts of several subcommands: exit statuses, common options, and configuration files."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from amanda.errors import AmandaError, FileError, UnknownToolError, did_you_mean, printable
from amanda.files import check_file_to_write
from amanda.options import kind_of
from amanda.tools.command._specs import SpecError, ToolSpec, Unreadable, merge_specs, read
from amanda.tools.results import parsing, read_text, reading

PATH = click.Path(path_type=Path)
_CLICK_SETTINGS: Any = {"help_option_names": ["-h", "--help"]}
_SIZE_TEXT = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?")
_USAGE_ERRORS = (SpecError, UnknownToolError)


def exit_status(command: click.Command, name: str, arguments: Sequence[str], failure: int = 1) -> int:
    """Run a subcommand; return its exit status, 2 for wrong usage, 130 after an interrupt.

    Args:
        command: Command of click, which parses the arguments.
        name: For messages, such as "amanda view".
        arguments: Words behind the name.
        failure: Status after an AmandaError, OSError or tool's error, printed to stderr; others are raised.
    """
    try:
        return int(command.main(list(arguments), name, standalone_mode=False, **_CLICK_SETTINGS) or 0)
    except click.Abort:  # click converts KeyboardInterrupt
        return _report_error(name, "interrupted", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AmandaError as error:
        return _report_error(name, str(error), 2 if isinstance(error, _USAGE_ERRORS) else failure, error)
    # os.getcwd() raises FileNotFoundError without a file's name, where the working directory is gone.
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        if error.filename is None and isinstance(error, FileNotFoundError):
            place = "the working directory has been deleted: "
        return _report_error(name, f"{place}{error.strerror or error}", failure)
    except Exception as error:
        if not _notes_of_tools(error):  # no tool raised it
            raise
        return _report_error(name, f"{type(error).__name__}: {error}", failure, error)


def save_option(*forms: str) -> Callable[[Any], Any]:
    """Return the option `--save FILE`, passed as `files`; forms: the suffixes that paths may have."""
    help_text = f"Write the result, as {', '.join(forms)}; may be repeated."
    kind = path_to_write(*forms)
    return click.option("--save", "files", multiple=True, type=kind, metavar="FILE", help=help_text)


def tool_option(help_text: str) -> Callable[[Any], Any]:
    """Return the option `--tool`, passed as `tools`; help_text: its help."""
    metavar = "TOOL[:OPTION=VALUE,...]"
    return click.option("-t", "--tool", "tools", multiple=True, metavar=metavar, help=help_text)


def compiled_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--compiled`, passed as `compiled`."""
    text = "How torch.compile callables run: op by op as eager code (default), or compiled with tools."
    kind = click.Choice(["eager", "instrument"])
    return click.option("--compiled", type=kind, default="eager", help=text)(command)


class OptionType(click.ParamType[Any]):
    """The type of an option of a subcommand, by an annotation as the constructors of tools have them."""

    def __init__(self, annotation: Any) -> None:
        self._annotation, self.name = annotation, kind_of(annotation).text

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value, read; end the command with a usage error for a value of another type."""
        try:
            return read(value, self._annotation)
        except Unreadable as error:
            self.fail(f"{error}, was given {str(value)!r}", param, ctx)


def _bytes_of_size(text: str) -> int:
    """Return the bytes of a size such as 500MB; raise BadParameter for other text."""
    match = _SIZE_TEXT.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 500MB or 4GB")
    # Decimal prefixes, as disks and `amount` have them: the position of the letter is the power of 1000.
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def limit_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--limit SIZE`, the size of the largest file to read; the command does not get it."""

    @functools.wraps(command)
    # `reading` holds the limit while the command runs, as its readers lie deep in other packages.
    def limited(limit: int | None, **options: Any) -> Any:
        with reading(limit):
            return command(**options)

    help_text = "Largest uncompressed size of a file to read, such as 4GB."
    return click.option("--limit", type=_bytes_of_size, metavar="SIZE", help=help_text)(limited)


def path_to_write(*forms: str) -> Callable[[str], Path]:
    """Return the type of an option for a file to write: a path with a known suffix, that can be written."""

    def read(text: str) -> Path:
        """Return the path; raise BadParameter where the file could not be written."""
        path = Path(text)
        if path.suffix not in forms:
            raise click.BadParameter(f"{path} ends in none of {', '.join(forms)}")
        # Checked before the command runs, which may take hours until it writes.
        try:
            check_file_to_write(path)
        except FileError as error:
            raise click.BadParameter(str(error)) from error
        return path

    return read


def _report_error(name: str, text: str, status: int, error: BaseException | None = None) -> int:
    """Write an error, and notes of tools on it, to standard error if that works; return the exit status."""
    with suppress(OSError):  # a file on the full disk that the message is about, perhaps
        sys.stderr.write(printable("\n".join([f"{name}: {text}", *_notes_of_tools(error), ""])))
    return status


def _notes_of_tools(error: BaseException | None) -> list[str]:
    """Return the notes on an error that name the tool and the op in which it was raised."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("[amanda]")]


def function_of(named: str) -> Callable[[], Any]:
    """Import and return the function of FILE:FUNCTION or MODULE:FUNCTION; raise SpecError without one."""
    source, _, name = named.rpartition(":")
    path = Path(source)
    if not source or not name:
        raise SpecError(f"{named!r} names no function; give FILE:FUNCTION, as in evaluate.py:accuracy")
    if path.is_file() and path.suffix != ".py":
        raise SpecError(f"{source} is no Python file; give FILE:FUNCTION, as in evaluate.py:accuracy")
    if path.suffix == ".py" and not path.is_file():
        raise SpecError(f"there is no file {source}")
    module = _load_file(path) if path.suffix == ".py" else _import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if isfunction(value)]
        raise SpecError(f"{source} has no function {name!r}; {did_you_mean(name, functions)}")
    named_function: Callable[[], Any] = function
    return named_function


def _load_file(path: Path) -> ModuleType:
    """Execute a file as a module under the name of the file, with its folder first on sys.path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: dataclasses and pickle look the module up, and its
    # neighbours are imported from its folder.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """Import a module by name; raise SpecError if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the module is there, and something that it imports is not
        raise SpecError(f"there is no module {name}, and no file of that name") from error


_CONFIG_KEYS = ("output", "tools")


@dataclass
class Config:
    """The content of a configuration file: tools, and the folder for results."""

    tools: list[ToolSpec] = field(default_factory=list)
    output: Path | None = None


def get_config(path: Path | None, tools: Sequence[str], example: str) -> Config:
    """Return a file's content, the tools of the command line merged in; raise SpecError without a tool."""
    # example: how the command names a tool, for the error.
    config = Config() if path is None else read_config(path)
    config.tools = merge_specs(config.tools, [ToolSpec.parse(text) for text in tools])
    if not config.tools:
        raise SpecError(f"no tool is given: {example}, or --config FILE; `amanda tools` lists them")
    return config


def read_config(path: Path) -> Config:
    """Return the tools and the output folder of a configuration file; raise SpecError if it is not valid."""
    content = _read_table(path)
    if not isinstance(content, Mapping):
        raise SpecError(f"{path} has no keys; it has {' and '.join(_CONFIG_KEYS)}")
    for key in content:
        if key not in _CONFIG_KEYS:
            raise SpecError(f"{path} has {key!r}; {did_you_mean(str(key), _CONFIG_KEYS)}")
    output = content.get("output")
    if output is not None and not isinstance(output, str):
        raise SpecError(f"{path}: output is {output!r}; give the path of a folder")
    return Config(_tool_specs(path, content.get("tools", {})), None if output is None else Path(output))


def _read_table(path: Path) -> Any:
    """Return the content of a TOML or YAML file, {} for an empty one; raise SpecError for any other."""
    try:
        with parsing(path, "configuration"):
            text = read_text(path).decode()
    except AmandaError as error:
        raise SpecError(str(error)) from error
    try:
        if path.suffix == ".toml":
            # Imported here: every process under `amanda run` imports this module, few read a file.
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib

            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return yaml.safe_load(text) or {}
    except Exception as error:  # the parser's own error, with line and column
        raise SpecError(f"{path} is no {path.suffix[1:].upper()}: {error}") from None
    raise SpecError(f"{path} is neither .toml nor .yaml")


def _tool_specs(path: Path, tools: Any) -> list[ToolSpec]:
    """Return a spec for each tool in a table of options by tool; raise SpecError for another form."""
    if not isinstance(tools, Mapping):
        raise SpecError(f"{path}: tools is {tools!r}; give a table of tools by name")
    specs = []
    for name, table in tools.items():
        options = table or {}  # `[tools.flops]` without options is None in YAML, an empty table in TOML
        if not isinstance(options, Mapping):
            raise SpecError(f"{path}: tool {name} is {options!r}; give a table of its options")
        specs.append(ToolSpec(str(name), {str(key): value for key, value in options.items()}))
    return specs
