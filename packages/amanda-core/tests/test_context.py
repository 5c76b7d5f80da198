"""OpContext, actions and namespaces on their own."""

from __future__ import annotations

import functools
import pickle
import re
from inspect import signature
from typing import Any

import pytest

import amanda
from amanda import ActionType, InstrumentationPoint, Namespace, OpContext, Tool
from amanda.action import Action, marks, routine_name
from amanda.context import OpFacts
from amanda.errors import ActionError, AmandaError, MissingKeyError, NamespaceError, ReplaceConflictError
from amanda.plan.action import signature_error

BEFORE, AFTER = InstrumentationPoint.BEFORE_FORWARD_OP, InstrumentationPoint.AFTER_FORWARD_OP
BEFORE_BACKWARD = InstrumentationPoint.BEFORE_BACKWARD_OP


def relu(x: Any) -> Any:
    """Stands for an op."""
    return x


class ReluBackward:
    """Stands for a backward op."""


def facts(**changes: Any) -> OpFacts:
    facts_of_op = OpFacts(
        relu, 0xABCD, Namespace("fake/1.0/eager"), names=("input", "slope", "mode"), inputs=[1.0, 0.5, "fan"],
        attributes={"slope": 0.5, "mode": "fan"}, scope="layer1.0", source="model.py:7",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(facts_of_op, name, value)
    return facts_of_op


def recorded(record: Any, point: InstrumentationPoint = BEFORE, **changes: Any) -> tuple[Action, ...]:
    """The actions that a callback records at a point."""

    def analyse(context: OpContext, _: InstrumentationPoint) -> None:
        context._tool = Tool()
        record(context)

    return OpContext(facts(**changes), analyse).trigger_callback(point)


def nothing(*_: Any) -> None:
    """A routine."""


def test_a_context_tells_of_its_op() -> None:
    context = OpContext(facts(), lambda *_: None)
    assert context.get_op() is relu
    assert context.get_op_id() == 0xABCD
    assert context.get_inputs() == [1.0, 0.5, "fan"]
    assert context.get_outputs() is None
    assert context.get_scope() == "layer1.0"
    assert context.get_source() == "model.py:7"
    assert context.get_attrs() == {"slope": 0.5, "mode": "fan"}
    assert context.get_value("slope") == context.get_value(1) == context.get_value(-2) == 0.5
    assert context.namespace == Namespace("fake/1.0/eager")
    assert context.is_eager()
    assert context.is_forward()
    assert not context.is_backward()
    assert context.get_backward_op() is context.get_backward_op_id() is None
    assert context.get_backward_order() == 0
    assert context.get_grad_outputs() is context.get_grad_inputs() is None


def test_what_a_context_gives_is_not_what_the_driver_holds() -> None:
    op_facts = facts()
    context = OpContext(op_facts, lambda *_: None)
    context.get_inputs().clear()
    context.get_attrs().clear()
    assert op_facts.inputs == [1.0, 0.5, "fan"]
    assert context.get_attrs() == {"slope": 0.5, "mode": "fan"}


def test_a_context_is_a_dict_that_can_be_a_key() -> None:
    context = OpContext(facts(), lambda *_: None, {"mask": 1})
    context["type"] = "relu"
    assert dict(context) == {"mask": 1, "type": "relu"}
    assert {context: 1}[context] == 1
    assert "relu" in repr(context)
    assert "0x000000000000abcd" in repr(context)


def test_a_backward_context_starts_from_the_forward_one_and_does_not_write_to_it() -> None:
    forward = OpContext(facts(), lambda *_: None)
    forward["mask"] = "kept"
    backward_facts = forward._facts.for_backward_op(ReluBackward, 99, True)
    backward = OpContext(backward_facts, lambda *_: None, forward)
    backward["own"] = True
    assert backward["mask"] == "kept"
    assert "own" not in forward
    assert backward.is_backward()
    assert backward.get_backward_op() is ReluBackward
    assert backward.get_backward_op_id() == 99
    assert backward.get_backward_order() == 1
    assert backward.get_op_id() == 0xABCD


def test_dropped_values_say_what_to_do() -> None:
    context = OpContext(facts(), lambda *_: None)
    context._facts.drop_values()
    for get in (context.get_inputs, context.get_outputs):
        with pytest.raises(AmandaError, match="keep what you need"):
            get()
    assert context.get_scope() == "layer1.0"


@pytest.mark.parametrize(
    ("select", "positions"),
    [
        (None, None),
        (1, (1,)),
        ("slope", (1,)),
        ([0, "mode"], (0, 2)),
        (-1, (2,)),
        ([], ()),
        (range(2), (0, 1)),
    ],
)
def test_positions_and_names_select_inputs(select: Any, positions: Any) -> None:
    (action,) = recorded(lambda context: context.insert_before_op(nothing, select))
    assert action.select == positions


@pytest.mark.parametrize("select", [3, -4, "weight", True, 1.5, [None]])
def test_what_selects_nothing_is_an_error_that_names_the_inputs(select: Any) -> None:
    selects = [select] if isinstance(select, float) else select
    with pytest.raises(ActionError, match=r"3 values.*input, slope, mode"):
        recorded(lambda context: context.insert_before_op(nothing, selects))


@pytest.mark.parametrize("kind", list(ActionType))
def test_each_action_is_recorded_at_its_point(kind: ActionType) -> None:
    backward = {"backward_op": ReluBackward, "backward_op_id": 9} if kind.is_backward else {}
    point = BEFORE_BACKWARD if kind.is_backward else BEFORE
    (action,) = recorded(lambda context: getattr(context, kind.value)(nothing, scale=2), point, **backward)
    assert action.type is kind
    assert action.kwargs == {"scale": 2}
    assert str(action) == f"{kind.value}({routine_name(nothing)})"


@pytest.mark.parametrize("kind", list(ActionType))
@pytest.mark.parametrize("point", list(InstrumentationPoint))
def test_an_action_at_a_point_that_cannot_take_it_is_an_error(
    kind: ActionType, point: InstrumentationPoint
) -> None:
    fits = kind.is_backward == point.is_backward and (kind.is_after or not point.is_after)
    backward = {"backward_op": ReluBackward, "backward_op_id": 9} if point.is_backward else {}

    def record(context: OpContext) -> None:
        getattr(context, kind.value)(nothing)

    if fits:
        assert len(recorded(record, point, **backward)) == 1
    else:
        with pytest.raises(ActionError, match=kind.value):
            recorded(record, point, **backward)


def test_an_action_outside_an_analysis_is_an_error() -> None:
    with pytest.raises(ActionError, match="outside an analysis routine"):
        OpContext(facts(), lambda *_: None).insert_before_op(nothing)


def test_a_routine_is_callable() -> None:
    with pytest.raises(ActionError, match="wants a callable"):
        recorded(lambda context: context.insert_before_op("relu"))


def test_one_tool_replaces_an_op_once() -> None:
    def twice(context: OpContext) -> None:
        context.replace_op(nothing)
        context.replace_op(nothing)

    with pytest.raises(ReplaceConflictError):
        recorded(twice)


def test_a_point_gives_the_actions_recorded_there_alone() -> None:
    def analyse(context: OpContext, point: InstrumentationPoint) -> None:
        context._tool = Tool()
        context.insert_after_op(nothing)

    context = OpContext(facts(), analyse)
    first, second = context.trigger_callback(BEFORE), context.trigger_callback(AFTER)
    assert len(first) == len(second) == 1
    assert first[0] is not second[0]


@pytest.mark.parametrize("mark", ["differentiable", "traceable", "observer", "innermost"])
def test_a_mark_is_told_by_the_action(mark: str) -> None:
    def routine(value: Any) -> Any:
        return value

    decorated = getattr(amanda, mark)(routine)
    (action,) = recorded(lambda context: context.insert_before_op(decorated))
    assert decorated is routine
    assert getattr(action, mark)
    assert marks(routine) == {mark}
    assert (
        sum(getattr(action, mark) for mark in ("differentiable", "traceable", "observer", "innermost")) == 1
    )


def test_marks_add_up_also_on_what_takes_no_attributes() -> None:
    marked = amanda.observer(amanda.traceable(abs))
    assert marks(marked) == {"observer", "traceable"}
    assert marks(abs) == frozenset()
    assert marked(-3) == 3


class Routines:
    """Methods as routines."""

    def plain(self, value: Any) -> None:
        """No run."""

    def running(self, value: Any, run: dict[str, Any]) -> None:
        """With run."""


@pytest.mark.parametrize(
    ("routine", "takes_run"),
    [
        (lambda value: value, False),
        (lambda value, run: value, True),
        (lambda value, *, run=None: value, True),
        (Routines().plain, False),
        (Routines().running, True),
        (functools.partial(Routines().running, 1), True),
        (abs, False),
        (max, False),
        (lambda **anything: None, False),
        (lambda *run: None, False),
        (functools.wraps(lambda value, run: value)(lambda *values, **kwargs: None), True),
    ],
)
def test_a_routine_with_a_parameter_run_is_given_it(routine: Any, takes_run: bool) -> None:
    (action,) = recorded(lambda context: context.insert_before_op(routine))
    assert action.takes_run == takes_run


def test_run_that_the_tool_gives_itself_is_the_tools() -> None:
    (action,) = recorded(lambda context: context.insert_before_op(lambda value, run: None, run=7))
    assert not action.takes_run
    assert action.kwargs == {"run": 7}


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("pytorch", True),
        ("pytorch/2.13.0", True),
        ("pytorch/2.13.0/eager", True),
        ("*", True),
        ("*/*/eager", True),
        ("pytorch/*/eager", True),
        ("*/*/graph", False),
        ("pytorch/2.13", False),
        ("tensorflow", False),
        ("pytorch/2.13.0/eager/more", False),
        ("py", False),
    ],
)
def test_a_pattern_matches_by_leading_tags(pattern: str, matches: bool) -> None:
    op = Namespace("pytorch/2.13.0/eager")
    assert op.matches(pattern) == matches
    assert op.matches(Namespace(pattern)) == matches


