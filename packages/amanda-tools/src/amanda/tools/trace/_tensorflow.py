"""Tensors of TensorFlow: eager ones, symbols of graphs, arguments of functions, and variables."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.trace._values import Ask, Facts, Values

_WRITES = re.compile(r"Assign\w*|Resource(?:Sparse)?Apply\w+|ResourceScatter\w+|ResourceStridedSliceAssign")
_HANDLES = ("resource", "variant")
_MAKES = {"ReadVariableOp": "", "Const": "constant"}
_MAKES.update(dict.fromkeys(("VarHandleOp", "VariableV2", "Variable"), "parameter"))
"""Kinds of what some types of operations make."""
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_(.+)_\d+")


class FrameworkValues(Values):
    """Answers of TensorFlow, whose tensors have a number each, whether eager or symbols of a graph."""

    def __init__(self, shape: Ask, dtype: Ask) -> None:
        super().__init__(shape, dtype)
        self._variables: dict[int, tuple[str, str]] = {}
        self._captured: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        self._arguments: dict[str, Sequence[int]] = {}

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also for one of unknown rank."""
        return hasattr(value, "_id") and self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True for a reference to a variable, an iterator or a dataset."""
        return self._dtype(tensor) in _HANDLES

    def name(self, tensor: Any) -> str | None:
        """Return a symbol's name; eager tensors have none."""
        return str(tensor.name) if hasattr(tensor, "op") else None

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and path of a variable of the outermost layer or module that is being called."""
        if self._dtype(tensor) != "resource":
            return "input", self.name(tensor)
        if tensor._id not in self._variables:
            for subject in interceptor.subjects()[:1]:
                self._note_variables(getattr(subject, "variables", ()))
        return self._variables.get(tensor._id, ("parameter", self.name(tensor)))

    def _note_variables(self, variables: Any) -> None:
        for variable in variables if isinstance(variables, (list, tuple)) else ():
            value = getattr(variable, "value", None)
            held = variable if hasattr(variable, "handle") else value
            handle = getattr(held, "handle", None)
            if handle is not None:
                kind = "parameter" if getattr(variable, "trainable", True) else "buffer"
                name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0")
                self._variables.setdefault(handle._id, (kind, name))

    def facts(self, context: amanda.OpContext) -> Facts:
        """Return the facts of an op, whose name is that of its graph, or its type in eager mode."""
        if context.is_backward():
            return Facts(str(context.get_backward_op().name), "gradient")
        kind, inputs = context.get_op_type(), context.get_inputs()
        written: Sequence[int] = ()
        if _WRITES.fullmatch(kind):
            written = [i for i, one in enumerate(inputs) if self._dtype(one) == "resource"] or (0,)
        makes = _MAKES.get(kind, "activation")
        return Facts(str(context.get_op().name), makes, written, kind.startswith("IteratorGetNext"))

    def outer(self, tensor: Any) -> Any:
        """Return the tensor that a function captured, or the index of an argument of its call."""
        graph = getattr(tensor, "graph", None)
        if graph is None or not hasattr(graph, "captures"):
            return None
        captured = self._captured.get(graph)
        if captured is None or tensor._id not in captured:
            pairs = ((inner._id, weakref.ref(outer)) for outer, inner in graph.captures)
            captured = self._captured[graph] = dict(pairs)
            self._note_variables(getattr(graph, "variables", ()))
        if tensor._id in captured:
            return captured[tensor._id]()
        arguments = self._arguments.get(graph.name, ())
        for index, argument in zip(arguments, graph.inputs, strict=False):
            if argument is tensor or argument._id == tensor._id:
                return index
        return None

    def note_call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note the arguments of the functions that an op calls, which come next."""
        skipped = 1 if context.get_op_type() in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        for value in context.get_attrs().values():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict) and "name" in one:
                    name = _FUNCTION.sub(r"\1", str(one["name"]))
                    self._arguments[name] = arguments[skipped:]
