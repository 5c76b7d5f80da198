"""Hooks at autograd's nodes, and graphs too deep for torch to free recursively."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from amanda.backend import Patches
from amanda.interceptor import ACTIVATION, NATIVE, DeferredRelease, HookRegistrar, Mark, active

from ._saved_tensors import has_hooks

AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
SUCCESSORS_KEY = "amanda.successors"


class NodeHooks:
    """Record of hooks at nodes that are the program's, or a library's, and were put there in a scope.

    Such a hook may take a gradient away: the graph alone no longer tells which gradients there are.
    on_tensors: whether tensors that are no leaves, or saved tensors, may have hooks, which may see gradients.
    patch_number: number of the present patches; nobody has seen which hooks were put at nodes before them.
    """

    of_program: ClassVar[bool] = False
    on_tensors: ClassVar[bool] = False
    patch_number: ClassVar[int] = 0


class QuickHooks:
    """Base of objects whose methods are hooks at nodes, which the driver removes by `remove_hook_handles`."""

    __slots__ = ()


def is_switched_off() -> bool:
    """Return True in a pass that a routine runs, or that runs disabled: it calls the hooks of others too."""
    return ACTIVATION.get(None) is not None and active() is None  # an engine's thread has no activation


def remove_hook_handles(handles: list[tuple[Any, Any]]) -> None:
    """Remove hooks from nodes, and empty the list; handles: pairs of a node and what registering returned."""
    if NATIVE:
        HookRegistrar.remove_all(handles)
        return
    for _, handle in handles:
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

    def register_hook(hook_by_key: Any, hook: Any) -> tuple[Any, Any]:
        """Return a node's hooks with a new hook that is not native, and its handle.

        A hook that is not the driver's is noted in `NodeHooks`, and registered by torch's function.
        hook_by_key: the node's dict of hooks; None if it has none yet.
        """
        if isinstance(getattr(hook, "__self__", None), QuickHooks):
            # Torch numbers its handles from 0 upwards; keys of the driver's are no such numbers.
            # A copy: passes on other threads may change the dict meanwhile.
            if hook_by_key and any(type(key) is int and key >= 0 for key in tuple(hook_by_key)):
                NodeHooks.of_program = True
            return HookRegistrar.add(hook_by_key, hook)
        # The program's hooks, and those of libraries, get the handle that torch promises.
        NodeHooks.of_program = True
        registered: tuple[Any, Any] = original(hook_by_key, hook)
        return registered

    patches.set(torch.autograd.Function, "_register_hook", staticmethod(HookRegistrar(register_hook)))
    _note_hooks_on_tensors(patches)


def _note_hooks_on_tensors(patches: Patches) -> None:
    """Note in `NodeHooks` that the program puts hooks on tensors, or on what is saved of them."""
    NodeHooks.patch_number += 1
    # A graph of an earlier scope may have got hooks since.
    NodeHooks.on_tensors = Mark.alive() > 0 or has_hooks()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            NodeHooks.on_tensors = True
            return function(*args, **kwargs)

        return call

    saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
    for holder, name in ((torch.Tensor, "register_hook"), (saved_tensors_hooks, "__enter__")):
        patches.set(holder, name, noting(getattr(holder, name)))


def free_without_recursion(node: Any) -> None:
    """Keep torch from freeing the graph behind a node by recursion, which overflows the stack if it is deep.

    The node's metadata hold its successors too, and free them after the node, not within its freeing.
    Native code calls this for some of the nodes that it visits, so that chains between them stay short.
    """
    successors = [child for child, _ in node.next_functions if child is not None]
    node.metadata.setdefault(SUCCESSORS_KEY, DeferredRelease(successors))
