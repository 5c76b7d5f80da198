"""Bodies in a graph, of control flow and of checkpoints with a policy, with traceable routines in them.

Compilers trace a body by itself, any number of times. So a body takes traceable routines alone: a call of
Python needs an effect, which torch allows in no body. Tensors that routines hold become operands of the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import GraphModule

from ._graph_copy import GraphCopy
from ._node_runs import run_graph
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from torch.fx import Node

    from ._instrumented import InstrumentedCall
    from ._node_runs import NodeRun
    from ._ops import GraphProgram
    from ._rewrite import FxRewriting


class ControlFlow(NamedTuple):
    """Positions among an op's arguments: of its bodies, and of the operands that each body takes last.

    operands_position: of the tuple of operands; None if all arguments behind the bodies are operands.
    """

    body_positions: tuple[int, ...]
    operands_position: int | None

    def operands(self, node: Node) -> Any:
        """Return the operands of an op's node; None if the node has other arguments than expected."""
        if self.operands_position is None:
            return node.args[len(self.body_positions) :]
        is_expected = not node.kwargs and len(node.args) == self.operands_position + 1
        return node.args[self.operands_position] if is_expected else None


_CONTROL_FLOW = {
    "cond": ControlFlow((1, 2), 3),
    "map_impl": ControlFlow((0,), 2),
    "scan": ControlFlow((0,), 3),
    "while_loop": ControlFlow((0, 1), 3),
    "tag_activation_checkpoint": ControlFlow((0,), None),
}


def analyse_bodies(
    node: Node,
    module: GraphModule,
    node_runs: Mapping[Node, NodeRun],
    symbols: GraphSymbols,
    make_rewriting: Callable[[GraphModule, GraphSymbols], FxRewriting],
) -> ControlFlowBodies | None:
    """Run the bodies of a control flow op without data, have tools analyse their ops, and return the bodies.

    None for other nodes, for unexpected arguments, and if a body has no examples of its inputs.
    node_runs: of the graph around the op.  make_rewriting: makes the rewriting of a body.
    """
    flow = _CONTROL_FLOW.get(str(node.target))
    operands = None if flow is None else flow.operands(node)
    if flow is None or operands is None:
        return None
    parameters = [
        symbols.parameter_of(node_runs[operand].value) if operand in node_runs else None
        for operand in operands
    ]
    bodies: dict[str, Body] = {}
    for i in flow.body_positions:
        name = str(getattr(node.args[i], "target", ""))
        body = getattr(module, name, None)
        body_symbols = _symbols_of_body(body, parameters) if isinstance(body, GraphModule) else None
        if body_symbols is None:
            return None
        bodies[name] = Body(make_rewriting(body_symbols.module, body_symbols))
    return ControlFlowBodies(node, flow, bodies)


def _symbols_of_body(body: GraphModule, parameters: Sequence[Any]) -> GraphSymbols | None:
    """Return the values of a body without data; None if the body has no examples of its inputs.

    parameters: for each operand of the op, the parameter that it is, or None.
    """
    examples = [node.meta.get("example_value") for node in body.graph.nodes if node.op == "placeholder"]
    if any(example is None for example in examples):
        return None
    # Carried values and rows come before the operands, and none of them is a weight.
    inputs = [None] * (len(examples) - len(parameters)) + list(parameters)
    return GraphSymbols(body, inputs, examples, [value is not None for value in inputs])


