"""Links between values and views that function transforms have wrapped, so that writes reach both."""

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from amanda.eager import Tie

from ._levels import innermost, with_batches_first, without_transforms, wrap_in_batches
from ._storages import WrittenPart

if TYPE_CHECKING:
    from ._views import TorchViews

_USES_OF_A_TIE = 2
"""References to the value's storage from a tie alone: of the tensor within the value, and of `_storage`."""
_REFERENCES_OF_A_TIE = 2
"""References to the value from a tie alone: its attribute, and the argument of `sys.getrefcount`."""


class LevelTie(Tie):
    """Link between wrappers: the value from a routine, and the view that the value replaced.

    A wrapper cannot be made again from its memory, so the tie holds both sides, until nothing else uses the
    memory of the value. Writes are copied at the level where they happen, where transforms see the copy.
    """

    def __init__(
        self, views: "TorchViews", view: torch.Tensor, value: torch.Tensor, on_death: Callable[[Tie], None]
    ) -> None:
        """Hold both sides, and the versions from which later writes are told; on_death: ends the tie."""
        self._on_death = on_death
        self._value, self._view = value, view
        self._storage = innermost(value).untyped_storage()
        # The memory of the value and of the view, by which writes find the tie.
        self.ends: tuple[Hashable, Hashable] = views.memory(value), views.memory(view)
        self._versions = self._current_versions()

    @property
    def value(self) -> torch.Tensor | None:
        """Return the value; None if only the tie still uses its memory."""
        return self._value if self.is_value_used else None

    @property
    def is_value_used(self) -> bool:
        """Return True if the program has the value, or anything else has a tensor in its memory."""
        if sys.getrefcount(self._value) > _REFERENCES_OF_A_TIE:
            return True
        use_count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return use_count > _USES_OF_A_TIE

    @property
    def view(self) -> torch.Tensor:
        """Return the view."""
        return self._view

    def drop_if_unused(self) -> None:
        """End the tie if nothing else uses the memory of the value."""
        if not self.is_value_used:
            self._on_death(self)

    def copy_across(self, start: Hashable, written: WrittenPart) -> WrittenPart | None:
        """Copy written elements to the other side, as an op of the program would; return them there.

        None is returned, and nothing copied, if the write was elsewhere in the storage.
        """
        value_memory, _ = self.ends
        value_was_written = start == value_memory
        source, target = (self._value, self._view) if value_was_written else (self._view, self._value)
        with without_transforms(), torch.no_grad():
            levels, source_data = with_batches_first(source)
            written_mask = written.mask_in(source_data)  # None: all elements
            if written_mask is not None and not bool(written_mask.any()):
                return None  # the write was elsewhere in the storage
        written_values = source
        if written_mask is not None:
            written_values = torch.where(wrap_in_batches(levels, written_mask), source, target)
        target.copy_(written_values)
        self._versions = self._current_versions()
        with without_transforms(), torch.no_grad():
            _, target_data = with_batches_first(target)
            return WrittenPart(target_data, written_mask)

    def side_written_unseen(self) -> torch.Tensor | None:
        """Return the side whose version has changed since the last copy; None if neither has."""
        value_version, view_version = self._current_versions()
        old_value_version, old_view_version = self._versions
        if value_version != old_value_version:
            return self._value
        return self._view if view_version != old_view_version else None

    def turn_into_view(self) -> bool:
        """Return False if the program still uses the value, which stays apart from the view."""
        return not self.is_value_used

    def _current_versions(self) -> Sequence[int | None]:
        sides = innermost(self._value), innermost(self._view)
        return [None if side.is_inference() else side._version for side in sides]
