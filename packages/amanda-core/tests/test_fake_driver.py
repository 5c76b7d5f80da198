"""The conformance suite on the fake framework."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import amanda
from amanda.testing import DriverTests, FakeDriver, Sample, attached, fake, never


class Network(fake.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        self.first = fake.Linear(fake.Parameter([0.5, 0.25, -1, 1.5, -0.75, 2, 0.125, 1, -0.5], (3, 3)))
        self.second = fake.Linear(fake.Parameter([1, -0.25, 0.5, -1.5, 0.625, 1, 2, -1, 0.375], (3, 3)))

    def forward(self, input: fake.Tensor) -> fake.Tensor:
        """The second layer's outputs."""
        hidden = fake.relu(self.first(input))
        result: fake.Tensor = self.second(hidden)
        return result


class Calling(fake.Module):
    """A module that calls a function."""

    def __init__(self, forward: Any) -> None:
        self.function = forward

    def forward(self, *args: Any) -> Any:
        """What the function gives."""
        return self.function(*args)


class FakeSample(Sample):
    """Everything by its own name."""

    driver = FakeDriver
    names: ClassVar = {"linear": "matmul", "pair": "split", "many": "muladd"}
    dtypes = ("float64", "float32", "int64", "complex128")
    relu_backward = "ReluBackward"
    leaf_backward = "AccumulateGrad"

    linear = property(lambda self: fake.matmul)
    relu = property(lambda self: fake.relu)
    add = property(lambda self: fake.add)
    add_ = property(lambda self: fake.add_)
    cat = property(lambda self: fake.cat)
    pair = property(lambda self: fake.split)
    item = property(lambda self: fake.item)
    many = property(lambda self: fake.muladd)

    def tensor(self, values: Sequence[Any], dtype: Any = None, requires_grad: bool = False) -> Any:
        return fake.tensor(values, dtype or "float64", requires_grad)

    def parameter(self, values: Sequence[Any]) -> Any:
        made = fake.tensor(values)
        return fake.Parameter(made.numbers, made.shape)

    def bits(self, tensor: Any) -> bytes:
        return struct.pack(f"{len(tensor.numbers)}d", *tensor.numbers)

    def numbers(self, tensor: Any) -> list[Any]:
        return list(tensor.numbers)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = tensor.shape
        return shape

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def overwrite(self, tensor: Any) -> None:
        tensor.assign(tensor.detach())

    def backward(self, tensor: Any) -> None:
        fake.sum(tensor).backward()

    def model(self) -> Any:
        return Network()

    def module(self, forward: Any) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return fake.checkpoint(function, tensor)

    def beyond(self) -> None:
        fake.opaque(self.input())


class TestFakeDriver(DriverTests):
    """The suite on the fake framework."""

    gaps: ClassVar = {
        "test_an_op_looked_up_before_the_scope_is_seen": never("operators in Python are attributes"),
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return FakeSample()


class Hearing(FakeDriver):
    """Keeps what `begin` tells."""

    heard: ClassVar[list[list[float]]] = []

    def begin(self, made: Any, inputs: Sequence[Any]) -> None:
        self.heard.append([one.numbers[0] for one in inputs])


@pytest.mark.parametrize("action", ["insert_before_op", "replace_op"])
def test_a_driver_hears_what_an_op_is_given_of_routines_before_its_backward_ops_are_made(action: str) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: getattr(context, action)(lambda value: fake.mul(value, 2)))
    tool.add_inst_for_op(lambda context: None, backward=True)
    Hearing.heard.clear()
    with attached(Hearing), amanda.apply(tool):
        made = fake.relu(fake.tensor([3.0], requires_grad=True))
    assert made.numbers == [6.0]
    assert Hearing.heard == [[6.0 if action == "insert_before_op" else 3.0]]


def test_without_the_cache_each_pass_through_a_graph_is_analysed_with_the_values_of_its_op() -> None:
    seen: list[list[float]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_inputs()[0].numbers), backward=True)
    with attached(FakeDriver), amanda.apply(tool) as scope:
        with amanda.cache_disabled():
            made = fake.relu(fake.tensor([3.0], requires_grad=True))
            for _ in range(3):
                made.backward()
        first = len(seen)
        made.backward()  # with the cache, the last analysis holds
    assert seen == [[3.0]] * len(seen)
    assert (len(seen), first) == (6, 6)  # of relu, and of what stores the gradient
    assert scope.report == []


def test_a_pass_without_the_cache_through_what_was_analysed_with_it_is_reported() -> None:
    analysed: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: analysed.append(context.get_op_type()), backward=True)
    with attached(FakeDriver), amanda.apply(tool) as scope:
        made = fake.relu(fake.tensor([3.0], requires_grad=True))
        made.backward()
        with amanda.cache_disabled():
            made.backward()
    assert len(analysed) == 2
    (entry,) = scope.report
    assert entry.what == "the analysis of a backward op of relu without the cache"
    assert "its forward op ran with the cache" in entry.reason
