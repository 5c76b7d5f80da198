"""autograd's arrays for tools: tensors, perhaps in boxes, and parameters, which `finalize` writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amanda.drivers.autograd._boxes import plain
from amanda.drivers.autograd._slots import leaves, mark_parameters, slot_of
from amanda.tools.kit import Tensors
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter


class AutogradTensors(Tensors):
    """Boxes, computed with as the arrays that lie in them."""

    def to_numpy(self, x: Any) -> Any:
        return plain(x)


class AutogradParameters(ParameterStore):
    """Arrays in nested dicts, lists, tuples and modules, which ops read as a whole."""

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        arrays = dict(leaves(mark_parameters(model)))
        if not arrays:
            raise ParameterError(f"{type(model).__name__} is no model of autograd: it has no arrays")
        for array in arrays.values():
            yield StoredParameter(self.identity(slot_of(array)), array)
