"""Counts by shape, and the types that native code alone fills.

Without native code plans run in Python, which needs no program, hook, reader of tensors or moments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from amanda.interceptor._fallback._graphs import Mark


class Resumption(NamedTuple):
    """State with which Python continues an execution that native code has begun.

    plan: the plan that native code has followed; the call may look different by now.
    step: the last step whose routine has run; -1: none has.
    returned: the result of that routine, which native code cannot put in place; None: no change.
    outputs: the result of the op, with changes by routines; NotImplemented: the op has not run.
    inputs: the inputs, where routines have changed some; else None.
    """

    plan: Any
    step: int
    returned: Any
    outputs: Any
    inputs: list[Any] | None


class ShapeCounter:
    """Counts of executions by the shapes of their values.

    Args:
        limit: Number of different shapes that native code counts without a call of Python.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._calls: dict[Any, int] = {}

    def add(self, shapes: Any, calls: int = 1) -> None:
        """Count executions.

        Args:
            shapes: A tuple for the inputs, one for the outputs, ..., each with the shape of each value.
            calls: How many executions with these shapes.
        """
        self._calls[shapes] = self._calls.get(shapes, 0) + calls

    def items(self) -> list[tuple[Any, int]]:
        """Return pairs of shapes and the number of their executions, in the order of first executions."""
        return list(self._calls.items())

    def clear(self) -> None:
        """Set all counts to zero."""
        self._calls = {}

    def __len__(self) -> int:
        return len(self._calls)


class CallCache:
    """An op's plans; without native code there are no programs to cache beside them.

    Args:
        plans: Plans of the op by plan key.
        sized: Whether the forms of calls have the sizes of tensors.
    """

    def __init__(self, plans: dict[Any, Any], sized: bool = False) -> None:
        self.plans = plans

    def learn(self, key: int, program: "Program | None") -> None:
        """Do nothing: native code alone runs programs.

        Args:
            key: Key of a call's form.
            program: Program for calls of this form; None for no routines.
        """

    def forget(self) -> None:
        """Do nothing: there are no programs to drop."""

    def __len__(self) -> int:
        return 0


