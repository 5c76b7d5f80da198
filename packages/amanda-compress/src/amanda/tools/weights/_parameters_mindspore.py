"""Parameters of MindSpore, of which ops read views by extents, strides and offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.libraries import do
from amanda.tools.weights._parameters import Changed, StoredParameter, StridedLayout, StridedStore, Undo

Part = StridedLayout | None


class MindSporeParameters(StridedStore):
    """Parameters, and views of all or a part of one."""

    def read(self, parameter: Any, part: Part) -> NDArray[Any]:
        """Return a part as an array."""
        array = parameter.asnumpy()
        return array if part is None else _strided(array.reshape(-1), part)

    def overlaps(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if two parts have elements in common."""
        return bool(self._shared_elements(part, other_part, whole).any())

    def covers(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if a part has every element of another."""
        return bool(self._shared_elements(part, other_part, whole).all())

    def _shared_elements(self, part: Part, other_part: Part, whole: StridedLayout) -> NDArray[Any]:
        mask = np.ones((part or whole).extents, bool)
        return self.transfer([(mask, part)], other_part, whole, False)

    def transfer(
        self, pieces: Sequence[tuple[Any, Any]], part: Part, whole: StridedLayout, fill: Any
    ) -> NDArray[Any]:
        """Return the values of a part, from values of other parts, `fill` where no piece has an element."""
        arrays = [value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value) for value, _ in pieces]
        row = np.full(int(np.prod(whole.extents)), fill, arrays[0].dtype)
        for array, (_, layout) in zip(arrays, pieces, strict=True):
            _strided(row, layout or whole)[...] = array
        values: NDArray[Any] = _strided(row, part or whole).copy()
        return values

    def parameters(self, model: Any) -> Iterator[MindSporeParameter]:
        """Yield each parameter of a cell or a list."""
        for parameter in model.get_parameters() if hasattr(model, "get_parameters") else model:
            yield MindSporeParameter(self.identity(parameter), parameter)


class MindSporeParameter(StoredParameter):
    """A parameter of MindSpore."""

    def change(self, changed: Changed, part: Part = None, undo: Undo | None = None) -> None:
        """Write the values that `changed` returns for the present values of a part."""
        old = self.read()
        row = old.reshape(-1).copy()
        view = row.reshape(old.shape) if part is None else _strided(row, part)
        view[...] = changed(view.copy())
        if undo is not None:
            undo.append(lambda: do("assign", self._parameter, old, like=self._parameter))
        do("assign", self._parameter, row.reshape(old.shape), like=self._parameter)


def _strided(row: NDArray[Any], layout: StridedLayout) -> NDArray[Any]:
    """Return a view of a row of numbers in a layout."""
    steps = [stride * row.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(row[layout.offset :], layout.extents, steps)
