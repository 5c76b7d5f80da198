"""Every test draws the same random numbers, whichever ran before it in its process."""

import random
import sys

import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed what draws numbers; frameworks that no test has imported are left alone."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
