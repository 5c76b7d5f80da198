"""Meaning 10, of scopes within each other, and of backward passes with some of the forward pass's tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

import amanda
from amanda.context import OpContext
from amanda.testing._gaps import Gaps, needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import FORWARD_POINTS, POINTS, also

SCOPES = [
    ("tu", "tu", "t", "t"),
    ("tu", "tu", "u", "u"),
    ("ut", "ut", "t", "t"),
    ("t", "t", "tu", "t"),
    ("u", "u", "t", ""),
    ("t>u", "tu", "t", "t"),
    ("t>u", "tu", "u", "u"),
    ("tu", "tu", "u>t", "tu"),
    ("cd", "bcd", "d", "bd"),
    ("b>d", "bd", "d", "bd"),
    ("b>d", "bd", "b", "b"),
    ("d", "ed", "b>d", "ed"),
]
"""Tools of a forward and of a backward pass, each with those whose routines run in the backward pass.

Those after ">" are of a scope within.  c depends on b, d on e; b and e stand for each other.
"""

NESTS = [["bt"], ["b>t"], ["b", "b>t"], ["t", "b>t", "bt"], ["e>t"], ["e", "e>t"], ["f>t"], ["f>g>t"]]
"""Scopes of passes that follow each other: t and f depend on b, g on e, which stands for b.

f and g are at forward ops alone.
"""


class Following(amanda.Tool):
    """A tool whose routines run where those of its dependents do."""

    follows_dependents = True


class PartialTests(Gaps):
    """Tools see what their dependencies wrote, and backward ops are seen by the tools that are open."""

    @pytest.mark.parametrize("base", [amanda.Tool, Following])
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_a_tool_sees_in_a_scope_within_what_it_sees_in_one_scope(
        self, sample: Sample, base: type[amanda.Tool], cache: bool
    ) -> None:
        passes = FORWARD_POINTS if "backward" in self.lacks else POINTS
        for scopes in NESTS:
            recorded: set[tuple[int, object, bool]] = set()
            tools = _writing_and_reading(sample, base, recorded)
            relu = sample.module(lambda x: sample.relu(x))
            for names in scopes:
                with _scope(tools, names, cache):
                    y = relu(sample.tensor([1.0], requires_grad=True))
                    if passes is POINTS:
                        sample.backward(y)
            assert recorded == {(i, f"written at {i}", i < 2) for i in range(len(passes))}, scopes

    @needs("backward")
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_the_routines_of_the_tools_that_are_open_run_in_each_backward_pass(
        self, sample: Sample, cache: bool
    ) -> None:
        for forward, whole, backward, part in SCOPES:
            log: list[str] = []
            tools = {name: _passing(name, sample.relu_backward, log) for name in "tubced"}
            tools["c"].depends_on(tools["b"])
            tools["d"].depends_on(tools["e"])
            relu = sample.module(lambda x: sample.relu(x))
            for opened, run in ((backward, part), (forward, whole), (backward, part)):
                with _scope(tools, forward, cache):
                    y = relu(sample.tensor([1.0], requires_grad=True))
                with _scope(tools, opened, cache):
                    sample.backward(y)
                assert log == [*run, *(f"{name} after" for name in run)], (forward, opened)
                log.clear()


def _writing_and_reading(
    sample: Sample, base: type[amanda.Tool], recorded: set[tuple[int, object, bool]]
) -> dict[str, amanda.Tool]:
    """Return the tools of `NESTS`; t adds its point, the last text and whether a key exists to `recorded`."""

    def write(context: OpContext, point: int) -> None:
        context.update({"text": f"written at {point}", "forward": True})
        if context.is_backward():
            del context["forward"]

    def read(context: OpContext, point: int) -> None:
        recorded.add((point, context.get("text"), "forward" in context))

    tools: dict[str, amanda.Tool] = {
        "b": _alike(base),
        "e": _alike(base),
        **{name: amanda.Tool() for name in "tfg"},
    }
    for point, where in enumerate(POINTS):
        only = sample.relu_backward if where.get("backward") else sample.name("relu")
        for name in "be":
            also(tools[name], partial(write, point=point), only, **where)
        also(tools["t"], partial(read, point=point), only, **where)
    for name in "fg":
        also(tools[name], lambda _: None, sample.name("relu"))
    for name, on in ("tb", "fb", "ge"):
        tools[name].depends_on(tools[on])
    return tools


def _alike(kind: type[amanda.Tool]) -> amanda.Tool:
    """Return a tool that stands for the others that are made here."""
    built: amanda.Tool = type(kind.__name__, (kind,), {"stands_for": lambda _: "alike"})()
    return built


def _passing(name: str, only: str, log: list[str]) -> amanda.Tool:
    def before(context: OpContext) -> None:
        context.insert_before_backward_op(lambda *_: log.append(name))

    def after(context: OpContext) -> None:
        context.insert_after_backward_op(lambda *_: log.append(f"{name} after"))

    built = also(_alike(amanda.Tool) if name in "be" else amanda.Tool(), before, only, backward=True)
    return also(built, after, only, backward=True, require_outputs=True)


@contextmanager
def _scope(tools: dict[str, amanda.Tool], names: str, cache: bool) -> Iterator[None]:
    with ExitStack() as scopes:
        for several in names.split(">"):
            scopes.enter_context(amanda.apply(*map(tools.__getitem__, several)))
        if not cache:
            scopes.enter_context(amanda.cache_disabled())
        yield
