"""Packages of models."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """The torchvision package, which needs two ops that a CPU build of torch lacks."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
    return pytest.importorskip("torchvision")


@pytest.fixture(scope="session")
def transformers(torchvision: Any) -> Any:
    """The transformers package, which imports torchvision."""
    return pytest.importorskip("transformers")
