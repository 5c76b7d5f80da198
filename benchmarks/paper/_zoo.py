"""The models and use cases of the paper's figures; random weights, and narrow twins with the same operators.

Models are those of torchvision and transformers for PyTorch, and of Keras for TensorFlow.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from _measure import QUICK

import amanda

VGG, RESNET, INCEPTION, BERT = "VGG19", "ResNet-50", "Inception-v3", "BERT-base"
NARROWER = 16
"""A twin's layers have a sixteenth of the channels."""
USE_CASES: dict[str, Callable[[], amanda.Tool]] = {
    "tracing": functools.partial(amanda.load_tool, "trace"),
    "FLOPs": functools.partial(amanda.load_tool, "flops"),
    "effective path": functools.partial(amanda.load_tool, "effective_path"),
    "pruning": functools.partial(amanda.load_tool, "prune", sparsity=0.5),
    "QAT": functools.partial(amanda.load_tool, "quantize", method="qat"),
}


def use_cases() -> dict[str, Callable[[], amanda.Tool]]:
    """Return the five use cases of the paper's evaluation; of a quick run two."""
    return {name: make for name, make in USE_CASES.items() if not QUICK or name in ("tracing", "pruning")}


@contextmanager
def narrow(*layers: type) -> Iterator[None]:
    """Give layers of these classes that are made meanwhile a sixteenth of their channels."""

    def of(make: Callable[..., None]) -> Callable[..., None]:
        def made(layer: Any, *sizes: Any, **options: Any) -> None:
            make(layer, *(_fewer(size) for size in sizes), **options)

        return made

    with ExitStack() as patches:
        for layer in layers:
            patches.enter_context(patch.object(layer, "__init__", of(layer.__init__)))  # type: ignore[misc]
        yield


def _fewer(size: Any) -> Any:
    """Divide channels; sizes of kernels and the colours of an image are smaller than these."""
    return size // NARROWER if isinstance(size, int) and size >= NARROWER else size


def in_pytorch() -> dict[str, Any]:
    """Return models of `_models.Pair` in PyTorch; of a quick run one, as narrow as its twin."""
    import torch
    from _models import Pair, models, narrow_resnet
    from models import vision  # of examples, where _models found those
    from torch import nn

    def application(name: str, size: int, narrowed: int, **options: Any) -> Pair:
        def make() -> nn.Module:
            return vision(name, init_weights=False, **options)

        def twin() -> tuple[nn.Module, torch.Tensor]:
            with narrow(nn.Conv2d, nn.Linear, nn.BatchNorm2d):
                return make(), torch.rand(2, 3, narrowed, narrowed)

        return Pair(lambda: (make(), torch.rand(1, 3, size, size)), twin, f"1 image of {size} x {size}")

    if QUICK:
        return {RESNET: Pair(narrow_resnet, narrow_resnet, "2 images of 32 x 32")}
    return {
        VGG: application("vgg19", 224, 32),
        RESNET: models()[RESNET],
        INCEPTION: application("inception_v3", 299, 75, aux_logits=False),
        BERT: models()[BERT],
    }


def in_tensorflow(narrowed: bool = False) -> dict[str, Any]:
    """Return models of `_graph_models.Model`, or their twins; of a quick run one small one."""
    from _graph_models import Sizes, application, bert_model, models

    if QUICK:
        return dict(list(models().items())[:1])

    def image_model(name: str, size: int, small: int) -> Any:
        if not narrowed:
            return application(name, size)
        wide = application(name, small)

        def make(keras: Any) -> Any:
            with narrow(keras.layers.Conv2D, keras.layers.Dense):
                return wide.make(keras)

        return wide._replace(make=make)

    return {
        VGG: image_model("VGG19", 224, 32),
        RESNET: image_model("ResNet50", 224, 32),
        INCEPTION: image_model("InceptionV3", 299, 75),
        BERT: bert_model(Sizes(width=24, vocabulary=100, tokens=8) if narrowed else Sizes()),
    }
