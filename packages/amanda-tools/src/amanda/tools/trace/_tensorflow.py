"""Tensors of TensorFlow: what a graph's symbols and functions' arguments stand for, and variables."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.trace._values import Description, Forget, Values

_WRITES = re.compile(r"Assign\w*|Resource(?:Sparse)?Apply\w+|ResourceScatter\w+|ResourceStridedSliceAssign")
_HANDLES = ("resource", "variant")
_READS = frozenset({"ReadVariableOp"})
_MAKES_VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_(.+)_\d+")


class TensorFlowValues(Values):
    """Tensors by the number that TensorFlow gives each once, whether eager or a graph's symbol."""

    def __init__(self, shape: Callable[[Any], Any], dtype: Callable[[Any], Any]) -> None:
        super().__init__(shape, dtype)
        self._variables: dict[int, tuple[str, str]] = {}
        self._captured: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        self._arguments: dict[str, Sequence[int]] = {}

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also one of unknown rank."""
        return hasattr(value, "_id") and self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True if a tensor stands for a variable, an iterator or a dataset."""
        return self._dtype(tensor) in _HANDLES

    def key(self, tensor: Any) -> Hashable:
        """Its number."""
        number: int = tensor._id
        return number

    def hold(self, tensor: Any, key: Hashable, forget: Forget) -> Any:
        """A weak reference."""
        return weakref.ref(tensor, lambda _: forget(key))

    def describe(self, tensor: Any) -> Description:
        """Extents, element type, device and size; a handle of a variable tells of the variable."""
        found = super().describe(tensor)
        return found._replace(bytes=None) if found.dtype in (*_HANDLES, "string") else found

    def name(self, tensor: Any) -> str | None:
        """A symbol's name; eager tensors have none."""
        return str(tensor.name) if hasattr(tensor, "op") else None

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Variables by the path that they have in the outermost layer or module that is being called."""
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

    def made(self, context: amanda.OpContext) -> str:
        """Constants and variables are told apart from activations."""
        if context.is_backward():
            return "gradient"
        kind = context.get_op_type()
        if kind in _READS:
            return ""
        if kind in _MAKES_VARIABLES:
            return "parameter"
        return "constant" if kind == "Const" else "activation"

    def brings_in(self, context: amanda.OpContext) -> bool:
        """An iterator does, which is another one in each epoch."""
        return context.get_op_type().startswith("IteratorGetNext")

    def written(self, context: amanda.OpContext) -> Sequence[int]:
        """The variables that an op assigns to: all whose handles it is given."""
        if context.is_backward() or not _WRITES.fullmatch(context.get_op_type()):
            return ()
        inputs = context.get_inputs()
        handles = tuple(i for i, one in enumerate(inputs) if self._dtype(one) == "resource")
        return handles or (0,)

    def op_name(self, context: amanda.OpContext) -> str:
        """The operation's name in its graph, its type in eager mode."""
        op = context.get_op() if context.is_forward() else context.get_backward_op()
        return str(op.name)

    # ---- functions ----

    def outer(self, tensor: Any) -> Any:
        """Return the tensor that a function captured or is called with, or its position."""
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

    def call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note what the functions that an op calls, which come next, are given."""
        skipped = 1 if context.get_op_type() in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        for value in context.get_attrs().values():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict) and "name" in one:
                    name = _FUNCTION.sub(r"\1", str(one["name"]))
                    self._arguments[name] = arguments[skipped:]
