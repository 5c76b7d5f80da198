"""Parameters of MindSpore, of which ops read views: extents, strides and offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda import interceptor
from amanda.tools._libraries import do
from amanda.tools.kit._holders import Change, Changed, Holders, Undo
from amanda.tools.kit._parts import Form


class MindSporeParameters(Holders):
    """Parameters, and views of all or a part of one."""

    def held(self, holder: Any, weight: Any) -> tuple[Any, Form | None]:
        """Return the parameter that a weight is or is a view of, and its form there."""
        form = _form_of(weight)
        return interceptor.ordinal(holder), None if form == _form_of(holder) else form

    def whole(self, holder: Any) -> Form:
        """Return the parameter's own form."""
        return _form_of(holder)

    def value(self, holder: Any, part: Form | None) -> NDArray[Any]:
        """Return a part as an array."""
        array = holder.asnumpy()
        return array if part is None else _strided(array.reshape(-1), part)

    def overlaps(self, part: Form | None, other: Form | None, whole: Form) -> bool:
        """Return True if two parts have elements in common."""
        return bool(self._shared(part, other, whole).any())

    def covers(self, part: Form | None, other: Form | None, whole: Form) -> bool:
        """Return True if a part has every element of another."""
        return bool(self._shared(part, other, whole).all())

    def _shared(self, part: Form | None, other: Form | None, whole: Form) -> NDArray[Any]:
        ones = np.ones((part or whole)[0], bool)
        return self.carried([(ones, part)], other, whole, False)

    def carried(
        self, pieces: Sequence[tuple[Any, Any]], part: Form | None, whole: Form, fill: Any
    ) -> NDArray[Any]:
        """Return what a part has of values at other parts, `fill` elsewhere; the last of several counts."""
        arrays = [value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value) for value, _ in pieces]
        row = np.full(int(np.prod(whole[0])), fill, arrays[0].dtype)
        for array, (_, form) in zip(arrays, pieces, strict=True):
            _strided(row, form or whole)[...] = array
        found: NDArray[Any] = _strided(row, part or whole).copy()
        return found

    def parameters(self, model: Any) -> Iterator[tuple[Any, Change]]:
        """Yield the identity of each parameter of a cell or a list, and what changes its values."""
        for parameter in model.get_parameters() if hasattr(model, "get_parameters") else model:
            yield interceptor.ordinal(parameter), partial(_change, parameter)


def _form_of(tensor: Any) -> Form:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _strided(row: NDArray[Any], form: Form) -> NDArray[Any]:
    """Return a view of a row of numbers in a form."""
    extents, strides, offset = form
    steps = [stride * row.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(row[offset:], extents, steps)


def _change(parameter: Any, part: Form | None, changed: Changed, undo: Undo) -> None:
    old = np.array(parameter.asnumpy())
    row = old.reshape(-1).copy()
    view = row.reshape(old.shape) if part is None else _strided(row, part)
    view[...] = changed(view.copy())
    undo.append(lambda: do("assign", parameter, old, like=parameter))
    do("assign", parameter, row.reshape(old.shape), like=parameter)
