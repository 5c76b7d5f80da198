"""Folding of values that an exported program computes from weights and constants alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def store_constants(program: ExportedProgram, old_constants: Mapping[str, Any]) -> None:
    """Fold values that depend on new constants and on weights alone into stored tensors.

    old_constants: the constants before the program was exported again, which renames constants: a constant
    equal to one of them is not new.  A folded value goes into a weight that nothing else reads, if there is
    one, else into the new constant.  Where one place would have to hold two different values, both stay
    computed.
    """
    _ConstantFolder(program, old_constants).fold()


class _ConstantFolder:
    """Folding of a program's constants.

    values: of nodes that depend on stored tensors alone.  sources: for each computed node that depends on a
    new constant, the placeholders that the node depends on.  new_placeholders: placeholders of new constants.
    """

    def __init__(self, program: ExportedProgram, old_constants: Mapping[str, Any]) -> None:
        """Find the stored tensors that the program does not write, and the new constants among them."""
        self.program = program
        self.old_constants = old_constants
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        specs = zip(placeholders, program.graph_signature.input_specs, strict=True)
        self.targets = {node: spec.target for node, spec in specs if spec.kind in _TENSOR_KINDS}
        # A buffer that the program writes has no constant value.
        changed = {*program.graph_signature.buffers_to_mutate.values()}
        self.values = {
            node: self._stored_tensor(name)
            for node, name in self.targets.items()
            if name and name not in changed
        }
        self.new_placeholders = {
            node
            for node, value in self.values.items()
            if self.targets[node] in program.constants
            and not any(_are_equal(value, constant) for constant in old_constants.values())
        }
        self.sources: dict[Node, set[Node]] = {}

    def fold(self) -> None:
        """Compute the values, store those that other nodes read, and drop what nothing reads any more."""
        for node in self.program.graph.nodes:
            self._compute_value(node)
        for node, placeholder in self._find_placeholders().items():
            self._move_value_to_placeholder(node, placeholder)
        for node in reversed([*self.sources]):  # users before what they use
            if not node.users:
                self.program.graph.erase_node(node)
        self._drop_placeholders(
            [node for node in self.targets if not node.users and self._may_be_dropped(node)]
        )
        self.program.graph.lint()
        self.program.graph_module.recompile()

    def _compute_value(self, node: Node) -> None:
        """Compute a node's value if all its inputs have values and one depends on a new constant."""
        inputs = node.all_input_nodes
        if (
            node.op != "call_function"
            or not inputs
            or any(node_input not in self.values for node_input in inputs)
        ):
            return
        sources = {
            source
            for node_input in inputs
            for source in ({node_input} if node_input in self.targets else self.sources.get(node_input, ()))
        }
        if not sources & self.new_placeholders:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.sources[node] = sources

    def _find_placeholders(self) -> dict[Node, Node]:
        """Return the placeholder that takes the value of each folded node that the rest of the program reads.

        A node without one stays computed, and what it depends on keeps its value.
        """
        last_nodes = [node for node in self.sources if any(user not in self.sources for user in node.users)]
        # What is returned stays computed, because the signature names outputs by their nodes.
        storable_nodes = [node for node in last_nodes if all(user.op != "output" for user in node.users)]
        takers: dict[Node, Node] = {}
        for node in storable_nodes:
            candidates = [
                placeholder
                for placeholder in self.sources[node]
                if self._can_take(placeholder, node, storable_nodes, takers)
            ]
            if candidates:
                # Weights first: their names are those of the model.
                takers[node] = min(candidates, key=lambda candidate: candidate in self.new_placeholders)
        while True:
            read_placeholders = {
                source for node in last_nodes if node not in takers for source in self.sources[node]
            }
            remaining = {node: taker for node, taker in takers.items() if taker not in read_placeholders}
            if len(remaining) == len(takers):
                return takers
            takers = remaining

    def _can_take(
        self,
        placeholder: Node,
        node: Node,
        storable_nodes: Collection[Node],
        takers: Mapping[Node, Node],
    ) -> bool:
        """Return True if a stored tensor can take a node's value: only folded nodes read it.

        Nodes share it if their values are equal; a weight only if those of all that depend on it are.
        takers: placeholders of the nodes so far.
        """
        if any(user not in self.sources for user in placeholder.users):
            return False
        value, stored_value = self.values[node], self.values[placeholder]
        if placeholder in self.new_placeholders:
            sharing_nodes = [other for other, taker in takers.items() if taker is placeholder]
        elif stored_value.shape == value.shape and stored_value.dtype == value.dtype:
            sharing_nodes = [other for other in storable_nodes if placeholder in self.sources[other]]
        else:
            return False
        return all(_are_equal(self.values[other], value) for other in sharing_nodes)

    def _move_value_to_placeholder(self, node: Node, placeholder: Node) -> None:
        """Write a node's value over a placeholder's tensor, which the rest of the program reads instead."""
        name = str(self.targets[placeholder])
        old_value = self._stored_tensor(name)
        new_value = self.values[node].detach().clone()
        if isinstance(old_value, torch.nn.Parameter):
            new_value = torch.nn.Parameter(new_value, old_value.requires_grad)
        holder = self.program.constants if name in self.program.constants else self.program.state_dict
        holder[name] = new_value
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user not in self.sources)

    def _stored_tensor(self, name: Any) -> Any:
        """Return the weight, buffer or constant of a name."""
        weight = self.program.state_dict.get(name)
        return self.program.constants[name] if weight is None else weight

    def _may_be_dropped(self, node: Node) -> bool:
        """Return True for a constant, new or old; weights stay in the program also if nothing reads them."""
        return node in self.new_placeholders or self.targets[node] in self.old_constants

    def _drop_placeholders(self, nodes: Sequence[Node]) -> None:
        """Drop placeholders with their tensors and their entries in the signature."""
        signature, program = self.program.graph_signature, self.program
        dropped_names = {str(self.targets[node]) for node in nodes}
        signature.input_specs[:] = [
            spec for spec in signature.input_specs if spec.target not in dropped_names
        ]
        for node in nodes:
            program.graph.erase_node(node)
        for name in dropped_names:
            program.constants.pop(name, None)
            program.state_dict.pop(name, None)


def _are_equal(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return first is second
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)
