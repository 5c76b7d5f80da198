"""ResNet-50, BERT-base and GPT-2 with random weights, and a narrow twin of each with the same operators."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import bert, let_torchvision_load, resnet50

Make = Callable[[], tuple[nn.Module, Tensor]]


class Pair(NamedTuple):
    """A model as it is used, and its narrow twin, with an example for each; and what the example is."""

    wide: Make
    twin: Make
    example: str


def models() -> dict[str, Pair]:
    """The models by name; a twin has the layers of the model, a few channels and a small example."""
    return {
        "ResNet-50": Pair(
            lambda: (resnet50(), torch.rand(1, 3, 224, 224)), narrow_resnet, "1 image of 224 x 224"
        ),
        "BERT-base": Pair(
            lambda: (bert(), torch.randint(0, 30_000, (1, 128))),
            lambda: (
                bert(vocab_size=100, hidden_size=24, intermediate_size=48),
                torch.randint(0, 100, (1, 8)),
            ),
            "128 tokens",
        ),
        "GPT-2": Pair(
            lambda: (gpt2(), torch.randint(0, 50_000, (1, 64))),
            lambda: (
                gpt2(vocab_size=100, n_embd=24, bos_token_id=0, eos_token_id=0),
                torch.randint(0, 100, (1, 8)),
            ),
            "64 tokens",
        ),
    }


def narrow_resnet() -> tuple[nn.Module, Tensor]:
    """The layers of ResNet-50 with one channel in the middle of each block, and an image of 32 x 32."""
    let_torchvision_load()
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [3, 4, 6, 3], num_classes=10, width_per_group=1), torch.rand(2, 3, 32, 32)


def gpt2(**config: Any) -> nn.Module:
    """transformers' GPT-2 with its language modelling head: 124 million parameters."""
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False, **config))
    return model


def inference(model: nn.Module, example: Tensor) -> Callable[[], None]:
    """The forward pass of a model that is not trained."""

    def step() -> None:
        model.eval()
        with torch.no_grad():
            model(example)

    return step


def training(model: nn.Module, example: Tensor) -> Callable[[], None]:
    """Forward and backward pass of a model in training."""

    def step() -> None:
        model.train()
        model.zero_grad()
        output: Any = model(example)
        loss = output if isinstance(output, Tensor) else output[0]
        loss.sum().backward()  # type: ignore[no-untyped-call]

    return step


PASSES = {"forward": inference, "forward + backward": training}
