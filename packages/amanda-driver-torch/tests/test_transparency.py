"""A tool that changes nothing leaves results, random state, models and torch itself as they were."""

import pytest
import torch

import amanda
from amanda.testing import Unchanged


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    return torch.nn.Sequential(torch.nn.Embedding(10, 16), layer, torch.nn.BatchNorm1d(5), torch.nn.Dropout())


def train(net: torch.nn.Module) -> list[torch.Tensor]:
    """Outputs, gradients, buffers, parameters and random state of three steps."""
    optimizer = torch.optim.AdamW(net.parameters())
    tensors = []
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        output = net(torch.randint(0, 10, (3, 5)))
        output.square().mean().backward()
        optimizer.step()
        tensors += [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        tensors += [value.clone() for value in net.state_dict().values()]
        tensors.append(torch.get_rng_state())
    return tensors


def attributes(net: torch.nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in net.modules()] + [dir(p) for p in net.parameters()]


@pytest.mark.parametrize("tool", [amanda.Tool, Unchanged])
def test_training_with_dropout_is_bit_identical(tool: type[amanda.Tool]) -> None:
    bare, net = train(model()), model()
    before = attributes(net)
    with amanda.apply(tool()):
        instrumented = train(net)
    assert all(torch.equal(expected, value) for expected, value in zip(bare, instrumented, strict=True))
    assert attributes(net) == before


def test_routines_did_run() -> None:
    tool = Unchanged()
    with amanda.apply(tool):
        train(model())
    assert tool.calls > 1000


def test_the_state_dict_has_no_more_keys_inside_a_scope() -> None:
    net = model()
    keys = list(net.state_dict())
    with amanda.apply(Unchanged()):
        train(net)
        assert list(net.state_dict()) == keys


def test_a_leaf_keeps_the_gradient_that_reaches_it_not_a_copy() -> None:
    net = model()
    with amanda.apply(Unchanged()):
        for _ in range(2):
            net.zero_grad()
            net(torch.randint(0, 10, (3, 5))).square().mean().backward()
            assert all(p.grad is not None and p.grad._version == 0 for p in net.parameters())
