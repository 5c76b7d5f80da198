"""What traceable routines hold: graphs follow its changes, and write what routines write."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import amanda
from amanda.testing import GraphDriverTests, GraphSample, Scaling

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class CompiledLayer(GraphSample):
    op: ClassVar = "linear"

    def __init__(self) -> None:
        layer = nn.Linear(3, 3).requires_grad_(False)
        self.bare = layer(X)
        self.compiled = torch.compile(layer, backend="aot_eager")

    def check_scaled(self, scale: float) -> None:
        assert torch.equal(self.compiled(X), self.bare * scale)

    def tensor(self, number: float) -> Any:
        return torch.full((3,), number)

    def copy_count(self) -> int:
        frames: int = torch._dynamo.utils.counters["frames"]["total"]
        return frames

    def apply(self, *tools: amanda.Tool) -> amanda.Scope:
        return amanda.apply(*tools, compiled="instrument")


class CompiledLayers(CompiledLayer):
    """Two of them, each a graph of its own."""

    def __init__(self) -> None:
        self.layers = [CompiledLayer() for _ in range(2)]

    def check_scaled(self, scale: float) -> None:
        for layer in self.layers:
            layer.check_scaled(scale)


class InModule(Scaling):
    def set_up(self) -> None:
        self.layer = nn.Module()
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * self.layer.scale

    def hold(self, scale: Any) -> None:
        self.layer.scale = nn.Parameter(torch.as_tensor(scale))


class TestGraphDriver(GraphDriverTests):
    @pytest.fixture
    def sample(self) -> GraphSample:
        return CompiledLayer()

    @pytest.mark.parametrize("tensors", [False, True])
    def test_what_a_module_holds_instead_is_read(self, sample: GraphSample, tensors: bool) -> None:
        self.test_what_is_held_instead_is_read(sample, InModule, tensors)

    def test_what_tracing_for_one_graph_changes_is_no_reason_to_trace_for_another(self) -> None:
        self.test_what_tracing_changes_is_no_reason_to_trace_again_and_is_reported(CompiledLayers())


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
