"""Tests of compiled programs know nothing of each other."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    gc.collect()  # or a callback of what other tests left is a frame that dynamo counts
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
