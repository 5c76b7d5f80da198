"""ResNet-50 and BERT with random weights; nothing is downloaded."""

from typing import Any

import torch
from torch import nn


def resnet50() -> nn.Module:
    """torchvision's ResNet-50: 25.6 million parameters, images of (batch, 3, 224, 224)."""
    let_torchvision_load()
    from torchvision import models

    model: nn.Module = models.resnet50()
    return model


def bert(**config: Any) -> nn.Module:
    """transformers' BERT base: 109 million parameters, tokens of (batch, length); gives a tuple.

    config: other sizes, as BertConfig calls them.
    """
    let_torchvision_load()  # which transformers imports where it is installed
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(BertConfig(return_dict=False, **config))
    return model


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
