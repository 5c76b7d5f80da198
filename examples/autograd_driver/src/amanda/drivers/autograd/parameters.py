"""autograd's parameters, which `finalize` of a tool writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from amanda.drivers.autograd._slots import leaves, mark_parameters, slot_of
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter


class AutogradParameters(ParameterStore):
    """Arrays in nested dicts, lists, tuples and modules, which ops read as a whole."""

    def read(self, parameter: Any, part: Any) -> Any:
        return parameter.tensor()

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        arrays = dict(leaves(mark_parameters(model)))
        if not arrays:
            raise ParameterError(f"{type(model).__name__} is no model of autograd: it has no arrays")
        for array in arrays.values():
            yield AutogradParameter(self.identity(slot_of(array)), array)


class AutogradParameter(StoredParameter):
    """An array of a model."""

    def write(self, values: Any) -> None:
        np.copyto(self._parameter, values)