class Body:
    """One body of a control flow op, in which ops are rewritten as in the graph around it."""

    def __init__(self, rewriting: FxRewriting) -> None:
        """Run the body without data, and have the tools analyse its forward ops."""
        self.rewriting = rewriting
        with rewriting.symbols.without_data():
            self._node_runs = run_graph(
                rewriting.module, rewriting.symbols.inputs, rewriting.symbols.attribute_symbol
            )
        calls = (call for node_run in self._node_runs.values() for call in node_run.calls)
        self.backward_counts = Counter(type(node).__name__ for call in calls for node, _ in call.nodes)
        self._instrumented_nodes: dict[Node, InstrumentedCall] = {}
        self._held_tensors_by_inner_op: dict[Node, Sequence[torch.Tensor]] = {}
        rewriting.analyse_forward(self._node_runs)

    def is_changed(self) -> bool:
        """Return True if routines are inserted into the body, or into a body in it."""
        inner_bodies = self.rewriting.bodies.values()
        return any(map(bool, self.rewriting.steps())) or any(bodies.are_changed() for bodies in inner_bodies)

    def try_routines(self) -> list[torch.Tensor]:
        """Try the routines of the body, and of bodies in it, without data; return the tensors they hold."""
        self._instrumented_nodes = self.rewriting.make_instrumented_nodes(self._node_runs)
        self._held_tensors_by_inner_op = {
            node: bodies.try_routines() for node, bodies in self.rewriting.bodies.items()
        }
        held_tensors = [call.held_tensors.tensors for call in self._instrumented_nodes.values()]
        return list(chain(*held_tensors, *self._held_tensors_by_inner_op.values()))

    def write_copy(self, held_tensors: Sequence[torch.Tensor]) -> GraphModule:
        """Return a copy of the body with routines in it; the tensors that these hold are its last inputs.

        A body is copied once: the tensors without data, on which `try_routines` ran, are dropped.
        """
        copy = _BodyCopy(self.rewriting.module, self.rewriting.program, held_tensors)
        for node, call in self._instrumented_nodes.items():
            names_of_module_tensors = list(self._node_runs[node].module_tensors)
            copy.replace_node(node, call, names_of_module_tensors)
        for node, bodies in self.rewriting.bodies.items():
            bodies.write_into(copy, self._held_tensors_by_inner_op[node])
        for node_run in self._node_runs.values():
            node_run.forget_symbols()
        return copy.finish()

    def report(self) -> None:
        """Report what is left out in transforms and bodies within the body."""
        self.rewriting.report_left_out(self._node_runs)


class ControlFlowBodies:
    """The bodies of one control flow op in a graph, by the names of the graph's attributes that hold them."""

    def __init__(self, node: Node, flow: ControlFlow, bodies: Mapping[str, Body]) -> None:
        self.node = node
        self._flow = flow
        self._bodies = bodies

    def are_changed(self) -> bool:
        """Return True if routines are inserted into any body."""
        return any(body.is_changed() for body in self._bodies.values())

    def try_routines(self) -> list[torch.Tensor]:
        """Try the routines of all bodies without data; return the tensors that they hold, each once."""
        tensors = [tensor for body in self._bodies.values() for tensor in body.try_routines()]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def write_into(self, copy: GraphCopy, held_tensors: Sequence[torch.Tensor]) -> None:
        """Put bodies with routines into a copy of the graph, and give them the held tensors."""
        copies = {name: body.write_copy(held_tensors) for name, body in self._bodies.items()}
        copy.replace_bodies(self.node, copies, self._flow.operands_position, held_tensors)

    def left_out_counts(self) -> Counter[str]:
        """Count the ops, by name, at which routines do not run."""
        return sum((body.rewriting.left_out_counts for body in self._bodies.values()), Counter[str]())

    def backward_counts(self) -> Counter[str]:
        """Count the backward ops of the bodies by name."""
        return sum((body.backward_counts for body in self._bodies.values()), Counter[str]())

    def report(self) -> None:
        """Report what is left out within the bodies."""
        for body in self._bodies.values():
            body.report()


class _BodyCopy(GraphCopy):
    """Copy of a body, in which the tensors that routines hold are inputs behind all others."""

    def __init__(
        self, body: GraphModule, program: GraphProgram, held_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Copy the body, and add an input for each held tensor, with an example as the other inputs have."""
        super().__init__(body, program, calls_python=False)
        self._module.meta.update(body.meta)  # where torch finds the policy of a checkpoint
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        examples = [node.meta.get("example_value") for node in placeholders]
        fake_mode = next((example.fake_mode for example in examples if hasattr(example, "fake_mode")), None)
        for i, tensor in enumerate(held_tensors):
            with self._module.graph.inserting_after(placeholders[-1]):
                placeholder = self._module.graph.placeholder(f"amanda_held_{i}")
            example = tensor if fake_mode is None else fake_mode.from_tensor(tensor, static_shapes=True)
            placeholder.meta = {"example_value": example}
            placeholders.append(placeholder)
            self._held_nodes[id(tensor)] = placeholder
