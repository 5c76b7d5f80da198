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
"""References to a storage that a tie itself holds: the tensor within the value, and the storage object."""
_REFERENCES_OF_A_TIE = 2
"""References to a value: the tie's attribute, and the argument of the function that counts."""


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
        uses: int = torch._C._storage_Use_Count(self._storage._cdata)
        return uses > _USES_OF_A_TIE

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
        # From the side that the write began at to the other.
        value_was_written = start == self.ends[0]
        source, target = (self._value, self._view) if value_was_written else (self._view, self._value)
        with without_transforms(), torch.no_grad():
            levels, data = with_batches_first(source)
            marks = written.marks_in(data)
            if marks is not None and not bool(marks.any()):
                return None  # the write was elsewhere in the storage
        changed = source if marks is None else torch.where(wrap_in_batches(levels, marks), source, target)
        target.copy_(changed)
        self._versions = self._current_versions()
        with without_transforms(), torch.no_grad():
            return WrittenPart(with_batches_first(target)[1], marks)

    def side_written_unseen(self) -> torch.Tensor | None:
        """Return the side whose version has changed since the last copy; None if neither has."""
        now, before = self._current_versions(), self._versions
        return next(
            (
                side
                for side, new, old in zip((self._value, self._view), now, before, strict=True)
                if new != old
            ),
            None,
        )

    def turn_into_view(self) -> bool:
        """Return False if the program still uses the value, which stays apart from the view."""
        return not self.is_value_used

    def _current_versions(self) -> Sequence[int | None]:
        sides = innermost(self._value), innermost(self._view)
        return [None if side.is_inference() else side._version for side in sides]
