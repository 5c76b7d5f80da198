"""Former names of functions, methods and options: they work for some versions, and warn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from warnings import warn

from amanda.errors import OptionError

P = ParamSpec("P")
T = TypeVar("T")


def warn_deprecated(name: str, use: str, since: str, gone: str, stacklevel: int = 1) -> None:
    """Emit the DeprecationWarning of a former name, at the line of a caller.

    since: distribution and version, such as "amanda-core 0.2".  gone: the version that removes the name.
    stacklevel: 1 for the caller of the function that calls this one, 2 for the caller of that caller.
    """
    text = f"{name} is deprecated since {since} and goes in {gone}: use {use}"
    warn(text, DeprecationWarning, stacklevel=stacklevel + 2)


def deprecated(*, use: str, since: str, gone: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function or a method emit a DeprecationWarning at each call, at the line of its caller.

    use: what to write instead.  since, gone: see `warn_deprecated`.

    >>> @deprecated(use="area", since="amanda-core 0.2", gone="0.4")
    ... def surface(width: float) -> float:
    ...     return width**2
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def with_warning(*args: P.args, **kwargs: P.kwargs) -> T:
            warn_deprecated(function.__qualname__, use, since, gone)
            return function(*args, **kwargs)

        return with_warning

    return decorate


def renamed(*, since: str, gone: str, **names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function or a constructor accept options under former names, with a DeprecationWarning.

    names: the present name of each option by the former one.  Raises OptionError at a call that gives both.
    since, gone: see `warn_deprecated`.

    >>> @renamed(since="amanda-core 0.2", gone="0.4", out="path")
    ... def save(path: str) -> str:
    ...     return path
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def with_former_names(*args: P.args, **kwargs: P.kwargs) -> T:
            options: dict[str, Any] = kwargs
            for former in names.keys() & options.keys():
                called, name = function.__qualname__.removesuffix(".__init__"), names[former]
                if name in options:
                    raise OptionError(f"{called}: {former} is the former name of {name}; give {name} alone")
                warn_deprecated(f"{called}({former}=...)", f"{name}=...", since, gone)
                options[name] = options.pop(former)
            return function(*args, **kwargs)

        return with_former_names

    return decorate