def test_a_namespace_is_pickled_and_printed() -> None:
    op = Namespace("pytorch/2.13.0/eager")
    assert pickle.loads(pickle.dumps(op)) == op
    assert str(op) == "pytorch/2.13.0/eager"
    assert tuple(op) == ("pytorch", "2.13.0", "eager")


def test_an_op_without_a_computation_says_so() -> None:
    with pytest.raises(AmandaError, match="relu cannot be called on other inputs in fake"):
        OpContext(facts(), lambda *_: None).get_computation()
    assert OpContext(facts(compute=relu), lambda *_: None).get_computation() is relu


def test_a_key_that_standard_mapping_writes_is_missing_with_the_fix() -> None:
    with pytest.raises(MissingKeyError, match=r"^Tool reads 'type' .*depends_on\(StandardMapping\(\)\)"):
        recorded(lambda context: context["type"])
    with pytest.raises(KeyError):
        recorded(lambda context: context["type"])
    assert recorded(lambda context: context.get("type")) == ()


def test_a_key_without_a_rule_for_the_framework_is_missing_with_the_fix() -> None:
    class StandardMapping(Tool):
        """Has no rule for the framework of this op."""

    tool = Tool()
    tool.depends_on(StandardMapping())

    def analyse(context: OpContext, _: InstrumentationPoint) -> None:
        context._tool = tool
        context["type"]

    with pytest.raises(MissingKeyError, match=r"no rule for fake/1\.0/eager: give it one"):
        OpContext(facts(), analyse).trigger_callback(BEFORE)


