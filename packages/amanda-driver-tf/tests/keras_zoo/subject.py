"""A model of the zoo: how to make it with one of the two Keras, and what to give it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
Keras = Any
"""The module `keras`, or its predecessor `tf_keras`, which still builds graphs for sessions."""


class Subject(NamedTuple):
    """A model by name.

    make: gives a model of a Keras.  inputs: gives what it is called with, for a batch of two.
    """

    name: str
    make: Callable[[Keras], Any]
    inputs: Callable[[], NDArray[Any]]


def images(size: int) -> NDArray[np.float32]:
    """Two images with values from 0 to 255, as the models of keras.applications take them."""
    return np.random.default_rng(0).uniform(0, 255, (2, size, size, 3)).astype(np.float32)


def tokens(length: int, vocabulary: int) -> NDArray[np.int32]:
    """Two sentences."""
    return np.random.default_rng(0).integers(0, vocabulary, (2, length)).astype(np.int32)
