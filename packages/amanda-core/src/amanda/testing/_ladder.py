"""The ladder of the conformance suite: rungs of tests, what each asks of a driver, and a driver's gaps."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest

from amanda import backend
from amanda.backend import BackwardStep, Call, EagerDriver, OpFacts
from amanda.plan.facts import add_note

T = TypeVar("T", bound=Callable[..., Any])

CAPABILITIES: Mapping[str, str] = {
    "auxiliary_state": "an op updates state that it is given and does not return, as a batch normalization",
    "backward": "the framework computes gradients",
    "batched_values": "under `vmap` a routine is called once, for a value that gives no numbers",
    "call_sites": "an op is a call in the program, which loops and lines tell apart, not a node of a graph",
    "checkpoints": "a part of the program can be computed again in the backward pass",
    "complex": "tensors can be complex",
    "fork": "a forked child can use the framework",
    "grad": "functions are transformed to their gradients",
    "in_place": "ops write into tensors that they are given",
    "jvp": "functions are transformed to their forward-mode derivatives",
    "leaves": "a backward pass stores gradients on the tensors that need them",
    "mutable_tensors": "a routine can write into a tensor",
    "numbers": "an op gives a number of Python",
    "out": "ops take a tensor to write their result into",
    "pickles": "models can be copied and pickled",
    "schema": "an op is given its arguments in the order and under the names of its schema",
    "traceable_calls": "a traceable routine is called at each execution, not once to be traced",
    "values": "analysis routines see the values of an execution, not symbols",
    "vmap": "functions of a sample are transformed to functions of a batch",
    "weak_references": "tensors can be referenced weakly",
}
"""Abilities of a framework, or of a mode of it, by the names that `needs` and `lacks` give them."""


def needs(*capabilities: str) -> Callable[[T], T]:
    """Return a decorator of a test that the suites of drivers without these capabilities do not have."""

    def decorate(test: T) -> T:
        test.__dict__["needs"] = frozenset(capabilities)
        return test

    return decorate


class Gaps:
    """A suite whose subclasses say what their driver lacks, and what they do not pass.

    lacks: capabilities that the driver does not have, with the reason; tests that need one are not collected.
    gaps: marks of other tests that do not pass, by name: `notimpl`, `notyet` or `never`.
    """

    lacks: ClassVar[dict[str, str]] = {}
    gaps: ClassVar[dict[str, pytest.MarkDecorator]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the tests that need what is lacking, and mark those in `gaps`, on copies.

        Raises TypeError for a capability, or a test, that there is not.
        """
        super().__init_subclass__(**kwargs)
        # A misspelt capability would take no test away, and these tests would fail without a hint.
        unknown = cls.lacks.keys() - CAPABILITIES.keys()
        if unknown:
            capabilities = ", ".join(CAPABILITIES)
            raise TypeError(
                f"{cls.__name__}.lacks names {', '.join(sorted(unknown))}; there are {capabilities}"
            )
        for name in dir(cls):
            needed_capabilities: frozenset[str] = getattr(getattr(cls, name), "needs", frozenset())
            if needed_capabilities & cls.lacks.keys():
                # None hides a test of a base class from pytest; a skip would count as one.
                setattr(cls, name, None)
        # `vars`, since the tests of inherited gaps are marked already.
        for name, mark in vars(cls).get("gaps", {}).items():
            test = getattr(cls, name, None)
            if not isinstance(test, types.FunctionType):
                raise TypeError(f"{cls.__name__}.gaps names {name}, which is no test that it has")
            setattr(cls, name, mark(_copy_of_test(test)))


def _copy_of_test(test: types.FunctionType) -> types.FunctionType:
    """Return a copy of a test with marks of its own, which do not reach other drivers' suites."""
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__dict__.update({**vars(test), "pytestmark": list(getattr(test, "pytestmark", []))})
    return copy


def notimpl(reason: str) -> pytest.MarkDecorator:
    """A gap that this driver could close."""
    return pytest.mark.xfail(strict=True, reason=f"not implemented: {reason}")


def notyet(reason: str) -> pytest.MarkDecorator:
    """A gap that waits for the framework, or for the core."""
    return pytest.mark.xfail(strict=True, reason=f"not yet: {reason}")


