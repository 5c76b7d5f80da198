"""Plans hold for all shapes, unless a routine has asked for them; routines are told those they run on."""

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.plan.tool_stack import PLANS_PER_OP


def only(name: str, *, backward: bool = False) -> Any:
    """Return what restricts a tool to an operator, or to its backward ops of this name."""

    def admits(context: OpContext) -> bool:
        op = context.get_backward_op() if context.is_backward() else context.get_op()
        return bool(op.__name__ == name) and context.is_backward() == backward

    return admits


class Noting(amanda.Tool):
    """Notes the shapes that its routines are given."""

    def __init__(self, name: str, point: str, *, backward: bool = False, after: bool = True) -> None:
        super().__init__()
        self.point = point
        self.analyses = 0
        self.calls: list[Any] = []
        self.add_inst_for_op(self.analyse, backward=backward, require_outputs=after)
        self.restrict(only(name, backward=backward))

    def analyse(self, context: OpContext) -> None:
        self.analyses += 1
        getattr(context, self.point)(self.note)

    def note(self, *values: Any, shapes: Any) -> None:
        self.calls.append(shapes)


class Reading(amanda.Tool):
    """Asks for shapes at some ops."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.analysed: list[Any] = []
        self.gone: list[int] = []
        self.add_inst_for_op(self.analyse, guard="read")
        self.restrict(lambda context: context.get_op().__name__ in ("relu", "sigmoid"))

    def analyse(self, context: OpContext) -> None:
        name = context.get_op().__name__
        shapes = context.get_input_shapes() if name in self.names else None
        self.analysed.append((name, shapes))
        context.insert_before_op(lambda *_: None)

    def op_gone(self, op_id: int) -> None:
        self.gone.append(op_id)


def lengths(*numbers: int) -> list[Any]:
    return [torch.ones(number, 3) for number in numbers]


def test_an_op_is_analysed_again_where_shapes_were_asked_for_alone() -> None:
    tool, model = Reading("relu"), nn.Sequential(nn.ReLU(), nn.Sigmoid())
    with amanda.apply(tool):
        for x in lengths(1, 2, 2, 1, 3):
            for _ in range(2):
                model(x)
    assert tool.analysed == [
        ("relu", ((1, 3),)), ("sigmoid", None), ("relu", ((2, 3),)), ("relu", ((3, 3),)),
    ]  # fmt: skip


def test_shapes_asked_for_at_one_dtype_decide_at_all() -> None:
    shapes: list[Any] = []

    class Some(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, guard="read")
            self.restrict(only("relu"))

        def analyse(self, context: OpContext) -> None:
            double = context.get_inputs()[0].dtype is torch.float64
            shapes.append(context.get_input_shapes() if double else None)
            context.insert_before_op(lambda *_: None)

    model = nn.ReLU()
    with amanda.apply(Some()):
        for _ in range(2):
            for x in lengths(1, 2):
                model(x)
            for x in lengths(1, 2):
                model(x.double())
    assert shapes == [None, ((1, 3),), ((2, 3),), None, None]


def test_a_scope_within_one_that_asked_is_asked_by_shape_too() -> None:
    outer, inner, model = Reading("relu"), Reading(), nn.ReLU()
    with amanda.apply(outer):
        for x in lengths(1, 2):
            with amanda.apply(inner):
                for _ in range(2):
                    model(x)
            model(x)
    assert outer.analysed == [("relu", ((1, 3),)), ("relu", ((2, 3),))]
    assert inner.analysed == [("relu", None)] * 2


@pytest.mark.parametrize("read", [True, False])
def test_plans_do_not_grow_with_each_length(read: bool) -> None:
    tool = Reading("relu") if read else Reading()
    model, weight = nn.ReLU(), torch.ones(3, requires_grad=True)
    with amanda.apply(tool) as scope:
        early = model(torch.ones(1, 3) * weight)
        for number in range(2, PLANS_PER_OP + 50):
            model(torch.ones(number, 3) * weight).sum().backward()
        early.sum().backward()
        (stack,) = tool._amanda.stacks.values()
        assert max(map(len, stack.plans.values())) == (PLANS_PER_OP if read else 1)
        again = len(tool.analysed)
        for _ in range(3):
            model(torch.ones(PLANS_PER_OP + 49, 3) * weight)
    assert len(tool.analysed) == again
    assert not tool.gone
    assert not list(scope.report)


def test_a_routine_is_given_the_shapes_of_each_execution() -> None:
    before, after = Noting("linear", "insert_before_op", after=False), Noting("linear", "insert_after_op")
    model = nn.Linear(3, 4)
    with amanda.apply(before, after), torch.no_grad():
        for x in lengths(1, 2, 2, 5):
            model(x)
    inputs = [((number, 3), (4, 3), (4,)) for number in (1, 2, 2, 5)]
    assert before.calls == [(shape,) for shape in inputs]
    assert after.calls == [
        (shape, ((number, 4),)) for shape, number in zip(inputs, (1, 2, 2, 5), strict=True)
    ]
    assert (before.analyses, after.analyses) == (1, 1)


def test_lists_views_numbers_and_what_the_data_choose_have_their_shapes() -> None:
    tools = [
        Noting(name, "insert_after_op") for name in ("cat", "narrow", "__getitem__", "nonzero", "unbind")
    ]
    with amanda.apply(*tools):
        for number in (1, 2, 3):
            x = torch.arange(4.0)
            torch.cat([x, x[:0]])
            x.narrow(0, 0, number)
            x[x < number]
            torch.nonzero(x < number)
            torch.ones(number, 2).unbind(0)
    cat, narrow, picked, nonzero, unbind = (tool.calls for tool in tools)
    assert cat == [((((4,), (0,)),), ((4,),))] * 3
    assert narrow == [(((4,), None, None, None), ((number,),)) for number in (1, 2, 3)]
    assert picked[1::2] == [(((4,), (4,)), ((number,),)) for number in (1, 2, 3)]
    assert nonzero == [(((4,),), ((number, 1),)) for number in (1, 2, 3)]
    assert [len(outputs) for _, outputs in unbind] == [1, 2, 3]


def test_an_op_that_changes_a_shape_in_place_had_the_one_that_it_was_given() -> None:
    tool = Noting("unsqueeze_", "insert_after_op")
    with amanda.apply(tool):
        for number in (1, 2, 2):
            torch.ones(number).unsqueeze_(0)
    assert [(inputs[0], outputs[0]) for inputs, outputs in tool.calls] == [
        ((number,), (1, number)) for number in (1, 2, 2)
    ]


def test_a_backward_op_has_the_shapes_of_its_own_forward_execution() -> None:
    tools = [
        Noting("ReluBackward0", point, backward=True, after=after)
        for point, after in (("insert_before_backward_op", False), ("insert_after_backward_op", True))
    ]
    model = nn.ReLU()
    with amanda.apply(*tools):
        for _ in range(4):  # the first in Python, the others as native code has learned
            results = [model(torch.ones(number, 3, requires_grad=True) * 2).sum() for number in (1, 2)]
            for result in reversed(results):
                result.backward()
    shapes = [((number, 3),) for number in (2, 1)] * 4
    assert tools[0].calls == [(shape, shape, shape) for shape in shapes]
    assert tools[1].calls == [(shape, shape, shape, shape) for shape in shapes]
    assert [tool.analyses for tool in tools] == [1, 1]


def test_backward_ops_of_backward_ops_have_them_too() -> None:
    calls: list[Any] = []

    class Both(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=True)
            self.restrict(lambda context: context.get_op().__name__ == "sigmoid")

        def analyse(self, context: OpContext) -> None:
            context.insert_before_backward_op(self.note, order=context.get_backward_order())

        def note(self, *values: Any, order: int, shapes: Any) -> None:
            calls.append((order, shapes[:2]))

    with amanda.apply(Both()):
        for number in (1, 2, 1, 2):
            x = torch.ones(number, requires_grad=True)
            (gradient,) = torch.autograd.grad(torch.sigmoid(x).sum(), x, create_graph=True)
            gradient.sum().backward()
            shapes = (((number,),), ((number,),))
            assert (1, shapes) in calls
            assert (2, shapes) in calls
            assert {passed_shapes for _, passed_shapes in calls} == {shapes}
            calls.clear()


def test_a_routine_that_gives_a_value_is_given_shapes_as_well() -> None:
    calls: list[Any] = []

    def double(x: Any, *, shapes: Any) -> Any:
        calls.append(shapes)
        return x * 2

    def note(x: Any, *, shapes: Any) -> None:
        calls.append(shapes)

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: [context.insert_after_op(routine) for routine in (double, note)] and None
    )
    tool.restrict(only("relu"))
    with amanda.apply(tool):
        results = [torch.relu(x) for x in lengths(1, 2, 2)]
    assert [int(result.sum()) for result in results] == [6, 12, 12]
    assert calls == [(((number, 3),), ((number, 3),)) for number in (1, 1, 2, 2, 2, 2)]


def test_a_parameter_of_that_name_that_a_value_fills_is_given_the_value() -> None:
    values: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda shapes: values.append(shapes)))
    tool.restrict(only("relu"))
    with amanda.apply(tool):
        for x in lengths(1, 2):
            torch.relu(x)
    assert [tuple(value.shape) for value in values] == [(1, 3), (2, 3)]


def test_what_asks_for_shapes_says_so_when_it_is_registered() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.get_input_shapes() and None)
    with amanda.apply(tool), pytest.raises(AmandaError, match='guard="read"'):
        torch.relu(torch.ones(1))


def test_shapes_cannot_be_asked_for_in_a_backward_pass() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None, guard="read")
    tool.add_inst_for_op(lambda context: context.get_input_shapes() and None, backward=True)
    with amanda.apply(tool):
        result = torch.relu(torch.ones(1, requires_grad=True))
        with pytest.raises(AmandaError, match="forward analysis"):
            result.backward()


@pytest.mark.parametrize("point", ["insert_before_op", "insert_after_op"])
def test_shapes_of_inputs_are_those_before_an_op_that_resizes_them(point: str) -> None:
    """Also in the first execution, whose routine is known only once the op has run."""
    tool = Noting("resize_", point, after=point == "insert_after_op")
    with amanda.apply(tool):
        for _ in range(4):
            torch.zeros(6).resize_(2, 2)
    assert len(tool.calls) == 4
    assert {shapes[0][0] for shapes in tool.calls} == {(6,)}
