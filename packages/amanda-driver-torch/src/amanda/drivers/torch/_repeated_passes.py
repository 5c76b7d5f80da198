"""Backward passes that repeat earlier ones, without hooks, and what may keep a pass from that."""

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
from amanda import interceptor
from amanda.interceptor import Hook, Mark

from ._nodes import AccumulateGrad, NodeHooks, QuickHooks, remove_hook_handles
from ._overrides import WithoutTorchFunction
from ._requirements import torch_attribute
from ._shared_nodes import NodeSharing


class _Probe(QuickHooks):
    """A hook without effect: to register it shows whether a node has hooks of the program."""

    def hook(self, *_: Any) -> None:
        """Change no gradient."""


def starts_with_torch_grads(caller: FrameType) -> bool:
    """Return True if torch has made the gradients with which a pass begins; caller: the frame that starts it.

    Torch hands a gradient by the program on as the same tensor, which the program still has.
    """
    is_backward = caller.f_globals.get("__name__") == "torch.autograd" and caller.f_code.co_name == "backward"
    return is_backward and caller.f_locals.get("grad_tensors", caller) is None


def is_running(backward_pass: Any) -> bool:
    """Return True if a frame of `run_backward` with this pass in a local is on the stack of its thread."""
    frame = sys._current_frames().get(backward_pass.thread)
    while frame is not None:
        if frame.f_code.co_name == "run_backward" and frame.f_locals.get("backward_pass") is backward_pass:
            return True
        frame = frame.f_back
    return False


class UnhookedPasses:
    """Passes under way without hooks, though tools count their executions.

    Threads share the nodes of leaves, and hooks at a node are called in every pass through it: a pass that
    adds hooks waits until those of other threads have ended, and a pass that shares nodes with another waits
    until that has its hooks, which then act in their own pass alone.  lock: of all passes.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.passes: list[Any] = []
        self._changed = threading.Condition(self.lock)
        self._waiting_count = 0  # of passes that wait to add hooks

    def begin(self, backward_pass: Any) -> bool:
        """Add a pass; return False if passes with hooks are under way, or wait to be."""
        with self.lock:
            if backward_pass.under_way or self._waiting_count:
                return False
            self.passes.append(backward_pass)
            return True

    def remove(self, backward_pass: Any) -> None:
        """Remove a pass, if it is here.  The caller holds the lock."""
        if backward_pass in self.passes:
            self.passes.remove(backward_pass)
            self._changed.notify_all()

    def wait_for_other_threads(self) -> None:
        """Wait until the passes of other threads have ended; none begins meanwhile.

        The caller holds the lock.
        """
        self._waiting_count += 1
        try:
            # A pass within a pass may be on another thread than the outer one, which waits for it.
            if _current_pass is None or _current_pass() == _NO_PASS:
                self._wait_while(lambda: self.passes)
        finally:
            self._waiting_count -= 1

    def wait_for_hooks(self, passes: Sequence[Any]) -> None:
        """Wait until these passes, if they are of other threads, have added their hooks.

        The caller holds the lock.
        """
        self._wait_while(lambda: [entry for entry in passes if entry.is_adding_hooks])

    def note_hooks_added(self, backward_pass: Any) -> None:
        """Mark a pass as having added its hooks, and wake the passes that wait for these."""
        with self.lock:
            backward_pass.is_adding_hooks = False
            self._changed.notify_all()

    def _wait_while(self, list_passes: Callable[[], Sequence[Any]]) -> None:
        """Wait while any of the listed passes runs on another thread."""
        thread = threading.get_ident()
        while any(entry.thread != thread and is_running(entry) for entry in list_passes()):
            self._changed.wait(_SECONDS_BETWEEN_LOOKS)


class PassOutsideScopes(NodeSharing):
    """A backward pass on a thread without a scope; at its nodes the hooks of passes in scopes do not act."""

    is_adding_hooks = False

    def __init__(self, list_nodes_behind: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """list_nodes_behind: returns all nodes of the graph of some outputs."""
        self._list_nodes_behind = list_nodes_behind
        self._node_handles = []
        self.thread = threading.get_ident()
        self.has_run_all = False

    def list_nodes(self) -> Sequence[Any]:
        """Return all nodes of the pass's graph."""
        return self._list_nodes_behind(self._outputs)

    def add_hooks(self, outputs: Sequence[Any]) -> None:
        """Add no hooks, but have the hooks of passes under way not act in this one."""
        with PassCounts.unhooked.lock:
            self.begin(outputs, PassCounts.unhooked.wait_for_hooks)

    def remove_hooks(self) -> None:
        """Remove the pass from those under way."""
        with PassCounts.unhooked.lock:
            self.end()

    def mark_backward_ops_analysed(self, may_run_again: bool) -> None:
        """Record nothing, as no tool has analysed a backward op."""


