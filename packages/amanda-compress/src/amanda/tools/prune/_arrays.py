"""Arrays that masks and scores are computed with."""

from __future__ import annotations

from typing import Any

Array = Any
"""An array of NumPy, or a tensor of PyTorch."""
