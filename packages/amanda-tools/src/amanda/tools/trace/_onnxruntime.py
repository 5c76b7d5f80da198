"""Values of ONNX' graphs: names, and which of them initializers hold."""

from __future__ import annotations

from typing import Any

import amanda
from amanda.tools.trace._values import Values


class OnnxValues(Values):
    """Symbols, of which a graph has one for each value."""

    def name(self, tensor: Any) -> str | None:
        """The value's name in the graph."""
        return str(tensor.name)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """An initializer, or what is made of one alone; another constant; or what the graph is given."""
        if tensor.root is not None:
            return "parameter", str(tensor.root)
        return "input" if tensor.constant is None else "constant", self.name(tensor)

    def made(self, context: amanda.OpContext) -> str:
        """Constants are told apart from activations."""
        return "constant" if context.get_op_type() == "Constant" else "activation"

    def op_name(self, context: amanda.OpContext) -> str:
        """The node's name, or its type where it has none."""
        op = context.get_op()
        return str(op.name or op.type)