_current_pass = torch_attribute("_C._current_graph_task_id")
_NO_PASS = -1
_SECONDS_BETWEEN_LOOKS = 0.1  # an interrupt may end a pass without a notice


_SKIPPED_PASSES = "skipped passes"  # key beside the forms, which are numbers


class PassCounts:
    """Counts of executions in one backward pass, learned for later passes or repeated from an earlier one.

    It serves passes in which all routines only count, or follow gradients that they have recorded before.
    A later pass through a graph of the same form counts the same, without hooks: torch's own nodes give each
    other the gradients that the graph says, whatever the numbers are.
    """

    class PassRecord(NamedTuple):
        """Record of an earlier pass, by whose hooks its counts are repeated.

        hooks: those of its nodes, with their positions among all.  identities: traces and shapes, which the
        record keeps alive, since a form is a hash of their ids.  patch_number: of the patches under which
        routines have followed gradients; None where all routines count.
        """

        hooks: tuple[tuple[int, Hook], ...]
        identities: Sequence[Any]
        patch_number: int | None

    limit: ClassVar[int] = 16
    """Most forms that are remembered for one stack of tools."""
    unhooked: ClassVar[UnhookedPasses] = UnhookedPasses()
    """Passes that repeat an earlier one."""
    skipped_passes: ClassVar[int] = 15
    """Number of passes that learn nothing, after one whose hooks do more than count."""

    def __init__(self, record_by_form: dict[Any, Any], caller: FrameType) -> None:
        """record_by_form: the stack's, of earlier passes; this object adds to them.

        caller: frame that starts the pass.
        """
        self._record_by_form, self._caller = record_by_form, caller
        self._form_to_learn: Hashable = None  # None if nothing is to be learned
        self._record_to_repeat: PassCounts.PassRecord | None = None
        self._list_nodes: Callable[[], list[Any]] = list
        self._nodes: list[Any] = []
        self._calls_before = 0

    @classmethod
    def of(cls, record_by_form: dict[Any, Any], caller: FrameType) -> "PassCounts | None":
        """Return counts for a pass of a stack; None for some passes after one that could not be repeated."""
        remaining = record_by_form.get(_SKIPPED_PASSES, 0)
        if not remaining:
            return cls(record_by_form, caller)
        # The form of a graph takes a walk through it, in vain for a tool that looks at values.
        record_by_form[_SKIPPED_PASSES] = remaining - 1
        return None

    def look_up(self, form: Hashable, list_nodes: Callable[[], list[Any]], backward_pass: Any) -> bool:
        """Return True if the pass, of this form, repeats a record; else note the form, to learn it.

        list_nodes: returns all of the graph, in the order of the form.
        """
        record = self._record_by_form.get(form)
        counts_alone = record is not None and record.patch_number is None
        self._list_nodes = list_nodes
        if record is not None and not counts_alone:  # counts need no nodes
            self._nodes = list_nodes()
        repeats = record is not None and (counts_alone or self._follows_as(record))
        if repeats and self.unhooked.begin(backward_pass):
            self._record_to_repeat = record
            return True
        if not counts_alone:
            self._form_to_learn = form
        self._calls_before = _calls_of_ops()
        return False

    def _follows_as(self, record: PassRecord) -> bool:
        """Return True if the routines of a record, which follow gradients, would record nothing new."""
        return (
            record.patch_number == NodeHooks.patch_number
            and self._is_unseen()
            and all(hook.repeats for _, hook in record.hooks)
        )

    def _is_unseen(self) -> bool:
        """Return True if nothing but torch's own nodes sees the gradients of the pass."""
        if NodeHooks.on_tensors or torch.is_anomaly_enabled() or not starts_with_torch_grads(self._caller):
            return False
        if _current_pass is None:  # see `UnhookedPasses`
            return False
        # Data-parallel training takes gradients from leaves, and may put others in their place.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return False
        variables = (node.variable for node in self._nodes if type(node) is AccumulateGrad)
        return not any(
            variable._backward_hooks or variable._post_accumulate_grad_hooks for variable in variables
        )

    def _may_follow(self, marks: Sequence[Mark], hook_count: int) -> bool:
        """Return True if nothing else has seen this pass's gradients, and all its nodes are known.

        marks: of the nodes that have any.  hook_count: number of calls of hooks, besides which no op ran.
        """
        leaves = [node for node in self._nodes if type(node) is AccumulateGrad]
        if len(marks) != len(self._nodes) or _calls_of_ops() - self._calls_before != hook_count:
            return False
        # The node of a leaf may be older than the scope.
        probe = _Probe().hook
        for leaf in leaves:
            remove_hook_handles([(leaf, leaf.register_prehook(probe)), (leaf, leaf.register_hook(probe))])
        with WithoutTorchFunction():
            return self._is_unseen() and not NodeHooks.of_program

    def learn_nothing(self) -> None:
        """Make no record of this pass, which does more than count."""
        self._form_to_learn = None

    def repeat_or_learn(self, node_handles: Sequence[tuple[Any, Any]], marks: Sequence[Mark]) -> None:
        """Count as an earlier pass did, or make a record of this one, which has run all nodes.

        No record is made if the program has hooks at nodes, or a hook cannot repeat; the oldest record makes
        room.  node_handles: of the pass's hooks, as `remove_hook_handles` takes them.  marks: of all nodes
        that have any.
        """
        record, self._record_to_repeat = self._record_to_repeat, None
        form, self._form_to_learn = self._form_to_learn, None
        if record is not None:
            Hook.count_again(record.hooks, self._nodes)
        elif form is not None and not NodeHooks.of_program:
            hooks = [handle.hook for _, handle in node_handles]
            if not all(isinstance(hook, Hook) for hook in hooks):  # of a node that another pass has too
                return
            counts_alone = all(hook.counts_alone for hook in hooks)
            if not counts_alone:  # after the pass, whose graph stays as it was
                self._nodes = self._list_nodes()
            if all(hook.repeats for hook in hooks) and (counts_alone or self._may_follow(marks, len(hooks))):
                while len(self._record_by_form) >= self.limit:
                    oldest_form = next(iter(self._record_by_form), None)
                    self._record_by_form.pop(oldest_form, None)
                identities = [(mark.trace, mark.shapes) for mark in marks]
                position_by_id = {id(node): position for position, node in enumerate(self._nodes)}
                # Counts need no nodes, so that none are listed for them.
                positions = [0 if counts_alone else position_by_id[id(node)] for node, _ in node_handles]
                patch_number = None if counts_alone else NodeHooks.patch_number
                self._record_by_form[form] = self.PassRecord(
                    tuple(zip(positions, hooks, strict=True)), identities, patch_number
                )
            else:
                self._record_by_form[_SKIPPED_PASSES] = self.skipped_passes

    def drop_counts_to_repeat(self) -> bool:
        """Drop the counts that a failed pass was to repeat; return True if there were any."""
        record, self._record_to_repeat = self._record_to_repeat, None
        return record is not None and bool(record.hooks)


def _calls_of_ops() -> int:
    """Return the number of calls of ops with routines, and of hooks, in this process so far."""
    statistics = interceptor.statistics()
    return int(sum(statistics["python"].values(), statistics["native"]))
