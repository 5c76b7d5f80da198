"""Pruning and quantisation of families of models, of which no line is changed for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

IMAGES, TOKENS = torch.rand(2, 3, 32, 32), torch.arange(16).reshape(2, 8)
TEXT = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}


def vgg() -> nn.Module:
    from torchvision.models import vgg

    model = vgg.VGG(vgg.make_layers([8, "M", 8, "M", 16, "M"], batch_norm=True), init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(16 * 49, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 5))
    return model


def resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=5, width_per_group=4)


def mobilenet() -> nn.Module:
    from torchvision.models import MobileNetV2

    return MobileNetV2(num_classes=5, width_mult=0.25, dropout=0.0)


def squeezenet() -> nn.Module:
    from torchvision.models import SqueezeNet

    return SqueezeNet("1_1", num_classes=5, dropout=0.0)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # it is zero at first
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "use_cache": False}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **sizes, **dropout, **TEXT))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(return_dict=False, **sizes, **dropout, **TEXT))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "VGG": (vgg, IMAGES), "ResNet": (resnet, IMAGES), "MobileNet": (mobilenet, IMAGES),
    "SqueezeNet": (squeezenet, IMAGES), "ViT": (vit, IMAGES), "GPT-2": (gpt2, TOKENS), "BERT": (bert, TOKENS),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_pruned_and_quantised_as_it_is(family: str, example: Any) -> None:
    example("models").let_torchvision_load()
    make, x = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    weights = {
        name: one
        for name, one in model.named_parameters()
        if one.dim() > 1 and not set(name.split(".")) & NOT
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prune, quantize = PruneTool(sparsity=0.5), QuantizeTool("dynamic", weight_bits=8, activation_bits=8)
    with amanda.apply(prune, quantize) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            first(model(x)).square().mean().backward()
            optimizer.step()
    prune.finalize(model)
    assert scope.report == []
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds

    assert len(prune.result.rows()) >= len(weights)
    for name, one in weights.items():
        assert round((one == 0).float().mean().item(), 2) == 0.5, name
    quantised = [one for one in quantize.result if one.tensor == "weight"]
    assert {one.module for one in quantised} == {row[2] for row in prune.result.rows()}


NOT = {"embeddings", "wte", "wpe", "class_token", "pos_embedding"}
"""Parts of names of what is looked up and added, not multiplied."""


def first(output: Any) -> Tensor:
    """A tensor of what a model gives that all its weights have made."""
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[1]