def test_a_key_of_another_tool_is_missing_with_the_nearest_one() -> None:
    def read(context: OpContext) -> None:
        context["mask"] = 1
        context["maks"]

    with pytest.raises(MissingKeyError, match=r"'maks' of a context .* did you mean mask"):
        recorded(read)


def test_a_namespace_is_not_compared_with_a_string_in_silence() -> None:
    namespace = Namespace("pytorch/2.13.0/eager")
    for compare in (
        lambda: namespace == "pytorch/2.13.0",
        lambda: namespace != "pytorch/2.13.0",
        lambda: namespace in ["tensorflow/2.13.0", "pytorch/2.13.0"],
    ):
        with pytest.raises(NamespaceError, match=r'no string: matches\("(pytorch|tensorflow)/2.13.0"\)'):
            compare()
    assert namespace == "pytorch" != "tensorflow"
    assert namespace != "tensorflow"
    assert "pytorch" == namespace  # noqa: SIM300  # as the first Amanda's mapping tool has it
    assert namespace == Namespace("pytorch/2.13.0/eager") != Namespace("pytorch/2.13.0/graph")
    assert namespace != 3
    assert {namespace: 1}[Namespace("pytorch/2.13.0/eager")] == 1
    assert "pytorch" in namespace
    assert namespace[0] == "pytorch"


