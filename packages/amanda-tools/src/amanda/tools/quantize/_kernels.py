"""Fake quantisation in one go, where a framework or the host has a fast way to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda.tools.mapping import backend_of
from amanda.tools.quantize import _pytorch, _tensorflow

_MODULES = {"torch": _pytorch, "tensorflow": _tensorflow}


def kernel_for(x: Any, axes: Sequence[int]) -> Callable[..., Any] | None:
    """Return `kernel(x, scale, zero_point, low, high, axes)`, which autodiff knows; None for other tensors.

    axes: of the channels in x that have scales of their own.
    """
    module = _MODULES.get(backend_of(x))
    return module.kernel if module is not None and module.has_kernel(x, axes) else None
