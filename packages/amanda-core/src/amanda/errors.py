"""Every error that Amanda raises, in one tree under `AmandaError`."""

from collections.abc import Iterable
from difflib import get_close_matches
from unicodedata import category

__all__ = [
    "ActionError",
    "AmandaError",
    "ArtefactError",
    "DependencyCycleError",
    "DriverError",
    "FileError",
    "MissingFileError",
    "MissingKeyError",
    "MutationError",
    "NamespaceError",
    "NotTraceableError",
    "OptionError",
    "PluginError",
    "ReplaceConflictError",
    "RoutineError",
    "ScopeError",
    "ToolError",
    "UnknownToolError",
    "did_you_mean",
    "printable",
]


class AmandaError(Exception):
    """Root of Amanda's errors; catch it to catch them all.

    `class RankError(AmandaError, module="amanda.tools.low_rank")`, in a private module of this package, is
    shown in tracebacks, and pickled, under the path that users import the class from.
    """

    def __init_subclass__(cls, module: str | None = None) -> None:
        super().__init_subclass__()
        if module is not None:
            cls.__module__ = module


class PluginError(AmandaError):
    """A driver, tool or command that a distribution registers cannot be used."""


class UnknownToolError(AmandaError, LookupError):
    """No distribution registers a tool under the given name."""


class ToolError(AmandaError, TypeError):
    """An object that was applied, registered or depended on is not a tool, or not a valid part of one."""


class OptionError(ToolError, ValueError):
    """An option of a tool or a function has a wrong value, is not known, or is missing."""


class DependencyCycleError(AmandaError, ValueError):
    """Tools depend on each other in a circle."""


class ActionError(AmandaError, ValueError):
    """An analysis routine recorded an action that its op or its point cannot take."""


class ReplaceConflictError(ActionError):
    """Two tools want to replace the same op."""


class RoutineError(AmandaError, TypeError):
    """An instrumentation routine does not accept its values, or returned an unfit replacement."""


class MutationError(RoutineError):
    """An isolated instrumentation routine wrote into a value that it was given."""


class MissingKeyError(AmandaError, KeyError):
    """An analysis routine read a key of a context that no tool before it has written."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's would be in quotes


class NamespaceError(AmandaError, TypeError):
    """A namespace was compared with a string."""


class ScopeError(AmandaError, RuntimeError):
    """A scope was started, stopped or used out of turn."""


class DriverError(AmandaError, RuntimeError):
    """A driver cannot instrument its framework as it is installed."""


class ArtefactError(AmandaError, ValueError):
    """A file of a model cannot be read, instrumented or written."""


class FileError(AmandaError, OSError):
    """A file or a folder cannot be read or written; the message names the path.

    Args:
        message: Text of the error, which names the path.
        errno: Number of the operating system's error; None where there was none.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class MissingFileError(FileError, FileNotFoundError):
    """A file does not exist, or the folder to write it to does not exist."""


class NotTraceableError(ArtefactError):
    """Routines that run as Python cannot be written into a model.

    Args:
        message: Text of the error.
        refusals: Op, its name or path, tool, routine and reason of each.
    """

    def __init__(self, message: str, refusals: Iterable[tuple[str, str, str, str, str]] = ()) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error about an unknown name.

    Args:
        name: The unknown name.
        candidates: The names that are known.

    Returns:
        The nearest candidate; all candidates where none is near; "there are none" without candidates.
    """
    names = sorted(candidates)
    # A typing mistake needs one name; without a near one the user has to see them all.
    if similar := get_close_matches(name, names, n=1):
        return f"did you mean {similar[0]}?"
    return f"there are {', '.join(names)}" if names else "there are none"


def printable(text: str, line: bool = False) -> str:
    """Return a stranger's text with escapes for characters that would steer a terminal.

    Args:
        text: Text of a file, a name or a value of others.
        line: Whether the text is to stay one line, so that tabs and line ends are escaped as well.

    >>> printable("conv\\x1b[2J")
    'conv\\\\x1b[2J'
    """
    # Nearly all texts: the search for categories below takes a while.
    if text.isascii() and text.isprintable():
        return text
    allowed = "" if line else "\n\t"

    def escape(character: str) -> str:
        # Control characters, formats such as those that turn the direction of text, and lone surrogates.
        steers = character not in allowed and category(character) in ("Cc", "Cf", "Cs")
        return character.encode("unicode_escape").decode() if steers else character

    return "".join(map(escape, text))
