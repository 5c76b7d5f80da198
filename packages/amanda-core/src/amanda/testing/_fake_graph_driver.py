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
    """A value of a graph while tools analyse it: its name, and the constant that it is, if any."""

    def __init__(self, name: str, constant: Tensor | None = None) -> None:
        self.name = name
        self.constant = constant


class TracedSymbol(NamedSymbol):
    """A value that a traceable routine computes with: what it does becomes nodes."""

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
    """One rewrite of a graph: the nodes of the copy, its constants, and the names of its outputs."""

    items: list[GraphNode | RoutineCallNode] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    outputs: Any = ()


class FakeRewriter(Rewriter[GraphNode]):
    """The rewrite of a graph."""

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
        """Return the inputs, each a value, a list of values or a plain number; and the outputs."""
        flat = [name for item in node.inputs for name in (item if isinstance(item, list) else [item])]
        sizes = [len(item) if isinstance(item, list) else None for item in node.inputs]
        inputs = Side(flat, [self.symbol(item) for item in flat], sizes)
        return inputs, Side(node.outputs, list(map(self.symbol, node.outputs)), [None] * len(node.outputs))

    def facts(self, node: GraphNode, inputs: Side) -> OpFacts:
        """Return the facts of a node, for tools."""
        variables = [i for i, value in enumerate(inputs.values) if _parameter(value) is not None]
        return OpFacts(
            node.op, digest(self.identity, node.name), self.rewriting.namespace, _NAMES, inputs.values,
            op_type=node.op.__name__, scope=node.scope, source=node.source, variable_positions=variables,
            graph=self.identity, read_value=_read,
            variable_of=_parameter, read_variables=lambda: tuple(id(inputs.values[i]) for i in variables),
            original=lambda: lambda values: node.op(*values),
        )  # fmt: skip

    def write_node(self, node: GraphNode, inputs: Side, outputs: Side) -> None:
        """Write the node."""
        flat = iter(inputs.refs)
        node_inputs = [
            next(flat) if size is None else [next(flat) for _ in range(size)] for size in inputs.sizes
        ]
        self.rewriting.items.append(node._replace(inputs=tuple(node_inputs)))

    def is_changeable(self, symbol: Any) -> bool:
        """Return True for what is not a plain number."""
        return isinstance(symbol, NamedSymbol)

    def write_call(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write a call of routines."""
        slot = self.rewriting.add_slot(insertion)
        output_names = [f"amanda_{slot}:{i}" for i in range(len(outputs))]
        self.rewriting.items.append(RoutineCallNode(slot, [item.ref for item in inputs], output_names))
        return [Value(name, self.symbol(name)) for name in output_names]

    def inline(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write what a routine does as nodes."""
        values = [
            TracedSymbol(item.ref, self) if isinstance(item.symbol, NamedSymbol) else item.symbol
            for item in inputs
        ]
        try:
            # Called once with symbols: what it does to these becomes nodes of the copy.
            results = self.run_routines(insertion, values)
        # The routine did with a symbol what only a tensor can do.
        except (TypeError, AttributeError) as error:
            raise NotTraceable(f"{type(error).__name__}: {error}") from error
        names = [self._name(item) for item in results]
        return [Value(name, self.symbol(name)) for name in names]

    def record(self, op: Callable[..., Any], *args: Any) -> TracedSymbol:
        """Write a node that a traced routine asks for."""
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
    """A rewritten graph, which runs instead of the user's."""

    def __init__(self, graph: OpGraph, rewriting: FakeRewriting) -> None:
        # Not the graph: copies live as long as it does, and are held where it is referenced weakly.
        self.inputs = list(graph.inputs)
        self.constants = {**graph.constants, **rewriting.constants}
        self.items = rewriting.items
        self.outputs = rewriting.outputs

    def run(self, execution: Execution, values: Sequence[Tensor]) -> Any:
        """Return what the copy computes of the values of the graph's inputs."""
        values_by_name: dict[str, Any] = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        with execution.running(), fake.no_grad():
            for item in self.items:
                if isinstance(item, RoutineCallNode):
                    results = execution.call(
                        item.slot, [_graphs.fill_names(name, values_by_name) for name in item.reads]
                    )
                    values_by_name.update(zip(item.result_names, results, strict=True))
                else:
                    values_by_name.update(_graphs.compute(item, values_by_name))
        return _graphs.fill_names(self.outputs, values_by_name)


class FakeGraphDriver(GraphDriver[FakeRewriting, RunnableCopy]):
    """The fake framework's graphs: a copy runs where `Graph.run` is called."""

    api = 2
    framework = "amanda.testing.fake"
    modes = ("graph",)
    tensors = SymbolTensors()

    def attach(self) -> None:
        """Patch the method that runs graphs."""
        run = OpGraph.run

        def run_copy(graph: OpGraph, values: Sequence[Tensor]) -> Any:
            """Run the copy of a graph; the graph itself where no scope is in force or nothing is inserted."""
            activation = interceptor.active()
            prepared = self.prepare(graph, activation.state) if activation else None
            if prepared is None:
                return run(graph, values)
            copy, execution = prepared
            return copy.run(execution, values)

        # Set by `attributes`, which `detach` restores.
        self.patches.set(OpGraph, "run", run_copy)

    def rewrite(self, graph: OpGraph, analysis: GraphAnalysis) -> FakeRewriting:
        """Rewrite a graph."""
        opaque = next((node for node in graph.nodes if node.op is _operators.opaque), None)
        rewriting = FakeRewriting(analysis=analysis, namespace=self.namespace)
        if opaque is not None:
            rewriting.report("opaque", "it has no operators inside")
        rewriter = FakeRewriter(graph, rewriting)
        rewriter.run()
        rewriting.outputs = _renamed(graph.outputs, rewriter.current_refs)
        return rewriting

    def build_runnable(self, graph: OpGraph, rewriting: FakeRewriting) -> RunnableCopy:
        """Make the copy."""
        return RunnableCopy(graph, rewriting)


_NAMES = ("input", "other")


def _read(value: Any) -> Any:
    """The value of a constant.

    Raises AmandaError for what is computed, or given to the graph.
    """
    if not isinstance(value, NamedSymbol):
        return value
    if value.constant is None:
        raise AmandaError(f"{value.name} has no value before the graph runs; read it in a routine")
    return value.constant


def _parameter(value: Any) -> Parameter | None:
    constant = value.constant if isinstance(value, NamedSymbol) else None
    return constant if isinstance(constant, Parameter) else None


def _renamed(names: Any, current: Mapping[str, str]) -> Any:
    if isinstance(names, tuple):
        return tuple(_renamed(item, current) for item in names)
    return current.get(names, names)
