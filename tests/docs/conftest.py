"""What the snippets need to run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import joblib
import pytest


@pytest.fixture(scope="session", autouse=True)
def _torchvision_loads(example: Callable[[str], ModuleType]) -> Iterator[None]:
    """Builds of torch for the CPU lack two ops that torchvision wants when it is imported."""
    example("models").let_torchvision_load()

    # A closure travels by value: workers cannot import the module of the other function.
    def let_torchvision_load() -> None:
        import torch

        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", signature)

    with joblib.parallel_config(backend="loky", initializer=let_torchvision_load):
        yield
