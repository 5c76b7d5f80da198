"""Models of keras.applications, two transformers, a recurrent network and a small CNN; random weights.

ConvNeXt is not among them: Keras 3 compiles grouped convolutions with XLA, which a scope takes apart, and
XLA rounds otherwise.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from .subject import CLASSES, Keras, Subject, images, tokens

SIZES = {
    "DenseNet121": 32, "DenseNet169": 32, "DenseNet201": 32,
    "EfficientNetB0": 32, "EfficientNetB1": 32, "EfficientNetB2": 32, "EfficientNetB3": 32,
    "EfficientNetV2B0": 32, "EfficientNetV2B1": 32, "EfficientNetV2B2": 32, "EfficientNetV2B3": 32,
    "EfficientNetV2S": 32, "InceptionResNetV2": 75, "InceptionV3": 75, "MobileNet": 32, "MobileNetV2": 32,
    "MobileNetV3Large": 32, "MobileNetV3Small": 32, "NASNetMobile": 32, "ResNet101": 32, "ResNet101V2": 32,
    "ResNet152": 32, "ResNet50": 32, "ResNet50V2": 32, "VGG16": 32, "VGG19": 32, "Xception": 71,
}  # fmt: skip
"""The least height and width that each takes."""

SAMPLE = {"SmallCNN"}
SAMPLE_TOGETHER = {("Recurrent", "function"), ("TransformerEncoder", "function")}
"""Models by the mode in which a default run has them too, under all tools at once."""
VOCABULARY, WIDTH, HEADS, LENGTH = 50, 16, 2, 6


def subjects() -> Iterator[Subject]:
    """Every model of the zoo."""
    for name, size in SIZES.items():
        yield Subject(name, partial(application, name, size), partial(images, size))
    yield Subject("SmallCNN", convolutional, partial(images, 8))
    yield Subject("Recurrent", recurrent, partial(tokens, LENGTH, VOCABULARY))
    for name, causal in (("TransformerEncoder", False), ("TransformerDecoder", True)):
        yield Subject(name, partial(transformer, causal), partial(tokens, LENGTH, VOCABULARY))


def application(name: str, size: int, keras: Keras) -> Any:
    """A model of keras.applications, as it is but for the number of its classes."""
    build = getattr(keras.applications, name)
    return build(weights=None, input_shape=(size, size, 3), classes=CLASSES)


def convolutional(keras: Keras) -> Any:
    """A convolution and a separable one with batch normalisation, pooling, dropout, a classifier.

    Without biases: where oneDNN is on, a pass of its own fuses the gradients of a bias and of its kernel.
    """
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.SeparableConv2D(8, 3, use_bias=False, activation="swish"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def transformer(causal: bool, keras: Keras, layers: int = 2) -> Any:
    """Token and position embeddings, blocks of attention and a GELU network, dropout, a classifier."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    positions = keras.layers.Lambda(_positions, (LENGTH,))(tokens)
    hidden = hidden + keras.layers.Embedding(LENGTH, WIDTH)(positions)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        attended = attention(hidden, hidden, use_causal_mask=causal)
        attended = keras.layers.Dropout(0.1)(attended)
        hidden = keras.layers.LayerNormalization()(hidden + attended)
        inner = keras.layers.Dense(2 * WIDTH, activation="gelu")(hidden)
        outer = keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(inner))
        hidden = keras.layers.LayerNormalization()(hidden + outer)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(tokens, keras.layers.Dense(CLASSES, activation="softmax")(pooled))


def recurrent(keras: Keras) -> Any:
    """Token embeddings, an LSTM and a GRU whose loops the graph has, a classifier."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=True),
            keras.layers.LSTM(WIDTH, return_sequences=True),
            keras.layers.GRU(WIDTH),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def _positions(ids: Any) -> Any:
    import tensorflow as tf

    return tf.zeros_like(ids) + tf.range(LENGTH)
