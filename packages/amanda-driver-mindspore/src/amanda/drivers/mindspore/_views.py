"""Views of tensors: the memory of a tensor, and copies of written elements between tied tensors."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amanda.eager import Tie, Views
from mindspore import Parameter, Tensor

from ._tensors import copy_into, memory_of, unrecorded

Flags = NDArray[np.bool_]


class TensorElements(NamedTuple):
    """Some elements of a tensor.  marks: a flag for each element, True for these."""

    tensor: Any
    marks: Flags

    @classmethod
    def at(cls, tensor: Any, index: Any) -> "TensorElements":
        """Return the elements of `tensor[index]`."""
        # A flag for each element, since an index may have slices, numbers, arrays and booleans.
        marks = np.zeros(tuple(tensor.shape), bool)
        marks[_numpy_index(index)] = True
        return cls(tensor, marks)


class MindSporeViews(Views):
    """Views of MindSpore, where tensors with the same storage share memory.

    MindSpore has no count of the writes to a storage, so writes without an op stay unseen.
    """

    def memory(self, value: Any) -> Hashable:
        """Return the address of a tensor's memory; None for a value without memory."""
        value = value.tensor if type(value) is TensorElements else value
        return (memory_of(value) or None) if isinstance(value, Tensor) else None

    def components_of(self, value: Any) -> Sequence[Any]:
        """Return the tensor itself, or nothing for a value without memory."""
        return () if self.memory(value) is None else (value,)

    def keeps_alive(self, view: Any, value: Any) -> bool:
        """Return True for the tensor itself: a view keeps the memory of its base alive, not the base."""
        return view is value

    def is_in_foreign_memory(self, value: Any) -> bool:
        """Return False."""
        return False

    def create_tie(
        self, view: Any, value: Any, is_input: bool, on_death: Callable[[Tie], None],
        holders: Sequence[Any] = (),
    ) -> Tie:  # fmt: skip
        """Tie a value to a view for as long as the program has the value, or a view of the value."""
        return StorageTie(self, view, value, on_death, holders)

    def copy_in_layout(self, view: Any, value: Any) -> Any:
        """Copy a tensor."""
        return value.copy()

    def shares_memory(self, value: Any) -> bool:
        """Return True for a tensor that is a part of its memory, and for a parameter."""
        return isinstance(value, Parameter) or value.untyped_storage().size() != value.nbytes

    def have_same_layout(self, first: Any, second: Any) -> bool:
        """Return True if two tensors have the same strides."""
        return list(first.stride()) == list(second.stride())

    def copy_writes(self, values: Sequence[Any]) -> None:
        """Copy the elements that an op has written to tied tensors."""
        # In a gradient, an assignment to elements of a tensor gives the tensor new memory.
        for value in values:
            self._move_ties(value.tensor if type(value) is TensorElements else value)
        super().copy_writes(values)

    def _move_ties(self, tensor: Any) -> None:
        """Update the ties of a value that has new memory: they are looked up by memory."""
        memory = self.memory(tensor)
        for tie in self._living_ties():
            if isinstance(tie, StorageTie) and tie.is_of(tensor):
                former_memory, view_memory = tie.ends
                if memory != former_memory:
                    tie.ends = memory, view_memory
                    self._ties[former_memory].remove(tie)
                    self._ties.setdefault(memory, []).append(tie)

    def written_parts(self, values: Sequence[Any]) -> dict[Hashable, "MemoryElements"]:
        """Return the written elements by memory: those of TensorElements, and all of a tensor."""
        part_by_memory: dict[Hashable, MemoryElements] = {}
        for value in values:
            is_part = type(value) is TensorElements
            elements = value if is_part else TensorElements(value, np.ones(tuple(value.shape), bool))
            part = part_by_memory.setdefault(self.memory(value), MemoryElements(elements.tensor))
            part.add(elements.tensor, elements.marks)
        return part_by_memory