def never(reason: str) -> pytest.MarkDecorator:
    """A gap that the framework's nature leaves open."""
    return pytest.mark.xfail(strict=True, reason=f"never: {reason}")


class Rung(Gaps):
    """A class of tests that one step of writing a driver makes pass; a failure says what the step is.

    title: what is shown, in the field's words.
    implement: names of the driver, of its `Call`, or of `amanda.backend`, that the step is about: "bind",
    "Call.invoke", "recomputed".
    """

    title: ClassVar[str] = ""
    implement: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, title: str = "", implement: tuple[str, ...] = (), **kwargs: Any) -> None:
        """Set title and names of a new rung, whose tests explain their failures; without a title nothing."""
        if title:
            cls.title, cls.implement = title, implement
            for name, test in list(vars(cls).items()):
                if name.startswith("test_") and isinstance(test, types.FunctionType):
                    setattr(cls, name, _with_explanation(test, cls))
        super().__init_subclass__(**kwargs)


def _with_explanation(test: types.FunctionType, rung: type[Rung]) -> Callable[..., Any]:
    """Wrap a test: a failure gets a note of what was expected, and what the rung asks a driver for."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        """Run the test; add the explanation to its failure."""
        __tracebackhide__ = True
        try:
            test(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as error:
            add_note(error, explanation(test, rung, error))
            raise

    return run


def explanation(test: Callable[..., Any], rung: type[Rung], error: BaseException) -> str:
    """Return the note of a failed test: what was expected of the driver, and what its rung is about."""
    expected = inspect.getdoc(test) or test.__name__.removeprefix("test_").replace("_", " ")
    lines = [f'Expected on the rung "{rung.title}": {" ".join(expected.split())}.'.replace("..", ".")]
    if isinstance(error, NotImplementedError) and not error.args:  # of a method that a template leaves open
        lines += _unwritten_method(error)
    if rung.implement:
        lines.append("What a driver implements for this rung:")
        lines += [f"  {name}: {summary(name)}" for name in rung.implement]
    return "\n".join(lines)


def _unwritten_method(error: BaseException) -> Iterator[str]:
    """Yield a line with the method that raised NotImplementedError; none without a traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is not None:
        frame = traceback.tb_frame
        holder = type(frame.f_locals.get("self")).__name__
        yield f"To be written: {holder}.{frame.f_code.co_name} in {frame.f_code.co_filename}:{frame.f_lineno}"


HOLDERS: Mapping[str, type] = {"Call": Call, "OpFacts": OpFacts, "BackwardStep": BackwardStep}
"""Classes whose names a rung gives with the class before them; other names are the driver's."""


def summary(name: str) -> str:
    """Return the first paragraph about a name that a driver implements: "bind", "Call.invoke"."""
    if callable(function := vars(backend).get(name)):
        return _first_paragraph(function)
    holder, _, member = name.rpartition(".")
    return member_summary(HOLDERS.get(holder, EagerDriver), member)


def _first_paragraph(documented_object: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(documented_object) or "").split("\n\n")[0].split())


def member_summary(kind: type, member: str) -> str:
    """Return the first paragraph about a member of a class, from its docstring or that of the class."""
    value = inspect.getattr_static(kind, member, None)
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(value, (types.FunctionType, property, functools.cached_property)):
        return _first_paragraph(value)
    # Attributes have their sentences in the docstring of their class.
    return attribute_summary(kind, member)


def attribute_summary(kind: type, name: str) -> str:
    """Return what the docstring of a class, or of one of its bases, says of an attribute; "" for nothing."""
    # "name: text" or "name, other: text" at the start of a line or after two spaces, up to the next entry.
    entry = re.compile(
        rf"(?:^|\n|  )(?:\w+, )*{name}(?:, \w+)*: (?P<text>.*?)(?=\n\n|(?:\n|  )\w+(?:, \w+)*: |$)", re.S
    )
    for base in kind.__mro__:
        if match := entry.search(inspect.getdoc(base) or ""):
            return " ".join(match["text"].split()).rstrip(".")
    return ""
