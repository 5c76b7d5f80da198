"""The conformance suite on the fake framework."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

import amanda
from amanda.testing import (
    DriverTests,
    FakeDriver,
    FakeGraphDriver,
    GraphDriverTests,
    GraphSample,
    Sample,
    attached,
    fake,
    never,
    notimpl,
)
from amanda.testing.fake._graphs import TracedFunction, operator


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
    op_names: ClassVar = {"linear": "matmul", "pair": "split", "many": "muladd"}
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
    batch_norm = property(lambda self: fake.batch_norm)

    def running_statistics(self) -> Sequence[Any]:
        return [fake.tensor([0.0, 0.0])]

    def tensor(self, values: Sequence[Any], dtype: Any = None, requires_grad: bool = False) -> Any:
        return fake.tensor(values, dtype or "float64", requires_grad)

    def parameter(self, values: Sequence[Any]) -> Any:
        tensor = fake.tensor(values)
        return fake.Parameter(tensor.numbers, tensor.shape)

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

    def grad(self, function: Any) -> Any:
        def gradient(tensor: Any) -> Any:
            leaf = fake.Tensor(tensor.numbers, tensor.shape, tensor.dtype, requires_grad=True)
            function(leaf).backward()
            return leaf.grad

        return gradient

    def run_uninstrumentable_op(self) -> None:
        fake.opaque(self.input())


class TestFakeDriver(DriverTests):
    """The suite on the fake framework."""

    lacks: ClassVar = {
        "batched_values": "nothing maps a function over samples",
        "jvp": "gradients are of backward mode alone",
        "vmap": "nothing maps a function over samples",
    }
    gaps: ClassVar = {
        "test_an_op_looked_up_before_the_scope_is_seen": never("operators in Python are attributes"),
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return FakeSample()


class Hearing(FakeDriver):
    """Keeps the inputs that `note_op_inputs` records."""

    heard: ClassVar[list[list[float]]] = []

    def note_op_inputs(self, capture: Any, inputs: Sequence[Any]) -> None:
        self.heard.append([value.numbers[0] for value in inputs])


@pytest.mark.parametrize("action", ["insert_before_op", "replace_op"])
def test_a_driver_hears_what_an_op_is_given_of_routines_before_its_backward_ops_are_made(action: str) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: getattr(context, action)(lambda value: fake.mul(value, 2)))
    tool.add_inst_for_op(lambda context: None, backward=True)
    Hearing.heard.clear()
    with attached(Hearing), amanda.apply(tool):
        result = fake.relu(fake.tensor([3.0], requires_grad=True))
    assert result.numbers == [6.0]
    assert Hearing.heard == [[6.0 if action == "insert_before_op" else 3.0]]


def test_without_the_cache_each_pass_through_a_graph_is_analysed_with_the_values_of_its_op() -> None:
    inputs: list[list[float]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: inputs.append(context.get_inputs()[0].numbers), backward=True)
    with attached(FakeDriver), amanda.apply(tool) as scope:
        with amanda.cache_disabled():
            result = fake.relu(fake.tensor([3.0], requires_grad=True))
            for _ in range(3):
                result.backward()
        first = len(inputs)
        result.backward()  # with the cache, the last analysis holds
    assert inputs == [[3.0]] * len(inputs)
    assert (len(inputs), first) == (6, 6)  # of relu, and of what stores the gradient
    assert scope.report == []


def test_a_pass_without_the_cache_through_what_was_analysed_with_it_is_reported() -> None:
    analysed: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: analysed.append(context.get_forward_op_type()), backward=True)
    with attached(FakeDriver), amanda.apply(tool) as scope:
        result = fake.relu(fake.tensor([3.0], requires_grad=True))
        result.backward()
        with amanda.cache_disabled():
            result.backward()
    assert len(analysed) == 2
    (entry,) = scope.report
    assert entry.what == "the analysis of a backward op of relu without the cache"
    assert "its forward op ran with the cache" in entry.reason


class Layer(TracedFunction):
    """A layer without bias."""

    def __init__(self, weight: fake.Parameter) -> None:
        self.weight = weight
        super().__init__(self.product)

    def product(self, x: Any) -> Any:
        """What is given, times the weight."""
        return MATMUL(x, self.weight)


class GraphNetwork(TracedFunction):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__(self.layers)
        self.first = Layer(fake.Parameter([0.5, 0.25, -1, 1.5, -0.75, 2, 0.125, 1, -0.5], (3, 3)))
        self.second = Layer(fake.Parameter([1, -0.25, 0.5, -1.5, 0.625, 1, 2, -1, 0.375], (3, 3)))

    def layers(self, x: Any) -> Any:
        """The second layer's outputs."""
        return self.second(RELU(self.first(x)))


