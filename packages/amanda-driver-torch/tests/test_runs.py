"""The dict `run` of an execution, also where native code calls the routines."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import amanda
from amanda import interceptor
from amanda.eager.driver import EagerDriver


class Handing(amanda.Tool):
    """Notes what each routine of an execution finds in `run`, and puts a number of its own there."""

    def __init__(self, give: Callable[[Any], Any] = lambda value: None, backward: bool = True) -> None:
        self.give, self.handed = give, list[list[str]]()
        self.add_inst_for_op(self.forward)
        if backward:
            self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        if "mul" in context.get_op().__name__:
            context.insert_before_op(self.note, inputs=[0], name="before")
            context.insert_before_op(self.note, inputs=[1], name="again")
            context.insert_after_op(self.note, name="after")

    def backward(self, context: amanda.OpContext) -> None:
        if "Mul" in str(context.get_backward_op()):
            context.insert_before_backward_op(self.note, grad_outputs=[], name="backward")

    def note(self, *values: Any, name: str, run: dict[str, Any]) -> Any:
        self.handed.append([*run, name])
        run[name] = values
        return self.give(values[0]) if name == "before" else None


FORWARD = [["before"], ["before", "again"], ["before", "again", "after"]]
WHOLE = [*FORWARD, ["before", "again", "after", "backward"]]


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, y)


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = torch.mul(x, w)
    product.sum().backward()  # type: ignore[no-untyped-call]
    return product


@pytest.mark.parametrize(
    ("give", "times"), [(lambda value: None, 1), (lambda value: value, 1), (lambda value: value * 2, 2)]
)
def test_routines_of_an_execution_share_a_dict_of_their_own(give: Callable[[Any], Any], times: int) -> None:
    tool, x, w = Handing(give), torch.rand(3), torch.rand(3, requires_grad=True)
    expected = x * times * w
    with amanda.apply(tool):
        for _ in range(5):
            tool.handed.clear()
            product = step(x, w)
            assert tool.handed == WHOLE
            assert torch.equal(product, expected)


def test_a_routine_whose_value_python_takes_goes_on_with_the_same_dict() -> None:
    tool, x, w = Handing(lambda value: value.double()), torch.rand(3), torch.rand(3, requires_grad=True)
    with amanda.apply(tool):
        for _ in range(5):
            tool.handed.clear()
            step(x, w)
            assert tool.handed == WHOLE


def test_native_code_calls_routines_that_share_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    tool, model, x = Handing(backward=False), Product(), torch.rand(3)
    with amanda.apply(tool):
        for execution in range(5):
            if execution == 2 and interceptor.NATIVE:  # the first ones are analysed, and learnt
                monkeypatch.setattr(EagerDriver, "_execute_plan", None)
            tool.handed.clear()
            model(x, x)
            assert tool.handed == FORWARD


def test_an_execution_that_raised_hands_nothing_on() -> None:
    tool, model, x = Handing(backward=False), Product(), torch.rand(3)
    with amanda.apply(tool):
        for y in (x, x, x, torch.rand(2), x):
            tool.handed.clear()
            try:
                model(x, y)
            except RuntimeError:
                assert tool.handed == FORWARD[:2]
            else:
                assert tool.handed == FORWARD


def test_the_dict_is_freed_with_the_graph() -> None:
    references: list[Any] = []

    class Keeping(Handing):
        def note(self, *values: Any, name: str, run: dict[str, Any]) -> None:
            run[name] = Part(values)
            references.append(weakref.ref(run[name]))

    class Part(list[Any]):
        pass

    x, w = torch.rand(3), torch.rand(3, requires_grad=True)
    with amanda.apply(Keeping()):
        for _ in range(4):
            step(x, w)
            product = torch.mul(x, w)
            assert references[-1]() is not None
            del product
            assert [reference() for reference in references] == [None] * len(references)


class Written(torch.nn.Module):
    def forward(self, call: Callable[..., Any], out: torch.Tensor) -> None:
        call(out=out)


@pytest.mark.parametrize("name", ["cat", "zeros", "mul"])
def test_values_that_are_handed_back_are_the_ops_own(name: str) -> None:
    """What an op writes is not written again, where a list or a tuple is among the values either."""

    def unchanged(*values: Any, run: dict[str, Any]) -> Any:
        return values

    def insert(context: amanda.OpContext) -> None:
        context.insert_before_op(unchanged)
        context.insert_after_op(unchanged)

    x, model, tool = torch.rand(1, 3), Written(), amanda.Tool()
    tool.add_inst_for_op(insert)
    calls = {
        "cat": partial(torch.cat, [x, x]),
        "zeros": partial(torch.zeros, (2, 3)),
        "mul": partial(torch.mul, x, 2),
    }
    for under in (amanda.disabled(), amanda.apply(tool)):
        with under:
            for _ in range(5):
                out = torch.empty(0)
                model(calls[name], out)
                assert out._version == 1
