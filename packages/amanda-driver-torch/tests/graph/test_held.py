"""What traceable routines hold: graphs follow its changes, and write what routines write."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amanda

X = torch.linspace(-1, 1, 6).reshape(2, 3)
SCALE: Any = 1.0


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaling(amanda.Tool):
    """Scales what linear ops give by what it holds in several ways."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.set_up()
        self.add_inst_for_op(self.analyse)

    def set_up(self) -> None:
        """Nothing more is needed."""

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_after_op(self.routine())

    def routine(self) -> Callable[..., Any]:
        return self.scaled

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output * self.held

    def hold(self, held: Any) -> None:
        self.held = held


class InContainer(Scaling):
    def set_up(self) -> None:
        self.all = {"one": [self.held]}

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output * self.all["one"][0]

    def hold(self, held: Any) -> None:
        self.all["one"][0] = held


class InObject(Scaling):
    def set_up(self) -> None:
        self.options = SimpleNamespace(scale=self.held)

    @property
    def scale(self) -> Any:
        return self.options.scale

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output * self.scale

    def hold(self, held: Any) -> None:
        self.options.scale = held


class InClosure(Scaling):
    def routine(self) -> Callable[..., Any]:
        held = self.held

        def hold(value: Any) -> None:
            nonlocal held
            held = value

        self.hold = hold  # type: ignore[method-assign]
        return amanda.traceable(lambda output: output * held)


class InModule(Scaling):
    def set_up(self) -> None:
        self.layer = nn.Module()
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output * self.layer.scale
        return scaled

    def hold(self, held: Any) -> None:
        self.layer.scale = nn.Parameter(torch.as_tensor(held))


class InGlobal(Scaling):
    def set_up(self) -> None:
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output * SCALE

    def hold(self, held: Any) -> None:
        globals()["SCALE"] = held


class ByName(Scaling):
    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output * getattr(self, "held")  # noqa: B009
        return scaled


@pytest.mark.parametrize("kind", [Scaling, InContainer, InObject, InClosure, InModule, InGlobal, ByName])
@pytest.mark.parametrize("values", [(2.0, 5.0), (torch.full((3,), 2.0), torch.full((3,), 5.0))])
def test_what_is_held_instead_is_read(kind: type[Scaling], values: tuple[Any, Any]) -> None:
    layer = nn.Linear(3, 3)
    tool = kind(values[0])
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        bare = layer(X)
        with amanda.apply(tool, compiled="instrument") as scope:
            first = [compiled(X) for _ in range(2)]
            tool.hold(values[1])
            second = [compiled(X) for _ in range(2)]
        frames = torch._dynamo.utils.counters["frames"]["total"]
        with amanda.apply(tool, compiled="instrument"):
            second.append(compiled(X))
        assert torch.equal(compiled(X), bare)
    for one in first:
        assert torch.equal(one, bare * 2)
    for one in second:
        assert torch.equal(one, bare * 5)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert not scope.report


def test_what_changes_often_is_read_by_python() -> None:
    layer, tool = nn.Linear(3, 3), Scaling(1.0)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        bare = layer(X)
        with amanda.apply(tool, compiled="instrument") as scope:
            for i in range(12):
                tool.hold(i / 4)
                assert torch.equal(compiled(X), bare * (i / 4))
                if i == torch._dynamo.config.recompile_limit:
                    frames = torch._dynamo.utils.counters["frames"]["total"]
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert "what it reads changes often: held" in str(scope.report)


class Counting(amanda.Tool):
    """Counts calls in a tensor: at linear ops, and at their backward ops."""

    def __init__(self) -> None:
        self.forward, self.backward = torch.zeros(()), torch.zeros(())
        self.add_inst_for_op(self.at_forward)
        self.add_inst_for_op(self.at_backward, backward=True)

    def at_forward(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_after_op(amanda.traceable(lambda output: self.counted(output, self.forward)))

    def at_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AddmmBackward0":
            context.insert_before_backward_op(
                amanda.traceable(lambda gradient: self.counted(gradient, self.backward))
            )

    def counted(self, value: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return value


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_tensor_that_is_held_is_written_once_in_an_execution(backend: str) -> None:
    tool = Counting()
    compiled = torch.compile(nn.Linear(3, 3), backend=backend)
    with amanda.apply(tool, compiled="instrument"):
        for _ in range(3):
            compiled(X).sum().backward()
    assert (int(tool.forward), int(tool.backward)) == (3, 3)


class Hiding(Scaling):
    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        self.last = output.shape
        scaled: torch.Tensor = output * getattr(self, "".join(["he", "ld"]))
        return scaled


def test_what_a_graph_does_not_follow_is_reported() -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend="aot_eager")
    with amanda.apply(Hiding(torch.ones(3)), compiled="instrument") as scope:
        compiled(X)
    assert "they set last; a compiled graph does not" in str(scope.report)
    assert "no name in its code leads to" in str(scope.report)


class Listing(Scaling):
    def set_up(self) -> None:
        self.scales: list[Any] = []

    @amanda.traceable
    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        self.scales.append(self.held)
        return output * self.scales[-1]


def test_what_tracing_changes_is_no_reason_to_trace_again() -> None:
    layers, tool = [nn.Linear(3, 3) for _ in range(2)], Listing(2.0)
    compiled = [torch.compile(one, backend="aot_eager") for one in layers]
    with torch.no_grad(), amanda.apply(tool, compiled="instrument") as scope:
        for i in range(3):
            for one in compiled:
                one(X)
            if not i:
                traced = len(tool.scales)
    assert len(tool.scales) == traced
    assert "they set scales; a compiled graph does not" in str(scope.report)
