"""Overrides of the user's: the driver's own reads of tensors reach no mode and no tensor subclass."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from ._requirements import found
from ._tensors import TorchTensors

_native: Any = torch._C  # its stubs lack what is used here

_RECORDERS = ("fx.experimental.proxy_tensor.get_proxy_mode", "_guards.TracingContext.try_get")


def overridden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a mode is active, or a tensor among the arguments overrides what functions do."""
    if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
        return True
    return any(map(has_torch_function, [value for value in args if isinstance(value, (list, tuple))]))


def is_recorded() -> bool:
    """Return True if ops are being recorded into a graph, where those of routines have no place."""
    return any(recorder is not None and recorder() for recorder in map(found, _RECORDERS))


Unseen: Any = _native.DisableTorchFunction
"""Context in which no `__torch_function__` is called; native, so that no interrupt comes between."""


def _unseen(primitive: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(primitive)
    def method(*args: Any, **kwargs: Any) -> Any:
        with Unseen():
            return primitive(*args, **kwargs)

    return method


class UnseenTensors(TorchTensors):
    """The primitives of `TorchTensors`, where a mode or a subclass of the user's would see them."""

    is_tensor = _unseen(TorchTensors.is_tensor)
    version = _unseen(TorchTensors.version)
    versions = _unseen(TorchTensors.versions)
    signature = _unseen(TorchTensors.signature)
    gradients = _unseen(TorchTensors.gradients)
    shapes = _unseen(TorchTensors.shapes)
    flatten = _unseen(TorchTensors.flatten)
    same = _unseen(TorchTensors.same)
    is_handed_back = _unseen(TorchTensors.is_handed_back)
    write = _unseen(TorchTensors.write)

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine with autograd off; the routine's own calls are seen."""
        unseen = Unseen()
        with unseen:
            before = torch.is_grad_enabled()
        try:
            with unseen:
                torch._C._set_grad_enabled(False)
            return func(*values, **kwargs)
        finally:
            with unseen:
                torch._C._set_grad_enabled(before)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` for `original`, of the class that the routine gave."""
        with Unseen():
            through: torch.Tensor = _of_class(type(value), super().straight_through(original, value))
            return through

    def kept(self, value: Any) -> Any:
        """A tensor's data without its graph, of its class."""
        with Unseen():
            kept = super().kept(value)
            return _of_class(type(value), kept) if isinstance(value, torch.Tensor) else kept

    def copied(self, value: Any) -> Any:
        """A differentiable copy, of its class."""
        with Unseen():
            return _of_class(type(value), super().copied(value))


def _of_class(kind: type, value: Any) -> Any:
    """`value` as the subclass that it was before its override was bypassed."""
    plain = type(value) is torch.Tensor and kind is not torch.Tensor
    overrides = getattr(kind, "__torch_function__", None) is not torch._C._disabled_torch_function_impl
    if plain and overrides and issubclass(kind, torch.Tensor):
        return value.as_subclass(kind)
    return value
