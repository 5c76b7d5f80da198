"""Graphs of the fake framework: a function is traced once for each form of its arguments, then runs.

A graph is a list of nodes, each of which calls an operator on values by name. Nothing is differentiated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any, ClassVar, NamedTuple

from amanda.testing.fake import _operators
from amanda.testing.fake._autograd import Parameter, Tensor, no_grad


class GraphNode(NamedTuple):
    """One call of an operator.

    inputs: names of values, lists of names, and plain numbers.  outputs: names of what the call gives.
    name: tells it from the other nodes.  scope: path of the function that it is in.  source: "file:line".
    """

    op: Callable[..., Any]
    inputs: tuple[Any, ...]
    outputs: tuple[str, ...]
    name: str
    scope: str = ""
    source: str = ""


class OpGraph:
    """A graph: its nodes in the order in which they run.

    inputs: names of the values that a run is given.  constants: values that every run has, by name.
    outputs: the name of what a run gives, or a tuple of names.
    _path: the attributes that hold the functions that are being traced.
    """

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.constants: dict[str, Tensor] = {}
        self.nodes: list[GraphNode] = []
        self.outputs: Any = ()
        self._path: list[str] = []

    def run(self, values: Sequence[Tensor]) -> Any:
        """Run the nodes on values of the graph's inputs; return its outputs."""
        values_by_name = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        with no_grad():
            for node in self.nodes:
                values_by_name.update(compute(node, values_by_name))
        return values_of_names(self.outputs, values_by_name)

    def add(self, op: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Add a node that calls an operator from the caller's line; return the symbols of its outputs."""
        caller = [frame for frame in traceback.extract_stack() if frame.filename != __file__][-1]
        name = f"{op.__name__}_{len(self.nodes)}"
        output_names = (f"{name}:0", f"{name}:1") if op is _operators.split else (name,)
        inputs = tuple(map(self._name_of, args))
        source = f"{caller.filename}:{caller.lineno}"
        self.nodes.append(GraphNode(op, inputs, output_names, name, ".".join(self._path), source))
        symbols = [TracedValue(self, output_name) for output_name in output_names]
        return _operators.Halves(*symbols) if len(symbols) > 1 else symbols[0]  # type: ignore[arg-type]

    def trace(self, function: Callable[..., Any], args: Sequence[Any]) -> OpGraph:
        """Add the operators that a function calls, with its tensor arguments as inputs; return the graph."""
        self.outputs = self._name_of(function(*map(self._symbol_of_argument, args)))
        return self

    def _symbol_of_argument(self, value: Any) -> Any:
        """Return a symbol for a tensor argument, a new input of the graph; other arguments as they are."""
        if isinstance(value, list):
            return [self._symbol_of_argument(item) for item in value]
        if not _is_graph_input(value):
            return value
        self.inputs.append(f"input_{len(self.inputs)}")
        return TracedValue(self, self.inputs[-1])

    def _name_of(self, value: Any) -> Any:
        """Return the name of a symbol, or of a tensor, which becomes a constant; also in tuples and lists.

        Any other value is returned as it is.
        """
        if isinstance(value, TracedValue):
            return value.name
        if isinstance(value, tuple):
            return tuple(map(self._name_of, value))
        if isinstance(value, list):
            return [self._name_of(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        constant_name = next((name for name, item in self.constants.items() if item is value), None)
        name = constant_name or f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


class TracedValue:
    """A symbol: a value of a graph that is traced, without numbers."""

    def __init__(self, graph: OpGraph, name: str) -> None:
        self.graph = graph
        self.name = name

    def __add__(self, other: Any) -> Any:
        return self.graph.add(_operators.add, [self, other])

    def __mul__(self, other: Any) -> Any:
        return self.graph.add(_operators.mul, [self, other])


class TracedFunction:
    """A function that runs as a graph; within the tracing of another it becomes part of that one's graph.

    scope: the attribute of a function that holds this one.
    """

    # Reentrant, since a function that is traced may call another.
    lock: ClassVar[Any] = RLock()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.scope = ""
        self.graphs: dict[Any, OpGraph] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a function that it holds takes the attribute's name as its scope."""
        if isinstance(value, TracedFunction):
            # An attribute's name is the path that a context tells, as that of a layer.
            value.scope = name
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy traces its own graphs, whose constants are its own parameters.
        return {**self.__dict__, "graphs": {}}

    def __call__(self, *args: Any) -> Any:
        """Run the graph for arguments of this form; within a trace, call the function itself."""
        graph = next((item.graph for item in _flatten_lists(args) if isinstance(item, TracedValue)), None)
        if graph is not None:
            outer_path = graph._path
            graph._path = [*outer_path, self.scope] if self.scope else outer_path
            try:
                return self.function(*args)
            finally:
                graph._path = outer_path
        # By dtype and rank, as frameworks retrace: another size of the same rank runs the same graph.
        key = tuple(map(_form_of, args))
        with self.lock:  # threads may call it for the first time at once
            if key not in self.graphs:
                self.graphs[key] = OpGraph().trace(self.function, args)
        return self.graphs[key].run([item for item in _flatten_lists(args) if _is_graph_input(item)])


def operator(op: Callable[..., Any]) -> TracedFunction:
    """Return an operator as a function: a call of it with tensors runs a graph of one node."""
    return TracedFunction(
        lambda *args: next(item.graph for item in _flatten_lists(args) if isinstance(item, TracedValue)).add(
            op, args
        )
    )


def compute(node: GraphNode, values_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a node gives, by name."""
    results = node.op(*(values_of_names(item, values_by_name) for item in node.inputs))
    return dict(zip(node.outputs, results if len(node.outputs) > 1 else [results], strict=True))


def values_of_names(names: Any, values_by_name: Mapping[str, Any]) -> Any:
    """Return the values of names, also in tuples and lists; any other item as it is, a pair as Halves."""
    if isinstance(names, tuple):
        values = [values_of_names(item, values_by_name) for item in names]
        # A pair is the result of `split`.
        return _operators.Halves(*values) if len(values) == 2 else tuple(values)
    if isinstance(names, list):
        return [values_of_names(item, values_by_name) for item in names]
    return values_by_name[names] if isinstance(names, str) else names


def _is_graph_input(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Parameter)


def _flatten_lists(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def _form_of(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_form_of, value))
    return (value.dtype, len(value.shape)) if _is_graph_input(value) else value
