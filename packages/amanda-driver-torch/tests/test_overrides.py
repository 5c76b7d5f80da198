"""Modes and tensor subclasses of the user's see the program's calls and none of the driver's."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amanda


class Everywhere(amanda.Tool):
    """A routine at every point of every op, which changes nothing."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(lambda context: None, backward=True, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def routine(self, *values: Any) -> Any:
        return values


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class DispatchLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    names: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x, weight).relu() + x
    y.sum().backward()
    return y


def in_a_mode(mode: type[FunctionLog | DispatchLog]) -> list[str]:
    x, weight = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.zeros(3, 3)
    with mode() as log:
        program(x, weight)
    names: list[str] = log.names
    return names


def with_a_subclass() -> list[str]:
    Logged.names.clear()
    program(torch.ones(2, 3).as_subclass(Logged), torch.nn.Parameter(torch.ones(3, 3)))
    return list(Logged.names)


@pytest.mark.parametrize("tool", [amanda.Tool, Everywhere])
@pytest.mark.parametrize(
    "run",
    [lambda: in_a_mode(FunctionLog), lambda: in_a_mode(DispatchLog), with_a_subclass],
    ids=["function mode", "dispatch mode", "subclass"],
)
def test_the_users_override_sees_the_same_calls(
    tool: type[amanda.Tool], run: Callable[[], list[str]]
) -> None:
    bare = run()
    with amanda.apply(tool()):
        first, second = run(), run()
    assert bare == first == second


def test_a_mode_around_the_scope_sees_the_same_calls() -> None:
    logs = []
    for scope in (contextlib.nullcontext(), amanda.apply(Everywhere())):
        x, weight = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 3))
        with FunctionLog() as log, scope:
            program(x, weight)
        logs.append(log.names)
    assert logs[0] == logs[1]


def test_a_changed_value_keeps_the_subclass_that_the_routine_gave() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda y: y * 2))
    x = torch.ones(3).as_subclass(Logged).requires_grad_()
    with amanda.apply(tool):
        y = torch.relu(x)
    assert type(y) is Logged
    assert torch.equal(y, torch.full((3,), 2.0))


class Computing(amanda.Tool):
    """Routines that compute with tensors: one that looks, and one that gives equal values."""

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        for value in context.get_inputs():
            if isinstance(value, torch.Tensor):
                value.abs().sum().item()
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)
        context.insert_after_op(self.recompute)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.look)
        context.insert_after_backward_op(self.look)

    @amanda.observer
    def look(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                (value * 2).abs().sum().item()
                self.devices.add(torch.empty(1).device.type)

    def recompute(self, *values: Any) -> None:
        (values[0] + 1).mul(2)


@pytest.mark.parametrize("mode", [FunctionLog, DispatchLog], ids=["function mode", "dispatch mode"])
def test_modes_see_no_op_that_a_routine_or_an_analysis_computes(mode: Any) -> None:
    bare = in_a_mode(mode)
    with amanda.apply(Computing()):
        assert in_a_mode(mode) == in_a_mode(mode) == bare


def test_a_subclass_sees_no_op_of_an_observer_or_an_analysis() -> None:
    tool = amanda.Tool()
    looking = Computing()
    tool.add_inst_for_op(lambda context: context.insert_after_op(looking.look))
    bare = with_a_subclass()
    with amanda.apply(tool):
        assert with_a_subclass() == with_a_subclass() == bare


def test_a_default_device_holds_in_routines() -> None:
    tool = Computing()
    with torch.device("meta"), amanda.apply(tool):
        torch.relu(torch.ones(2, device="cpu"))
    assert tool.devices == {"meta"}


def test_a_replacement_runs_under_the_modes_of_the_program() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            context.replace_op(lambda x: x.clamp(min=0)) if context.get_op_type() == "relu" else None
        )
    )
    for mode in (FunctionLog, DispatchLog):
        with amanda.apply(tool), mode() as log:
            torch.relu(torch.ones(2))
        assert any("clamp" in name for name in log.names)


def test_modes_are_entered_again_after_a_routine_that_raises() -> None:
    def fail(*values: Any) -> None:
        raise KeyError

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(fail))
    with DispatchLog() as inner, FunctionLog() as outer:
        with pytest.raises(KeyError), amanda.apply(tool):
            torch.ones(2)
        inner.names.clear()
        outer.names.clear()
        torch.relu(torch.zeros(2))
    assert inner.names == ["aten.zeros.default", "aten.relu.default"]
    assert outer.names == ["zeros", "relu"]


class Limited(torch.Tensor):
    """A class that has an attribute only after its own `__new__`."""

    limit: float

    @staticmethod
    def __new__(cls, x: torch.Tensor, limit: float) -> "Limited":
        limited = x.as_subclass(cls)
        limited.limit = limit
        return limited

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        limits = [
            argument.limit
            for argument in args
            if isinstance(argument, cls) and function.__name__ != "__set__"
        ]
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls) and limits:
            result.limit = limits[0]
        return result


def test_a_routine_changes_a_subclass_inside_its_own_new() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda y: y.clone()))
    x = torch.ones(3, requires_grad=True)
    with amanda.apply(tool):
        for _ in range(2):
            y = Limited(x, 3.0) * 2
            assert type(y) is Limited
            assert y.limit == 3.0
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.as_subclass(torch.Tensor), torch.full((3,), 2.0))
