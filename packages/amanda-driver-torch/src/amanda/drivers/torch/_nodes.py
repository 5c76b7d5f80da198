"""Hooks at autograd's nodes, and graphs of nodes that are too deep for torch to free by recursion."""

import threading
from collections import OrderedDict
from itertools import count
from typing import Any

import torch
from amanda.backend import Patches
from amanda.interceptor import NATIVE, Hook

FREED_AFTER_KEY = "amanda.relief"
_handle_numbers = count(-1, -1)  # handles count upwards from 0


class QuickHooks:
    """Base of objects whose methods are hooks at nodes, which the driver removes by `remove_hook_handles`."""

    __slots__ = ()


def remove_hook_handles(handles: list[tuple[Any, Any]]) -> None:
    """Remove hooks from nodes; handles: pairs of a node and what registering the hook returned."""
    for _, handle in handles:
        if type(handle) is tuple:  # of a hook that `register_hooks_without_handles` made torch register
            hooks, number = handle
            hooks.pop(number, None)
        else:
            handle.remove()
    handles.clear()


def register_hooks_without_handles(patches: Patches) -> None:
    """Make torch register the driver's hooks at nodes without a `RemovableHandle`.

    A handle takes longer to make than the hook takes to run. Hooks of the program get handles as ever, and so
    do all hooks without native code.
    """
    original = getattr(torch.autograd.Function, "_register_hook", None)
    if original is None or not NATIVE:
        return

    def register_hook(hooks: Any, hook: Any) -> tuple[Any, Any]:
        """Return a node's hooks with a new hook, and what `remove_hook_handles` removes it by."""
        # The program's hooks, and those of libraries, get the handle that torch promises.
        if type(hook) is not Hook and not isinstance(getattr(hook, "__self__", None), QuickHooks):
            registered: tuple[Any, Any] = original(hooks, hook)
            return registered
        if hooks is None:
            hooks = OrderedDict()
        number = next(_handle_numbers)
        hooks[number] = hook
        return hooks, (hooks, number)

    patches.set(torch.autograd.Function, "_register_hook", staticmethod(register_hook))


class _FreeingState(threading.local):
    # Per thread, since graphs are freed on whichever thread drops the last reference.
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.under_way = False


class FreedAfterNode:
    """Object that a node holds and that holds the node's successors, to free them after the node.

    Python frees the successors from a list, one after another; torch would free each within the last.
    """

    __slots__ = ("_freeing", "_successors")
    _of_thread = _FreeingState()

    def __init__(self, successors: list[Any]) -> None:
        self._successors = successors
        self._freeing = self._of_thread

    def __del__(self) -> None:
        """Free the successors, or leave them to the loop that already runs on this thread."""
        freeing = self._freeing
        freeing.waiting.append(self._successors)
        del self._successors
        if freeing.under_way:  # the loop of an outer call frees the successors after this one returns
            return
        freeing.under_way = True
        try:
            while freeing.waiting:
                freeing.waiting.pop()
        finally:
            freeing.under_way = False


def free_without_recursion(node: Any) -> None:
    """Keep torch from freeing the graph behind a node by recursion, which overflows the stack if it is deep.

    Native code calls this for some of the nodes that it visits, so that chains between them stay short.
    """
    successors = [child for child, _ in node.next_functions if child is not None]
    node.metadata.setdefault(FREED_AFTER_KEY, FreedAfterNode(successors))
