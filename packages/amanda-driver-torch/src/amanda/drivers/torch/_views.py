"""Views of tensors: which memory a tensor lies in, and copying what was written from one to another."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from amanda.eager import Tie, Views
from torch.autograd import forward_ad

from ._overrides import of_class

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that override nothing."""


class TorchViews(Views):
    """`Views` of PyTorch, where tensors with one storage share memory."""

    def memory(self, value: Any) -> Hashable:
        """Return the storage of a strided tensor; None for one that a subclass wraps, and other layouts."""
        kind = type(value)
        if kind is Written:
            value, kind = value.tensor, type(value.tensor)
        if kind in PLAIN:
            return _storage(value)
        if not isinstance(value, torch.Tensor) or kind.__torch_dispatch__ is not _NO_DISPATCH:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return _storage(value)

    def is_lent(self, value: torch.Tensor) -> bool:
        """Return whether the memory came from elsewhere: torch resizes its own alone."""
        return not value.untyped_storage().resizable()

    def tie(
        self, view: torch.Tensor, value: torch.Tensor, is_input: bool, on_death: Callable[[Tie], None]
    ) -> Tie:
        """Tie a value to a view, outside autograd where that is a `detach` of its base, or its `data`."""
        return TensorTie(self, view, value, is_input or view._is_view(), on_death)

    def laid_out(self, view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Clone a tensor, with the strides of the view: `contiguous` copies where it would have copied."""
        if view.shape != value.shape or view.stride() == value.stride() or overlaps(view):
            return of_class(value, value.clone())
        return of_class(value, value.new_empty_strided(value.size(), view.stride()).copy_(value))

    def shares(self, value: torch.Tensor) -> bool:
        """Return whether a tensor is a view of another, or a parameter."""
        return value._is_view() or (value.requires_grad and value.is_leaf)

    def alike(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two tensors have the same strides."""
        return one.stride() == other.stride()

    def parts(self, values: Sequence[Any]) -> dict[Hashable, "Part"]:
        """Return which elements of which storages the tensors are."""
        parts: dict[Hashable, Part] = {}
        for value in values:
            memory = self.memory(value)
            if type(value) is Written:
                parts[memory] = Part(value.tensor, value.marks)
                continue
            parts[memory] = parts[memory].with_(value) if memory in parts else Part(value)
        return parts


class Written(NamedTuple):
    """Some elements of a tensor; marks: which."""

    tensor: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def at(cls, tensor: torch.Tensor, index: Any) -> "Written":
        """The elements at an index."""
        marks = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        marks[index] = True
        return cls(tensor, marks)


class Part:
    """Elements of a storage that were written: those of a tensor, or some of these."""

    def __init__(self, tensor: torch.Tensor, marks: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self._whole = marks is None and _is_whole(tensor)
        self._flags: torch.Tensor | None = None
        if marks is not None:
            _strided_as(self._filled(False), tensor).copy_(marks)

    def with_(self, tensor: torch.Tensor) -> "Part":
        """Add the elements of another tensor in the storage."""
        self._whole = self._whole or tensor.element_size() != self.tensor.element_size()
        if not self._whole:
            _strided_as(self._filled(True), tensor).fill_(True)
        return self

    def at(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return which elements of a tensor in the storage were written; None if all were.

        Elements of two sizes, as after `view(dtype)`, are not told apart: all count as written.
        """
        if self._whole or tensor.element_size() != self.tensor.element_size():
            return None
        if self._flags is None and _same_elements(self.tensor, tensor):
            return None
        return _strided_as(self._filled(True), tensor)

    def _filled(self, own: bool) -> torch.Tensor:
        if self._flags is None:
            tensor = self.tensor
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._flags = torch.zeros(size, dtype=torch.bool, device=tensor.device)
            if own:
                _strided_as(self._flags, tensor).fill_(True)
        return self._flags


class TensorTie(Tie):
    """A tensor that a routine gave, and the view whose place it took.

    It keeps the memory of the view alive, as the view would, but not its graph.
    recorded: whether autograd knows that writes into the one are writes into the other.
    """

    def __init__(
        self,
        views: TorchViews,
        view: torch.Tensor,
        value: torch.Tensor,
        recorded: bool,
        on_death: Callable[[Tie], None],
    ) -> None:
        self._views = views
        self.ends = views.memory(value), views.memory(view)
        self._value = weakref.ref(value, lambda _: on_death(self))
        self._base = weakref.ref(view if view._base is None else view._base)
        self._recorded = recorded
        with torch.no_grad():
            self._data, self._view = value.detach(), view.detach()
        self._versions = self._now()

    @property
    def value(self) -> torch.Tensor | None:
        """The value, unless it is gone or was given other memory."""
        value = self._value()
        return value if value is not None and self._views.memory(value) == self.ends[0] else None

    @property
    def view(self) -> torch.Tensor:
        """The view, outside autograd."""
        return self._view

    def carry(self, start: Hashable, written: Part) -> Part | None:
        """Copy the elements that were written to the other side, as an op of the program would."""
        value, base = self._value(), self._base()
        if value is not None and self.value is None:
            return None  # it was given other memory
        at_value = start == self.ends[0]
        marks = written.at(self._data if at_value else self._view)
        try:
            if marks is not None and not marks.is_meta and not bool(marks.any()):
                return None
            recorded = self._recorded and written.tensor.requires_grad and torch.is_grad_enabled()
            with torch.set_grad_enabled(recorded or forward_ad._current_level >= 0):
                data, view = _reached(self._data, value, at_value, written), self._view
                if torch.is_grad_enabled():
                    view = _reached(view, base, not at_value, written)
                source, target = (data, view) if at_value else (view, data)
                if at_value and marks is not None and overlaps(view):
                    return _write_overlapping(base, self._view, data, marks)
                target.copy_(source if marks is None else torch.where(marks, source, target))
                return Part(target, marks)
        finally:
            self._versions = self._now()

    def drifted(self) -> torch.Tensor | None:
        """Return the side whose version has changed since the last copy."""
        value = self.value
        if value is None:
            return None
        now, before = self._now(), self._versions
        if now[0] != before[0]:
            return value
        return self._view if now[1] != before[1] else None

    def rejoin(self) -> bool:
        """Give the value the memory of the view, if that holds the same."""
        value, view = self.value, self._view
        if value is None:
            return True
        same = value.shape == view.shape and value.dtype == view.dtype and value.device == view.device
        if value.is_inference() or not same:
            return False
        with torch.no_grad():
            if not value.is_meta and not bool(((value == view) | ((value != value) & (view != view))).all()):
                return False
            value.data = view
        return True

    def _now(self) -> tuple[int, int]:
        return _version(self._data), _version(self._view)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):  # a wrapper of functorch, a nested tensor
        return None


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor are one in memory, as `expand` makes it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.size(), tensor.stride(), strict=True))


def _write_overlapping(
    base: torch.Tensor | None, view: torch.Tensor, value: torch.Tensor, marks: torch.Tensor
) -> Part:
    """Write the marked elements of a value into an expanded view, then update the value's other rows."""
    size = view.untyped_storage().nbytes() // view.element_size()
    whole = (view if base is None else base).as_strided((size,), (1,), 0)
    whole = whole.detach() if base is None else whole
    index = _strided_as(torch.arange(size, device=view.device), view)[marks]
    whole[index] = value[marks]
    flags = torch.zeros(size, dtype=torch.bool, device=view.device)
    flags[index] = True
    value.copy_(torch.where(_strided_as(flags, view), _strided_as(whole, view), value))
    return Part(whole, flags)


def in_memory_like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` where `original` lies, in a copy of that tensor's storage."""
    with torch.no_grad():
        storage = original.untyped_storage().clone()  # type: ignore[no-untyped-call]
        own = torch.empty(0, dtype=original.dtype, device=original.device)
        own.set_(storage, original.storage_offset(), original.size(), original.stride())
    return own.copy_(value)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _reached(data: torch.Tensor, own: torch.Tensor | None, was_written: bool, written: Part) -> torch.Tensor:
    """Return `data`, which is outside autograd, as what autograd knows.

    own: the tensor of the program that `data` is, or is a view of; None if that is gone, and then only
    what was written of it, and what reads that, need be known.
    """
    if own is not None:
        return _view_like(data, own)
    if was_written and torch.is_grad_enabled():
        return _view_like(data, written.tensor)
    return data.detach()


def _view_like(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Make a view of `base` once more, in autograd."""
    if _same_elements(view, base):
        return base
    if base.is_complex() != view.is_complex():
        base = torch.view_as_real(base) if base.is_complex() else torch.view_as_complex(base)
    again = base.as_strided(view.size(), view.stride(), view.storage_offset())
    again = again.conj() if view.is_conj() != again.is_conj() else again
    return again._neg_view() if view.is_neg() != again.is_neg() else again


def _strided_as(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return flags.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__
