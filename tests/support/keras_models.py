"""Models in Keras' layers, of Keras 2 and 3 alike."""

from __future__ import annotations

from typing import Any


def resnet50(library: Any, size: int = 224, classes: int = 1000) -> Any:
    """The ResNet-50 of torchvision for images of size x size x 3: strides are in the 3x3 convolutions."""
    layers = library.layers

    def convolution(x: Any, channels: int, size: int, stride: int = 1) -> Any:
        x = layers.Conv2D(channels, size, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    images = layers.Input((size, size, 3))
    x = layers.ReLU()(convolution(images, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width, stride = 64 << stage, 2 if stage and not block else 1
            y = layers.ReLU()(convolution(x, width, 1))
            y = layers.ReLU()(convolution(y, width, 3, stride))
            x = convolution(x, 4 * width, 1, stride) if not block else x
            x = layers.ReLU()(layers.Add()([convolution(y, 4 * width, 1), x]))
    return library.Model(images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))
