"""Hooks at nodes: torch makes a handle for each, which takes longer than the hook itself."""

from collections import OrderedDict
from itertools import count
from typing import Any

import torch
from amanda.backend import Attributes
from amanda.interceptor import NATIVE, Hook

_numbers = count(-1, -1)  # handles count upwards from 0


class Handle(tuple[OrderedDict[int, Any], int]):
    """The hooks of a node, and which is meant."""

    __slots__ = ()

    def remove(self) -> None:
        """Take the hook away."""
        self[0].pop(self[1], None)


def place_hooks_quickly(attributes: Attributes) -> None:
    """Make torch put native hooks into a node's hooks without a `RemovableHandle`; others as ever."""
    original = getattr(torch.autograd.Function, "_register_hook", None)
    if original is None or not NATIVE:
        return

    def register_hook(hooks: Any, hook: Any) -> tuple[Any, Any]:
        if type(hook) is not Hook:
            registered: tuple[Any, Any] = original(hooks, hook)
            return registered
        if hooks is None:
            hooks = OrderedDict()
        number = next(_numbers)
        hooks[number] = hook
        return hooks, Handle((hooks, number))

    attributes.set(torch.autograd.Function, "_register_hook", staticmethod(register_hook))
