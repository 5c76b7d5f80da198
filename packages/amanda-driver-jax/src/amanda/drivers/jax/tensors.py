"""Arrays of JAX in the words of the tools, by this distribution's entry point in `amanda.tensors`."""

from typing import Any

import jax.numpy as jnp
from amanda.tools.kit import Tensors


class JaxTensors(Tensors):
    """Arrays of JAX; what is computed of them is NumPy's, as in the base."""

    def cast(self, value: Any, like: Any) -> Any:
        """Return a number or an array in the element type of an array."""
        return jnp.asarray(value).astype(like.dtype)
