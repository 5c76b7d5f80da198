"""Memory of tensors for the core, and ties, which copy writes between a routine's value and a view."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from amanda.eager import Tie, Views
from torch.autograd import forward_ad

from ._level_ties import LevelTie
from ._levels import innermost, is_wrapped, with_batches_first, without_transforms
from ._overrides import as_class_of
from ._storages import (
    PLAIN,
    WrittenElements,
    WrittenPart,
    copy_laid_out_like,
    distinct_elements,
    has_overlap,
    has_same_elements,
    is_strided,
    storage_id,
    strided_as,
    strided_parts,
)
from ._straight_through import report_lost_writes


class TorchViews(Views):
    """`Views` of PyTorch, where tensors with one storage share memory."""

    def __init__(self) -> None:
        super().__init__()
        self._level_ties: list[LevelTie] = []

    def memory(self, value: Any) -> Hashable:
        """Return the storage of a strided tensor, by address; None for a tensor that consists of others."""
        if type(value) is WrittenElements:
            value = value.tensor
        if type(value) in PLAIN:
            return None if value.is_nested else storage_id(value)
        if not is_strided(value):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return storage_id(value)

    def components_of(self, value: Any) -> Sequence[Any]:
        """Return the strided tensors that a tensor consists of, such as the values of a sparse one."""
        return (value,) if type(value) is WrittenElements else strided_parts(value)

    def keeps_alive(self, view: Any, value: torch.Tensor) -> bool:
        """Return True for the tensor itself and its views in autograd, unlike a `detach` or a part.

        True in any case for a wrapped value.
        """
        # A tie of wrapped tensors holds the value itself.
        return (
            view is value
            or is_wrapped(value)
            or getattr(view, "_base", None) is (value if value._base is None else value._base)
        )

    def is_in_foreign_memory(self, value: torch.Tensor) -> bool:
        """Return True for memory from outside of torch, which torch cannot resize."""
        return not innermost(value).untyped_storage().resizable()

    def create_tie(
        self, view: torch.Tensor, value: torch.Tensor, is_input: bool, on_death: Callable[[Tie], None],
        holders: Sequence[torch.Tensor] = (),
    ) -> Tie:  # fmt: skip
        """Link a value to a view; autograd records writes through the link unless the view is a `detach`.

        holders: tensors of the program of which the value is a part, such as the values of a sparse tensor.
        is_input: whether the view is an input of the op.  on_death: called when the value's memory is gone.
        A link of wrapped tensors holds both of them; links of this kind that nothing uses any more end here,
        and writes that such a link loses are reported.
        """
        if any(map(is_wrapped, (view, value, *holders))):
            self.drop_unused()
            report_lost_writes(view)
            tie = LevelTie(self, view, value, on_death)
            self._level_ties.append(tie)
            return tie
        if holders:
            return PartTie(self, view, value, holders, on_death)
        is_known_to_autograd = is_input or (
            view._is_view() and (view._base is None or is_strided(view._base))
        )
        return TensorTie(self, view, value, is_known_to_autograd, on_death)

    def copy_in_layout(self, view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Clone a tensor with the strides of a view, so that `contiguous` copies if it would have copied.

        The clone for a wrapped view has the batches of the view.
        """
        if is_wrapped(view):
            return torch.empty_like(view).copy_(value)
        copy: torch.Tensor = as_class_of(value, copy_laid_out_like(view, value))
        return copy

    def drop_unused(self) -> None:
        """End the ties of wrapped tensors whose memory nothing else uses any more."""
        for tie in self._level_ties:
            tie.drop_if_unused()
        self._level_ties = [tie for tie in self._level_ties if tie.is_value_used]

    def shares_memory(self, value: torch.Tensor) -> bool:
        """Return True if a tensor is a view of another, or a parameter."""
        return value._is_view() or (value.requires_grad and value.is_leaf)

    def have_same_layout(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Return True if two tensors have the same strides."""
        return first.stride() == second.stride()

    def written_parts(self, values: Sequence[Any]) -> dict[Hashable, WrittenPart]:
        """Return the part of each storage that consists of written tensors' elements, by storage.

        values: tensors, or `WrittenElements` of one, the only value in its storage.
        """
        part_by_memory: dict[Hashable, WrittenPart] = {}
        with without_transforms():
            for value in values:
                memory = self.memory(value)
                if type(value) is WrittenElements:
                    part_by_memory[memory] = value.part()
                    continue
                tensor = with_batches_first(value)[1] if is_wrapped(value) else value
                part = part_by_memory.get(memory)
                part_by_memory[memory] = WrittenPart(tensor) if part is None else part.add(tensor)
        return part_by_memory


class TensorTie(Tie):
    """Link between a tensor that a routine returned, the value, and the view that the value replaced.

    The link lives as long as the memory of the value, which other tensors of the program may share. It keeps
    the memory of the view alive, as the view would, but not the view's graph.
    recorded: whether autograd records writes into the value as writes into the view, and the reverse.
    """

    def __init__(
        self, views: TorchViews, view: torch.Tensor, value: torch.Tensor, recorded: bool,
        on_death: Callable[[Tie], None],
    ) -> None:  # fmt: skip
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
            self._full_view = view.detach()
            # Copies between the sides write each memory cell once.
            cells = view if view.stride() == value.stride() else value
            self._distinct_view = distinct_elements(self._full_view, cells)
            distinct_value = distinct_elements(value.detach(), cells)
        # By these the value is made again from its storage; a tensor here would keep the storage alive.
        self._empty_value = torch.empty(0, dtype=distinct_value.dtype, device=distinct_value.device)
        self._value_form = distinct_value.storage_offset(), distinct_value.size(), distinct_value.stride()
        # Views that torch conjugates or negates only when it reads them.
        self._is_conj, self._is_neg = distinct_value.is_conj(), distinct_value.is_neg()
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
        return self._full_view

    @property
    def _detached_value(self) -> Any:
        """Return the value, outside autograd; None where its memory is gone."""
        storage = self._storage()
        if storage is None:
            return None
        with torch.no_grad():
            data = self._empty_value.detach().set_(storage, *self._value_form)
            data = data.conj() if self._is_conj else data
            return data._neg_view() if self._is_neg else data

    def copy_across(self, start: Hashable, written: WrittenPart) -> WrittenPart | None:
        """Copy written elements to the other side, as an op of the program would; return them there.

        None is returned, and nothing copied, if the write was elsewhere or the value's memory is gone.
        """
        value, base = self._value(), self._base()
        if value is not None and self.value is None:
            return None  # the program gave the value other memory
        value_data, view_data = self._detached_value, self._distinct_view
        if value_data is None:
            return None
        value_memory, _ = self.ends
        value_was_written = start == value_memory
        are_conjugate = False
        if value_data.is_complex() and view_data.is_complex() and not written.tensor.is_complex():
            # The real or the imaginary parts alone may be written; a gradient goes on to the others.
            are_conjugate = value_data.is_conj() != view_data.is_conj()
            value_data, view_data = _real_pairs(value_data), _real_pairs(view_data)
        mask = written.mask_in(value_data if value_was_written else view_data)
        try:
            if mask is not None and not mask.is_meta and not bool(mask.any()):
                return None  # the write was elsewhere in the storage
            is_recorded = self._recorded and written.tensor.requires_grad and torch.is_grad_enabled()
            # Recorded only if the write was: gradients then follow the copy to the other side.
            with torch.set_grad_enabled(is_recorded or forward_ad._current_level >= 0):
                value_side = _as_known_to_autograd(value_data, value, value_was_written, written)
                view_side = view_data
                if torch.is_grad_enabled():
                    view_side = _as_known_to_autograd(view_data, base, not value_was_written, written)
                source, target = (value_side, view_side) if value_was_written else (view_side, value_side)
                if are_conjugate:
                    real, imaginary = source[..., 0], source[..., 1]
                    source = torch.stack([real, -imaginary], -1)
                if value_was_written and mask is not None and has_overlap(view_data):
                    return _write_expanded_view(base, view_data, source, mask)
                target.copy_(source if mask is None else torch.where(mask, source, target))
                return WrittenPart(target, mask)
        finally:  # the copy itself must not count as a write of the program
            self._versions = self._current_versions()

    def side_written_unseen(self) -> torch.Tensor | None:
        """Return the side whose version has changed since the last copy; None if neither has.

        None, too, for a value that was given other memory.
        """
        value = self._value()
        if value is not None and self.value is None:
            return None
        value_versions, view_version = self._current_versions()
        old_value_versions, old_view_version = self._versions
        version_pairs = zip(value_versions, old_value_versions, strict=True)
        if any(new is not None and new != old for new, old in version_pairs):
            return self._detached_value if value is None else value
        return self._full_view if view_version != old_view_version else None

    def turn_into_view(self) -> bool:
        """Make the value a view of the view's memory; return False, and change nothing, if they differ.

        True, too, if the value is gone.
        """
        value, view = self.value, self._full_view
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
        return [_version_of(self._value())], _version_of(self._distinct_view) or 0


class PartTie(TensorTie):
    """Link of a value that is not a tensor of the program, such as the values tensor of a sparse tensor.

    Autograd knows no such part.  holders: tensors of the program in the memory of the value.
    """

    def __init__(
        self, views: TorchViews, view: torch.Tensor, value: torch.Tensor, holders: Sequence[torch.Tensor],
        on_death: Callable[[Tie], None],
    ) -> None:  # fmt: skip
        """Link a part to the view, unknown to autograd; the holders are held weakly."""
        self._holders = [weakref.ref(holder) for holder in holders]
        super().__init__(views, view, value, recorded=False, on_death=on_death)
        self._value = self._base = _no_tensor  # no tensor of the program stands on either side

    @property
    def value(self) -> torch.Tensor | None:
        """Return the part; None where the memory is gone."""
        data: torch.Tensor | None = self._detached_value
        return data

    def turn_into_view(self) -> bool:
        """Give the holders the memory of the view, where torch lets them take it.

        Returns False if the values differ, or if a holder still has the value's memory.
        """
        value = self._detached_value
        if value is None:
            return True
        if value.stride() != self._distinct_view.stride() or not _is_equal(value, self._distinct_view):
            return False
        # From a place in the memory of the value to the same place in that of the view.
        offset_shift = self._distinct_view.storage_offset() - value.storage_offset()
        del value  # a tensor in the memory that the holders are about to leave
        for part in self._parts_in_memory():
            with torch.no_grad():
                offset = part.storage_offset() + offset_shift
                part.data = self._distinct_view.as_strided(part.size(), part.stride(), offset)
        return not self._parts_in_memory()

    def _parts_in_memory(self) -> list[torch.Tensor]:
        """Return the parts of the holders that lie in the memory of the value."""
        parts = (part for holder in self._holders for part in self._views.components_of(holder()))
        return [part for part in parts if self._views.memory(part) == self.ends[0]]

    def _current_versions(self) -> tuple[Sequence[int | None], int]:
        return [_version_of(holder()) for holder in self._holders], _version_of(self._distinct_view) or 0


def _no_tensor() -> None:
    return None


def _real_pairs(x: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of complex numbers as they lie in memory, in a last axis."""
    return torch.view_as_real(x.conj() if x.is_conj() else x)


def _is_equal(value: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if two tensors hold the same numbers, or have no data; NaN equals NaN."""
    return value.is_meta or bool(((value == view) | ((value != value) & (view != view))).all())


def _write_expanded_view(
    base: torch.Tensor | None, view: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> WrittenPart:
    """Write elements of a value into an expanded view, then update the value's elements in the same cells.

    base: of the view, known to autograd; None if it is gone.  mask: of the elements to write.
    Returns the written cells of the view's storage.
    """
    cell_count = view.untyped_storage().nbytes() // view.element_size()
    cells = (view if base is None else base).as_strided((cell_count,), (1,), 0)
    cells = cells.detach() if base is None else cells
    written_cells = strided_as(torch.arange(cell_count, device=view.device), view)[mask]
    cells[written_cells] = value[mask]
    is_written = torch.zeros(cell_count, dtype=torch.bool, device=view.device)
    is_written[written_cells] = True
    value.copy_(torch.where(strided_as(is_written, view), strided_as(cells, view), value))
    return WrittenPart(cells, is_written)


def _version_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _as_known_to_autograd(
    data: torch.Tensor, program_tensor: torch.Tensor | None, was_written: bool, written: WrittenPart
) -> torch.Tensor:
    """Return elements outside autograd as a tensor that autograd knows, in the same memory.

    program_tensor: the program's tensor that has the elements; None if it is gone. The elements are then a
    view of the tensor that was written, if this side was, and else stay outside autograd.
    """
    if program_tensor is not None:
        return _view_in_autograd(data, program_tensor)
    if was_written and torch.is_grad_enabled():
        return _view_in_autograd(data, written.tensor)
    return data.detach()


def _view_in_autograd(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the elements of `view`, in the storage of `base`, as a view of `base` that autograd knows.

    It is conjugated or negated as `view` is; `base` itself if both have the same elements.
    """
    if has_same_elements(view, base) and view.is_conj() == base.is_conj() and view.is_neg() == base.is_neg():
        return base
    if base.is_complex() and not view.is_complex():
        base = _real_pairs(base)
    if view.is_complex() and not base.is_complex():  # the base may be the real part alone
        pairs = _real_pairs(view)
        base_pairs = base.as_strided(pairs.size(), pairs.stride(), pairs.storage_offset())
        new_view = torch.view_as_complex(base_pairs)
    else:
        new_view = base.as_strided(view.size(), view.stride(), view.storage_offset())
    new_view = new_view.conj() if view.is_conj() != new_view.is_conj() else new_view
    return new_view._neg_view() if view.is_neg() != new_view.is_neg() else new_view
