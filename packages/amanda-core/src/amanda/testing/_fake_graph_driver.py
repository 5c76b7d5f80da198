"""The fake framework's graphs, brought to Amanda: the smallest driver of graphs, to read and to copy from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.backend import (
    Execution,
    GraphAnalysis,
    GraphDriver,
    Insertion,
    NotTraceable,
    OpFacts,
    Rewriter,
    Rewriting,
    Side,
    Value,
    digest,
)
from amanda.errors import AmandaError
from amanda.testing import fake
from amanda.testing._fake_driver import FakeTensors
from amanda.testing.fake import Parameter, Tensor, _graphs, _operators
from amanda.testing.fake._graphs import GraphNode, OpGraph


class NamedSymbol:
    """A value of a graph while tools analyse it: its name, and the constant that it is; None if computed."""

    def __init__(self, name: str, constant: Tensor | None = None) -> None:
        self.name = name
        self.constant = constant


class TracedSymbol(NamedSymbol):
    """A value that a traceable routine computes with; what the routine does becomes nodes of the rewriter."""

    def __init__(self, name: str, rewriter: FakeRewriter) -> None:
        super().__init__(name)
        self.rewriter = rewriter

    def __mul__(self, other: Any) -> TracedSymbol:
        return self.rewriter.record(_operators.mul, self, other)

    def __add__(self, other: Any) -> TracedSymbol:
        return self.rewriter.record(_operators.add, self, other)


class SymbolTensors(FakeTensors):
    """Tensors of the fake framework, and symbols of its graphs."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, and for what stands for one."""
        return isinstance(value, (Tensor, NamedSymbol))

    def read_each(self, value: Any, read: Callable[[Any], Any]) -> Any:
        """Return what `read` returns for a tensor, and None for a symbol, which has no properties."""
        return super().read_each(value, lambda x: None if isinstance(x, NamedSymbol) else read(x))

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the type of `original`; a symbol as it is."""
        return value if isinstance(value, NamedSymbol) else super().straight_through(original, value)


class RoutineCallNode(NamedTuple):
    """A node of a rewritten graph that calls routines: those in a slot, on values by name."""

    slot: int
    reads: Sequence[str]
    result_names: Sequence[str]


@dataclass(kw_only=True)
class FakeRewriting(Rewriting):
    """The result of a rewrite: nodes of the copy, constants, and the names of outputs."""

    items: list[GraphNode | RoutineCallNode] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    outputs: Any = ()


class FakeRewriter(Rewriter[GraphNode]):
    """Writes the copy of a graph: its nodes, and calls of routines between them, on values by name."""

    rewriting: FakeRewriting

    def __init__(self, graph: OpGraph, rewriting: FakeRewriting) -> None:
        super().__init__(rewriting)
        self.graph = graph
        # By the graph's number: two graphs of one function have ops of their own.
        self.identity = digest("fake/graph", interceptor.ordinal(graph))
        self.symbols = {name: NamedSymbol(name, value) for name, value in graph.constants.items()}

    def nodes(self) -> Iterator[GraphNode]:
        """Return the nodes, in the order in which they run."""
        return iter(self.graph.nodes)

    def sides(self, node: GraphNode) -> tuple[Side, Side]:
        """Return a node's inputs, names, lists of names and plain numbers, and its outputs as sides."""
        names = [name for item in node.inputs for name in (item if isinstance(item, list) else [item])]
        sizes = [len(item) if isinstance(item, list) else None for item in node.inputs]
        inputs = Side(refs=names, symbols=list(map(self.symbol, names)), sizes=sizes)
        output_symbols = list(map(self.symbol, node.outputs))
        return inputs, Side(node.outputs, output_symbols, sizes=[None] * len(node.outputs))

    def facts(self, node: GraphNode, inputs: Side) -> OpFacts:
        """Return the facts of a node, for tools; its id is that of its name in the graph."""
        positions = [i for i, value in enumerate(inputs.values) if _parameter_of(value) is not None]
        return OpFacts(
            node.op, digest(self.identity, node.name), self.rewriting.namespace, _INPUT_NAMES, inputs.values,
            op_type=node.op.__name__, scope=node.scope, source=node.source, variable_positions=positions,
            graph=self.identity, read_value=_read_constant,
            variable_of=_parameter_of, read_variables=lambda: tuple(id(inputs.values[i]) for i in positions),
            original=lambda: lambda values: node.op(*values),
        )  # fmt: skip

    def write_node(self, node: GraphNode, inputs: Side, outputs: Side) -> None:
        """Write a node to the copy, with the names of its inputs after the routines before it."""
        names = iter(inputs.refs)
        # A size is that of a list among the inputs; None for a single value.
        node_inputs = [
            next(names) if size is None else [next(names) for _ in range(size)] for size in inputs.sizes
        ]
        self.rewriting.items.append(node._replace(inputs=tuple(node_inputs)))

    def is_changeable(self, symbol: Any) -> bool:
        """Return True for a value of the graph; a plain number among a node's inputs cannot be replaced."""
        return isinstance(symbol, NamedSymbol)

    def write_call(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write a node that calls the routines of an insertion by their slot; return its outputs."""
        slot = self.rewriting.add_slot(insertion)
        output_names = [f"amanda_{slot}:{i}" for i in range(len(outputs))]
        input_names = [value.ref for value in inputs]
        self.rewriting.items.append(RoutineCallNode(slot, input_names, output_names))
        return [Value(name, self.symbol(name)) for name in output_names]

    def inline(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write what traceable routines do as nodes; return their results.

        Raises NotTraceable if a routine does with a symbol what only a tensor can do.
        """
        symbols = [
            TracedSymbol(value.ref, self) if isinstance(value.symbol, NamedSymbol) else value.symbol
            for value in inputs
        ]
        try:
            # Called once with symbols: what the routines do to these becomes nodes of the copy.
            results = self.run_routines(insertion, symbols)
        except (TypeError, AttributeError) as error:
            raise NotTraceable(f"{type(error).__name__}: {error}") from error
        names = [self._name(result) for result in results]
        return [Value(name, self.symbol(name)) for name in names]

    def record(self, op: Callable[..., Any], *args: Any) -> TracedSymbol:
        """Write a node for an operation of a traced routine; return the symbol of its result."""
        name = f"amanda_traced_{len(self.rewriting.items)}"
        self.rewriting.items.append(GraphNode(op, tuple(map(self._name, args)), (name,), name))
        return TracedSymbol(name, self)

    def symbol(self, name: Any) -> Any:
        """Return the symbol of a value by its name; a plain number as it is."""
        return self.symbols.setdefault(name, NamedSymbol(name)) if isinstance(name, str) else name

    def _name(self, value: Any) -> Any:
        """Return the name of a symbol, or of a tensor, which becomes a constant; any other value as it is."""
        if isinstance(value, NamedSymbol):
            return value.name
        if not isinstance(value, Tensor):
            return value
        # The constant is held in `constants`, so no other tensor gets its id.
        name = f"amanda_constant_{id(value)}"
        self.rewriting.constants[name] = value
        return name


class RunnableCopy:
    """A rewritten graph with the routines of tools in it, which runs instead of the user's."""

    def __init__(self, graph: OpGraph, rewriting: FakeRewriting) -> None:
        # Not the graph: copies live as long as it does, and are held where it is referenced weakly.
        self.inputs = list(graph.inputs)
        self.constants = {**graph.constants, **rewriting.constants}
        self.items = rewriting.items
        self.outputs = rewriting.outputs

    def run(self, execution: Execution, values: Sequence[Tensor]) -> Any:
        """Return the outputs of the copy for values of the graph's inputs.  execution: calls the routines."""
        values_by_name: dict[str, Any] = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        with execution.running(), fake.no_grad():
            for item in self.items:
                if isinstance(item, RoutineCallNode):
                    arguments = [_graphs.values_of_names(name, values_by_name) for name in item.reads]
                    results = execution.call(item.slot, arguments)
                    values_by_name.update(zip(item.result_names, results, strict=True))
                else:
                    values_by_name.update(_graphs.compute(item, values_by_name))
        return _graphs.values_of_names(self.outputs, values_by_name)


class FakeGraphDriver(GraphDriver[FakeRewriting, RunnableCopy]):
    """The driver of the fake framework's graphs: where `Graph.run` is called, a rewritten copy runs."""

    api = 2
    framework = "amanda.testing.fake"
    modes = ("graph",)
    tensors = SymbolTensors()

    def attach(self) -> None:
        """Patch the method that runs graphs, until `detach` restores the patches."""
        original = OpGraph.run

        def run_copy(graph: OpGraph, values: Sequence[Tensor]) -> Any:
            """Run the copy of a graph; the graph itself where no scope is in force or nothing is inserted."""
            activation = interceptor.active()
            copy_and_execution = self.prepare(graph, activation.state) if activation else None
            if copy_and_execution is None:
                return original(graph, values)
            copy, execution = copy_and_execution
            return copy.run(execution, values)

        self.patches.set(OpGraph, "run", run_copy)

    def rewrite(self, graph: OpGraph, analysis: GraphAnalysis) -> FakeRewriting:
        """Return the rewrite of a graph with the insertions of an analysis; report an opaque op."""
        rewriting = FakeRewriting(analysis=analysis, namespace=self.namespace)
        if any(node.op is _operators.opaque for node in graph.nodes):
            rewriting.report("opaque", "it has no operators inside")
        rewriter = FakeRewriter(graph, rewriting)
        rewriter.run()
        rewriting.outputs = _rename(graph.outputs, rewriter.current_refs)
        return rewriting

    def build_runnable(self, graph: OpGraph, rewriting: FakeRewriting) -> RunnableCopy:
        """Return the copy of a graph that a rewrite has written."""
        return RunnableCopy(graph, rewriting)


_INPUT_NAMES = ("input", "other")


def _read_constant(value: Any) -> Any:
    """Return the tensor of a constant's symbol; a plain number as it is.

    Raises AmandaError for a value that is computed, or given to the graph.
    """
    if not isinstance(value, NamedSymbol):
        return value
    if value.constant is None:
        raise AmandaError(f"{value.name} has no value before the graph runs; read it in a routine")
    return value.constant


def _parameter_of(value: Any) -> Parameter | None:
    constant = value.constant if isinstance(value, NamedSymbol) else None
    return constant if isinstance(constant, Parameter) else None


def _rename(names: Any, current_names: Mapping[str, str]) -> Any:
    """Return the names under which routines have left values that the graph gives under these names."""
    if isinstance(names, tuple):
        return tuple(_rename(item, current_names) for item in names)
    return current_names.get(names, names)
