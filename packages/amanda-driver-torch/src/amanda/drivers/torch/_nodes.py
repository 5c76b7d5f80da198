"""Hooks at autograd's nodes, passes that only count, and graphs too deep for torch to free by recursion."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
from amanda.backend import Patches
from amanda.interceptor import NATIVE, Hook, Mark

FREED_AFTER_KEY = "amanda.relief"
_handle_numbers = count(-1, -1)  # handles count upwards from 0


class NodeHooks:
    """Record of hooks at nodes that are the program's, or a library's, and were put there in a scope.

    Such a hook may take a gradient away: the graph alone no longer tells which gradients there are.
    """

    of_program: ClassVar[bool] = False


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
            NodeHooks.of_program = True
            registered: tuple[Any, Any] = original(hooks, hook)
            return registered
        if hooks is None:
            hooks = OrderedDict()
        number = next(_handle_numbers)
        hooks[number] = hook
        return hooks, (hooks, number)

    patches.set(torch.autograd.Function, "_register_hook", staticmethod(register_hook))


class PassCounts:
    """The counts of one backward pass in which all routines only count.

    A later pass through a graph of the same form counts the same, without hooks: torch's own nodes give each
    other the gradients that the graph says, whatever the numbers are.
    """

    class PassRecord(NamedTuple):
        """Record of an earlier pass.

        hooks: those of its nodes.  identities: traces and shapes, by whose identity the form is known.
        """

        hooks: Sequence[Hook]
        identities: Sequence[Any]

    limit: ClassVar[int] = 16
    """Most forms that are remembered for one stack of tools."""

    def __init__(self, records: dict[Any, PassRecord]) -> None:
        """records: of the stack's passes, by form."""
        self._records = records
        self._form: Hashable = None
        self._hooks_to_repeat: Sequence[Hook] | None = None

    def repeats(self, form: Hashable) -> bool:
        """Return True if an earlier pass through a graph of this form tells what this one counts."""
        self._form = form
        record = self._records.get(form)
        self._hooks_to_repeat = None if record is None else record.hooks
        return record is not None

    def forget_form(self) -> None:
        """Learn nothing of this pass, which does more than count."""
        self._form = None

    def end(self, handles: Sequence[tuple[Any, Any]], marks: Iterable[Mark]) -> None:
        """Count, or learn what has been counted, after the pass has run all nodes.

        handles: of the hooks, as `remove_hook_handles` takes them.  marks: of all nodes.
        """
        hooks, self._hooks_to_repeat = self._hooks_to_repeat, None
        form, self._form = self._form, None
        if hooks is not None:
            for hook in hooks:
                hook.count_again()
        elif form is not None and not NodeHooks.of_program:
            hooks = [hooks_of_node[number] for _, (hooks_of_node, number) in handles]
            if all(hook.repeats for hook in hooks):
                while len(self._records) >= self.limit:
                    self._records.pop(next(iter(self._records), None), None)
                self._records[form] = self.PassRecord(hooks, [(mark.trace, mark.shapes) for mark in marks])

    def fail(self) -> bool:
        """End without counts; return True if the pass should have counted."""
        hooks, self._hooks_to_repeat = self._hooks_to_repeat, None
        return bool(hooks)


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
