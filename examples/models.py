"""Models of torchvision and transformers with random weights; nothing is downloaded."""

from typing import Any

import torch
from torch import nn


def resnet50() -> nn.Module:
    """torchvision's ResNet-50: 25.6 million parameters, images of (batch, 3, 224, 224)."""
    return vision("resnet50")


def vision(name: str, **options: Any) -> nn.Module:
    """A classification model of torchvision."""
    let_torchvision_load()
    from torchvision import models

    model: nn.Module = getattr(models, name)(**options)
    return model


def bert(**config: Any) -> nn.Module:
    """transformers' BERT base: 109 million parameters, tokens of (batch, length); gives a tuple.

    config: other sizes, as BertConfig calls them.
    """
    let_torchvision_load()  # which transformers imports where it is installed
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(BertConfig(return_dict=False, **config))
    return model


def gpt2(**config: Any) -> nn.Module:
    """transformers' GPT-2 with its head, tokens of (batch, length); gives the logits.

    config: other sizes, as GPT2Config calls them.
    """
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(GPT2Config(use_cache=False, **config))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids).logits
            return logits

    return Logits()


def let_torchvision_load() -> None:
    """Let torchvision be imported also beside a build of torch that its binary was not made for.

    Its Python describes two operators of the binary. No classification model calls them, so it
    is enough that their names exist.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(operator + signature)  # type: ignore[no-untyped-call]
        _declared.append(library)


_declared: list[torch.library.Library] = []  # what a library defines lasts as long as it does
