"""The analysis of a graph's ops, where a tool's own exception ends it."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest

import amanda
from amanda.backend import GraphAnalysis, Namespace, OpFacts, State, TensorOps
from amanda.plan import Plan
from amanda.plan.tool_stack import stack_for


class Symbols(TensorOps):
    """Tensors of which nothing is known."""

    is_tensor = signature = shapes = version = detach_value = differentiable_copy = staticmethod(
        lambda value: None
    )
    without_autodiff = staticmethod(nullcontext)
    write = staticmethod(lambda target, value, isolated: None)
    straight_through = staticmethod(lambda original, value: value)


class Watching(amanda.Tool):
    """Looks at what an op gives; a faulty one raises at the first, before or after it."""

    def __init__(self, faulty: str = "") -> None:
        self.faulty = faulty
        self.add_inst_for_op(lambda context: self.analyse(context, "before"))
        self.add_inst_for_op(lambda context: self.analyse(context, "after"), require_outputs=True)

    def analyse(self, context: amanda.OpContext, place: str) -> None:
        if place == self.faulty:
            self.faulty = ""
            raise ZeroDivisionError
        if place == "after":
            context.insert_after_op(lambda output: None)


def analysed(state: State) -> Plan:
    facts = OpFacts("add", 1, Namespace("toy/1/graph"), ["x"], ["x"])
    analysis = GraphAnalysis(state, Symbols())
    try:
        return analysis.analyse_forward(facts, ["y"])
    except BaseException:
        analysis.drop_plans()
        raise


@pytest.mark.parametrize("place", ["before", "after"])
def test_no_plan_is_left_of_an_analysis_that_failed(place: str) -> None:
    outer, inner = Watching(), Watching(place)
    state = State(stack_for([inner], stack_for([outer], None)))
    with suppress(ZeroDivisionError):
        analysed(state)
    assert [action.tool for action in analysed(state).after] == [outer, inner]