def test_a_set_or_dict_of_frameworks_finds_a_namespace() -> None:
    namespace = Namespace("pytorch/2.13.0/eager")
    assert namespace in {"pytorch", "jax"}
    assert namespace not in {"tensorflow"}
    assert {"pytorch": 1, "jax": 2}[namespace] == 1  # type: ignore[index]
    assert {namespace: 1}["pytorch"] == 1  # type: ignore[index]
    assert len({namespace, Namespace("pytorch/2.13.0/graph"), Namespace("pytorch/2.13.0/eager")}) == 2


@pytest.mark.parametrize(
    ("get", "point", "remedy"),
    [
        (OpContext.get_outputs, BEFORE, "require_outputs=True"),
        (OpContext.get_backward_op, BEFORE, "backward=True"),
        (OpContext.get_grad_outputs, BEFORE, "backward=True"),
        (OpContext.get_grad_inputs, BEFORE, "backward=True, require_outputs=True"),
        (
            OpContext.get_grad_inputs,
            InstrumentationPoint.BEFORE_BACKWARD_OP,
            "backward=True, require_outputs=True",
        ),
    ],
)
def test_what_is_not_there_yet_is_an_error_with_the_remedy(
    get: Any, point: InstrumentationPoint, remedy: str
) -> None:
    backward = {"backward_op": ReluBackward, "backward_op_id": 99} if point.is_backward else {}
    with pytest.raises(AmandaError, match=re.escape(f"{get.__name__} of ")) as error:
        recorded(get, point, **backward)
    assert f"add_inst_for_op(routine, {remedy})" in str(error.value)


def test_a_routine_at_several_points_gets_none_where_there_is_nothing() -> None:
    values: list[Any] = []

    def see(context: OpContext) -> None:
        values.append(context.get_outputs())

    tool = Tool()
    tool.add_inst_for_op(see)
    tool.add_inst_for_op(see, require_outputs=True)

    def analyse(context: OpContext, _: InstrumentationPoint) -> None:
        context._tool = tool
        see(context)

    OpContext(facts(), analyse).trigger_callback(BEFORE)
    assert values == [None]


def test_the_type_of_a_backward_op_is_its_word_or_an_error() -> None:
    backward = OpContext(facts(op_type="relu").for_backward_op(ReluBackward, 99, True), lambda *_: None)
    assert backward.get_forward_op_type() == "relu"
    with pytest.raises(AmandaError, match=r"get_op_type of .*, a backward op of relu: .*StandardMapping\(\)"):
        backward.get_op_type()
    backward["backward_type"] = "relu_backward"
    assert backward.get_op_type() == "relu_backward"


def test_a_context_tells_whether_the_op_has_run() -> None:
    points: list[bool] = []
    for point in InstrumentationPoint:
        backward = {"backward_op": ReluBackward, "backward_op_id": 99} if point.is_backward else {}
        recorded(lambda context: points.append(context.is_after()), point, **backward)
    assert points == [False, True, False, True]


def test_the_error_of_a_signature_names_the_argument_that_selects_values() -> None:
    for kind in ActionType:
        (argument,) = [name for name in signature(getattr(OpContext, kind.value)).parameters
                       if name in ("inputs", "outputs", "grad_inputs", "grad_outputs")]  # fmt: skip
        action = Action(kind, lambda: None, Tool(), None, {})
        assert f"Select values, as by {argument}=[0]" in str(signature_error(action, [1.0], [], [1.0], {}))
