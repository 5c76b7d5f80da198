"""What each framework does in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Protocol, cast

from amanda.tools.mapping import backend_of
from amanda.tools.prune import _numpy, _other, _pytorch, _tensorflow

Array = Any
"""A NumPy array or a tensor of PyTorch: what masks are computed with. Tensors of others become arrays."""


class Arrays(Protocol):
    """What masks are computed with."""

    def plain(self, weight: Any) -> Array: ...
    def as_mask(self, kept: Array, weight: Any) -> Any: ...
    def row(self, arrays: Sequence[Array]) -> Array: ...
    def lowest_dropped(self, scores: Array, count: int) -> Array: ...
    def ranks(self, values: Array) -> Array: ...
    def like(self, array: Any, other: Array) -> Array: ...
    def numbers(self, array: Array) -> Any: ...
    def stored(self, array: Any) -> Array: ...


@cache
def _module_of(backend: str) -> Arrays:
    return cast(Arrays, _MODULES.get(backend, _other))


_MODULES = {"torch": _pytorch, "tensorflow": _tensorflow, "numpy": _numpy, "builtins": _numpy}


def framework_of(tensor: Any) -> Arrays:
    """The module for a tensor, or for an array that masks are computed with."""
    return _module_of(backend_of(tensor))


def on_arrays(kept: Callable[..., Array]) -> Callable[..., Any]:
    """Let a function of arrays, which tells what is kept, give the mask of a weight of any framework."""

    @wraps(kept)
    def mask(weight: Any, *args: Any, **kwargs: Any) -> Any:
        framework = framework_of(weight)
        return framework.as_mask(kept(framework.plain(weight), *args, **kwargs), weight)

    return mask
