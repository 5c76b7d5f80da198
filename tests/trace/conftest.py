"""ResNet-50 and what was traced of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.trace import Graph, TraceTool


@pytest.fixture(scope="session")
def resnet(resnet50: Callable[[], nn.Module]) -> nn.Module:
    """The model, which does not train."""
    torch.manual_seed(0)
    return resnet50().eval()


@pytest.fixture(scope="session")
def images() -> Tensor:
    """What it is called with."""
    return torch.rand(1, 3, 32, 32)


@pytest.fixture(scope="session")
def graph(resnet: nn.Module, images: Tensor) -> Graph:
    """A forward and a backward pass."""
    tracer = TraceTool()
    with amanda.apply(tracer):
        resnet(images).sum().backward()
    return tracer.graph
