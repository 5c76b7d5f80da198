"""ResNet-50, BERT and GPT-2 train compiled: the ops and backward ops of eager mode, the values of inductor.

By default BERT of one layer by AOTAutograd alone; `-m "zoo or not zoo"`, as `nox -s zoo`, has all of them
compiled by inductor.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda

pytestmark = pytest.mark.filterwarnings("ignore")  # what models and the compiler warn of is not ours

PRODUCTS = ("convolution", "addmm", "mm", "bmm", "scaleddotproduct")
WORDS = ("conv2d", "linear", "addmm", "matmul", "mm", "bmm", "scaled_dot_product_attention")


class Counted(amanda.Tool):
    """How often each kind of op, and of backward op, is executed."""

    def __init__(self, only: Callable[[str], bool] = lambda name: True) -> None:
        self.only = only
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.add_inst_for_op(self.at_forward)
        self.add_inst_for_op(self.at_backward, backward=True)

    def at_forward(self, context: amanda.OpContext) -> None:
        name = context.get_op_type()
        if self.only(name):
            context.insert_after_op(self.count, outputs=[], kind=self.forward, name=name)

    def at_backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__.lower()
        if any(name.startswith(product) for product in PRODUCTS):
            name = "".join(character for character in name if not character.isdigit())
            context.insert_after_backward_op(self.count, grad_inputs=[], kind=self.backward, name=name)

    @amanda.observer
    def count(self, kind: Counter[str], name: str) -> None:
        kind[name] += 1


def resnet50(_: Any) -> tuple[nn.Module, torch.Tensor]:
    import torchvision

    return torchvision.models.resnet50(num_classes=10).train(), torch.randn(2, 3, 64, 64)


def bert(transformers: Any, layers: int = 12) -> tuple[nn.Module, torch.Tensor]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=24, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertForSequenceClassification(config)
    return model.eval(), torch.randint(0, 100, (2, 8))


def gpt2(transformers: Any) -> tuple[nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=24, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 100, (2, 8))


def step(model: nn.Module, call: Any, example: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of a training step."""
    model.zero_grad()
    output = call(example)
    loss = getattr(output, "logits", output).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(model: nn.Module, example: torch.Tensor, backend: str) -> None:
    """Counts against eager mode, values against the compiled model without tools, to the bit."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    eager, tool = Counted(WORDS.__contains__), Counted(WORDS.__contains__)
    with amanda.apply(eager):
        step(model, model, example)
    model.load_state_dict(state)
    compiled = torch.compile(model, backend=backend)
    bare = step(model, compiled, example)
    for _ in range(2):
        model.load_state_dict(state)
        tool.forward.clear()
        tool.backward.clear()
        with amanda.apply(tool, compiled="instrument") as scope:
            observed = step(model, compiled, example)
        assert not scope.report
        assert tool.forward == eager.forward
        assert tool.backward == eager.backward
    assert all(map(torch.equal, observed, bare))
    before = torch._dynamo.utils.counters["frames"]["total"]
    model.load_state_dict(state)
    for value, expected in zip(step(model, compiled, example), bare, strict=True):
        assert torch.equal(value, expected)
    assert torch._dynamo.utils.counters["frames"]["total"] == before


@pytest.mark.slow
def test_bert_of_one_layer_has_the_products_of_eager_mode(transformers: Any) -> None:
    torch.manual_seed(0)
    check(*bert(transformers, layers=1), backend="aot_eager")


@pytest.mark.zoo
@pytest.mark.parametrize("make", [resnet50, bert, gpt2])
def test_products_and_values_under_inductor(make: Callable[..., Any], transformers: Any) -> None:
    torch.manual_seed(0)
    check(*make(transformers), backend="inductor")
