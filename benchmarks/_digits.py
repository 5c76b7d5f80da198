"""Digits of scikit-learn: 1797 images of 8 by 8 pixels in ten classes."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Array = Any


class Digits(NamedTuple):
    """Images in [0, 1] with a last axis of one channel, and their classes; 30 % are kept for testing."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array


def digits() -> Digits:
    """Return the same halves at each call, with every class in both by its share."""
    found = load_digits()
    images = (found.images[..., None] / 16).astype(np.float32)
    split = train_test_split(images, found.target, test_size=0.3, random_state=0, stratify=found.target)
    return Digits(split[0], split[2], split[1], split[3])
