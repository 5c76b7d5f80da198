"""Decorators of functions with options: arguments are compared with annotations, former names warn."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload
from warnings import warn

from amanda.errors import AmandaError, OptionError, did_you_mean
from amanda.options.kinds import Kind, Mismatch, kind_of, shown

P = ParamSpec("P")
T = TypeVar("T")
ClassT = TypeVar("ClassT", bound=type)

# Not None, which is the default of many options.
REQUIRED: Any = inspect.Parameter.empty
"""Default of an option that has none."""


@dataclass(frozen=True)
class Option:
    """One option of a tool or a function: its name, annotation and default (`REQUIRED` without one)."""

    name: str
    annotation: Any
    default: Any

    @property
    def kind(self) -> Kind:
        """Return what the option accepts."""
        return kind_of(self.annotation)

    @property
    def type_in_words(self) -> str:
        """Return what the option accepts, in words; "" without an annotation."""
        return "" if self.annotation is REQUIRED else self.kind.words

    @property
    def default_in_words(self) -> str:
        """Return the repr of the default, the string of a path, or "required"."""
        if self.default is REQUIRED:
            return "required"
        return str(self.default) if isinstance(self.default, PurePath) else repr(self.default)

    @property
    def default_as_text(self) -> str:
        """Return the default as a command line has it: "true", "none", "a+b"; "required" without one."""
        if self.default is None or isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, (list, tuple)):
            return "+".join(map(str, self.default))
        return "required" if self.default is REQUIRED else str(self.default)

    def __str__(self) -> str:
        kind = f": {self.type_in_words}" if self.type_in_words else ""
        default = "" if self.default is REQUIRED else f" = {self.default_in_words}"
        return f"{self.name}{kind}{default}"


class _Decorator(Protocol):
    """`checked` with an error: of a class and of a function it returns the same type."""

    @overload
    def __call__(self, target: ClassT, /) -> ClassT: ...

    @overload
    def __call__(self, target: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def checked(target: ClassT, /) -> ClassT: ...


@overload
def checked(target: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def checked(*, error: type[AmandaError]) -> _Decorator: ...


def checked(target: Any = None, /, *, error: type[AmandaError] = OptionError) -> Any:
    """Compare the arguments of each call of a function, or of a constructor, with its annotations.

    Numbers of numpy arrive as Python's own.  Defaults, and arguments without an annotation, are not compared.

    Args:
        target: A function or a method, such as `__init__`; or a dataclass, whose fields are compared.
        error: Raised with the names of what is called and of the option, the value, and what is right.

    Returns:
        The function or class, whose calls are checked; without `target` a decorator.
    """
    if target is None:
        return functools.partial(_with_checks, error=error)
    return _with_checks(target, error=error)


def _with_checks(target: Any, error: type[AmandaError]) -> Any:
    """Return a function that compares its arguments with its annotations before it runs.

    For a class, replaces its constructor by such a function and returns the class.
    error: raised for a value that does not fit.
    """
    if isinstance(target, type):
        # By `getattr` and `setattr`, since type checkers refuse to read or set `__init__` of a class.
        constructor = getattr(target, "__init__")  # noqa: B009
        setattr(target, "__init__", _with_checks(constructor, error))  # noqa: B010
        return target
    # Created at the first call, since it reads annotations: importing a tool costs nothing.
    checks: _ArgumentChecks | None = None

    @functools.wraps(target)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        """Call the target with the arguments as their kinds accept them; the first call makes the checks."""
        # pytest leaves out frames with this name, so that a failing test shows the caller's line.
        __tracebackhide__ = True
        nonlocal checks
        if checks is None:
            checks = _ArgumentChecks(target, error)
        args = checks.check_positional(args)
        # A call without keywords, which is the most frequent, makes no dict.
        return target(*args, **checks.check_keywords(args, kwargs)) if kwargs else target(*args)

    return check_and_call


class _ArgumentChecks:
    """The kinds of the arguments of a function, by position and by name; None where any value is right."""

    def __init__(self, function: Callable[..., Any], error: type[AmandaError]) -> None:
        parameters = inspect.signature(function).parameters
        hints = annotations_of(function)
        kinds = {name: kind_of(hints[name]) for name in parameters if name in hints}
        self._error, self._qualname = error, function.__qualname__
        self._is_method = next(iter(parameters), "") == "self"
        self._positional: list[tuple[str, Kind | None]] = []
        self._variadic: tuple[str, Kind | None] = "", None  # of `*args`
        self._keywords: dict[str, Kind | None] = {}
        self._other_keyword: Kind | None = None  # of `**kwargs`
        self._takes_any_keyword = False
        for name, parameter in parameters.items():
            kind = kinds.get(name)
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._variadic = name, kind
            elif parameter.kind is parameter.VAR_KEYWORD:
                unpacked = _unpacked(hints.get(name))
                self._keywords.update({key: kind_of(hint) for key, hint in unpacked.items()})
                if not unpacked:
                    self._takes_any_keyword, self._other_keyword = True, kind
            else:
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._positional.append((name, kind))
                if parameter.kind is not parameter.POSITIONAL_ONLY:
                    self._keywords[name] = kind
        self._positional_count = len(self._positional)

    def check_positional(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that are given by position, with numpy's numbers as Python's own.

        Raises `error` for a value that is not of its kind.  Python itself refuses arguments beyond the last.
        """
        accepted_args = args
        for position, value in enumerate(args):
            is_variadic = position >= self._positional_count
            name, kind = self._variadic if is_variadic else self._positional[position]
            if kind is not None:
                try:
                    accepted = kind.accept(value)
                except Mismatch as mismatch:
                    raise self._wrong_argument(args, name, value, kind, mismatch) from None
                if accepted is not value:
                    # Hardly ever needed: a tuple is copied only where numpy's number becomes Python's.
                    accepted_args = (*accepted_args[:position], accepted, *accepted_args[position + 1 :])
        return accepted_args

    def check_keywords(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are given by name, with numpy's numbers as Python's own, in `kwargs`.

        Raises OptionError for a name that is not an option, and `error` for a value that is not of its kind.
        """
        for name, value in kwargs.items():
            kind = self._keywords.get(name, self._other_keyword)
            if kind is not None:
                try:
                    kwargs[name] = kind.accept(value)
                except Mismatch as mismatch:
                    raise self._wrong_argument(args, name, value, kind, mismatch) from None
            elif name not in self._keywords and not self._takes_any_keyword:
                hint = did_you_mean(name, self._keywords.keys() - {"self"})
                raise OptionError(
                    f"{self._callee_name(args)} got an unexpected keyword argument {name!r}; {hint}"
                )
        return kwargs

    def _wrong_argument(
        self, args: tuple[Any, ...], name: str, value: Any, kind: Kind, why: Mismatch
    ) -> AmandaError:
        """Return the error about an argument that is not of its kind; for a tool given a model, its usage."""
        callee = self._callee_name(args)
        # Tools have a `usage`: the first thing that many try is to give one a model.
        usage = getattr(args[0], "usage", None) if self._is_method and args else None
        is_function_or_class = isinstance(value, (type, types.FunctionType, types.MethodType))
        if usage and callable(value) and not is_function_or_class:
            return self._error(
                f"{callee} takes options, not a {type(value).__name__}: tool = {callee}(); {usage}"
            )
        return mistake(callee, name, value, kind, str(why) or self._option_of_word(value), self._error)

    def _option_of_word(self, value: Any) -> str:
        """Return a question that names the only option with such a word; "" for other values."""
        if not isinstance(value, str):
            return ""
        # Of an option that takes any text no word is typical.
        options = [
            name for name, kind in self._keywords.items()
            if kind is not None and _accepts(kind, value) and not _accepts(kind, "?")
        ]  # fmt: skip
        return f"did you mean {options[0]}={value!r}?" if len(options) == 1 else ""

    def _callee_name(self, args: tuple[Any, ...]) -> str:
        """Return the name of what is called: of a constructor the class, which may be a user's subclass."""
        if self._qualname.endswith("__init__") and self._is_method and args:
            return type(args[0]).__name__
        return self._qualname.rpartition("<locals>.")[2]


def _accepts(kind: Kind, value: Any) -> bool:
    """Return True if a value is of a kind."""
    try:
        kind.accept(value)
    except Mismatch:
        return False
    return True


def mistake(
    called: str, option: str, value: Any, kind: Kind, why: str = "", error: type[AmandaError] = OptionError
) -> AmandaError:
    """Return the error about a value of an option that is not of its kind.

    Args:
        called: Name of the function or class, for the text.
        option: Name of the option.
        value: The wrong value.
        kind: The kind that the option has, as `kind_of` returns it.
        why: A reason, for a value of the kind that is wrong all the same; "" without one.
        error: Class of the error.
    """
    is_question = why.endswith("?")  # "did you mean ...?"
    hint = f"; {why}" if is_question else f" ({why})" if why else ""
    return error(f"{called}: {option} is {shown(value)}; give {kind.words}{hint}")


def options_of(target: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a class's constructor, or of a function, by name.

    Those that `**options: Unpack[...]` stands for have None as their default; `*args` is no option.

    Args:
        target: A class, such as a tool, or a function.
    """
    function = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    hints = annotations_of(function)
    options = {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            unpacked = _unpacked(hints.get(parameter.name))
            options.update({name: Option(name, hint, None) for name, hint in unpacked.items()})
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            hint = hints.get(parameter.name, inspect.Parameter.empty)
            options[parameter.name] = Option(parameter.name, hint, parameter.default)
    return options


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, below all wrappers, as types.

    Any stands for names that type checkers alone import, and for an annotation that fails to evaluate.
    """
    function = inspect.unwrap(function)
    global_names, hints = getattr(function, "__globals__", {}), {}
    stand_in_by_name: dict[str, Any] = {"Unpack": _Unpack}
    for parameter, annotation in getattr(function, "__annotations__", {}).items():
        # One annotation at a time, so that a name which is missing here spoils no other.
        holder = types.SimpleNamespace(__annotations__={parameter: annotation})
        # Each round evaluates the annotation with Any for one more missing name.
        while parameter not in hints:
            try:
                hints.update(
                    typing.get_type_hints(holder, global_names, stand_in_by_name, include_extras=True)
                )
            except NameError as error:
                stand_in_by_name[str(error.name)] = Any
            except Exception:  # such as an array of a type that is Any
                hints[parameter] = Any
    return hints


class _Unpack(Generic[T]):
    """Stands for `typing.Unpack`, which Python 3.10 lacks."""


def _unpacked(hint: Any) -> Mapping[str, Any]:
    """Return the annotations of the options that `**options: Unpack[Options]` stands for; {} for others."""
    members = typing.get_args(hint) if typing.get_origin(hint) is _Unpack else ()
    return typing.get_type_hints(members[0], include_extras=True) if members else {}


def warn_deprecated(name: str, use: str, since: str, gone: str, stacklevel: int = 1) -> None:
    """Emit the DeprecationWarning of a former name, at the line of a caller.

    Args:
        name: The former name.
        use: The present name, or the code to write instead.
        since: Distribution and version, such as "amanda-core 0.2".
        gone: The version that removes the name.
        stacklevel: 1 for the caller of the function that calls this one, 2 for the caller of that caller.
    """
    text = f"{name} is deprecated since {since} and goes in {gone}: use {use}"
    warn(text, DeprecationWarning, stacklevel=stacklevel + 2)


def deprecated(*, use: str, since: str, gone: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function or a method emit a DeprecationWarning at each call, at the line of its caller.

    Args:
        use: The code to write instead.
        since: As in `warn_deprecated`.
        gone: As in `warn_deprecated`.

    >>> @deprecated(use="area", since="amanda-core 0.2", gone="0.4")
    ... def surface(width: float) -> float:
    ...     return width**2
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that warns of `function` at each call, and calls it."""

        @functools.wraps(function)
        def with_warning(*args: P.args, **kwargs: P.kwargs) -> T:
            warn_deprecated(function.__qualname__, use, since, gone)
            return function(*args, **kwargs)

        return with_warning

    return decorate


def renamed(*, since: str, gone: str, **names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function or a constructor accept options under former names, with a DeprecationWarning.

    Args:
        **names: The present name of each option by the former one.  A call that gives both raises
            OptionError.
        since: As in `warn_deprecated`.
        gone: As in `warn_deprecated`.

    >>> @renamed(since="amanda-core 0.2", gone="0.4", out="path")
    ... def save(path: str) -> str:
    ...     return path
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that calls `function` by the present names of its options."""

        @functools.wraps(function)
        def with_former_names(*args: P.args, **kwargs: P.kwargs) -> T:
            """Warn of each former name, and call the function; raise OptionError for both names of one."""
            options: dict[str, Any] = kwargs
            # A set of both, since most calls give no former name.
            for former_name in names.keys() & options.keys():
                callee_name, name = function.__qualname__.removesuffix(".__init__"), names[former_name]
                if name in options:
                    raise OptionError(
                        f"{callee_name}: {former_name} is the former name of {name}; give {name} alone"
                    )
                warn_deprecated(f"{callee_name}({former_name}=...)", f"{name}=...", since, gone)
                options[name] = options.pop(former_name)
            return function(*args, **kwargs)

        return with_former_names

    return decorate
