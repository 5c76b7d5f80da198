"""Tools: registering, depending, and state that outlives a run."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import amanda
from amanda import Tool
from amanda.errors import ToolError
from amanda.testing import FakeDriver, attached, fake


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with attached(FakeDriver):
        yield


class Network(fake.Module):
    """Two layers."""

    def __init__(self) -> None:
        self.first = fake.Linear(fake.Parameter([1.0, 2.0, 3.0, 4.0], (2, 2)))
        self.second = fake.Linear(fake.Parameter([1.0, 0.0, 0.0, 1.0], (2, 2)))

    def forward(self, x: fake.Tensor) -> Any:
        return self.second(fake.relu(self.first(x)))


class Scaling(Tool):
    """A learned scale for every layer's input: what quantisation keeps."""

    def __init__(self, start: float = 2.0) -> None:
        self.start = start
        self.scopes: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ != "matmul":
            return
        scale = self.keep(context, "scale", self._make)
        self.scopes.append(context.get_scope())
        context.insert_before_op(self.scaled, [0], scale=scale)

    def _make(self) -> fake.Parameter:
        return fake.Parameter([self.start], ())

    @staticmethod
    @amanda.differentiable
    def scaled(value: fake.Tensor, scale: fake.Parameter) -> fake.Tensor:
        return value * scale.numbers[0]


def x() -> fake.Tensor:
    return fake.tensor([[1.0, 1.0]])


def test_a_tool_need_not_call_its_base_init() -> None:
    names: list[str] = []

    class Own(Tool):
        def __init__(self, level: int, *, name: str = "own") -> None:
            self.level, self.name = level, name
            self.add_inst_for_op(lambda context: names.append(context.get_op().__name__))

    with amanda.apply(Own(3, name="other")):
        fake.relu(x())
    assert names == ["relu"]


def test_a_plain_tool_is_registered_on() -> None:
    names: list[str] = []
    tool = Tool()
    tool.add_inst_for_op(lambda context: names.append("forward"))
    with amanda.apply(tool):
        fake.relu(x())
    assert names == ["forward"]


@pytest.mark.parametrize("callback", [None, 3, "analyse"])
def test_what_is_registered_is_callable(callback: Any) -> None:
    with pytest.raises(ToolError, match=r"callback is .*; give the routine without calling it"):
        Tool().add_inst_for_op(callback)


@pytest.mark.parametrize("guard", ["dtype", 3, ()])
def test_a_guard_is_shape_or_a_callable(guard: Any) -> None:
    with pytest.raises(ToolError, match="give 'shape' or 'read', a function, or None"):
        Tool().add_inst_for_op(lambda context: None, guard=guard)


def test_a_tool_depends_on_instances() -> None:
    with pytest.raises(ToolError, match=r"give an instance: Scaling\(\)"):
        Tool().depends_on(Scaling)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="not a Tool"):
        Tool().depends_on("mapping")  # type: ignore[arg-type]


def test_analyses_of_one_tool_run_as_registered() -> None:
    order: list[int] = []
    tool = Tool()
    for i in range(3):
        tool.add_inst_for_op(lambda _, i=i: order.append(i))  # type: ignore[misc]
    with amanda.apply(tool):
        fake.relu(x())
    assert order == [0, 1, 2]


def test_state_is_kept_by_module_path_op_and_name() -> None:
    tool = Scaling()
    tool.prepare(Network(), x())
    assert sorted(tool.state_dict()) == ["first/matmul/scale", "second/matmul/scale"]


def test_prepare_runs_the_model_and_gives_its_result() -> None:
    tool, model = Scaling(), Network()
    result = tool.prepare(model, x())
    assert result.numbers == [16.0, 24.0]
    assert len(list(tool.parameters())) == 2
    assert tool.prepare(lambda value, *, times: times, x(), times=3) == 3


def test_prepare_without_a_model_says_what_it_was_given() -> None:
    with pytest.raises(ToolError, match="given a list; give a model, then an example"):
        amanda.Tool().prepare([1.0])  # type: ignore[arg-type]


def test_preparing_is_a_former_name_of_calibrating() -> None:
    class Calibrated(Scaling):
        calibrates_when_prepared = True
        calls = 0

        def calibrating(self) -> contextlib.AbstractContextManager[Any]:
            self.calls += 1
            return contextlib.nullcontext()

    tool, plain = Calibrated(), Scaling()
    tool.prepare(Network(), x())
    with pytest.warns(DeprecationWarning, match="amanda-core 0.2 and goes in 0.4: use calibrating"):
        tool.preparing()
    assert tool.calls == 2
    with pytest.warns(DeprecationWarning, match="use"), plain.preparing(), plain.calibrating():
        pass


