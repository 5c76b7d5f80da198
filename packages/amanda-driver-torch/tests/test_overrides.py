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
