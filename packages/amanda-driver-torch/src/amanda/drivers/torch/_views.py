"""Views of tensors: which memory a tensor lies in, and copies of writes between tensors that share it."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from amanda.eager import Tie, Views
from torch.autograd import forward_ad

from ._level_ties import LevelTie
from ._levels import innermost, is_wrapped, with_batches_first, without_transforms
from ._overrides import as_class_of
from ._storages import (
    PLAIN,
    copy_laid_out_like,
    distinct_elements,
    has_overlap,
    is_strided,
    storage_id,
    strided_parts,
)


class TorchViews(Views):
    """`Views` of PyTorch, where tensors with one storage share memory."""

    def __init__(self) -> None:
        super().__init__()
        self._level_ties: list[LevelTie] = []

    def memory(self, value: Any) -> Hashable:
        """Return the storage of a strided tensor; None for one that consists of others."""
        if type(value) is WrittenElements:
            value = value.tensor
        if type(value) in PLAIN:
            return None if value.is_nested else storage_id(value)
        if not is_strided(value):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return storage_id(value)

    def parts_of(self, value: Any) -> Sequence[Any]:
        """Return the strided tensors that a tensor consists of, such as the values of a sparse one."""
        return (value,) if type(value) is WrittenElements else strided_parts(value)

    def keeps_alive(self, view: Any, value: torch.Tensor) -> bool:
        """Return True for the tensor itself and its views in autograd, unlike a `detach` or a part."""
        # A tie of wrapped tensors holds the value itself.
        return (
            view is value
            or is_wrapped(value)
            or getattr(view, "_base", None) is (value if value._base is None else value._base)
        )

    def is_lent(self, value: torch.Tensor) -> bool:
        """Return True for memory from outside of torch, which torch cannot resize."""
        return not innermost(value).untyped_storage().resizable()

    def tie(
        self,
        view: torch.Tensor,
        value: torch.Tensor,
        is_input: bool,
        on_death: Callable[[Tie], None],
        holders: Sequence[torch.Tensor] = (),
    ) -> Tie:
        """Link a value to a view; autograd records writes through the link unless the view is a `detach`.

        holders: tensors of the program of which the value is a part, such as the values of a sparse tensor.
        A link of wrapped tensors holds both of them; links of this kind that nothing uses any more end here.
        """
        if any(map(is_wrapped, (view, value, *holders))):
            self.drop_unused()
            tie = LevelTie(self, view, value, on_death)
            self._level_ties.append(tie)
            return tie
        if holders:
            return PartTie(self, view, value, holders, on_death)
        is_known = is_input or (view._is_view() and (view._base is None or is_strided(view._base)))
        return TensorTie(self, view, value, is_known, on_death)

    def laid_out(self, view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Clone a tensor with the strides of a view, so that `contiguous` copies if it would have copied."""
        if is_wrapped(view):
            return torch.empty_like(view).copy_(value)
        copy: torch.Tensor = as_class_of(value, copy_laid_out_like(view, value))
        return copy

    def drop_unused(self) -> None:
        """End the ties of wrapped tensors whose memory nothing else uses any more."""
        for tie in self._level_ties:
            tie.drop_if_unused()
        self._level_ties = [tie for tie in self._level_ties if tie.is_used]

    def shares(self, value: torch.Tensor) -> bool:
        """Return True if a tensor is a view of another, or a parameter."""
        return value._is_view() or (value.requires_grad and value.is_leaf)

    def alike(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Return True if two tensors have the same strides."""
        return first.stride() == second.stride()

    def parts(self, values: Sequence[Any]) -> dict[Hashable, "WrittenPart"]:
        """Return the elements that the tensors are of each storage, by storage."""
        parts: dict[Hashable, WrittenPart] = {}
        with without_transforms():
            for value in values:
                memory = self.memory(value)
                if type(value) is WrittenElements:
                    parts[memory] = value.part()
                    continue
                tensor = with_batches_first(value)[1] if is_wrapped(value) else value
                parts[memory] = parts[memory].add(tensor) if memory in parts else WrittenPart(tensor)
        return parts


class WrittenElements(NamedTuple):
    """Some elements of a tensor; marks: which."""

    tensor: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def at(cls, tensor: torch.Tensor, index: Any) -> "WrittenElements":
        """Return the elements of a tensor at an index, as `tensor[index] = y` writes them."""
        if is_wrapped(tensor):
            marks = torch.zeros_like(tensor, dtype=torch.bool)
        else:
            marks = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        marks[index] = True
        return cls(tensor, marks)

    def part(self) -> "WrittenPart":
        """Return the elements as a part of their storage."""
        if is_wrapped(self.tensor):
            return WrittenPart(with_batches_first(self.tensor)[1], with_batches_first(self.marks)[1])
        return WrittenPart(self.tensor, self.marks)


class WrittenPart:
    """Written elements of a storage: all elements of a tensor, or some of them."""

    def __init__(self, tensor: torch.Tensor, marks: torch.Tensor | None = None) -> None:
        """Note the written elements of a tensor: those that `marks` selects, all without marks."""
        self.tensor = tensor
        self._whole = marks is None and _is_whole(tensor)
        self._flags: torch.Tensor | None = None
        if marks is not None:
            # Of elements that are one in memory, one that is marked is enough: `copy_` would take the last.
            _strided_as(self._storage_flags(tensor_is_marked=False), tensor).masked_fill_(marks, True)

    def add(self, tensor: torch.Tensor) -> "WrittenPart":
        """Add the elements of another tensor in the storage."""
        self._whole = self._whole or tensor.element_size() != self.tensor.element_size()
        if not self._whole:
            _strided_as(self._storage_flags(tensor_is_marked=True), tensor).fill_(True)
        return self

    def marks_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the elements of a tensor in the storage that were written; None if all were.

        An element of another size, as after `view(dtype)`, was written if any of its bytes was.
        """
        if self._whole:
            return None
        size, written_size = tensor.element_size(), self.tensor.element_size()
        if self._flags is None and size == written_size and _same_elements(self.tensor, tensor):
            return None
        flags = self._storage_flags(tensor_is_marked=True)
        if size < written_size:
            flags = flags.repeat_interleave(written_size // size)
        elif size > written_size:
            count = size // written_size
            whole_elements = flags[: len(flags) // count * count]  # the storage may end within an element
            flags = whole_elements.view(-1, count).any(1)
        return _strided_as(flags, tensor)

    def _storage_flags(self, tensor_is_marked: bool) -> torch.Tensor:
        """Return a flag for each element of the storage, which are made at the first call.

        tensor_is_marked: whether flags that are made now have those of the tensor's elements set.
        """
        if self._flags is None:
            tensor = self.tensor
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._flags = torch.zeros(size, dtype=torch.bool, device=tensor.device)
            if tensor_is_marked:
                _strided_as(self._flags, tensor).fill_(True)
        return self._flags


class TensorTie(Tie):
    """Link between a tensor that a routine returned, the value, and the view that the value replaced.

    The link lives as long as the memory of the value, which other tensors of the program may share. It keeps
    the memory of the view alive, as the view would, but not the view's graph.
    recorded: whether autograd records writes into the value as writes into the view, and the reverse.
    """

    def __init__(
        self,
        views: TorchViews,
        view: torch.Tensor,
        value: torch.Tensor,
        recorded: bool,
        on_death: Callable[[Tie], None],
    ) -> None:
        """Hold the memory of the view, and how the value lies in its own; on_death: called as that goes."""
        self._views = views
        self.ends = views.memory(value), views.memory(view)
        # The storage, not the value: other tensors of the program may share it and outlive the value.
        self._storage = weakref.ref(value.untyped_storage(), lambda _: on_death(self))
        self._value: Callable[[], torch.Tensor | None] = weakref.ref(value)
        self._base: Callable[[], torch.Tensor | None] = weakref.ref(
            view if view._base is None else view._base
        )
        self._recorded = recorded
        with torch.no_grad():
            self._whole = view.detach()
            cells = view if view.stride() == value.stride() else value
            part, self._view = distinct_elements(value.detach(), cells), distinct_elements(self._whole, cells)
        # What it takes to make the value again from its storage; a tensor here would keep it alive.
        self._empty = torch.empty(0, dtype=part.dtype, device=part.device)
        self._place = part.storage_offset(), part.size(), part.stride()
        self._is_conj, self._is_neg = part.is_conj(), part.is_neg()
        self._versions = self._current_versions()

    @property
    def value(self) -> torch.Tensor | None:
        """Return the value; None if it is gone or was given other memory."""
        value = self._value()
        return value if value is not None and self._views.memory(value) == self.ends[0] else None

    @property
    def is_link(self) -> bool:
        """Return True if the memory of the value is gone."""
        return self._storage() is None

    @property
    def view(self) -> torch.Tensor:
        """Return the view, outside autograd."""
        return self._whole

    @property
    def _detached_value(self) -> Any:
        """Return the value, outside autograd; None where its memory is gone."""
        storage = self._storage()
        if storage is None:
            return None
        with torch.no_grad():
            data = self._empty.detach().set_(storage, *self._place)
            data = data.conj() if self._is_conj else data
            return data._neg_view() if self._is_neg else data

    def carry(self, start: Hashable, written: WrittenPart) -> WrittenPart | None:
        """Copy written elements to the other side, as an op of the program would; return them there.

        None is returned, and nothing copied, if the write was elsewhere or the value's memory is gone.
        """
        value, base = self._value(), self._base()
        if value is not None and self.value is None:
            return None  # it was given other memory
        value_data, view_data = self._detached_value, self._view
        if value_data is None:
            return None
        value_was_written, is_conjugate = start == self.ends[0], False
        if value_data.is_complex() and view_data.is_complex() and not written.tensor.is_complex():
            # The real or the imaginary parts alone may be written; a gradient goes on to the others.
            is_conjugate = value_data.is_conj() != view_data.is_conj()
            value_data, view_data = _real_pairs(value_data), _real_pairs(view_data)
        marks = written.marks_in(value_data if value_was_written else view_data)
        try:
            if marks is not None and not marks.is_meta and not bool(marks.any()):
                return None  # the write was elsewhere in the storage
            recorded = self._recorded and written.tensor.requires_grad and torch.is_grad_enabled()
            # Recorded only if the write was: gradients then follow the copy to the other side.
            with torch.set_grad_enabled(recorded or forward_ad._current_level >= 0):
                value_side, view_side = (
                    _as_known_to_autograd(value_data, value, value_was_written, written),
                    view_data,
                )
                if torch.is_grad_enabled():
                    view_side = _as_known_to_autograd(view_data, base, not value_was_written, written)
                source, target = (value_side, view_side) if value_was_written else (view_side, value_side)
                if is_conjugate:
                    real, imaginary = source[..., 0], source[..., 1]
                    source = torch.stack([real, -imaginary], -1)
                if value_was_written and marks is not None and has_overlap(view_data):
                    return _write_overlapping(base, view_data, source, marks)
                target.copy_(source if marks is None else torch.where(marks, source, target))
                return WrittenPart(target, marks)
        finally:  # the copy itself must not count as a write of the program
            self._versions = self._current_versions()

    def drifted(self) -> torch.Tensor | None:
        """Return the side whose version has changed since the last copy; None if neither has.

        None, too, for a value that was given other memory.
        """
        value = self._value()
        if value is not None and self.value is None:
            return None
        (versions, view_version), (old_versions, old_view_version) = self._current_versions(), self._versions
        if any(new is not None and new != old for new, old in zip(versions, old_versions, strict=True)):
            return self._detached_value if value is None else value
        return self._whole if view_version != old_view_version else None

    def rejoin(self) -> bool:
        """Give the value the memory of the view, if that holds the same; return False if it does not."""
        value, view = self.value, self._whole
        if value is None:
            return True
        is_alike = value.shape == view.shape and value.dtype == view.dtype and value.device == view.device
        if value.is_inference() or not is_alike:
            return False
        with torch.no_grad():
            if not _is_equal(value, view):
                return False
            value.data = view  # keeps the tensor object, which the program holds
        return True

    def _current_versions(self) -> tuple[Sequence[int | None], int]:
        """Return the versions of the tensors of the program in the value's memory, and that of the view."""
        return [_version_of(self._value())], _version_of(self._view) or 0


class PartTie(TensorTie):
    """Link of a value that is not a tensor of the program, such as the values tensor of a sparse tensor.

    Autograd knows no such part.  holders: tensors of the program in the memory of the value.
    """

    def __init__(
        self,
        views: TorchViews,
        view: torch.Tensor,
        value: torch.Tensor,
        holders: Sequence[torch.Tensor],
        on_death: Callable[[Tie], None],
    ) -> None:
        """Link a part to the view, unknown to autograd; the holders are held weakly."""
        self._holders = [weakref.ref(holder) for holder in holders]
        super().__init__(views, view, value, recorded=False, on_death=on_death)
        self._value = self._base = _no_tensor  # no tensor of the program stands on either side

    @property
    def value(self) -> torch.Tensor | None:
        """Return the part; None where the memory is gone."""
        data: torch.Tensor | None = self._detached_value
        return data

    def rejoin(self) -> bool:
        """Give the holders the memory of the view, where torch lets them take it.

        Returns False if the values differ, or if a holder still has the value's memory.
        """
        value = self._detached_value
        if value is None:
            return True
        if value.stride() != self._view.stride() or not _is_equal(value, self._view):
            return False
        shift = self._view.storage_offset() - value.storage_offset()
        del value  # a tensor in the memory that the holders are about to leave
        for part in self._parts_in_memory():
            with torch.no_grad():
                start = part.storage_offset() + shift
                part.data = self._view.as_strided(part.size(), part.stride(), start)
        return not self._parts_in_memory()

    def _parts_in_memory(self) -> list[torch.Tensor]:
        """Return the parts of the holders that lie in the memory of the value."""
        parts = (part for holder in self._holders for part in self._views.parts_of(holder()))
        return [part for part in parts if self._views.memory(part) == self.ends[0]]

    def _current_versions(self) -> tuple[Sequence[int | None], int]:
        return [_version_of(holder()) for holder in self._holders], _version_of(self._view) or 0


def _no_tensor() -> None:
    return None


def _real_pairs(x: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of complex numbers as they lie in memory, in a last axis."""
    return torch.view_as_real(x.conj() if x.is_conj() else x)


def _is_equal(value: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if two tensors hold the same numbers, or have no data; NaN equals NaN."""
    return value.is_meta or bool(((value == view) | ((value != value) & (view != view))).all())


def _write_overlapping(
    base: torch.Tensor | None, view: torch.Tensor, value: torch.Tensor, marks: torch.Tensor
) -> WrittenPart:
    """Write the marked elements of a value into an expanded view, then update the value's other rows."""
    size = view.untyped_storage().nbytes() // view.element_size()
    whole = (view if base is None else base).as_strided((size,), (1,), 0)
    whole = whole.detach() if base is None else whole
    index = _strided_as(torch.arange(size, device=view.device), view)[marks]
    whole[index] = value[marks]
    flags = torch.zeros(size, dtype=torch.bool, device=view.device)
    flags[index] = True
    value.copy_(torch.where(_strided_as(flags, view), _strided_as(whole, view), value))
    return WrittenPart(whole, flags)


def _version_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _as_known_to_autograd(
    data: torch.Tensor, program_tensor: torch.Tensor | None, was_written: bool, written: WrittenPart
) -> torch.Tensor:
    """Return `data`, which is outside autograd, as what autograd knows.

    program_tensor: the program's tensor that `data` is, or is a view of; None if that is gone. Then autograd
    need only know what was written, and what reads that.
    """
    if program_tensor is not None:
        return _view_in_autograd(data, program_tensor)
    if was_written and torch.is_grad_enabled():
        return _view_in_autograd(data, written.tensor)
    return data.detach()


def _view_in_autograd(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the elements of `view` as a view of `base` that autograd knows; `base` itself if these are all.

    The two lie in one storage.
    """
    if _same_elements(view, base) and view.is_conj() == base.is_conj() and view.is_neg() == base.is_neg():
        return base
    if base.is_complex() and not view.is_complex():
        base = _real_pairs(base)
    if view.is_complex() and not base.is_complex():  # the base may be the real part alone
        pairs = _real_pairs(view)
        base = base.as_strided(pairs.size(), pairs.stride(), pairs.storage_offset())
        new_view = torch.view_as_complex(base)
    else:
        new_view = base.as_strided(view.size(), view.stride(), view.storage_offset())
    new_view = new_view.conj() if view.is_conj() != new_view.is_conj() else new_view
    return new_view._neg_view() if view.is_neg() != new_view.is_neg() else new_view


def _strided_as(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's view of flags, or of other values, that there are for each element of its storage."""
    return flags.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _same_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have the same elements, in the same order."""
    return (
        first.storage_offset() == second.storage_offset()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