def test_clear_forgets_state() -> None:
    tool = Scaling()
    tool.prepare(Network(), x())
    tool.clear()
    assert tool.state_dict() == {}


def test_parameters_reach_an_optimizer() -> None:
    tool, model = Scaling(), Network()
    tool.prepare(model, x())
    for parameter in tool.parameters():
        parameter.numbers[0] = 10.0
    with amanda.apply(tool):
        assert model(x()).numbers == [400.0, 600.0]


def test_kept_values_that_are_not_trained_are_no_parameters() -> None:
    tool = Tool()
    tool.add_inst_for_op(lambda context: tool.keep(context, "mask", lambda: fake.tensor([1.0])))
    tool.add_inst_for_op(lambda context: tool.keep(context, "count", lambda: 3))
    tool.prepare(lambda value: fake.relu(value), x())
    assert sorted(tool.state_dict()) == ["/relu/count", "/relu/mask"]
    assert list(tool.parameters()) == []


def test_state_is_made_once() -> None:
    tool, model, calls = Tool(), Network(), []

    def make() -> int:
        calls.append(1)
        return len(calls)

    tool.add_inst_for_op(lambda context: tool.keep(context, "count", make))
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(3):
            model(x())
    assert len(calls) == 3
    assert sorted(tool.state_dict().values()) == [1, 2, 3]


def test_two_ops_of_one_name_in_a_module_are_told_apart() -> None:
    tool = Tool()
    tool.add_inst_for_op(lambda context: tool.keep(context, "id", context.get_op_id))

    class Twice(fake.Module):
        def forward(self, value: fake.Tensor) -> Any:
            return fake.relu(fake.relu(value))

    model = Twice()
    tool.prepare(model, x())
    tool.prepare(model, x())
    state = tool.state_dict()
    assert sorted(state) == ["/relu.1/id", "/relu/id"]
    assert state["/relu/id"] != state["/relu.1/id"]


def test_state_survives_a_restart() -> None:
    tool = Scaling()
    tool.prepare(Network(), x())
    for parameter in tool.parameters():
        parameter.numbers[0] = 10.0
    saved = pickle.loads(pickle.dumps(tool.state_dict()))

    again, model = Scaling(), Network()
    again.load_state_dict(saved)
    assert {key: value.numbers for key, value in again.state_dict().items()} == {
        "first/matmul/scale": [10.0],
        "second/matmul/scale": [10.0],
    }
    with amanda.apply(again):
        assert model(x()).numbers == [400.0, 600.0]
    assert [parameter.numbers for parameter in again.parameters()] == [[10.0], [10.0]]


def test_loading_into_a_tool_in_use_lets_its_ops_be_analysed_anew() -> None:
    tool, model = Scaling(), Network()
    with amanda.apply(tool):
        assert model(x()).numbers == [16.0, 24.0]
    tool.load_state_dict({key: fake.Parameter([10.0], ()) for key in tool.state_dict()})
    with amanda.apply(tool):
        assert model(x()).numbers == [400.0, 600.0]
    assert tool.scopes == ["first", "second"] * 2


class Renewing(Scaling):
    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "matmul":
            scale = self.keep(context, "scale", self._make, load=self._loaded, renew=self._renew)
            context.insert_before_op(self.scaled, [0], scale=scale)

    @staticmethod
    def _loaded(number: float) -> fake.Parameter:
        return fake.Parameter([number], ())

    @staticmethod
    def _renew(former: fake.Parameter, value: fake.Parameter) -> fake.Parameter:
        former.numbers[:] = value.numbers
        return former


def test_a_parameter_that_was_made_before_loading_may_be_kept() -> None:
    tool, model = Renewing(), Network()
    tool.prepare(model, x())
    parameters = list(tool.parameters())
    for number in (10.0, 20.0):
        tool.load_state_dict(dict.fromkeys(tool.state_dict(), number))
        tool.prepare(model, x())
        assert list(map(id, tool.parameters())) == list(map(id, parameters))
        assert [parameter.numbers for parameter in parameters] == [[number], [number]]
    tool.load_state_dict({})
    tool.prepare(model, x())
    assert [parameter.numbers for parameter in tool.parameters()] == [[2.0], [2.0]]
    assert parameters[0].numbers == [20.0]


def test_loading_in_an_open_scope_takes_effect() -> None:
    tool, model = Scaling(), Network()
    with amanda.apply(tool):
        assert model(x()).numbers == [16.0, 24.0]
        tool.load_state_dict({key: fake.Parameter([10.0], ()) for key in tool.state_dict()})
        assert model(x()).numbers == [400.0, 600.0]


