"""Meaning 10, of backward passes in scopes with some of the tools of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

import amanda
from amanda.context import OpContext
from amanda.testing._gaps import needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import also, tool

SCOPES = [
    ("tu", "t"),
    ("tu", "u"),
    ("ut", "t"),
    ("t", "tu"),
    ("u", "t"),
    ("t>u", "t"),
    ("t>u", "u"),
    ("tu", "u>t"),
]
"""Tools of a forward and of a backward pass; those after ">" are of a scope within."""


class PartialTests:
    """Backward ops are seen by the tools of their forward op that are open."""

    @needs("backward")
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_the_routines_of_the_tools_that_are_open_run_in_each_backward_pass(
        self, sample: Sample, cache: bool
    ) -> None:
        for forward, backward in SCOPES:
            log: list[str] = []
            tools = {name: _passing(name, sample.relu_backward, log) for name in "tu"}
            relu = sample.module(lambda x: sample.relu(x))
            for opened in (backward, forward, backward):
                with _scope(tools, forward, cache):
                    y = relu(sample.tensor([1.0], requires_grad=True))
                with _scope(tools, opened, cache):
                    sample.backward(y)
                run = [name for name in forward if name in tools and name in opened]
                assert log == [*run, *(f"{name} after" for name in run)], (forward, opened)
                log.clear()


def _passing(name: str, only: str, log: list[str]) -> amanda.Tool:
    def before(context: OpContext) -> None:
        context.insert_before_backward_op(lambda *_: log.append(name))

    def after(context: OpContext) -> None:
        context.insert_after_backward_op(lambda *_: log.append(f"{name} after"))

    made = tool(before, only, backward=True)
    return also(made, after, only, backward=True, require_outputs=True)


@contextmanager
def _scope(tools: dict[str, amanda.Tool], names: str, cache: bool) -> Iterator[None]:
    outer, _, inner = names.partition(">")
    scopes = [amanda.apply(*map(tools.__getitem__, names)) for names in (outer, inner)]
    with scopes[0], scopes[1], nullcontext() if cache else amanda.cache_disabled():
        yield
