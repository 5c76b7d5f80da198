"""Masks within function transforms of torch.func."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, vmap  # noqa: E402

import amanda  # noqa: E402
from amanda.tools.prune import PruneTool  # noqa: E402
from amanda.tools.quantize import QuantizeTool  # noqa: E402


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def pruned(net: Any) -> Any:
    """Return a copy of a network with the smaller half of each weight set to zero."""
    copy = network()
    for name, value in net.named_parameters():
        if name.endswith("weight"):
            lowest = value.abs().flatten().topk(value.numel() // 2, largest=False).indices
            with torch.no_grad():
                copy.get_parameter(name).view(-1)[lowest] = 0
    return copy


def test_a_mask_acts_under_vmap_and_grad() -> None:
    net, rows = network(), torch.rand(5, 8)

    def slopes(net: Any) -> Any:
        return vmap(grad(lambda x: net(x).sum()))(rows)

    expected, tool = pruned(net), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        values, gradients = vmap(net)(rows), slopes(net)
    assert torch.equal(values, vmap(expected)(rows))
    assert torch.equal(gradients, slopes(expected))
    assert tool.result.zeros == 20


def test_a_mask_that_is_first_needed_within_grad_acts() -> None:
    net, x = network(), torch.rand(8)
    expected = grad(lambda x: pruned(net)(x).sum())(x)
    with amanda.apply(PruneTool(sparsity=0.5)):
        assert torch.equal(grad(lambda x: net(x).sum())(x), expected)


def test_a_mask_acts_on_parameters_that_are_handed_in() -> None:
    net, rows = network(), torch.rand(5, 8)
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    with amanda.apply(PruneTool(sparsity=0.5)):
        result = functional_call(net, parameters, (rows,))
        batched = vmap(lambda x: functional_call(net, parameters, (x,)))(rows)
    assert torch.equal(result, pruned(net)(rows))
    torch.testing.assert_close(batched, result)


def test_weights_that_a_transform_wraps_are_left_and_named() -> None:
    net, rows = network(), torch.rand(5, 8)
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    stacked = {name: torch.stack([value, 2 * value]) for name, value in parameters.items()}

    def ensemble() -> Any:
        return vmap(lambda p, x: functional_call(net, p, (x,)), in_dims=(0, None))(stacked, rows)

    bare, tool = ensemble(), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        assert torch.equal(ensemble(), bare)
    assert "linear of 0 is left as it is: it belongs to a transform, such as vmap" in str(tool.result)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch.jit, with which torch decomposes tangents
@pytest.mark.parametrize("method", ["dynamic", "qat", "lsq"])
def test_weights_are_quantised_that_are_first_read_within_a_transform(method: Any) -> None:
    net, x = network(), torch.rand(5, 8)
    tool = QuantizeTool(method=method, activation_bits=None)
    with amanda.apply(tool):
        _, derivative = torch.func.jvp(lambda x: net(x).sum(), (x,), (torch.ones_like(x),))
        result = net(x)
    assert not torch.equal(result, net(x))
    assert derivative.isfinite()
