"""ResNet-50 and BERT with random weights; nothing is downloaded."""

import torch
from torch import nn


def resnet50() -> nn.Module:
    """torchvision's ResNet-50: 25.6 million parameters, images of (batch, 3, 224, 224)."""
    try:
        from torchvision import models
    except RuntimeError:
        # torchvision's binary was built for another build of torch. Its Python describes two
        # operators of that binary, which no classification model calls, so names suffice.
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        from torchvision import models
    model: nn.Module = models.resnet50()
    return model


_declared: list[torch.library.Library] = []  # what a library defines lasts as long as it does


def bert() -> nn.Module:
    """transformers' BERT base: 109 million parameters, tokens of (batch, length); gives a tuple."""
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(BertConfig(return_dict=False))
    return model
