"""Values of ONNX graphs: names, and initializers."""

from __future__ import annotations

from typing import Any

import amanda
from amanda.tools.trace._values import Facts, Values


class FrameworkValues(Values):
    """Answers of ONNX Runtime, whose graphs have one symbol for each value."""

    def name(self, tensor: Any) -> str | None:
        """Return the value's name in the graph."""
        return str(tensor.name)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and name: of an initializer or a value made of one alone, a constant, or an input."""
        if tensor.root is not None:
            return "parameter", str(tensor.root)
        return "input" if tensor.constant is None else "constant", self.name(tensor)

    def facts(self, context: amanda.OpContext) -> Facts:
        """Return the facts of an op, whose name is the node's, or the type where the node has none."""
        op = context.get_op()
        makes = "constant" if context.get_op_type() == "Constant" else "activation"
        return Facts(str(op.name or op.type), makes)