NODES = never("an op is a node of a graph, however often it is run, and from wherever")
SYMBOLS = never("a symbol is a name, without a shape or a type")
MATMUL, RELU, OPAQUE = map(operator, (fake.matmul, fake.relu, fake.opaque))


class FakeGraphSample(FakeSample):
    """Each op, and each module, is a function that runs as a graph."""

    driver = FakeGraphDriver
    linear = property(lambda self: MATMUL)
    relu = property(lambda self: RELU)
    add = property(lambda self: ADD)
    cat = property(lambda self: CAT)
    pair = property(lambda self: SPLIT)
    many = property(lambda self: MANY)

    def bits(self, tensor: Any) -> bytes:
        return b"" if tensor is None else super().bits(tensor)

    def backward(self, tensor: Any) -> None:
        pass

    def model(self) -> Any:
        return GraphNetwork()

    def module(self, forward: Any) -> Any:
        return TracedFunction(forward)

    def run_uninstrumentable_op(self) -> None:
        OPAQUE(self.input())


ADD, CAT, SPLIT, MANY = map(operator, (fake.add, fake.cat, fake.split, fake.muladd))


class TestFakeGraphDriver(DriverTests):
    """The suite on graphs."""

    lacks: ClassVar = {
        "auxiliary_state": "no node of a graph writes into a tensor",
        "checkpoints": "graphs are not differentiated, so nothing is computed again",
        "in_place": "no node of a graph writes into a tensor",
        "out": "no node of a graph writes into a tensor",
        "backward": "graphs are not differentiated",
        "call_sites": "an op is a node of a graph, however often it is run, and from wherever",
        "values": "a graph is analysed before it runs, on symbols",
        "schema": "an input is a value by its position; nothing has a name",
        "numbers": "`item()` is no node",
        "traceable_calls": "a traceable routine is called when it is traced",
        "batched_values": "a graph is run, not transformed",
        "grad": "a graph is run, not transformed",
        "jvp": "a graph is run, not transformed",
        "vmap": "a graph is run, not transformed",
    }
    gaps: ClassVar = {
        "test_a_plan_with_actions_is_guarded_by_dtype_and_rank": SYMBOLS,
        "test_a_tool_that_decides_by_shape_is_asked_for_each": SYMBOLS,
        "test_ops_of_a_routine_are_not_instrumented": SYMBOLS,
        "test_one_call_site_over_several_weights_is_several_ops": NODES,
        "test_a_plan_dies_with_its_parameter": never("a plan dies with the graph, which holds the parameter"),
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return FakeGraphSample()


class Held(GraphSample):
    """relu(x) * weight."""

    op: ClassVar = "relu"

    def __init__(self, traced: list[Any]) -> None:
        weight = fake.Parameter([3.0, 5.0], (2,))
        self.function = TracedFunction(lambda x: RELU(x) * weight)
        self.traced = traced

    def check_scaled(self, scale: float) -> None:
        result = self.function(fake.tensor([1.0, 2.0]))
        assert result.numbers == [3.0 * scale, 10.0 * scale]

    def tensor(self, number: float) -> Any:
        return fake.tensor([number, number])

    def copy_count(self) -> int:
        return len(self.traced)


class TestGraphs(GraphDriverTests):
    """What traceable routines read, in graphs."""

    gaps: ClassVar = {
        "test_a_tensor_that_no_name_leads_to_is_reported": notimpl("constants are not told of"),
    }

    @pytest.fixture
    def sample(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphSample]:
        traced: list[Any] = []
        runnable = FakeGraphDriver.build_runnable

        def counted(driver: FakeGraphDriver, *args: Any) -> Any:
            traced.append(args)
            return runnable(driver, *args)

        monkeypatch.setattr(FakeGraphDriver, "build_runnable", counted)
        with attached(FakeGraphDriver):
            yield Held(traced)
