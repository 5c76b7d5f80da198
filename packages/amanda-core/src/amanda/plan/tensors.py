"""Primitives of a framework's tensors, which a driver implements; lists of tensors, and shapes.

A value that stands for many samples, as under a vmap, has a shape of its own kind.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from amanda.errors import RoutineError

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine
    from amanda.plan.facts import OpFacts

T = TypeVar("T")
Batches = tuple[tuple[int, int], ...]
Tangents = tuple[tuple[tuple[int, ...], Batches], ...]


class TensorOps(ABC):
    """Primitives of a framework's tensors, which a driver implements.

    has_symbolic_tensors: whether calls may be traced into a program, where tensors stand for values to come.
    """

    # A class attribute, since it is asked at each routine of each execution.
    has_symbolic_tensors: ClassVar[bool] = False

    def trace_routine(
        self, action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], autodiff: bool,
        shapes: Hashable,
    ) -> list[Any] | None:  # fmt: skip
        """Put a routine into the program that is traced; return the values with the routine's future results.

        Called only for a driver that `has_symbolic_tensors`.

        Args:
            action: Routine, with the positions that it selects.
            values: The op's values at this point.
            facts: Facts of the op.
            run: Dict that the routines of this execution share.
            autodiff: Whether routines without a mark take part in autodiff too.
            shapes: Shapes of the execution, for a routine that takes shapes; else None.

        Returns:
            The values with the routine's future results; None where the routine has to be called now.
        """
        return None

    def note_replacement(self, action: Action, facts: OpFacts) -> None:  # noqa: B027 - most have nothing to do
        """Record that a replacement runs now, perhaps in a program that is traced.

        Called only for a driver that `has_symbolic_tensors`.

        Args:
            action: The replacement.
            facts: Facts of the op that it replaces.
        """

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor of the framework."""

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of every tensor among the inputs; a driver of several devices adds those."""
        return tuple(
            self.read_each(value, lambda tensor: (tensor.dtype, len(tensor.shape))) for value in inputs
        )

    def device_of(self, value: Any) -> str:
        """Name the device of a value, in the framework's words; "" where it is not a tensor or has none."""
        return str(getattr(value, "device", "")) if self.is_tensor(value) else ""

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of each input: a tuple for a tensor, for a list as in `read_each`, else None."""
        return tuple(self.read_each(value, lambda tensor: tuple(tensor.shape)) for value in inputs)

    def read_each(self, value: Any, read: Callable[[Any], Any]) -> Any:
        """Return what `read` returns for a tensor; a tuple of that for the tensors of a list, else None.

        Other elements of a list are left out; a list without tensors gives None.

        Args:
            value: An input or output of an op.
            read: Function of one tensor.
        """
        if self.is_tensor(value):
            return read(value)
        if isinstance(value, (list, tuple)):
            return tuple(read(tensor) for tensor in value if self.is_tensor(tensor)) or None
        return None

    @abstractmethod
    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Return a context in which autodiff records nothing."""

    @abstractmethod
    def version(self, value: Any) -> Any:
        """Return a counter or checksum that a write into a value changes; None where there is neither."""

    # A method of its own, which a driver may answer in one call for all values.
    def versions(self, values: Sequence[Any]) -> list[Any]:
        """Return the version of each value."""
        return [self.version(value) for value in values]

    def call_without_autodiff(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine where autodiff records nothing.

        Args:
            func: The routine.
            values: Values that it receives by position.
            kwargs: Keyword arguments from the tool, and those that Amanda adds, such as `run`.
        """
        with self.without_autodiff():
            return func(*values, **kwargs)

    # False is always right: then the routine's value is used instead of the equal original.
    def have_equal_bits(self, first: Any, second: Any) -> bool:
        """Return True if two tensors certainly have the same class, dtype, shape and bits.

        Returns False unless a driver overrides it.

        Args:
            first: Tensor of the program.
            second: Tensor from a routine.
        """
        return False

    def call_observer(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that changes no value, with the overrides of tensor subclasses switched off.

        Args:
            func: The observer.
            values: Values that it receives by position.
            kwargs: Keyword arguments from the tool, and those that Amanda adds, such as `run`.
        """
        return self.call_without_autodiff(func, values, kwargs)

    def call_in_autodiff(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that computes for the program, such as a replacement.

        Args:
            func: The routine.
            values: Values that it receives by position.
            kwargs: Keyword arguments from the tool, and those that Amanda adds, such as `run`.
        """
        return func(*values, **kwargs)

    def without_overrides(self) -> AbstractContextManager[Any]:
        """Return a context in which tools read tensors without modes and overrides of tensor subclasses.

        That of the base does nothing.
        """
        return nullcontext()

    @abstractmethod
    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` so that its gradient passes unchanged to `original`.

        Casts between floating types.

        Args:
            original: Tensor of the program, which the value replaces.
            value: Tensor from a routine.

        Raises:
            RoutineError: Where the shapes differ, or where only one of the two is complex.
        """

    @abstractmethod
    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor; where isolated, the gradient passes straight through.

        Args:
            target: The user's tensor.
            value: Tensor from a routine.
            isolated: Whether the routine took no part in autodiff.
        """

    @abstractmethod
    def detach_value(self, value: Any) -> Any:
        """Return a value that can be stored: the same contents, detached from the graph of autodiff."""

    def detach_values(self, values: Sequence[Any]) -> list[Any]:
        """Return values that can be stored, as `detach_value` does."""
        return [self.detach_value(value) for value in values]

    @abstractmethod
    def differentiable_copy(self, value: Any) -> Any:
        """Return a differentiable copy of a tensor."""


def shape_error(shape: Any, original: Any) -> RoutineError:
    """Return the error for a routine's value of another shape than the original's.

    Args:
        shape: Shape of the routine's value.
        original: Shape of the value that it replaces.
    """
    return RoutineError(
        f"a routine returned shape {shape} where shape {original} was given; mark it "
        "@amanda.differentiable if it is meant to change shapes"
    )


def dtype_error(dtype: Any, original: Any, remedy: str = "return a floating type") -> RoutineError:
    """Return the error for a routine's value of a type that cannot stand for the original's.

    Args:
        dtype: Type of the routine's value.
        original: Type of the value that it replaces.
        remedy: Advice at the end of the message.
    """
    return RoutineError(f"a routine returned {dtype} where {original} was given; {remedy}")


def complex_error(dtype: Any, original: Any) -> RoutineError:
    """Return the error for a complex value in the place of a real one, or the reverse.

    Args:
        dtype: Type of the routine's value.
        original: Type of the value that it replaces.
    """
    # A cast from complex would drop the imaginary part without notice.
    return dtype_error(dtype, original, "it may not turn real into complex or back")


class ImmutableTensorOps(TensorOps):
    """Primitives of immutable tensors that belong to no graph of autodiff."""

    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def version(self, value: Any) -> Any:
        """Return None."""
        return None

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raise RoutineError."""
        raise RoutineError(f"a {type(target).__name__} cannot be written into; return another value instead")

    def detach_value(self, value: Any) -> Any:
        """Return the value."""
        return value

    def differentiable_copy(self, value: Any) -> Any:
        """Return the value."""
        return value


class BoxedTensors(TensorOps):
    """Primitives of tensors that autodiff keeps in boxes; isolated routines get what is in the boxes."""

    @abstractmethod
    def unboxed(self, value: Any) -> Any:
        """Return a value without the boxes of autodiff, or a list of such values."""

    def unwrap_for_analysis(self, values: list[Any]) -> list[Any]:
        """Return the values for analysis routines, without boxes."""
        return [self.unboxed(value) for value in values]

    def detach_value(self, value: Any) -> Any:
        """Return the value without boxes."""
        return self.unboxed(value)

    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: autodiff records what is in boxes."""
        return nullcontext()

    def call_without_autodiff(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine with unboxed values; return the program's values for those that it hands back."""
        unboxed_values = [self.unboxed(value) for value in values]
        value_by_unboxed_id = dict(zip(map(id, unboxed_values), values, strict=True))
        for unboxed, value in zip(unboxed_values, values, strict=True):
            if isinstance(value, (list, tuple)):
                value_by_unboxed_id.update(zip(map(id, unboxed), value, strict=True))
        with self.without_autodiff():
            result = func(*unboxed_values, **kwargs)
        if isinstance(result, (list, tuple)) and id(result) not in value_by_unboxed_id:
            return [value_by_unboxed_id.get(id(item), item) for item in result]
        return value_by_unboxed_id.get(id(result), result)


class TensorMap(Generic[T]):
    """A weak map with tensors of any framework as keys: it keeps no tensor alive."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[weakref.ref[Any], T]] = {}

    @staticmethod
    def key(tensor: Any) -> Hashable:
        """Return a key that no other living tensor has."""
        return getattr(tensor, "_id", None) or id(tensor)  # eager tensors of TensorFlow have numbers

    def __setitem__(self, tensor: Any, value: T) -> None:
        key = self.key(tensor)
        self._entries[key] = weakref.ref(tensor, partial(self._drop_dead, key)), value

    def get(self, tensor: Any) -> T | None:
        """Return the value of a tensor; None for a tensor without one."""
        reference, value = self._entries.get(self.key(tensor), (None, None))
        # An `id` may belong to another object by now; the reference says whether the tensor still lives.
        return value if reference is not None and reference() is not None else None

    def _drop_dead(self, key: Hashable, dead_reference: weakref.ref[Any]) -> None:
        """Drop the entry of a dead tensor, unless a new tensor has its key."""
        reference, _ = self._entries.get(key, (None, None))
        # The key may have been given to a new tensor before the callback of the old one ran.
        if reference is dead_reference:
            del self._entries[key]


def spread(values: Iterable[Any]) -> list[Any]:
    """Return the values in one list, with the elements of a list or tuple in its place."""
    return [
        element for value in values for element in (value if isinstance(value, (list, tuple)) else (value,))
    ]


def is_among(value: Any, tensors: Sequence[Any]) -> bool:
    """Return True if a value is one of the tensors, or a list of some of them.

    Args:
        value: Tensor, or list of tensors, compared by identity.
        tensors: Tensors, or lists of tensors.
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_among(tensor, tensors) for tensor in value)
    return any(value is tensor for tensor in tensors)


class BatchedShape(tuple[int, ...]):
    """The shape of one sample, with the sizes of the batches that the value has beside it.

    batches: pairs of the level of a vmap and its number of samples.
    tangents: of forward-mode derivatives, each as the levels that differentiate, and its own batches.
    any_made: whether such a shape was ever made; most programs have none, and need no look for them.
    Unequal to the same shape with others.
    """

    any_made: ClassVar[bool] = False
    batches: Batches
    tangents: Tangents

    def __new__(cls, shape: Iterable[int], batches: Batches, tangents: Tangents = ()) -> BatchedShape:
        """Make the shape of a sample in some batches, of a value with some tangents."""
        BatchedShape.any_made = True
        batched = super().__new__(cls, shape)
        batched.batches, batched.tangents = tuple(batches), tuple(tangents)
        return batched

    def __eq__(self, other: object) -> bool:
        if tuple.__eq__(self, other) is not True or self.batches != getattr(other, "batches", ()):
            return False
        return bool(self.tangents == getattr(other, "tangents", ()))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.batches, self.tangents))

    def __repr__(self) -> str:
        batches = f" in batches of {', '.join(str(size) for _, size in self.batches)}" if self.batches else ""
        tangents = f" with {len(self.tangents)} tangents" if self.tangents else ""
        return f"{tuple(self)!r}{batches}{tangents}"


def sample_count(shapes: Any) -> int:
    """Return how many samples an execution with these shapes computes: 1 without a vmap."""
    return prod(_sizes_by_vmap_level(shapes).values()) if BatchedShape.any_made else 1


_NUMBERS = frozenset({int})


def _sizes_by_vmap_level(shapes: Any) -> dict[int, int]:
    """Return the sizes of the batches of shapes, or of nested lists of shapes, by the level of the vmap."""
    if isinstance(shapes, BatchedShape):
        return dict(shapes.batches)
    sizes: dict[int, int] = {}
    if isinstance(shapes, (list, tuple)):
        for shape in shapes:
            # Most shapes have no batches: a call for each of these, and for each number, takes longest.
            if shape is not None and not (type(shape) is tuple and _NUMBERS.issuperset(map(type, shape))):
                sizes.update(_sizes_by_vmap_level(shape))
    return sizes
