"""Views of tensors: which memory a tensor lies in, and copying what was written from one to another."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amanda.eager import Tie, Views
from mindspore import Parameter, Tensor

from ._tensors import copy_into, memory_of, unrecorded

Flags = NDArray[np.bool_]


class Written(NamedTuple):
    """Some elements of a tensor; marks: which."""

    tensor: Any
    marks: Flags

    @classmethod
    def at(cls, tensor: Any, index: Any) -> "Written":
        """The elements at an index."""
        marks = np.zeros(tuple(tensor.shape), bool)
        marks[_in_numpy(index)] = True
        return cls(tensor, marks)


class MindSporeViews(Views):
    """`Views` of MindSpore, where tensors with one storage share memory.

    MindSpore does not tell how often a tensor was written, so writes that no op shows are not followed.
    """

    def memory(self, value: Any) -> Hashable:
        """Return the address of a tensor's memory; None for what has none."""
        value = value.tensor if type(value) is Written else value
        return (memory_of(value) or None) if isinstance(value, Tensor) else None

    def parts_of(self, value: Any) -> Sequence[Any]:
        """Return the tensor itself; nothing for a value that is none."""
        return () if self.memory(value) is None else (value,)

    def keeps_alive(self, view: Any, value: Any) -> bool:
        """Return True for the tensor itself: a view keeps the memory of its base alone."""
        return view is value

    def is_lent(self, value: Any) -> bool:
        """Return False."""
        return False

    def tie(
        self, view: Any, value: Any, is_input: bool, on_death: Callable[[Tie], None],
        holders: Sequence[Any] = (),
    ) -> Tie:  # fmt: skip
        """Tie a value to a view for as long as the program has the value, or what is a view of it."""
        return TensorTie(self, view, value, on_death, holders)

    def laid_out(self, view: Any, value: Any) -> Any:
        """Copy a tensor."""
        return value.copy()

    def shares(self, value: Any) -> bool:
        """Return whether a tensor is a part of its memory, or a parameter."""
        return isinstance(value, Parameter) or value.untyped_storage().size() != value.nbytes

    def alike(self, one: Any, other: Any) -> bool:
        """Return whether two tensors have the same strides."""
        return list(one.stride()) == list(other.stride())

    def wrote(self, values: Sequence[Any]) -> None:
        """Copy what an op has written, after which its tensors may lie in other memory.

        In a gradient an assignment to elements of a tensor gives the tensor new memory.
        """
        for value in values:
            self._move(value.tensor if type(value) is Written else value)
        super().wrote(values)

    def _move(self, tensor: Any) -> None:
        memory = self.memory(tensor)
        for tie in self._living_ties():
            if isinstance(tie, TensorTie) and tie.is_of(tensor) and memory != (former := tie.ends[0]):
                tie.ends = memory, tie.ends[1]
                self._ties[former].remove(tie)
                self._ties.setdefault(memory, []).append(tie)

    def parts(self, values: Sequence[Any]) -> dict[Hashable, "Part"]:
        """Return which elements of which memory the tensors are."""
        parts: dict[Hashable, Part] = {}
        for value in values:
            written = value if type(value) is Written else Written(value, np.ones(tuple(value.shape), bool))
            parts.setdefault(self.memory(value), Part(written.tensor)).add(*written)
        return parts


class Part:
    """Elements of a memory that were written; all of them, if tensors of several element types lie in it."""

    def __init__(self, tensor: Any) -> None:
        self._itemsize = tensor.itemsize
        self._flags = np.zeros(tensor.untyped_storage().size() // self._itemsize, bool)

    def add(self, tensor: Any, marks: Flags) -> None:
        """Add the marked elements of a tensor."""
        if tensor.itemsize == self._itemsize:
            _strided(self._flags, tensor)[marks] = True
        else:
            self._flags[...] = True

    def at(self, tensor: Any) -> Flags:
        """Return which elements of a tensor in the memory were written."""
        if tensor.itemsize == self._itemsize:
            return _strided(self._flags, tensor)
        return np.full(tuple(tensor.shape), bool(self._flags.any()))


class TensorTie(Tie):
    """A tensor that a routine gave, and the view whose place it took.

    holders: what lies in the memory of a value that the program does not have itself.
    """

    def __init__(
        self, views: MindSporeViews, view: Any, value: Any, on_death: Callable[[Tie], None],
        holders: Sequence[Any],
    ) -> None:  # fmt: skip
        self._views, self._view = views, view
        self.ends = views.memory(value), views.memory(view)
        self._kept = value if holders else None

        def let_go(_: object) -> None:
            if self.is_link:
                self._kept = None
                on_death(self)

        self._holders = [weakref.ref(one, let_go) for one in holders or [value]]
        self._value: Callable[[], Any] = weakref.ref(value)

    @property
    def value(self) -> Any:
        """The value, unless it is gone."""
        return self._value()

    def is_of(self, tensor: Any) -> bool:
        """Return True for the tie of a value."""
        return self._value() is tensor

    @property
    def is_link(self) -> bool:
        """Return True if nothing of the program lies in the memory of the value."""
        return all(one() is None for one in self._holders)

    @property
    def view(self) -> Any:
        """The view."""
        return self._view

    def carry(self, start: Hashable, written: Part) -> Part | None:
        """Copy the elements that were written to the other side."""
        value = self.value
        if value is None:
            return None
        source, target = (value, self._view) if start == self.ends[0] else (self._view, value)
        marks = written.at(source)
        if not marks.any():
            return None
        with unrecorded():
            copy_into(target, Tensor(np.where(marks, source.asnumpy(), target.asnumpy())))
        part = Part(target)
        part.add(target, marks)
        return part

    def drifted(self) -> None:
        """Return None: nothing tells of a write that was not seen."""

    def rejoin(self) -> bool:
        """Give the value the memory of the view, if both hold the same and nothing else lies in its own."""
        value = self.value
        if value is None:
            return True
        if self._kept is not None or value.asnumpy().tobytes() != self._view.asnumpy().tobytes():
            return False
        value.assign_value(self._view)
        return True


def _strided(row: NDArray[Any], tensor: Any) -> NDArray[Any]:
    """Return the elements of a row where those of a tensor lie in its memory."""
    steps = [step * row.itemsize for step in tensor.stride()]
    return np.lib.stride_tricks.as_strided(row[tensor.storage_offset() :], tuple(tensor.shape), steps)


def _in_numpy(index: Any) -> Any:
    if isinstance(index, Tensor):
        return index.asnumpy()
    if isinstance(index, (list, tuple)):
        return type(index)([_in_numpy(one) for one in index])
    return index
