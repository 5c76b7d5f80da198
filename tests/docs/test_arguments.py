"""Docstrings of public functions list their arguments, as editors and the reference show them."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

from amanda.interceptor import _fallback
from amanda.tools.results import Result
from amanda_docs.pages import ROOT

TOOLS = {
    f"amanda.tools.{path.parent.name}" for path in ROOT.glob("packages/*/src/amanda/tools/[!_]*/__init__.py")
}
# Functions of another project, which its own reference explains.
LEFT_OUT = {"amanda.tools.libraries"}
ROOMS = [
    "amanda",
    "amanda.action",
    "amanda.backend",
    "amanda.context",
    "amanda.eager",
    "amanda.errors",
    "amanda.files",
    "amanda.graph",
    "amanda.interceptor",
    "amanda.options",
    "amanda.plan",
    "amanda.plugins",
    "amanda.scope",
    "amanda.testing",
    *sorted(TOOLS - LEFT_OUT),
]
# What Amanda makes, and hands to routines and rules: a user never calls these constructors.
MADE_BY_AMANDA = {
    "amanda.OpContext", "amanda.context.OpContext", "amanda.tools.rewrite.Match",
    "amanda.tools.rewrite.OpCall", "amanda.tools.search.Site", "amanda.tools.weights.Weight",
}  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_a_function_of_several_arguments_lists_them_all(room: str) -> None:
    assert {name: names for name, names in unlisted(room).items() if name not in MADE_BY_AMANDA} == {}


def test_each_exception_is_one() -> None:
    names = {name for room in ROOMS for name in unlisted(room)}
    assert names >= MADE_BY_AMANDA


def unlisted(room: str) -> dict[str, list[str]]:
    """Return by name the arguments that a docstring lacks, of functions with two or more."""
    found = {}
    for name, function, docstring in callables(room):
        arguments = arguments_of(function)
        listed = set(re.findall(r"^    \*{0,2}(\w+): ", section(docstring, "Args"), re.MULTILINE))
        if len(arguments) > 1 and not listed.issuperset(arguments):
            found[name] = [argument for argument in arguments if argument not in listed]
    return found


def callables(room: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield name, function and docstring of functions, constructors and methods of a room."""
    module = importlib.import_module(room)
    values = {name: getattr(module, name) for name in module.__all__}
    if room == "amanda.interceptor":
        # The callables of the native interceptor have no signatures, and the reference shows those in Python.
        values.update((name, getattr(_fallback, name)) for name in values if hasattr(_fallback, name))
    # A method of a protocol says what the methods of all its classes do.
    protocols = [kind for kind in values.values() if getattr(kind, "_is_protocol", False)]
    for name, value in values.items():
        if inspect.isroutine(value):
            yield f"{room}.{name}", value, inspect.getdoc(value) or ""
        elif inspect.isclass(value) and not issubclass(value, enum.Enum):
            constructor = None if value in protocols else vars(value).get("__init__")
            if constructor and not is_dataclass(value) and not issubclass(value, Result):
                docstrings = filter(None, map(inspect.getdoc, (value, constructor)))
                yield f"{room}.{name}", constructor, "\n\n".join(docstrings)
            for method, function in methods_of(value):
                if value in protocols or not any(hasattr(protocol, method) for protocol in protocols):
                    yield f"{room}.{name}.{method}", function, inspect.getdoc(function) or ""


def methods_of(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield public methods, but those that override a method with the same arguments, and tests."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if name.startswith(("_", "test_")) or not inspect.isfunction(function):
            continue
        overridden = [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]
        overridden = [getattr(base, "__func__", base) for base in overridden]
        if not any(callable(base) and arguments_of(base) == arguments_of(function) for base in overridden):
            yield name, function


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of arguments, without the object itself and private ones."""
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def section(docstring: str, title: str) -> str:
    """Return the lines below a heading, "" without the heading."""
    return "".join(re.findall(rf"^{title}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE))
