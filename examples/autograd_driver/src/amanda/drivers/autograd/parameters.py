"""autograd's parameters, which `finalize` of a tool writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from amanda.drivers.autograd._slots import leaves, mark_parameters, slot_of
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter


class AutogradParameters(ParameterStore):
    """Arrays in nested dicts, lists, tuples and modules, which ops read as a whole."""

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, Any]:
        return self.identity(parameter), None

    def read(self, parameter: Any, part: Any) -> Any:
        return parameter.array()

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        arrays = dict(leaves(mark_parameters(model)))
        if not arrays:
            raise ParameterError(f"{type(model).__name__} is no model of autograd: it has no arrays")
        for array in arrays.values():
            yield AutogradParameter(self.identity(slot_of(array)), array)


class AutogradParameter(StoredParameter):
    """An array of a model."""

    def change(self, update: Callable[[Any], Any], part: Any = None, undo: Any = None) -> None:
        old = self.read()
        new = update(old)
        if undo is not None:
            undo.append(partial(np.copyto, self._parameter, old))
        np.copyto(self._parameter, new)
