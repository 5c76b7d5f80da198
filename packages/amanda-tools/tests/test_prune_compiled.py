"""Pruning in graphs that torch.compile instruments: the masks of eager mode, compiled with the graph."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import amanda
from amanda.tools.prune import PruneTool

X = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def trained(net: nn.Module, call: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        call(X).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("mask_gradients", [True, False])
def test_training_compiled_is_training_in_eager_mode_and_calls_no_python(mask_gradients: bool) -> None:
    torch._dynamo.reset()
    nodes: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        nodes.extend(module.graph.nodes)
        return lookup_backend("aot_eager")(module, inputs)

    net, prune = network(), PruneTool(sparsity=0.5, mask_gradients=mask_gradients)
    with amanda.apply(prune):
        expected = trained(net, net)
    net, prune = network(), PruneTool(sparsity=0.5, mask_gradients=mask_gradients)
    with amanda.apply(prune, compiled="instrument"):
        weights = trained(net, torch.compile(net, backend=backend))
    assert all(map(torch.equal, weights, expected))
    assert [row["sparsity"] for row in prune.result.to_dict()["rows"]] == [0.5, 0.5]
    assert not [node for node in nodes if "amanda" in str(node.target) and "begin" in str(node.target)]


def test_masks_that_are_made_again_are_called_as_python() -> None:
    torch._dynamo.reset()
    results = []
    for compiled in ("eager", "instrument"):
        net = network()
        prune = PruneTool(sparsity=0.5, schedule="cubic", end=2)
        call = torch.compile(net, backend="aot_eager")
        with amanda.apply(prune, compiled=compiled):  # type: ignore[arg-type]
            for _ in range(3):
                output = call(X)
                prune.step()
        results.append(output)
    assert torch.equal(*results)
