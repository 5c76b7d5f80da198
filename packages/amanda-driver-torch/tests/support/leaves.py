"""Leaves of autograd, and what is equal to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close


def leaf(*values: float) -> Tensor:
    """Numbers that need a gradient."""
    return torch.tensor(values, dtype=torch.float, requires_grad=True)


def same(result: Any, expected: Any) -> None:
    """Assert that tensors are equal, as they are nested."""
    assert_close(result, expected, rtol=0, atol=0)
