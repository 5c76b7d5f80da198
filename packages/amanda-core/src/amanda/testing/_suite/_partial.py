"""Meaning 10, of backward passes in scopes with some of the tools of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.testing._gaps import needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import also, inserting, tool


def passing(name: str, only: str, log: list[str]) -> amanda.Tool:
    """A tool that notes its analysis of one backward op, and each execution."""

    def before(context: OpContext) -> None:
        assert context.get_inputs() and context.get_outputs() and context.get_grad_outputs()
        log.append(f"analysis {name}")
        context.insert_before_backward_op(lambda *_: log.append(name))

    def after(context: OpContext) -> None:
        assert context.get_grad_inputs()
        context.insert_after_backward_op(lambda *_: log.append(f"{name} after"))

    made = tool(before, only, backward=True)
    return also(made, after, only, backward=True, require_outputs=True)


class PartialTests:
    """Each tool that is open analyses a backward op once, and its routines run in each pass."""

    @needs("backward")
    @pytest.mark.parametrize("forward", ["t", "tu", "ut", "t>u"])
    @pytest.mark.parametrize("backward", ["t", "u", "tu", "ut", "t>u", "u>t", ""])
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_the_routines_of_the_tools_that_are_open_run(
        self, sample: Sample, forward: str, backward: str, cache: bool
    ) -> None:
        log: list[str] = []
        tools = {name: passing(name, sample.relu_backward, log) for name in "tu"}
        relu, x = sample.module(lambda x: sample.relu(x)), sample.tensor([1.0], requires_grad=True)
        order = [name for name in forward if name in tools]
        analysed: set[str] = set()
        for scope in (backward, forward, backward):
            with _scope(tools, forward, cache):
                y = relu(x)
            with _scope(tools, scope, cache) as reports:
                sample.backward(y)
            run = [name for name in order if name in scope]
            first = [name for name in run if not cache or name not in analysed]
            analysed.update(run)
            assert log == [*(f"analysis {name}" for name in first), *run, *(f"{name} after" for name in run)]
            assert reports == []
            log.clear()

    @needs("backward")
    def test_a_tool_that_opens_later_finds_what_its_dependency_put_in_the_context(
        self, sample: Sample
    ) -> None:
        log: list[str] = []

        def rewrite(context: OpContext) -> None:
            context["word"] = context.get("word", "") + "seen"

        base = amanda.Tool()
        base.add_inst_for_op(rewrite, backward=True)
        base.add_closing_inst_for_op(lambda context: context.pop("word"), backward=True)
        tops = [passing(name, sample.relu_backward, log) for name in "tu"]
        for top in tops:
            top.depends_on(base)
            also(top, lambda context: log.append(context["word"]), sample.relu_backward, backward=True)
        relu = sample.module(lambda x: sample.relu(x))
        for scope in (tops[:1], tops[1:], tops):
            with amanda.apply(*tops):
                y = relu(sample.tensor([1.0], requires_grad=True))
            with amanda.apply(*scope):
                sample.backward(y)
        one, two = (["analysis " + name, "seen", name, f"{name} after"] for name in "tu")
        assert log == [*one, *two, "t", "u", "t after", "u after"]

    @needs("backward")
    def test_an_analysis_that_fails_leaves_those_of_other_tools(self, sample: Sample) -> None:
        log: list[str] = []
        one, other = (passing(name, sample.relu_backward, log) for name in "tu")
        failing = [True]

        def fail(context: OpContext) -> None:
            if failing:
                raise ZeroDivisionError("in the analysis")

        also(other, fail, sample.relu_backward, backward=True)
        relu = sample.module(lambda x: sample.relu(x))

        def backward(*tools: amanda.Tool) -> None:
            with amanda.apply(one, other):
                y = relu(sample.tensor([1.0], requires_grad=True))
            with amanda.apply(*tools):
                sample.backward(y)

        backward(one)
        with pytest.raises(ZeroDivisionError, match="in the analysis"):
            backward(one, other)
        log.clear()
        backward(one)
        assert log == ["t", "t after"]
        failing.clear()
        backward(one, other)
        assert log[2:] == ["analysis u", "t", "u", "t after", "u after"]

    @needs("backward")
    def test_of_two_replacements_the_second_is_refused_also_in_a_later_pass(self, sample: Sample) -> None:
        tools = [inserting("replace_backward_op", sample.relu_backward, lambda grad: grad) for _ in range(2)]
        relu = sample.module(lambda x: sample.relu(x))

        def backward(*opened: amanda.Tool) -> None:
            with amanda.apply(*tools):
                y = relu(sample.tensor([1.0], requires_grad=True))
            with amanda.apply(*opened):
                sample.backward(y)

        backward(tools[0])
        backward(tools[0])
        with pytest.raises(amanda.errors.ReplaceConflictError):
            backward(*tools)


@contextmanager
def _scope(tools: dict[str, amanda.Tool], names: str, cache: bool) -> Iterator[list[Any]]:
    """Apply the tools of these names, those after ">" in a scope within."""
    outer, _, inner = names.partition(">")
    with amanda.apply(*(tools[name] for name in outer)) as scope:
        with amanda.apply(*(tools[name] for name in inner)):
            if cache:
                yield scope.report
            else:
                with amanda.cache_disabled():
                    yield scope.report
