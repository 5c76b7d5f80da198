"""ResNet-50, BERT-base and GPT-2 with random weights, and a narrow twin of each with the same operators."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _measure import QUICK
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import bert, gpt2, let_torchvision_load, resnet50

Made = tuple[nn.Module, Tensor]


class Pair(NamedTuple):
    """A model as it is used, and its narrow twin, with an example for each; the example in words."""

    wide: Callable[[], Made]
    twin: Callable[[], Made]
    example: str

    def both(self) -> Iterator[tuple[str, Made]]:
        """Yield "wide" and "twin" with the models; in a quick run the twin alone."""
        for kind in ("twin",) if QUICK else ("wide", "twin"):
            yield kind, getattr(self, kind)()

    def usual(self) -> Made:
        """Return the model as it is used; in a quick run its twin."""
        return self.twin() if QUICK else self.wide()


def models() -> dict[str, Pair]:
    """Return models by name; a twin has the layers of the model, a few channels and a small example."""
    return {
        "ResNet-50": Pair(
            lambda: (resnet50(), torch.rand(1, 3, 224, 224)), narrow_resnet, "1 image of 224 x 224"
        ),
        "BERT-base": Pair(
            lambda: (bert(), torch.randint(0, 30_000, (1, 128))), narrow_bert, "128 tokens"
        ),
        "GPT-2": Pair(
            lambda: (gpt2(), torch.randint(0, 50_000, (1, 64))),
            lambda: (
                gpt2(vocab_size=100, n_embd=24, bos_token_id=0, eos_token_id=0),
                torch.randint(0, 100, (1, 8)),
            ),
            "64 tokens",
        ),
    }  # fmt: skip


def narrow_resnet() -> Made:
    """Return the layers of ResNet-50 with one channel in the middle of each block, and images of 32 x 32."""
    let_torchvision_load()
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [3, 4, 6, 3], num_classes=10, width_per_group=1), torch.rand(2, 3, 32, 32)


def narrow_bert() -> Made:
    """Return the layers of BERT-base, 24 wide, and 8 tokens."""
    return bert(vocab_size=100, hidden_size=24, intermediate_size=48), torch.randint(0, 100, (1, 8))


def inference(model: nn.Module, example: Tensor) -> Callable[[], None]:
    """Return the forward pass of a model that is not trained."""

    def step() -> None:
        model.eval()
        with torch.no_grad():
            model(example)

    return step


def training(model: nn.Module, example: Tensor) -> Callable[[], None]:
    """Return the forward and backward pass of a model in training."""

    def step() -> None:
        model.train()
        model.zero_grad()
        total(model(example)).backward()  # type: ignore[no-untyped-call]

    return step


def total(output: Any) -> Tensor:
    """Return the sum of a model's output, or of the first of several."""
    return (output if isinstance(output, Tensor) else output[0]).sum()


PASSES = {"forward": inference, "forward + backward": training}
