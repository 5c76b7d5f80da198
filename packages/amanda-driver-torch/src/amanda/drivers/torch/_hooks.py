"""Hooks at nodes: torch makes a handle for each, which takes longer than the hook itself."""

from collections import OrderedDict
from itertools import count
from typing import Any

import torch
from amanda.backend import Attributes
from amanda.interceptor import NATIVE, Hook

_numbers = count(-1, -1)  # handles count upwards from 0


class Hooks:
    """A base of objects whose methods are hooks that we remove ourselves, by `remove_all`."""

    __slots__ = ()


def remove_all(handles: list[tuple[Any, Any]]) -> None:
    """Take hooks away from nodes by what putting each there has returned; empty the list then."""
    for _, handle in handles:
        if type(handle) is tuple:
            hooks, number = handle
            hooks.pop(number, None)
        else:
            handle.remove()
    handles.clear()


def place_hooks_quickly(attributes: Attributes) -> None:
    """Make torch put our own hooks into a node's hooks without a `RemovableHandle`; others as ever."""
    original = getattr(torch.autograd.Function, "_register_hook", None)
    if original is None or not NATIVE:
        return

    def register_hook(hooks: Any, hook: Any) -> tuple[Any, Any]:
        if type(hook) is not Hook and not isinstance(getattr(hook, "__self__", None), Hooks):
            registered: tuple[Any, Any] = original(hooks, hook)
            return registered
        if hooks is None:
            hooks = OrderedDict()
        number = next(_numbers)
        hooks[number] = hook
        return hooks, (hooks, number)

    attributes.set(torch.autograd.Function, "_register_hook", staticmethod(register_hook))