def test_state_of_another_model_is_an_error_that_names_what_is_missing() -> None:
    tool = Scaling()
    tool.load_state_dict({"module.first/matmul/scale": 3.0})
    message = r"no first/matmul/scale among the 1 values.* module\.first.*strict=False"
    with pytest.raises(ToolError, match=message):
        tool.prepare(Network(), x())
    tool.load_state_dict({})
    tool.prepare(Network(), x())


def test_state_that_nothing_asked_for_is_kept() -> None:
    tool = Scaling()
    tool.load_state_dict({"third/matmul/scale": 3.0}, strict=False)
    tool.prepare(Network(), x())
    assert set(tool.state_dict()) == {"first/matmul/scale", "second/matmul/scale", "third/matmul/scale"}


def test_a_tool_is_copied_and_pickled_with_its_state() -> None:
    tool = Scaling(3.0)
    tool.prepare(Network(), x())
    for twin in (copy.deepcopy(tool), pickle.loads(pickle.dumps(tool))):
        assert twin.start == 3.0
        assert sorted(twin.state_dict()) == sorted(tool.state_dict())
        with amanda.apply(twin):
            assert Network()(x()).numbers == [36.0, 54.0]
        assert twin._amanda.analyses[0].tool is twin


def matmuls(context: amanda.OpContext) -> bool:
    return bool(context.get_op().__name__ == "matmul")


def halved(context: amanda.OpContext, type: amanda.ActionType, routine: Any) -> Any:
    return None if context.get_scope() == "first" else lambda value, **kwargs: routine(value, **kwargs) * 0.5


def test_a_restricted_tool_analyses_what_is_admitted() -> None:
    names: list[str] = []
    tool = Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    tool.restrict(matmuls)
    tool.restrict(lambda context: context.get_scope() == "second")
    with amanda.apply(tool):
        Network()(x())
    assert names == ["matmul"]


def test_a_restriction_in_an_open_scope_holds_from_the_next_on() -> None:
    names: list[str] = []
    tool, network = Tool(), Network()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    with amanda.apply(tool):
        network(x())
    first, names[:] = list(names), []
    tool.restrict(matmuls)
    with amanda.apply(tool):
        network(x())
    assert names == [name for name in first if name == "matmul"]


def test_an_exception_of_a_restriction_names_the_tool() -> None:
    tool = Tool()
    tool.add_inst_for_op(lambda context: None)
    tool.restrict(lambda context: context["nothing"])
    with pytest.raises(KeyError) as caught, amanda.apply(tool):
        Network()(x())
    assert "[amanda] tool Tool, before_forward_op of matmul" in caught.value.__notes__[0]


def test_what_wraps_a_tools_routines_may_change_or_leave_them_out() -> None:
    plain, changed = Network(), Network()
    tool = Scaling(start=2.0)
    tool.wrap_routines(halved)
    with amanda.apply(tool):
        result = changed(x())
    assert result.numbers == plain(x()).numbers  # doubled and halved in the second, neither in the first


def test_a_copied_tool_keeps_its_restrictions() -> None:
    tool = Scaling()
    tool.restrict(matmuls)
    again = pickle.loads(pickle.dumps(tool))
    assert again._amanda.admissions == [matmuls]


def test_a_replacement_may_leave_the_op_to_itself() -> None:
    tool, network = Tool(), Network()
    tool.add_inst_for_op(lambda context: context.replace_op(lambda *inputs: NotImplemented))
    with amanda.apply(tool):
        result = network(x())
    assert result.numbers == network(x()).numbers


@pytest.mark.parametrize("fails", [False, True])
def test_a_tool_hears_that_its_scope_was_left(fails: bool) -> None:
    left_tools: list[str] = []

    class Hearing(Tool):
        def __init__(self, name: str) -> None:
            self.name = name

        def scope_left(self) -> None:
            left_tools.append(self.name)

    dependency, tool = Hearing("dependency"), Hearing("tool")
    tool.depends_on(dependency)
    with contextlib.suppress(ZeroDivisionError), amanda.apply(tool):
        with amanda.apply(tool, Hearing("inner")):
            pass
        assert left_tools == ["inner"]  # the others have joined in the scope around
        if fails:
            raise ZeroDivisionError
    assert left_tools == ["inner", "dependency", "tool"]


def test_each_tool_hears_that_its_scope_opened_and_closed_also_if_one_fails() -> None:
    heard: list[str] = []

    class Hearing(Tool):
        def __init__(self, name: str) -> None:
            self.name = name

        def scope_entered(self) -> None:
            heard.append(f"{self.name} entered")

        def scope_left(self) -> None:
            heard.append(f"{self.name} left")
            if self.name == "first":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), amanda.apply(Hearing("first"), Hearing("second")):
        assert heard == ["first entered", "second entered"]
    assert heard[2:] == ["first left", "second left"]
    with amanda.apply(Tool()):
        pass