class _NativeAlone:
    """Base of types that exist here only for annotations and `isinstance`; creating one is a TypeError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"a {type(self).__name__} is for the native interceptor")


class Hook(_NativeAlone):
    """A callable for a framework: it runs a program's routines on a tuple of values."""

    def __call__(self, *values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run the routines; return the values to use, or None if none changed."""
        raise NotImplementedError

    counts_alone: bool
    """True if every routine counts executions and no hook is left out, so that `count_again` needs no op."""

    @property
    def repeats(self) -> bool:
        """True if `count_again` does for all routines what a call would do."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """True if a call before an op would have no effect, so that a hook after it may do without."""
        raise NotImplementedError

    @staticmethod
    def count_again(hooks: "tuple[tuple[int, Hook], ...]", ops: list[Any] | None) -> None:
        """Count an execution at each hook as its last call did, without the values.

        Args:
            hooks: Each with the position of its op in `ops`.
            ops: The ops of a pass that has ended; None where each hook `counts_alone`.
        """
        raise NotImplementedError


class HookRegistrar(_NativeAlone):
    """Callable by which the framework registers a hook at a node; quick for a `Hook`.

    Args:
        other: Called for any other hook; returns the node's hooks, and a handle.
    """

    def __call__(self, hooks: dict[Any, Any] | None, hook: Any) -> tuple[dict[Any, Any], Any]:
        """Return the node's hooks with the new one, and a handle."""
        raise NotImplementedError

    @staticmethod
    def add(hooks: dict[Any, Any] | None, hook: Any) -> tuple[dict[Any, Any], Any]:
        """Add a hook to those of a node; return the hooks, and a handle.

        The handle has the attribute `hook`, and the methods `remove()` and `replace(hook)`.

        Args:
            hooks: Those of the node; None where it has none yet.
            hook: The new one.
        """
        raise NotImplementedError

    @staticmethod
    def register_all(
        marked: list[tuple[Any, Mark, int]], stack: Any, leaf: type, parameter: type, leaf_place: int,
        handles: list[tuple[Any, Any]],
    ) -> list[tuple[Any, Mark, int]]:  # fmt: skip
        """Register the hooks that plans store for nodes; return the rest, whose hooks depend on more.

        Args:
            marked: Nodes with their marks and numbers.
            stack: Tools of the plans whose hooks are registered.
            leaf: Type of the nodes that accumulate the gradient of a `variable`.
            parameter: Type of the variables that have a place of their own among an op's leaves.
            leaf_place: Place of the first of these.
            handles: Gets pairs of a node and a handle.
        """
        raise NotImplementedError

    @staticmethod
    def remove_all(handles: list[tuple[Any, Any]]) -> None:
        """Remove hooks from nodes, and empty the list of pairs of a node and a handle."""
        raise NotImplementedError


class Program(_NativeAlone):
    """Routines around an op, which native code runs."""

    def hook(
        self, reader: "Reader", resume: Callable[..., Any], actions: Any, idle: Hook | None,
        shapes: Any = None,
    ) -> Hook:  # fmt: skip
        """Return a callable that runs the routines on a tuple of values.

        Args:
            reader: Reader of tensors of the framework.
            resume: Continues in Python after a result that native code cannot put in place.
            actions: Actions of the routines, which `resume` receives.
            idle: For a hook after an op, the hook before it, which `is_idle` and is left out; None without.
            shapes: Argument `shapes` for routines that take it; None where no routine does.
        """
        raise NotImplementedError


class Moments(_NativeAlone):
    """Statistics of the numbers of arrays, read in one pass; bits as `amanda.tools.stats.Bins` has them.

    numbers: those of `amanda.tools.stats.Statistics`, in their order.  counts: of each bin, int64 in bytes;
    None where nothing was counted.
    """

    numbers: tuple[Any, ...]
    counts: bytes | None

    def add(self, array: Any) -> bool:
        """Add the numbers of an array; return False unless they are contiguous floats or doubles."""
        raise NotImplementedError

    def merge(self, moments: Any) -> None:
        """Add the statistics of other moments with the same bins."""
        raise NotImplementedError

    @staticmethod
    def add_all(moments: tuple[Any, ...], arrays: tuple[Any, ...], lengths: tuple[int, ...]) -> list[int]:
        """Add the numbers of each array to its moments; return the positions of those that are not read.

        Args:
            moments: Of each array.
            arrays: Contiguous floats, doubles, integers or truth values are read.
            lengths: Number of elements that an array must have to be read; -1 for any.
        """
        raise NotImplementedError


def nonfinite(arrays: tuple[Any, ...]) -> list[int]:
    """Return the positions of arrays that hold NaN or Inf, or are not read: of all, without native code."""
    return list(range(len(arrays)))


class Gate:
    """A switch of routines: native code does not call a `GatedRoutine` while its gate is not open."""

    def __init__(self, open: bool = True) -> None:
        self.open = open


class GatedRoutine:
    """Base of observers that do nothing while a gate is not open; Python calls them in any case.

    Args:
        gate: The gate, which others may share.
    """

    def __init__(self, gate: Gate) -> None:
        pass


class FiniteCheck:
    """Base of two routines around an op, which native code calls only where an output is not finite.

    before: routine before the op; None: this one is.  skips: whether native code may skip the routine.
    copies: of the routine before an op, whether the op writes its first input.  copy: the bytes of that input
    from before the op, if the op has run.

    Args:
        before: Routine before the op, of the routine after it; None for the routine before the op.
        tally: Counts the executions that native code skips.
    """

    copy: bytearray | None = None

    def __init__(self, before: "FiniteCheck | None" = None, tally: ShapeCounter | None = None) -> None:
        self.before = before
        self.skips = self.copies = False


class MomentsObserver:
    """Base of observers instead of which native code adds the values' numbers to `Moments`.

    moments: for each value, None for a value that is no tensor; None: the routine is called, as Python does
    in any case.  length: number of elements, of all values, that native code measures; -1: any.
    executions: how many native code has measured.
    """

    moments: tuple[Moments | None, ...] | None = None
    length = -1
    executions = 0


class Reader(_NativeAlone):
    """A reader of tensors for native code."""

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, sized: bool = False) -> int:
        """Return 64 bits for the form of a call, by which programs are cached; 0 for an unknown form.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call; None for none.
            sized: Whether the sizes of tensors are part of the form.
        """
        raise NotImplementedError

    def can_substitute(self, original: Any, value: Any) -> bool:
        """Return True if native code may put a value in the place of a tensor.

        Args:
            original: Tensor of the program.
            value: Value that a routine returned.
        """
        raise NotImplementedError

    def host_memory(self, value: Any) -> tuple[int, int, bool] | None:
        """Return address and bytes of a tensor's numbers in host memory; None where only Python reads them.

        Then, whether these are the elements, each once: a view may have other numbers between them.
        """
        raise NotImplementedError

    def memory(self, value: Any) -> int:
        """Return a number for the memory of a plain tensor; 0 for any other value."""
        raise NotImplementedError

    def version(self, value: Any) -> int | None:
        """Return a number that changes when a tensor, or a tensor of a list, is written."""
        raise NotImplementedError
