"""Overrides of the program's: its modes and tensor subclasses are not called for the driver and for tools.

The driver works outside of all modes and overrides, enters them again for the ops of the program, and runs
an isolated routine outside of the modes, with the overrides of the subclasses that it is given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _pop_mode, _push_mode

from ._requirements import found

_native: Any = torch._C  # its stubs lack what is used here

_RECORDERS = ("fx.experimental.proxy_tensor.get_proxy_mode", "_guards.TracingContext.try_get")

Unseen: Any = _native.DisableTorchFunction
"""Context in which no `__torch_function__` is called; native, so that no interrupt comes between."""
_Seen: Any = _native._EnableTorchFunction
_is_seen = _native._is_torch_function_enabled
_is_unseen = getattr(_native, "_is_torch_function_all_disabled", lambda: False)
_count_dispatch_modes = _native._len_torch_dispatch_stack
_count_function_modes = _native._len_torch_function_stack


def overridden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a mode is active, or a tensor among the arguments overrides what functions do."""
    if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
        return True
    return any(map(has_torch_function, [value for value in args if isinstance(value, (list, tuple))]))


def is_recorded() -> bool:
    """Return True if ops are being recorded into a graph, where those of routines have no place."""
    return any(recorder is not None and recorder() for recorder in map(found, _RECORDERS))


class Modes:
    """Modes and overrides that the program has switched on around an op.

    dispatch: its dispatch modes, the innermost first.
    """

    __slots__ = ("_dispatch", "_subclasses")

    def __init__(self, subclasses: bool = True, dispatch: Sequence[Any] = ()) -> None:
        self._subclasses = subclasses
        self._dispatch = dispatch

    def entered(self) -> AbstractContextManager[Any]:
        """Context for what is the program's: its ops, and what runs in the place of an op."""
        if self._subclasses and not self._dispatch:
            return _Seen()  # type: ignore[no-any-return]
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with _Seen(), nullcontext() if self._subclasses else _native.DisableTorchFunctionSubclass():
            push_all(self._dispatch)
            try:
                yield
            finally:
                pop_all()


SEEN, MODES_ONLY = Modes(), Modes(subclasses=False)


def current() -> Modes | None:
    """Return the overrides that are in force, without dispatch modes; None where there are none."""
    if _is_seen():
        return SEEN
    return None if _is_unseen() else MODES_ONLY


@contextmanager
def left() -> Iterator[Modes]:
    """Context outside of all overrides and modes of the program; yields them."""
    subclasses = _is_seen()
    with Unseen():
        dispatch = pop_all()
        try:
            yield Modes(subclasses, dispatch)
        finally:
            push_all(dispatch)


def reading() -> AbstractContextManager[Any]:
    """Context in which the driver, and analysis routines, read tensors: outside of overrides and modes."""
    return left() if _count_dispatch_modes() else Unseen()


def pop_all() -> list[Any]:
    """Leave all dispatch modes; return them, the innermost first."""
    return [_pop_mode() for _ in range(_count_dispatch_modes())]


def push_all(modes: Sequence[Any]) -> None:
    """Enter dispatch modes, of which the first is to be the innermost."""
    for mode in reversed(modes):
        _push_mode(mode)


def call_alone(
    func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any], overrides: bool = True
) -> Any:
    """Call a routine outside of the program's autograd and modes; a hot path where there are no modes.

    A default device holds, as in any code.  overrides: whether subclasses among the values override what the
    routine calls.
    """
    before = torch.is_grad_enabled()
    try:
        _native._set_grad_enabled(False)
        if _count_function_modes() or _count_dispatch_modes() or forward_ad._current_level >= 0:
            return _call_outside_of_modes(func, values, kwargs, overrides)
        if overrides is _is_seen():
            return func(*values, **kwargs)
        with _Seen() if overrides else Unseen():
            return func(*values, **kwargs)
    finally:
        _native._set_grad_enabled(before)


def _call_outside_of_modes(
    func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any], overrides: bool
) -> Any:
    with ExitStack() as stack:
        if forward_ad._current_level >= 0:
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        stack.enter_context(_without_function_modes())
        dispatch = pop_all()
        stack.callback(push_all, dispatch)
        stack.enter_context(_Seen())
        with nullcontext() if overrides else _native.DisableTorchFunctionSubclass():
            return func(*values, **kwargs)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = [_native._pop_torch_function_stack() for _ in range(_count_function_modes())]
    try:
        for mode in modes[::-1]:
            if isinstance(mode, DeviceContext):
                _native._push_on_torch_function_stack(mode)
        yield
    finally:
        while _count_function_modes():
            _native._pop_torch_function_stack()
        for mode in modes[::-1]:
            _native._push_on_torch_function_stack(mode)


def of_class(like: torch.Tensor, value: Any) -> Any:
    """`value` as the subclass that a tensor is of, with its attributes, after an op without overrides."""
    kind = type(like)
    if kind is torch.Tensor or type(value) is not torch.Tensor:
        return value
    if kind.__torch_function__ is torch._C._disabled_torch_function_impl:  # such as a Parameter
        return value
    made: Any = value.as_subclass(kind)
    if made is not like:
        made.__dict__.update(like.__dict__)
    return made
