"""A model of the zoo: how to make it and what to give it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Table = dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""Settings of a configuration, and a function that makes inputs, by the name of the architecture."""


class Subject(NamedTuple):
    """A model by name.

    settles: the step after which its control flow stays as it is; one, unless its state decides on it.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Mapping[str, Any]]]
    settles: int = 1


def tokens(*shape: int) -> Tensor:
    """Token ids of a vocabulary of 64, none of them special."""
    return torch.randint(3, 60, shape or (2, 12))


def with_placeholders(count: int) -> Tensor:
    """24 token ids, `count` of them 63: the places of what comes from an image or a sound."""
    ids = tokens(2, 24)
    ids[:, 2 : 2 + count] = 63
    return ids


def image(*shape: int) -> Tensor:
    """Two images of 32 x 32, or of another shape."""
    return torch.randn(*(shape or (2, 3, 32, 32)))


def full_mask(*shape: int) -> Tensor:
    """A mask that hides nothing."""
    return torch.ones(*shape, dtype=torch.long)
