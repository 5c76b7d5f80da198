"""Modes and tensor subclasses of the program, which the driver and the tools must not trigger.

The driver works outside of all modes and overrides. It enters them again for the ops of the program. It runs
an isolated routine outside of the modes, but with the overrides of the subclasses among its values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _pop_mode, _push_mode

from ._requirements import torch_attribute

_native: Any = torch._C  # its stubs lack what is used here

_RECORDERS = ("fx.experimental.proxy_tensor.get_proxy_mode", "_guards.TracingContext.try_get")

WithoutTorchFunction: Any = _native.DisableTorchFunction
"""Context in which no `__torch_function__` is called; native, so that no interrupt can divide it."""
_WithTorchFunction: Any = _native._EnableTorchFunction
_overrides_enabled = _native._is_torch_function_enabled
_all_overrides_disabled = getattr(_native, "_is_torch_function_all_disabled", lambda: False)
_count_dispatch_modes = _native._len_torch_dispatch_stack
_count_function_modes = _native._len_torch_function_stack


def has_overrides(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a function mode is active, or a tensor among the arguments overrides functions."""
    values = (*args, *kwargs.values()) if kwargs else args
    if has_torch_function(values):
        return True
    # Lists of tensors, as `torch.cat` takes, are not looked into by `has_torch_function`.
    return any(map(has_torch_function, [value for value in values if isinstance(value, (list, tuple))]))


def is_recording_graph() -> bool:
    """Return True if ops are being recorded into a graph, which ops of routines must not enter."""
    return any(recorder is not None and recorder() for recorder in map(torch_attribute, _RECORDERS))


class ProgramModes:
    """Modes and overrides that the program has switched on around an op, to be entered for the op.

    subclasses: whether tensor subclasses override functions.  dispatch_modes: the innermost first.
    """

    __slots__ = ("_dispatch_modes", "_subclasses")

    def __init__(self, subclasses: bool = True, dispatch_modes: Sequence[Any] = ()) -> None:
        self._subclasses = subclasses
        self._dispatch_modes = dispatch_modes

    def enter(self) -> AbstractContextManager[Any]:
        """Return a context under these modes, for the ops of the program and for replacements of ops."""
        if self._subclasses and not self._dispatch_modes:  # native, and so cheaper than a context in Python
            return _WithTorchFunction()  # type: ignore[no-any-return]
        return self._enter_overrides_and_modes()

    @contextmanager
    def _enter_overrides_and_modes(self) -> Iterator[None]:
        """Enter the overrides and dispatch modes within the context."""
        # Torch has a switch for all overrides and one for those of subclasses alone.
        without_subclasses = nullcontext() if self._subclasses else _native.DisableTorchFunctionSubclass()
        with _WithTorchFunction(), without_subclasses:
            push_dispatch_modes(self._dispatch_modes)
            try:
                yield
            finally:
                pop_dispatch_modes()


class NoOverrides(ProgramModes):
    """Modes of a program that has switched all overrides off."""

    def enter(self) -> AbstractContextManager[Any]:
        """Return a context in which no override is called."""
        return WithoutTorchFunction()  # type: ignore[no-any-return]


NO_OVERRIDES = NoOverrides()
WITH_SUBCLASSES, MODES_ONLY = ProgramModes(), ProgramModes(subclasses=False)


def current_overrides() -> ProgramModes | None:
    """Return the active `__torch_function__` overrides; None if all overrides are disabled."""
    if _overrides_enabled():
        return WITH_SUBCLASSES
    return None if _all_overrides_disabled() else MODES_ONLY


@contextmanager
def leave_overrides() -> Iterator[ProgramModes]:
    """Leave all overrides and modes of the program within the context, which yields them."""
    subclasses = _overrides_enabled()
    with WithoutTorchFunction():
        dispatch_modes = pop_dispatch_modes()
        try:
            yield ProgramModes(subclasses, dispatch_modes)
        finally:
            push_dispatch_modes(dispatch_modes)


def reading_context() -> AbstractContextManager[Any]:
    """Return the context in which the driver and analysis routines read tensors, outside of overrides."""
    return leave_overrides() if _count_dispatch_modes() else WithoutTorchFunction()


def pop_dispatch_modes() -> list[Any]:
    """Leave all dispatch modes; return them, the innermost first."""
    return [_pop_mode() for _ in range(_count_dispatch_modes())]


def push_dispatch_modes(modes: Sequence[Any]) -> None:
    """Enter dispatch modes; the first becomes the innermost."""
    for mode in reversed(modes):
        _push_mode(mode)


def call_outside_modes(
    func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any], overrides: bool = True
) -> Any:
    """Call a routine with autograd off and outside of the program's modes; return the routine's result.

    A default device stays in force, as in any code.  overrides: whether subclasses among the values override
    what the routine calls.  A hot path where there are no modes.
    """
    was_grad_enabled = torch.is_grad_enabled()
    try:
        # Not `torch.no_grad`, which costs three times as much.
        _native._set_grad_enabled(False)
        if _count_function_modes() or _count_dispatch_modes() or forward_ad._current_level >= 0:
            return _call_leaving_modes(func, values, kwargs, overrides)
        if overrides is _overrides_enabled():  # the usual case: nothing to switch
            return func(*values, **kwargs)
        with _WithTorchFunction() if overrides else WithoutTorchFunction():
            return func(*values, **kwargs)
    finally:
        _native._set_grad_enabled(was_grad_enabled)


def _call_leaving_modes(
    func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any], overrides: bool
) -> Any:
    """Call a routine outside of forward-mode AD, function modes and dispatch modes; the slow path."""
    with ExitStack() as stack:
        if forward_ad._current_level >= 0:
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        stack.enter_context(without_function_modes())
        dispatch_modes = pop_dispatch_modes()
        stack.callback(push_dispatch_modes, dispatch_modes)
        stack.enter_context(_WithTorchFunction())
        with nullcontext() if overrides else _native.DisableTorchFunctionSubclass():
            return func(*values, **kwargs)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Leave all function modes but a default device within the context."""
    modes = [_native._pop_torch_function_stack() for _ in range(_count_function_modes())]
    try:
        for mode in modes[::-1]:
            if isinstance(mode, DeviceContext):  # `torch.set_default_device` is a mode too
                _native._push_on_torch_function_stack(mode)
        yield
    finally:
        while _count_function_modes():
            _native._pop_torch_function_stack()
        for mode in modes[::-1]:
            _native._push_on_torch_function_stack(mode)


def as_class_of(like: torch.Tensor, value: Any) -> Any:
    """Return a plain tensor as an instance of the subclass of another tensor, with that tensor's attributes.

    Ops that run without overrides return plain tensors.  Any other value is returned as it is, and so is one
    for a tensor without a subclass, or of a subclass that overrides nothing.
    """
    tensor_class = type(like)
    if tensor_class is torch.Tensor or type(value) is not torch.Tensor:
        return value
    if tensor_class.__torch_function__ is torch._C._disabled_torch_function_impl:  # such as a Parameter
        return value
    instance: Any = value.as_subclass(tensor_class)
    if instance is not like:
        instance.__dict__.update(like.__dict__)
    return instance
