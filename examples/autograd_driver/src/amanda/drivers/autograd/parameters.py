"""Autograd's parameters, which `finalize` of a tool writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter

from amanda.drivers.autograd.tensors import AutogradTensors


class AutogradParameters(ParameterStore):
    """Parameters of Autograd's models, which ops read as a whole."""

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, Any]:
        """Return the identity of a parameter, and the part that an op reads: None for all of it."""
        return self.identity(parameter), None

    def read(self, parameter: Any, part: Any) -> Any:
        """Return the present values of a parameter, as a tensor."""
        raise NotImplementedError("parameter.detach() or what Autograd has for it")

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        """Yield the parameters of a model; raise ParameterError for what is no model."""
        raise NotImplementedError("yield AutogradParameter(self.identity(parameter), parameter) of each")


class AutogradParameter(StoredParameter):
    """One parameter of Autograd."""

    def read(self) -> Any:
        """Return the present values, as an array of NumPy."""
        return AutogradTensors().to_numpy(self._parameter)

    def change(self, changed: Callable[[Any], Any], part: Any = None, undo: Any = None) -> None:
        """Write `changed` of the present values; append to `undo` a function that writes the old ones."""
        raise NotImplementedError("old = a copy; write(changed(old)); undo.append(partial(write, old)) unless None")
