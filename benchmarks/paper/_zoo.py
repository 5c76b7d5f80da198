"""The models of the paper's figures with random weights, and narrow twins with the same operators.

Of torchvision and transformers for PyTorch; of Keras, with a BERT of its layers, for TensorFlow.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

VGG, RESNET, INCEPTION, BERT = "VGG19", "ResNet-50", "Inception-v3", "BERT-base"
NARROWER = 16
"""A twin's layers have a sixteenth of the channels."""


@contextmanager
def narrow(*layers: type) -> Iterator[None]:
    """Layers of these classes that are made meanwhile have a sixteenth of their channels."""

    def of(make: Callable[..., None]) -> Callable[..., None]:
        def made(layer: Any, *sizes: Any, **options: Any) -> None:
            make(layer, *(_fewer(size) for size in sizes), **options)

        return made

    with ExitStack() as patches:
        for layer in layers:
            patches.enter_context(patch.object(layer, "__init__", of(layer.__init__)))  # type: ignore[misc]
        yield


def _fewer(size: Any) -> Any:
    """Of channels; sizes of kernels and the colours of an image are smaller than these."""
    return size // NARROWER if isinstance(size, int) and size >= NARROWER else size


def in_pytorch(quick: bool = False) -> dict[str, Any]:
    """Models of `_models.Pair`, as they are used in PyTorch; of a quick run one, as narrow as its twin."""
    import torch
    from _models import Pair, bert, narrow_resnet, resnet50
    from models import vision  # of examples, where _models found those
    from torch import nn

    def image(size: int) -> torch.Tensor:
        return torch.rand(1, 3, size, size)

    def twin(make: Callable[[], nn.Module], size: int) -> tuple[nn.Module, torch.Tensor]:
        with narrow(nn.Conv2d, nn.Linear, nn.BatchNorm2d):
            return make(), torch.rand(2, 3, size, size)

    def small_bert() -> tuple[nn.Module, torch.Tensor]:
        model = bert(vocab_size=100, hidden_size=24, intermediate_size=48)
        return model, torch.randint(0, 100, (1, 8))

    def vgg() -> nn.Module:
        return vision("vgg19", init_weights=False)

    def inception() -> nn.Module:
        return vision("inception_v3", init_weights=False, aux_logits=False)

    if quick:
        return {RESNET: Pair(narrow_resnet, narrow_resnet, "2 images of 32 x 32")}
    return {
        VGG: Pair(lambda: (vgg(), image(224)), lambda: twin(vgg, 32), "1 image of 224 x 224"),
        RESNET: Pair(lambda: (resnet50(), image(224)), narrow_resnet, "1 image of 224 x 224"),
        INCEPTION: Pair(
            lambda: (inception(), image(299)), lambda: twin(inception, 75), "1 image of 299 x 299"
        ),
        BERT: Pair(lambda: (bert(), torch.randint(0, 30_000, (1, 128))), small_bert, "128 tokens"),
    }  # fmt: skip


def in_tensorflow(quick: bool = False, narrowed: bool = False) -> dict[str, Any]:
    """Models of `_graph_models.Model`, or their twins; of a quick run one small one."""
    from _graph_models import Model, Sizes, bert_model, image, models

    def application(name: str, size: int, words: str) -> Any:
        def make(keras: Any) -> Any:
            layers = (keras.layers.Conv2D, keras.layers.Dense) if narrowed else ()
            with narrow(*layers):
                shape = (size, size, 3)
                return getattr(keras.applications, name)(weights=None, input_shape=shape)

        return Model(make, image(size), words)

    if quick:
        return dict(list(models(True).items())[:1])
    sizes = Sizes(width=24, vocabulary=100, tokens=8) if narrowed else Sizes()
    return {
        VGG: application("VGG19", 32 if narrowed else 224, "1 image of 224 x 224"),
        RESNET: application("ResNet50", 32 if narrowed else 224, "1 image of 224 x 224"),
        INCEPTION: application("InceptionV3", 75 if narrowed else 299, "1 image of 299 x 299"),
        BERT: bert_model(sizes),
    }
