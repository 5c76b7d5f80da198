"""Faults where no module is, and PyTorchFI has no site: functional convolutions, attention, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amanda.tools.inject import Campaign, InjectError, InjectTool


class Functional(nn.Module):
    """A small vision transformer that calls functions on parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(16, 3, 4, 4) / 7)
        self.qkv = nn.Parameter(torch.randn(48, 16) / 4)
        self.head = nn.Parameter(torch.randn(10, 16) / 4)

    def forward(self, images: Tensor) -> Tensor:
        tokens = F.conv2d(images, self.kernel, stride=4).flatten(2).transpose(1, 2)
        q, k, v = F.linear(tokens, self.qkv).chunk(3, -1)
        return F.linear(F.scaled_dot_product_attention(q, k, v).mean(1), self.head)


@pytest.fixture
def model() -> Functional:
    return Functional()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "layers", [[nn.Conv2d], [nn.Conv2d, nn.Linear, nn.MultiheadAttention], ["all"]], ids=str
)
def test_pytorchfi_has_no_site_in_it(model: Functional, layers: list[object]) -> None:
    fault_injection = pytest.importorskip("pytorchfi.core").fault_injection
    injector = fault_injection(model, 2, input_shape=[3, 16, 16], layer_types=layers, use_cuda=False)
    assert injector.output_size == []
    assert injector.weights_size == []
    with_module = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert fault_injection(with_module, 1, input_shape=[3, 16, 16], use_cuda=False).output_size


@pytest.mark.parametrize("target", ["outputs", "inputs", "weights"])
@pytest.mark.parametrize("kind", ["conv2d", "scaled_dot_product_attention", "linear"])
def test_every_op_of_it_can_have_faults(model: Functional, images: Tensor, kind: str, target: str) -> None:
    tool = InjectTool(type=kind, target=target, seed=2, field="exponent")  # type: ignore[arg-type]
    campaign = Campaign(tool, trials=10)
    if (kind, target) == ("scaled_dot_product_attention", "weights"):
        with pytest.raises(InjectError, match="has a tensor for this fault"):
            campaign.run(lambda: model(images))
        return
    result = campaign.run(lambda: model(images))
    assert result.count("no_fault") == 0
    assert {trial.injections[0].type for trial in result.trials} == {kind}
    assert {row[1] for row in result.rows()} == {kind}
    assert result.count("sdc") + result.count("nan") > 5


@pytest.mark.parametrize("kind", ["conv2d", "scaled_dot_product_attention", "linear"])
@pytest.mark.parametrize("target", ["grad_outputs", "grad_inputs"])
def test_so_can_their_gradients_and_the_seed_gives_them_again(
    model: Functional, images: Tensor, kind: str, target: str
) -> None:
    def step() -> list[Tensor | None]:
        model.zero_grad()
        F.cross_entropy(model(images), torch.tensor([1, 2])).backward()
        return [parameter.grad for parameter in model.parameters()]

    tool = InjectTool(type=kind, target=target, field="exponent")  # type: ignore[arg-type]
    results = [Campaign(tool, trials=5).run(step) for _ in range(2)]
    assert results[0].to_dict() == results[1].to_dict()
    assert {trial.injections[0].phase for trial in results[0].trials} == {"backward"}
    assert results[0].count("sdc") + results[0].count("nan") > 1
