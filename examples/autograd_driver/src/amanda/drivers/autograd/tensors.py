"""Autograd's tensors for tools, which compute with arrays of NumPy.

autoray knows many libraries; what it does not know of Autograd is here. `autoray.register_function("autograd",
"transpose", function)` names a function that Autograd has by another name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.tools.kit import Tensors


class AutogradTensors(Tensors):
    """Tensors of Autograd, computed with in NumPy."""

    def to_numpy(self, x: Any) -> Any:
        """Return an array of NumPy with the same values."""
        raise NotImplementedError("x.detach().numpy() or what Autograd has for it")

    def copy(self, array: Any) -> Any:
        """Return a copy, as an array, of an array or a tensor."""
        return np.array(array if isinstance(array, np.ndarray) else self.to_numpy(array))

    def cast(self, value: Any, like: Any) -> Any:
        """Return an array as a tensor of the dtype and on the device of another."""
        raise NotImplementedError("autograd.tensor(value, dtype=like.dtype)")

    def kind(self, x: Any) -> tuple[str, str]:
        """Return names of the dtype and of the device of a tensor."""
        raise NotImplementedError("(str(x.dtype), str(x.device))")
