"""Pruning in graphs that torch.compile instruments: the masks of eager mode, compiled with the graph."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import amanda
from amanda.tools.prune import PruneTool, element_mask
from amanda.tools.quantize import QuantizeTool

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


class Parts(nn.Module):
    """A product with a part of a parameter; which one, each graph has for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[chosen])


def test_graphs_that_read_other_parts_of_a_parameter_have_masks_of_their_own() -> None:
    torch._dynamo.reset()
    model, prune, x = Parts(), PruneTool(sparsity=0.5), torch.rand(2, 4)
    call = torch.compile(model, backend="aot_eager")
    with amanda.apply(prune, compiled="instrument"):
        found = [call(x, chosen) for chosen in (2, 0, 1, 2)]
    weights = [one * element_mask(one, 0.5) for one in model.weight.detach()]
    for chosen, y in zip((2, 0, 1, 2), found, strict=True):
        assert torch.equal(y, nn.functional.linear(x, weights[chosen]))
    names = {name for name in prune.state_dict() if "mask" in name}
    assert names == {"weight/mask@0", "weight/mask@16", "weight/mask@32"}


@pytest.mark.parametrize("method", ["static", "lsq"])
def test_graphs_that_read_other_parts_of_a_parameter_have_the_scales_of_eager_mode(method: Any) -> None:
    outputs, names, x = [], [], torch.rand(2, 4)
    for compiled in ("eager", "instrument"):
        torch._dynamo.reset()
        model, quantize = Parts(), QuantizeTool(method, weight_bits=4, activation_bits=None)
        call = torch.compile(model, backend="aot_eager")
        with amanda.apply(quantize, compiled=compiled):  # type: ignore[arg-type]
            outputs.append(torch.stack([call(x, chosen) for chosen in (2, 0, 1, 2)]))
        names.append(sorted(quantize.state_dict()))
    torch.testing.assert_close(*outputs)
    assert names[0] == names[1]
