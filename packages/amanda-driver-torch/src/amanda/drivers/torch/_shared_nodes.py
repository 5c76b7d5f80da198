"""Backward passes that run the same nodes at the same time: hooks there act in their own pass alone."""

import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar

from amanda.backend import State
from torch.utils.hooks import RemovableHandle

from ._nodes import QuickHooks
from ._requirements import torch_attribute

# Torch copies objects of a pass's caller to the engine's threads; "context" is its `contextvars.Context`.
_has_copied_object = torch_attribute("_C._is_key_in_tls")
_copied_object = torch_attribute("_C._get_obj_in_tls")


def value_for_pass_caller(variable: ContextVar[Any]) -> Any:
    """Return a context variable of the caller of the backward pass that runs on a thread of the engine.

    None on other threads, and where torch does not bring the caller's context to the engine's threads.
    """
    if _has_copied_object is None or not _has_copied_object("context"):
        return None
    context = _copied_object("context")  # None after a pass of torch 2.12
    return None if context is None else context.get(variable)


class HookOfPass(QuickHooks):
    """A hook at a node that passes under way at the same time share; it acts in its own pass alone."""

    __slots__ = ("_acts", "_hook")

    def __init__(self, hook: Callable[..., Any], acts: Callable[[], bool]) -> None:
        """acts: returns True in the hook's own pass."""
        self._hook, self._acts = hook, acts

    def act(self, *gradients: Any) -> Any:
        """Call the hook in its own pass; return its result, or None, which changes no gradient."""
        return self._hook(*gradients) if self._acts() else None


PASS_ID: ContextVar[int] = ContextVar("amanda_backward_pass")
"""The `id` of the innermost backward pass under way that a thread has started."""


class NodeSharing:
    """Base of backward passes, which may run nodes of others that are under way at the same time.

    Such a pass is around this one or on another thread; they share the nodes of leaves, and whole graphs.
    A hook at a node is called in every pass through it: at shared nodes it is made to act in its own alone.
    under_way: passes that have, or are to have, hooks, or are outside of scopes, in the order of their start.
    """

    under_way: ClassVar[list[Any]] = []
    # Most passes share no nodes, so that these stay as they are.
    _shared_ids: AbstractSet[int] = frozenset()
    _nodes: Sequence[Any] = ()  # of the whole graph; listed once others are under way
    _outputs: Sequence[Any]
    _node_handles: list[tuple[Any, Any]]
    _state: State

    def list_nodes(self) -> Sequence[Any]:
        """Return all nodes of the pass's graph, also those without marks."""
        raise NotImplementedError

    def begin(self, outputs: Sequence[Any], wait_for_hooks: Callable[[Sequence[Any]], None]) -> None:
        """List the pass among those under way, and share the nodes that others of them run.

        The caller holds the lock of all passes.
        outputs: of the pass.  wait_for_hooks: waits until passes of other threads have added their hooks.
        """
        self._outputs = outputs
        shared_ids_by_pass = {}
        for other_pass in self.under_way:
            if shared_ids := self.ids_shared_with(other_pass):
                shared_ids_by_pass[other_pass] = shared_ids
                self.share_nodes(shared_ids)
        self.under_way.append(self)
        if shared_ids_by_pass:
            wait_for_hooks([*shared_ids_by_pass])
            for other_pass, shared_ids in shared_ids_by_pass.items():
                other_pass.share_nodes(shared_ids)

    def end(self) -> None:
        """Remove the pass from those under way, if it is there.  The caller holds the lock of all passes."""
        self.under_way[:] = [other_pass for other_pass in self.under_way if other_pass is not self]

    def ids_shared_with(self, other: Any) -> set[int]:
        """Return the ids of the nodes that another pass runs too."""
        for backward_pass in (self, other):
            backward_pass._nodes = backward_pass._nodes or backward_pass.list_nodes()
        return {id(node) for node in self._nodes}.intersection(map(id, other._nodes))

    def share_nodes(self, ids: AbstractSet[int]) -> None:
        """Make the hooks at nodes that another pass runs too act in this pass alone; ids: of these nodes."""
        for node, handle in self._node_handles:
            if id(node) in ids and id(node) not in self._shared_ids:
                self._replace_hook(node, handle)
        self._shared_ids = self._shared_ids | ids

    def _replace_hook(self, node: Any, handle: Any) -> None:
        """Make a registered hook act in this pass alone; handle: what registering returned."""
        if not isinstance(handle, RemovableHandle):
            handle.replace(self._guard(node, handle.hook))
            return
        hook_by_id = handle.hooks_dict_ref()
        if hook_by_id is not None and handle.id in hook_by_id:  # not removed since
            hook_by_id[handle.id] = self._guard(node, hook_by_id[handle.id])

    def hook_of_pass(self, node: Any, hook: Any) -> Any:
        """Return a hook for a node, which acts in this pass alone if others share the node; None for None."""
        return hook if hook is None or id(node) not in self._shared_ids else self._guard(node, hook)

    def _guard(self, node: Any, hook: Any) -> Any:
        """Return a hook that acts in this pass alone."""
        return HookOfPass(hook, partial(self._is_running, id(node))).act

    def _is_running(self, node_id: int) -> bool:
        """Return True if a node that runs on this thread is run by this pass."""
        # The engine's copy first: a thread that has started a pass within a pass may run nodes of both.
        pass_id = value_for_pass_caller(PASS_ID) or PASS_ID.get(None)
        # The stack of the engine's threads begins with the hook.
        if pass_id is not None or sys._getframe(1).f_back is not None:
            return pass_id == id(self)
        self._state.report(
            "backward ops that passes on several threads share",
            "this torch does not tell whose pass its own threads run: the routines are those of the first",
        )
        sharing_passes = (entry for entry in self.under_way if node_id in entry._shared_ids)
        return next(sharing_passes, None) is self
