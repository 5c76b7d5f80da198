"""Values of JAX: arrays, and the symbols of programs that are traced."""

from __future__ import annotations

from typing import Any

import amanda
from amanda.backend import TensorMap
from amanda.tools.kit import leaves
from amanda.tools.trace._values import Ask, Facts, Values


class FrameworkValues(Values):
    """Answers of JAX, whose weights are known by their slots in a model or in arguments."""

    def __init__(self, shape: Ask, dtype: Ask) -> None:
        super().__init__(shape, dtype)
        self._weights: TensorMap[str] = TensorMap()

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True for an op that is traced into a program: its inputs and outputs are symbols."""
        import jax

        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or ()
        return any(isinstance(one, jax.core.Tracer) for one in leaves(values))

    def facts(self, context: amanda.OpContext) -> Facts:
        """Return the facts of an op, and note which of its inputs are weights."""
        if context.is_forward():
            for index, value in enumerate(context.get_inputs()):
                variable = None if isinstance(value, (list, tuple)) else context.get_variable(index)
                if variable is not None and self._dtype(value) is not None:
                    self._weights[value] = str(context.get_variable_path(variable))
        return super().facts(context)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and path of a weight."""
        path = self._weights.get(tensor)
        return ("input", None) if path is None else ("parameter", path)
