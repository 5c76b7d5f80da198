"""Meanings 8 to 10: the order of tools, scopes within each other, and passes with some of the tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import DependencyCycleError
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import FORWARD_POINTS, POINTS, Insertion, add_routine, inserter, tool

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
"""Tools of a forward pass, and those of which routines run in a backward pass with the same tools; then tools
of another backward pass, and those of which routines run there.

Tools have one letter; those after ">" are of a scope within.  c depends on b, d on e; b and e stand for each
other.
"""

NESTS = [["bt"], ["b>t"], ["b", "b>t"], ["t", "b>t", "bt"], ["e>t"], ["e", "e>t"], ["f>t"], ["f>g>t"]]
"""Scopes of passes that follow each other: t and f depend on b, g on e, which stands for b.

f and g are at forward ops alone.
"""


class Following(amanda.Tool):
    """A tool whose routines run where those of its dependents do."""

    follows_dependents = True


class OrderTests(Rung, title="order", implement=("BackwardStep.run_before", "BackwardStep.run_after")):
    """Tools, nested scopes and passes with some of the tools have an order."""

    def test_tools_act_in_the_order_of_apply(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = inserter("insert_before_op", sample.op_name("relu"), lambda value: value + 1)
        times = inserter("insert_before_op", sample.op_name("relu"), lambda value: value * 10)
        with amanda.apply(plus, times):
            assert sample.numbers(sample.relu(x)) == [20.0]
        with amanda.apply(times, plus):
            assert sample.numbers(sample.relu(x)) == [11.0]

    def test_dependencies_join_and_come_first(self, sample: Sample) -> None:
        order: list[str] = []
        base = tool(lambda _: order.append("base"), sample.op_name("relu"))
        middle = tool(lambda _: order.append("middle"), sample.op_name("relu"))
        top = tool(lambda _: order.append("top"), sample.op_name("relu"))
        top.depends_on(middle)
        middle.depends_on(base)
        with amanda.apply(top):
            sample.relu(sample.tensor([1.0]))
        assert order == ["base", "middle", "top"]

    def test_a_dependency_of_two_acts_once(self, sample: Sample) -> None:
        order: list[str] = []
        base = tool(lambda _: order.append("base"), sample.op_name("relu"))
        tops = [tool(lambda _: order.append("top"), sample.op_name("relu")) for _ in range(2)]
        for top in tops:
            top.depends_on(base)
        with amanda.apply(*tops, base):
            sample.relu(sample.tensor([1.0]))
        # Applied by itself as well as joined by two others, it still acts once.
        assert order == ["base", "top", "top"]

    def test_a_cycle_is_an_error_that_prints_it(self) -> None:
        class Mapping(amanda.Tool):
            pass

        class Pruning(amanda.Tool):
            pass

        mapping, pruning = Mapping(), Pruning()
        mapping.depends_on(pruning)
        pruning.depends_on(mapping)
        with pytest.raises(DependencyCycleError, match="Mapping -> Pruning -> Mapping"):
            amanda.apply(mapping)

    def test_a_closing_routine_runs_once_after_the_last_dependent(self, sample: Sample) -> None:
        order: list[str] = []
        base = tool(lambda _: order.append("open"), sample.op_name("relu"))
        base.add_closing_inst_for_op(
            lambda context: (
                order.append("close") if context.get_op().__name__ == sample.op_name("relu") else None
            )
        )
        tops = [tool(lambda _: order.append("top"), sample.op_name("relu")) for _ in range(2)]
        for top in tops:
            top.depends_on(base)
        bystander = tool(lambda _: order.append("other"), sample.op_name("relu"))
        with amanda.apply(tops[0], tops[1], bystander):
            sample.relu(sample.tensor([1.0]))
        # A tool that does not depend on it comes after the closing routine, as applied.
        assert order == ["open", "top", "top", "close", "other"]

    def test_an_innermost_routine_is_next_to_the_op(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = amanda.innermost(lambda value: value + 1)
        cases: list[tuple[Insertion, float]] = [("insert_before_op", 11.0), ("insert_after_op", 20.0)]
        for action, expected in cases:
            near = inserter(action, sample.op_name("relu"), plus)
            far = inserter(action, sample.op_name("relu"), lambda value: value * 10)
            # In both orders, and in scopes within each other: what is innermost does not depend on either.
            for tools in ((near, far), (far, near)):
                with amanda.apply(*tools):
                    assert sample.numbers(sample.relu(x)) == [expected]
                with amanda.apply(tools[0]), amanda.apply(tools[1]):
                    assert sample.numbers(sample.relu(x)) == [expected]

    @needs("backward")
    def test_an_innermost_routine_is_next_to_the_backward_op(self, sample: Sample) -> None:
        order: list[str] = []
        cases: list[tuple[Insertion, list[str]]] = [
            ("insert_before_backward_op", ["far", "near"]),
            ("insert_after_backward_op", ["near", "far"]),
        ]
        for action, expected in cases:
            near = amanda.innermost(lambda *_: order.append("near"))
            close = inserter(action, sample.relu_backward, near)
            remote = inserter(action, sample.relu_backward, lambda *_: order.append("far"))
            for outer, inner in ((close, remote), (remote, close)):
                for _ in range(2):  # the second time by plans that are known
                    order.clear()
                    x = sample.tensor([1.0], requires_grad=True)
                    with amanda.apply(outer), amanda.apply(inner):
                        sample.backward(sample.relu(x))
                    assert order == expected

    def test_inner_scopes_act_after_outer_ones(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = inserter("insert_before_op", sample.op_name("relu"), lambda value: value + 1)
        times = inserter("insert_before_op", sample.op_name("relu"), lambda value: value * 10)
        with amanda.apply(plus):
            with amanda.apply(times):
                assert sample.numbers(sample.relu(x)) == [20.0]
            assert sample.numbers(sample.relu(x)) == [2.0]
        with amanda.apply(times), amanda.apply(plus):
            assert sample.numbers(sample.relu(x)) == [11.0]

    def test_each_scope_of_a_nest_has_plans_of_its_own(self, sample: Sample) -> None:
        analysed: list[str] = []
        outer = tool(lambda _: analysed.append("outer"), sample.op_name("relu"))
        inner = tool(lambda _: analysed.append("inner"), sample.op_name("relu"))
        module, x = sample.module(lambda x: sample.relu(x)), sample.tensor([1.0])
        with amanda.apply(outer):
            module(x)
            for _ in range(2):
                with amanda.apply(inner):
                    module(x)
                    module(x)
            module(x)
        # Each tool once: the plan of the outer scope serves with and without the inner one.
        assert analysed == ["outer", "inner"]

    def test_a_tool_of_a_scope_around_acts_once_at_its_outermost_place(self, sample: Sample) -> None:
        runs: list[str] = []
        shared = inserter("insert_before_op", sample.op_name("relu"), lambda _: runs.append("shared"))
        inner = inserter("insert_before_op", sample.op_name("relu"), lambda _: runs.append("inner"))
        inner.depends_on(shared)
        with amanda.apply(shared), amanda.apply(inner, shared):
            sample.relu(sample.tensor([1.0]))
        # Three times asked for, by two scopes and a dependency, it acts at its outermost place alone.
        assert runs == ["shared", "inner"]

    @needs("backward")
    def test_the_inner_scope_sees_what_the_outer_put_in_the_context(self, sample: Sample) -> None:
        recorded: list[Any] = []
        outer = tool(lambda context: context.update(type="rectifier"), sample.op_name("relu"))
        inner = tool(lambda context: recorded.append(context.get("type")), sample.op_name("relu"))
        add_routine(
            inner, lambda context: recorded.append(context.get("type")), sample.relu_backward, backward=True
        )
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(outer), amanda.apply(inner):
            sample.backward(sample.relu(x))
        assert recorded == ["rectifier", "rectifier"]

    @needs("backward")
    def test_backward_routines_of_nested_scopes_all_run(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        plus = inserter("insert_before_backward_op", sample.relu_backward, lambda grad: grad + 1)
        times = inserter("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 10)
        with amanda.apply(plus), amanda.apply(times):
            sample.backward(sample.relu(x))
        # (1 + 1) * 10: the outer scope's routine runs first, as in the forward pass.
        assert sample.numbers(sample.gradient(x)) == [20.0]

    @pytest.mark.parametrize("base", [amanda.Tool, Following])
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_a_tool_sees_in_a_scope_within_what_it_sees_in_one_scope(
        self, sample: Sample, base: type[amanda.Tool], cache: bool
    ) -> None:
        points = FORWARD_POINTS if "backward" in self.lacks else POINTS
        for nest in NESTS:
            recorded: set[tuple[int, object, bool]] = set()
            # New tools for each nest, so that no plan of the last one answers.
            tools = _nested_tools(sample, base, recorded)
            relu = sample.module(lambda x: sample.relu(x))
            for names in nest:
                with _nested_scopes(tools, names, cache):
                    y = relu(sample.tensor([1.0], requires_grad=True))
                    if points is POINTS:
                        sample.backward(y)
            # The key "forward" is there at the first two points, those of the forward pass.
            assert recorded == {(i, f"written at {i}", i < 2) for i in range(len(points))}, nest

    @needs("backward")
    @pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
    def test_the_routines_of_the_tools_that_are_open_run_in_each_backward_pass(
        self, sample: Sample, cache: bool
    ) -> None:
        for forward, same_run, backward, run in SCOPES:
            log: list[str] = []
            tools = {name: _logging_tool(name, sample.relu_backward, log) for name in "tubced"}
            tools["c"].depends_on(tools["b"])
            tools["d"].depends_on(tools["e"])
            relu = sample.module(lambda x: sample.relu(x))
            # The other pass first, before anything is analysed, and again once all tools have analysed it.
            for names, expected in ((backward, run), (forward, same_run), (backward, run)):
                with _nested_scopes(tools, forward, cache):
                    y = relu(sample.tensor([1.0], requires_grad=True))
                with _nested_scopes(tools, names, cache):
                    sample.backward(y)
                assert log == [*expected, *(f"{name} after" for name in expected)], (forward, names)
                log.clear()


def _nested_tools(
    sample: Sample, base: type[amanda.Tool], recorded: set[tuple[int, object, bool]]
) -> dict[str, amanda.Tool]:
    """Return the tools of `NESTS`, by letter: b and e write into the context at each point, t reads there.

    recorded: gets point, text and whether there is a key "forward" of each reading; f and g do nothing.
    """

    def write(context: OpContext, point: int) -> None:
        context.update({"text": f"written at {point}", "forward": True})
        if context.is_backward():
            del context["forward"]

    def read(context: OpContext, point: int) -> None:
        recorded.add((point, context.get("text"), "forward" in context))

    tools: dict[str, amanda.Tool] = {
        "b": _interchangeable_tool(base),
        "e": _interchangeable_tool(base),
        **{name: amanda.Tool() for name in "tfg"},
    }
    for point, arguments in enumerate(POINTS):
        op = sample.relu_backward if arguments.get("backward") else sample.op_name("relu")
        for name in "be":
            add_routine(tools[name], partial(write, point=point), op, **arguments)
        add_routine(tools["t"], partial(read, point=point), op, **arguments)
    for name in "fg":
        add_routine(tools[name], lambda _: None, sample.op_name("relu"))
    for dependent, dependency in ("tb", "fb", "ge"):
        tools[dependent].depends_on(tools[dependency])
    return tools


def _interchangeable_tool(kind: type[amanda.Tool]) -> amanda.Tool:
    """Return a tool of a class that stands for all tools returned here: a scope applies one of them."""
    interchangeable: amanda.Tool = type(kind.__name__, (kind,), {"stands_for": lambda _: "alike"})()
    return interchangeable


def _logging_tool(name: str, op: str, log: list[str]) -> amanda.Tool:
    """Return a tool that logs its name before, and after, a backward op; b and e stand for each other."""

    def before(context: OpContext) -> None:
        context.insert_before_backward_op(lambda *_: log.append(name))

    def after(context: OpContext) -> None:
        context.insert_after_backward_op(lambda *_: log.append(f"{name} after"))

    logging_tool = _interchangeable_tool(amanda.Tool) if name in "be" else amanda.Tool()
    add_routine(logging_tool, before, op, backward=True)
    return add_routine(logging_tool, after, op, backward=True, require_outputs=True)


@contextmanager
def _nested_scopes(tools: dict[str, amanda.Tool], names: str, cache: bool) -> Iterator[None]:
    """Open scopes of tools by their letters, as "t>u": ">" begins a scope within."""
    with ExitStack() as scopes:
        for scope_names in names.split(">"):
            scopes.enter_context(amanda.apply(*(tools[name] for name in scope_names)))
        if not cache:
            scopes.enter_context(amanda.cache_disabled())
        yield