class MemoryElements:
    """The written elements of a memory; all of them if tensors of several element sizes lie in it."""

    def __init__(self, tensor: Any) -> None:
        self._itemsize = tensor.itemsize
        # Strides may be anything, so elements are compared by flags, one for each element of the storage.
        self._flags = np.zeros(tensor.untyped_storage().size() // self._itemsize, bool)

    def add(self, tensor: Any, marks: Flags) -> None:
        """Add the marked elements of a tensor."""
        if tensor.itemsize == self._itemsize:
            _flags_of_tensor(self._flags, tensor)[marks] = True
        else:
            self._flags[...] = True

    def at(self, tensor: Any) -> Flags:
        """Return flags of the written elements of a tensor in the memory."""
        if tensor.itemsize == self._itemsize:
            return _flags_of_tensor(self._flags, tensor)
        return np.full(tuple(tensor.shape), bool(self._flags.any()))


class StorageTie(Tie):
    """A value, a tensor that a routine returned, tied to the view that it replaces.

    holders: the program's tensors in the memory of the value, if the program does not have the value itself.
    ends: the memory of the value, and that of the view.
    """

    def __init__(
        self, views: MindSporeViews, view: Any, value: Any, on_death: Callable[[Tie], None],
        holders: Sequence[Any],
    ) -> None:  # fmt: skip
        """Hold the view, and the value if it has holders; call `on_death` after the last holder."""
        self._views, self._view = views, view
        self.ends = views.memory(value), views.memory(view)
        # The program has the value itself, or views of its memory alone; then the tie holds the value.
        self._held_value = value if holders else None

        def release(_: object) -> None:
            """Release the value and call `on_death`, once the last holder has died."""
            if self.is_link:
                self._held_value = None
                on_death(self)

        self._holders = [weakref.ref(holder, release) for holder in holders or [value]]
        self._value: Callable[[], Any] = weakref.ref(value)

    @property
    def value(self) -> Any:
        """The value while it lives, else None."""
        return self._value()

    def is_of(self, tensor: Any) -> bool:
        """Return True if the tensor is the tied value."""
        return self._value() is tensor

    @property
    def is_link(self) -> bool:
        """True if no tensor of the program lies in the memory of the value."""
        return all(reference() is None for reference in self._holders)

    @property
    def view(self) -> Any:
        """The view."""
        return self._view

    def copy_across(self, start: Hashable, written: MemoryElements) -> MemoryElements | None:
        """Copy the written elements to the other side of the tie; return them, or None if there are none.

        start: the memory in which they were written.  Nothing is copied once the value is dead.
        """
        value = self.value
        if value is None:
            return None
        value_memory, _ = self.ends
        source, target = (value, self._view) if start == value_memory else (self._view, value)
        marks = written.at(source)
        if not marks.any():
            return None
        with unrecorded():
            copy_into(target, Tensor(np.where(marks, source.asnumpy(), target.asnumpy())))
        part = MemoryElements(target)
        part.add(target, marks)
        return part

    def side_written_unseen(self) -> None:
        """Return None: MindSpore has no sign of an unseen write."""

    def turn_into_view(self) -> bool:
        """Give the value the memory of the view; return False if their contents differ.

        Also return False if other tensors lie in the memory of the value; return True if the value is dead.
        """
        value = self.value
        if value is None:
            return True
        # Bytes are compared, since no NaN equals another.
        if self._held_value is not None or value.asnumpy().tobytes() != self._view.asnumpy().tobytes():
            return False
        # Afterwards both share memory, as the program expects, and the tie is not needed any more.
        value.assign_value(self._view)
        return True


def _flags_of_tensor(memory_flags: Flags, tensor: Any) -> Flags:
    """Return the flags of a tensor's elements, as a view of the flags of the memory that it lies in."""
    strides = [stride * memory_flags.itemsize for stride in tensor.stride()]
    flags = memory_flags[tensor.storage_offset() :]
    return np.lib.stride_tricks.as_strided(flags, tuple(tensor.shape), strides)


def _numpy_index(index: Any) -> Any:
    """Return an index of a tensor as one for NumPy: with arrays instead of tensors, also in lists."""
    if isinstance(index, Tensor):
        return index.asnumpy()
    if isinstance(index, (list, tuple)):
        return type(index)([_numpy_index(entry) for entry in index])
    return index
