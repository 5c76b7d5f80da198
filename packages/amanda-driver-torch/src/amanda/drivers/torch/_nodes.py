"""Hooks at autograd's nodes, counts of backward passes, and graphs too deep for torch to free recursively."""

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from amanda.backend import Patches
from amanda.interceptor import NATIVE, Hook, HookRegistrar, Mark

FREED_AFTER_KEY = "amanda.relief"


class NodeHooks:
    """Record of hooks at nodes that are the program's, or a library's, and were put there in a scope.

    Such a hook may take a gradient away: the graph alone no longer tells which gradients there are.
    """

    of_program: ClassVar[bool] = False


class QuickHooks:
    """Base of objects whose methods are hooks at nodes, which the driver removes by `remove_hook_handles`."""

    __slots__ = ()


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
            return HookRegistrar.add(hook_by_key, hook)
        # The program's hooks, and those of libraries, get the handle that torch promises.
        NodeHooks.of_program = True
        registered: tuple[Any, Any] = original(hook_by_key, hook)
        return registered

    patches.set(torch.autograd.Function, "_register_hook", staticmethod(HookRegistrar(register_hook)))


_PASSES_WITHOUT = "passes without"  # key beside the forms, which are numbers


class PassCounts:
    """Counts of executions in one backward pass, learned for later passes or repeated from an earlier one.

    It serves passes in which all routines only count.  A later pass through a graph of the same form counts
    the same, without hooks: torch's own nodes give each other the gradients that the graph says, whatever the
    numbers are.
    """

    class PassRecord(NamedTuple):
        """Record of an earlier pass, by whose hooks its counts are repeated.

        hooks: those of its nodes.  identities: traces and shapes, which the record keeps alive, since a form
        is a hash of their ids.
        """

        hooks: tuple[Hook, ...]
        identities: Sequence[Any]

    limit: ClassVar[int] = 16
    """Most forms that are remembered for one stack of tools."""
    passes_without: ClassVar[int] = 15
    """Number of passes that learn nothing, after one whose hooks do more than count."""

    def __init__(self, record_by_form: dict[Any, Any]) -> None:
        """record_by_form: the stack's, of earlier passes; this object adds to them."""
        self._record_by_form = record_by_form
        self._form_to_learn: Hashable = None  # None if nothing is to be learned
        self._hooks_to_repeat: tuple[Hook, ...] | None = None

    @classmethod
    def of(cls, record_by_form: dict[Any, Any]) -> "PassCounts | None":
        """Return counts for a pass of a stack; None for some passes after one that could not be repeated."""
        remaining = record_by_form.get(_PASSES_WITHOUT, 0)
        if not remaining:
            return cls(record_by_form)
        # The form of a graph takes a walk through it, in vain for a tool that looks at values.
        record_by_form[_PASSES_WITHOUT] = remaining - 1
        return None

    def look_up(self, form: Hashable) -> bool:
        """Return True if a pass of this form has a record, to repeat; else note the form, to learn it."""
        self._form_to_learn = form
        record = self._record_by_form.get(form)
        self._hooks_to_repeat = None if record is None else record.hooks
        return record is not None

    def learn_nothing(self) -> None:
        """Make no record of this pass, which does more than count."""
        self._form_to_learn = None

    def repeat_or_learn(self, node_handles: Sequence[tuple[Any, Any]], marks: Iterable[Mark]) -> None:
        """Count as an earlier pass did, or make a record of this one, which has run all nodes.

        No record is made if the program has hooks at nodes, or a hook cannot repeat; the oldest record makes
        room.  node_handles: of the pass's hooks, as `remove_hook_handles` takes them.  marks: of all nodes.
        """
        hooks, self._hooks_to_repeat = self._hooks_to_repeat, None
        form, self._form_to_learn = self._form_to_learn, None
        if hooks is not None:
            Hook.count_again(hooks)
        elif form is not None and not NodeHooks.of_program:
            hooks = tuple(handle.hook for _, handle in node_handles)
            if all(hook.repeats for hook in hooks):
                while len(self._record_by_form) >= self.limit:
                    oldest_form = next(iter(self._record_by_form), None)
                    self._record_by_form.pop(oldest_form, None)
                identities = [(mark.trace, mark.shapes) for mark in marks]
                self._record_by_form[form] = self.PassRecord(hooks, identities)
            else:
                self._record_by_form[_PASSES_WITHOUT] = self.passes_without

    def drop_counts_to_repeat(self) -> bool:
        """Drop the counts that a failed pass was to repeat; return True if there were any."""
        hooks, self._hooks_to_repeat = self._hooks_to_repeat, None
        return bool(hooks)


class _FreeingState(threading.local):
    """Successors that wait to be freed on this thread: graphs end on whichever drops the last reference."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []  # successors that the running loop is to free
        self.is_running = False


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
        if freeing.is_running:  # the loop of an outer call frees the successors after this one returns
            return
        freeing.is_running = True
        try:
            while freeing.waiting:
                freeing.waiting.pop()
        finally:
            freeing.is_running = False


def free_without_recursion(node: Any) -> None:
    """Keep torch from freeing the graph behind a node by recursion, which overflows the stack if it is deep.

    Native code calls this for some of the nodes that it visits, so that chains between them stay short.
    """
    successors = [child for child, _ in node.next_functions if child is not None]
    node.metadata.setdefault(FREED_AFTER_KEY, FreedAfterNode(successors))
