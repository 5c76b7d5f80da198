"""Calls of an eager framework, and the backward ops that they make, as a driver describes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from amanda.plan.tensors import TensorOps, spread

if TYPE_CHECKING:
    from amanda import interceptor
    from amanda.eager.trace import Trace
    from amanda.eager.views import Views
    from amanda.plan.lifetime import SlotOf


class Call(ABC):
    """One call of an op: its inputs in schema order, and how to make the call with others.

    mutable: positions of the inputs that the op writes into.
    targets: positions of those that it returns: `self` of an in-place op, `out=`.
    """

    __slots__ = ("inputs", "mutable", "names", "op", "targets")

    op: Any
    inputs: list[Any]
    names: Sequence[str]
    mutable: Sequence[int]
    targets: Sequence[int]

    @abstractmethod
    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op itself on these inputs."""

    def fitted(self, inputs: list[Any]) -> list[Any]:
        """Return changed inputs in the memory that the op needs; one may read beyond its tensor."""
        return inputs

    def computation(self) -> Callable[[Sequence[Any]], Any] | None:
        """Return a function that runs the op on inputs like this call's; None where there is none.

        The function holds none of this call's inputs."""
        return None

    def compute(self, inputs: Sequence[Any]) -> Any:
        """Run the op for a replacement; return a single output as itself."""
        return self.invoke(list(inputs))

    def written(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the user's tensors that the op has written and gives back."""
        return spread(inputs[i] for i in self.targets) if self.targets else []

    def unreturned(self, outputs: Any) -> Sequence[int]:
        """Return the positions of inputs that the op has written and did not return.  outputs: its result."""
        return ()

    def with_written(
        self, outputs: Any, inputs: Sequence[Any], values: list[Any], rebuild: Callable[[list[Any]], Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Add the inputs that the op wrote without returning them to its result, flattened."""
        written = [inputs[i] for i in self.unreturned(outputs)]
        if not written:
            return values, rebuild
        count = len(values)
        return [*values, *written], lambda changed: rebuild(list(changed[:count]))

    def writes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return what the op has written of the user's tensors, as `Views.wrote` takes it."""
        return [*spread(inputs[i] for i in self.mutable), *self.written(inputs, outputs)]

    def may_write(self) -> bool:
        """Return whether the op may write into its inputs; some ops do so without a schema that says it."""
        return True

    def may_write_unseen(self) -> bool:
        """Return True if the op may write other tensors, or inputs without saying so, as scripts do."""
        return False

    def takes_equals(self) -> bool:
        """Return True if native code may give the op a tensor in the place of one of equal dtype and shape.

        So it has no effect on its inputs, and reads of a tensor's memory what is the tensor's.
        """
        return False

    def formed(self, result: Any) -> Any:
        """Return a replacement's result in the form that the op's own has."""
        return result

    def sources(self) -> tuple[int | tuple[int, int], ...] | None:
        """Return which argument each input is, positional ones and then those by keyword; -1: a default.

        A pair for the one input that is the tuple of the arguments from its first to before its second.
        None where that cannot be said.
        """
        return None

    def attributes(self) -> dict[str, Any]:
        """Return the non-tensor arguments by name."""
        return {}

    def parameters(self) -> Sequence[int]:
        """Return the positions of inputs that were read from a variable, where the input does not show it."""
        return ()

    def op_type(self) -> str:
        """Return the framework's own name for what the op computes, one for all its spellings."""
        return str(getattr(self.op, "__name__", self.op))


class Saved:
    """Tensors that the backward ops of an op save, which may share memory with what is written later."""

    def seeing(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op and see what it saves."""
        return call.invoke(inputs)

    def keep(self) -> None:
        """Copy what was saved of the values, since they are written now."""


class EagerOps(TensorOps):
    """Calls of a framework, beside its tensors; a driver implements it.

    identity_types: types of the values that tell ops apart, such as parameters.
    slot_of: gives the name of the slot in which an object holds a parameter, and what fits there; None where
    the object does not hold it. What is put anew into a slot, as offloading does, is the same parameter to
    tools.
    reader: how native code reads tensors; None where it does not.
    views: which values stand for views; None where tensors never share memory.
    """

    identity_types: tuple[type, ...] = ()
    slot_of: SlotOf | None = None
    reader: interceptor.Reader | None = None
    views: Views | None = None

    namespace: Any

    @abstractmethod
    def bind(self, site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call as the tools see it."""

    @abstractmethod
    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return an op's result as a list, and a function that puts such a list back into its form."""

    def invoke(self, site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call as the program does."""
        return site.invoke(args, kwargs)

    def results(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return what `flatten` does for the result of a call, with what the op wrote and did not return."""
        return call.with_written(outputs, inputs, *self.flatten(outputs))

    @abstractmethod
    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which of the inputs need a gradient; None where autodiff records nothing."""

    def written_later(self, values: Sequence[Any]) -> Saved | None:
        """Return the context to run an op in, after which these values may be written once more.

        None where `saved_of` finds all that it will have saved.
        """
        return None

    def saves_out_of_reach(self, value: Any) -> bool:
        """Return True if `saved_of` could not find what an op that writes this value will save of it."""
        return True

    def saved_of(self, written: Sequence[Any], outputs: Sequence[Any]) -> Saved:
        """Return what the backward ops of the op that has just written these values have saved of them.

        outputs: what the op gave, from which its backward ops are found as well.
        """
        return Saved()

    def known_to_autodiff(
        self, own: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], given: list[Any]
    ) -> list[Any]:
        """Return the values that routines gave as outputs, with the place in autodiff that the op's have.

        So a leaf that the op makes stays a leaf, and a tensor that it hands through keeps its gradient.
        own: the op's inputs.  inputs: those that it ran with.
        """
        return given

    def is_handed_back(self, value: Any, inputs: Sequence[Any]) -> bool:
        """Return True for an output that is a tensor which the program has already, such as an input."""
        return self.is_tensor(value) and any(value is one for one in spread(inputs))

    def shown(self, values: list[Any]) -> list[Any]:
        """Return values as analysis routines see them, where a framework wraps them for autodiff."""
        return values

    def variable_of(self, value: Any) -> Any:
        """Return what holds an input's value from one execution to the next; None where nothing does."""
        return None

    def part_of(self, value: Any, variable: Any) -> str:
        """Name the part of a variable that an input is a view of; "" for all of it, in any form."""
        return ""

    def path_of(self, subjects: Sequence[Any]) -> Callable[[Any], str | None]:
        """Return what gives the path of a variable in the outermost of the enclosing calls' objects.

        It keeps none of them alive.
        """
        return _nowhere

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Return the path of the innermost enclosing call's object within the outermost's."""
        return ""

    def scope_aliases(self, subjects: Sequence[Any]) -> Sequence[str]:
        """Return other paths of the innermost object, such as by names of layers."""
        return ()

    def obstacle(self, site: interceptor.Site) -> tuple[str, str] | None:
        """Return what keeps a call from being instrumented at this moment, and why; None if nothing does."""
        return None

    @abstractmethod
    def tracing(self) -> AbstractContextManager[Any]:
        """Return a context around the op that finds the op's backward ops; made before the routines run."""

    def begin(self, made: Any, inputs: Sequence[Any]) -> None:
        """Take the inputs of the op, or of its replacement, before the context `made` is entered.

        What routines returned is among it: backward ops that these values come from are not of the op.
        """

    @abstractmethod
    def attach_trace(self, trace: Trace, made: Any, values: list[Any]) -> None:
        """Leave the trace with the backward ops that the context `made` has found.

        values: the op's outputs, and those of its inputs that it wrote.
        """

    def made_between(self, begin: int, start: int, end: int) -> Any:
        """Return what `tracing` would have found, by readings of the clock of the driver's `reader`."""
        raise NotImplementedError

    def leaving(self, trace: Trace, writes: bool) -> Any:
        """Return what makes a `Program` leave this trace with the backward ops of each execution.

        writes: whether the op writes into a tensor that it is given.
        """
        raise NotImplementedError


def _nowhere(variable: Any) -> str | None:
    return None
