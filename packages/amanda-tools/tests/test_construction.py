"""What makes a model is a phase of its own, which `amanda run` leaves out unless it is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.mapping import StandardMapping
from amanda.tools.select import select


class Phases(amanda.Tool):
    """Types of ops by phase, in the order in which they were met."""

    def __init__(self) -> None:
        self.types: dict[str, list[str]] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.types.setdefault(context["phase"], []).append(context["type"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.randn(8) * 0.1)
        nn.init.kaiming_normal_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale + torch.zeros(8)


def test_constructors_and_initializers_are_of_the_phase_construction() -> None:
    tool = Phases()
    with amanda.apply(tool):
        model = Model()
        x = torch.rand(3, 4)
        model(x)
        model.linear.reset_parameters()
        nn.init.zeros_(model.scale)
    assert tool.types["forward"] == ["rand", "linear", "add", "batch_norm", "mul", "zeros", "add"]
    types = tool.types["construction"]
    assert {"uniform", "randn", "mul", "normal", "fill", "zero"} <= set(types)
    assert types[-1] == "zero"
    assert set(tool.types) == {"forward", "construction"}


def test_what_a_layer_makes_when_it_is_first_called_is_construction() -> None:
    tool = Phases()
    lazy = nn.LazyLinear(3)
    with amanda.apply(tool):
        lazy(torch.ones(2, 5))
    assert tool.types["forward"] == ["ones", "linear"]
    assert "uniform" in tool.types["construction"]


def test_layers_of_keras_are_built_in_the_phase_construction() -> None:
    import keras
    import tensorflow as tf

    tool = Phases()
    with amanda.apply(tool):
        layer = keras.layers.Dense(4)
        layer(tf.ones((2, 3)))
    assert tool.types["forward"] == ["Fill", "ReadVariableOp", "matmul", "ReadVariableOp", "BiasAdd"]
    assert "StatelessRandomUniformV2" in tool.types["construction"]


def test_a_tool_is_applied_to_construction_alone() -> None:
    tool = select(FlopsTool(), phase="construction")
    with amanda.apply(tool):
        Model()(torch.rand(3, 4))
    assert {row[0] for row in tool.result.rows()} == {"construction"}


PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
nn.init.normal_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.rand(16, 4)).sum().backward()
optimizer.step()
"""


def phases(folder: Path, *options: str) -> list[list[Any]]:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    line = [sys.executable, "-m", "amanda", "run", *options, "-o", str(folder), "--", str(program)]
    children.run(line, check=True)
    contents = []
    for name in ("flops", "trace"):
        content = json.loads((folder / f"{name}.json").read_text())
        contents.append(sorted({row["phase"] for row in content.get("rows", content.get("ops", ()))}))
    return contents


@pytest.mark.long
def test_amanda_run_leaves_construction_out_of_every_tool(tmp_path: Path) -> None:
    tools = ["-t", "flops", "-t", "trace"]
    assert phases(tmp_path, *tools) == [["backward", "forward", "optimizer"]] * 2
    every = ["backward", "construction", "forward", "optimizer"]
    assert phases(tmp_path, "--construction", *tools) == [every] * 2
    of_one = ["-t", "flops:phase=construction", "-t", "trace"]
    assert phases(tmp_path, *of_one) == [["construction"], ["backward", "forward", "optimizer"]]
