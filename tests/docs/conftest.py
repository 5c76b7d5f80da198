"""What the snippets need to run here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="session", autouse=True)
def _torchvision_loads(example: Callable[[str], ModuleType]) -> None:
    """Builds of torch for the CPU lack two ops that torchvision wants when it is imported."""
    example("models").let_torchvision_load()
