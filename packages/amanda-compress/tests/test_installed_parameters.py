"""Tools that change weights, on a framework whose parameters a distribution of others brings."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from repository import repository_path

import amanda
from amanda.testing import FakeDriver, attached, fake
from amanda.tools.kit import _tensors
from amanda.tools.mapping import _mapping
from amanda.tools.prune import PruneTool
from amanda.tools.weights import (
    ParameterError,
    ParameterStore,
    Weight,
    WeightTool,
    _parameters,
    parameter_store,
)

SOURCE = repository_path("tests/plugins/fake-arrays")


def forget() -> None:
    _mapping._installed_entries.cache_clear()
    _tensors._tensors.cache_clear()
    _parameters._store.cache_clear()


def register(folder: Path, entries: str) -> None:
    metadata = folder / "fake_arrays-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-arrays\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(entries)
    forget()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, with the module of a distribution that waits for its entry points."""
    (tmp_path / "fake_arrays.py").write_text((SOURCE / "fake_arrays.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("fake_arrays", None)
    forget()


@pytest.fixture
def installed(path: Path) -> None:
    project = (SOURCE / "pyproject.toml").read_text()
    groups = re.findall(r'entry-points\."(.*)"\]\n"(.*)" = "(.*)"', project)
    register(path, "\n".join(f"[{group}]\n{name} = {value}" for group, name, value in groups))


class Kept(WeightTool[Weight]):
    """Keeps the larger half of the elements of each weight."""

    elementwise = True

    def on_weight(self, weight: Weight) -> None:
        weight.keep_elements("mask", 1.0, "float64")

    def update(self, weight: Weight, value: Any) -> None:
        weight["mask"] = abs(value) >= np.median(abs(value))

    def transform(self, value: Any, mask: Any) -> Any:
        return value * mask

    def transform_gradient(self, gradient: Any, mask: Any) -> Any:
        return gradient * mask


class Model(fake.Module):
    def __init__(self) -> None:
        self.first = fake.Linear(fake.Parameter([3.0, -0.1, 0.2, -2.0], (2, 2)))
        self.second = fake.Linear(fake.Parameter([0.5, 4.0, -5.0, 0.3], (2, 2)))

    def forward(self, x: fake.Tensor) -> fake.Tensor:
        return self.second(fake.relu(self.first(x)))


def train(model: Model, steps: int) -> list[float]:
    """Return the outputs after some steps of gradient descent."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        fake.sum(model(fake.tensor([[1.0, 2.0]]))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            new = [a - 0.01 * b for a, b in zip(parameter.numbers, parameter.grad.numbers, strict=True)]
            parameter.assign(fake.Tensor(new, parameter.shape))
    return list(model(fake.tensor([[1.0, 2.0]])).numbers)


@pytest.mark.usefixtures("installed")
def test_a_tool_trains_saves_and_finalizes_on_a_framework_of_others() -> None:
    model, tool = Model(), Kept()
    with attached(FakeDriver), amanda.apply(tool):
        outputs = train(model, 3)
    assert [weight.module for weight in tool.weights] == ["first", "second"]
    state = tool.state_dict()
    assert {"first.weight/mask", "second.weight/mask"} < state.keys()
    again = Kept()
    again.load_state_dict(state)
    with attached(FakeDriver), amanda.apply(again):
        assert list(model(fake.tensor([[1.0, 2.0]])).numbers) == outputs
    result = again.finalize(model)
    assert [row[-1] for row in result.rows()] == ["first.weight", "second.weight"]
    assert result.model is model
    assert model.first.weight.numbers[1:3] == [0.0, 0.0]
    assert list(model(fake.tensor([[1.0, 2.0]])).numbers) == outputs


@pytest.mark.usefixtures("installed")
def test_finalize_of_no_model_of_the_framework_is_an_error_of_the_tool() -> None:
    model, tool = Model(), Kept()
    with attached(FakeDriver), amanda.apply(tool):
        model(fake.tensor([[1.0, 2.0]]))
    with pytest.raises(tool.error, match="int is no module of the fake framework"):
        tool.finalize(3)


class Handle:
    """What a framework holds instead of a parameter, to which no weak reference is possible."""

    __slots__ = ("parameter",)
    framework = "amanda"


class HandleDriver(FakeDriver):
    handles: ClassVar[dict[int, Handle]] = {}

    def describe(self, call: Any, subjects: Any) -> Any:
        facts = super().describe(call, subjects)
        facts.variable_of, facts.path_of = self._handle_of, lambda variable: None
        return facts

    def _handle_of(self, value: Any) -> Any:
        is_parameter = isinstance(value, fake.Parameter)
        return self.handles.setdefault(id(value), Handle()) if is_parameter else None


@pytest.mark.usefixtures("installed")
def test_layers_whose_parameters_have_no_weak_references_have_a_mask_each() -> None:
    numbers = [[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 3.0, 2.0]]
    layers = [fake.Linear(fake.Parameter(row, (2, 2))) for row in numbers]
    prune = PruneTool(sparsity=0.5)
    with attached(HandleDriver), amanda.apply(prune):
        for layer in layers:
            layer(fake.tensor([[1.0, 1.0]]))
    masks = [weight.to_numpy(weight["mask"]).reshape(-1).tolist() for weight in prune.weights]
    assert masks == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("fake_arrays:Nothing", r"fake_arrays:Nothing of fake-arrays 0\.1\.0 cannot be imported"),
        ("fake_arrays:FakeTensors", r"fake-arrays 0\.1\.0 is .*subclass of amanda\.tools\.weights\.Param"),
    ],
)
def test_a_broken_parameter_store_is_an_error_that_names_its_distribution(
    value: str, told: str, path: Path
) -> None:
    register(path, f"[amanda.parameters]\namanda = {value}\n")
    with pytest.raises(ParameterError, match=told):
        parameter_store(fake.tensor([1.0]))


def test_a_framework_without_a_parameter_store_has_the_general_one() -> None:
    assert type(parameter_store(fake.tensor([1.0]))) is ParameterStore


def test_the_framework_of_a_holder_decides_among_those_that_share_a_class_of_arrays(path: Path) -> None:
    register(path, "[amanda.parameters]\namanda = fake_arrays:FakeParameters\n")
    array = np.ones(2)
    assert type(parameter_store(array, Handle())).__name__ == "FakeParameters"
    assert type(parameter_store(array)).__name__ == "Initializers"
