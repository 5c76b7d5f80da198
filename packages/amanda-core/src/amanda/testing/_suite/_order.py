"""Meanings 8 and 9: in which order tools act, and which namespace an op is in."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda.errors import DependencyCycleError
from amanda.testing._gaps import needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import Insertion, also, inserting, tool


class OrderTests:
    """Dependencies, nesting and namespaces."""

    def test_tools_act_in_the_order_of_apply(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = inserting("insert_before_op", sample.name("relu"), lambda value: value + 1)
        times = inserting("insert_before_op", sample.name("relu"), lambda value: value * 10)
        with amanda.apply(plus, times):
            assert sample.numbers(sample.relu(x)) == [20.0]
        with amanda.apply(times, plus):
            assert sample.numbers(sample.relu(x)) == [11.0]

    def test_dependencies_join_and_come_first(self, sample: Sample) -> None:
        order: list[str] = []
        base = tool(lambda _: order.append("base"), sample.name("relu"))
        middle = tool(lambda _: order.append("middle"), sample.name("relu"))
        top = tool(lambda _: order.append("top"), sample.name("relu"))
        top.depends_on(middle)
        middle.depends_on(base)
        with amanda.apply(top):
            sample.relu(sample.tensor([1.0]))
        assert order == ["base", "middle", "top"]

    def test_a_dependency_of_two_acts_once(self, sample: Sample) -> None:
        order: list[str] = []
        base = tool(lambda _: order.append("base"), sample.name("relu"))
        tops = [tool(lambda _: order.append("top"), sample.name("relu")) for _ in range(2)]
        for top in tops:
            top.depends_on(base)
        with amanda.apply(*tops, base):
            sample.relu(sample.tensor([1.0]))
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
        base = tool(lambda _: order.append("open"), sample.name("relu"))
        base.add_closing_inst_for_op(
            lambda context: (
                order.append("close") if context.get_op().__name__ == sample.name("relu") else None
            )
        )
        tops = [tool(lambda _: order.append("top"), sample.name("relu")) for _ in range(2)]
        for top in tops:
            top.depends_on(base)
        bystander = tool(lambda _: order.append("other"), sample.name("relu"))
        with amanda.apply(tops[0], tops[1], bystander):
            sample.relu(sample.tensor([1.0]))
        assert order == ["open", "top", "top", "close", "other"]

    def test_an_innermost_routine_is_next_to_the_op(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = amanda.innermost(lambda value: value + 1)
        cases: list[tuple[Insertion, float]] = [("insert_before_op", 11.0), ("insert_after_op", 20.0)]
        for action, expected in cases:
            near = inserting(action, sample.name("relu"), plus)
            far = inserting(action, sample.name("relu"), lambda value: value * 10)
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
            close = inserting(action, sample.relu_backward, near)
            remote = inserting(action, sample.relu_backward, lambda *_: order.append("far"))
            for outer, inner in ((close, remote), (remote, close)):
                for _ in range(2):  # the second time by plans that are known
                    order.clear()
                    x = sample.tensor([1.0], requires_grad=True)
                    with amanda.apply(outer), amanda.apply(inner):
                        sample.backward(sample.relu(x))
                    assert order == expected

    def test_inner_scopes_act_after_outer_ones(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        plus = inserting("insert_before_op", sample.name("relu"), lambda value: value + 1)
        times = inserting("insert_before_op", sample.name("relu"), lambda value: value * 10)
        with amanda.apply(plus):
            with amanda.apply(times):
                assert sample.numbers(sample.relu(x)) == [20.0]
            assert sample.numbers(sample.relu(x)) == [2.0]
        with amanda.apply(times), amanda.apply(plus):
            assert sample.numbers(sample.relu(x)) == [11.0]

    def test_each_scope_of_a_nest_has_plans_of_its_own(self, sample: Sample) -> None:
        analysed: list[str] = []
        outer = tool(lambda _: analysed.append("outer"), sample.name("relu"))
        inner = tool(lambda _: analysed.append("inner"), sample.name("relu"))
        module, x = sample.module(lambda x: sample.relu(x)), sample.tensor([1.0])
        with amanda.apply(outer):
            module(x)
            for _ in range(2):
                with amanda.apply(inner):
                    module(x)
                    module(x)
            module(x)
        assert analysed == ["outer", "inner"]

    def test_a_tool_of_a_scope_around_acts_once_at_its_outermost_place(self, sample: Sample) -> None:
        runs: list[str] = []
        shared = inserting("insert_before_op", sample.name("relu"), lambda _: runs.append("shared"))
        inner = inserting("insert_before_op", sample.name("relu"), lambda _: runs.append("inner"))
        inner.depends_on(shared)
        with amanda.apply(shared), amanda.apply(inner, shared):
            sample.relu(sample.tensor([1.0]))
        assert runs == ["shared", "inner"]

    @needs("backward")
    def test_the_inner_scope_sees_what_the_outer_put_in_the_context(self, sample: Sample) -> None:
        recorded: list[Any] = []
        outer = tool(lambda context: context.update(type="rectifier"), sample.name("relu"))
        inner = tool(lambda context: recorded.append(context.get("type")), sample.name("relu"))
        also(inner, lambda context: recorded.append(context.get("type")), sample.relu_backward, backward=True)
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(outer), amanda.apply(inner):
            sample.backward(sample.relu(x))
        assert recorded == ["rectifier", "rectifier"]

    @needs("backward")
    def test_backward_routines_of_nested_scopes_all_run(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        plus = inserting("insert_before_backward_op", sample.relu_backward, lambda grad: grad + 1)
        times = inserting("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 10)
        with amanda.apply(plus), amanda.apply(times):
            sample.backward(sample.relu(x))
        assert sample.numbers(sample.gradient(x)) == [20.0]

    def test_an_op_is_in_the_namespace_of_its_driver(self, sample: Sample) -> None:
        recorded: list[amanda.Namespace] = []
        with amanda.apply(tool(lambda context: recorded.append(context.namespace))):
            sample.relu(sample.tensor([1.0]))
        framework, version, mode = recorded[0]
        assert mode in sample.driver.modes
        assert recorded[0].matches(framework)
        assert recorded[0].matches(f"{framework}/{version}")
        assert recorded[0].matches(f"*/*/{mode}")
        assert not recorded[0].matches(f"{framework}/0.0.0")
        assert not recorded[0].matches("nowhere")
