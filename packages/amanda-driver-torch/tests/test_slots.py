"""A parameter is a slot of its module: what is put there anew for each call is read by the same ops."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import children
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.interceptor import NATIVE


class Ids(amanda.Tool):
    """How often each op is analysed, and what it is given as it executes."""

    def __init__(self) -> None:
        self.analysed: list[int] = []
        self.values: list[float] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.analysed.append(context.get_op_id())
        if context.get_op_type() == "linear":
            context.insert_before_op(
                lambda weight: self.values.append(float(weight.sum())), inputs=["weight"]
            )


class Loaded(nn.Linear):
    """Puts its parameters into their slots for each call, and takes them out behind it."""

    def __init__(self, size: int) -> None:
        super().__init__(4, size)
        self.values = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for name, value in self.values.items():
            self._parameters[name] = nn.Parameter(value * self.calls).to("cpu")
        result = super().forward(x)
        for name in self.values:
            self._parameters[name] = nn.Parameter(self._parameters[name].to("meta"))  # type: ignore[union-attr]
        return result


X = torch.ones(2, 4)


@pytest.mark.slow
def test_all_of_this_holds_for_the_pure_python_interceptor() -> None:
    if not NATIVE:
        return
    done = children.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "AMANDA_NATIVE": "0"},
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_parameters_that_are_loaded_for_each_call_are_the_same() -> None:
    model, tool = nn.Sequential(Loaded(4), nn.ReLU(), Loaded(4)), Ids()
    with amanda.apply(tool):
        for _ in range(5):
            model(X)
    assert len(tool.analysed) == len(set(tool.analysed))
    first = float(model.get_submodule("0").values["weight"].sum())
    assert tool.values[::2] == pytest.approx([first * (1 + call) for call in range(5)])


def test_a_parameter_of_another_shape_is_another() -> None:
    layer, tool = nn.Linear(4, 2), Ids()
    wider = nn.Linear(4, 3)
    with amanda.apply(tool):
        layer(X)
        layer.weight, layer.bias = wider.weight, wider.bias
        layer(X)
    assert len(set(tool.analysed)) == 2


def test_parameters_of_two_modules_are_told_apart() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.nn.functional.linear(x, weight)
            return x

    model, tool = Shared(), Ids()
    with amanda.apply(tool):
        for _ in range(12):
            model(X)
    assert len(tool.analysed) == len(set(tool.analysed))
    linears = tool.analysed
    assert len(linears) >= 3


def test_what_is_known_dies_with_the_module() -> None:
    class Gone(Ids):
        def __init__(self) -> None:
            super().__init__()
            self.gone: list[int] = []

        def op_gone(self, op_id: int) -> None:
            self.gone.append(op_id)

    tool = Gone()
    with amanda.apply(tool):
        layer: Any = Loaded(4)
        for _ in range(3):
            layer(X)
        before = len(tool.analysed)
        del layer
        gc.collect()
        nn.Identity()(X + 1)
    assert len(tool.analysed) >= before
    assert set(tool.gone) <= set(tool.analysed)
    assert len(tool.gone) >= 1
