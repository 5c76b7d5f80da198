"""Values that an exported program computes of weights and constants alone, stored instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def store_constants(program: ExportedProgram, known: Mapping[str, Any]) -> None:
    """Compute what depends on a constant that is new, and else on weights at most; store what comes of it.

    known: the constants that are not new, by the names that they had: a program that is exported again has
    others for them, and the old ones for what nothing reads.  A weight that nothing else reads takes the
    value; else the constant does.
    """
    _Storing(program, known).run()


class _Storing:
    """values: of the nodes that are known.  made: those among them that depend on a new constant."""

    def __init__(self, program: ExportedProgram, known: Mapping[str, Any]) -> None:
        self.program = program
        self.known = known
        places = [node for node in program.graph.nodes if node.op == "placeholder"]
        specs = zip(places, program.graph_signature.input_specs, strict=True)
        self.targets = {node: spec.target for node, spec in specs if spec.kind in _HELD}
        changed = {*program.graph_signature.buffers_to_mutate.values()}
        self.values = {
            node: self._stored(name) for node, name in self.targets.items() if name and name not in changed
        }
        self.fresh = {
            node
            for node, value in self.values.items()
            if self.targets[node] in program.constants
            and not any(_equal(value, one) for one in known.values())
        }
        self.made: dict[Node, set[Node]] = {}  # with the held ones that each depends on
        self.taken: set[Node] = set()

    def run(self) -> None:
        for node in self.program.graph.nodes:
            self._compute(node)
        ends = [node for node in self.made if any(user not in self.made for user in node.users)]
        ends = [node for node in ends if all(user.op != "output" for user in node.users)]
        for node in ends:
            self._store(node, ends)
        for node in reversed([*self.made]):
            if not node.users:
                self.program.graph.erase_node(node)
        self._drop([node for node in self.targets if not node.users and self._is_left_over(node)])
        self.program.graph.lint()
        self.program.graph_module.recompile()

    def _compute(self, node: Node) -> None:
        given = node.all_input_nodes
        if node.op != "call_function" or not given or any(one not in self.values for one in given):
            return
        sources = {
            source for one in given for source in ({one} if one in self.targets else self.made.get(one, ()))
        }
        if not sources & self.fresh:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.made[node] = sources

    def _store(self, node: Node, ends: Collection[Node]) -> None:
        """Replace a node, for all that reads it, by a weight or a new constant that holds its value."""
        free = [place for place in self.made[node] if self._takes(place, node, ends)]
        if not free:
            return
        place = min(free, key=lambda one: one in self.fresh)
        self.taken.add(place)
        name = str(self.targets[place])
        held = self._stored(name)
        stored = self.values[node].detach().clone()
        if isinstance(held, torch.nn.Parameter):
            stored = torch.nn.Parameter(stored, held.requires_grad)
        holder = self.program.constants if name in self.program.constants else self.program.state_dict
        holder[name] = stored
        place.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in self.made)

    def _takes(self, place: Node, node: Node, ends: Collection[Node]) -> bool:
        """Return True if a held tensor can be a node's value: nothing else reads it, or what equals that."""
        value, held = self.values[node], self.values[place]
        if place in self.fresh:
            return place not in self.taken and all(user in self.made for user in place.users)
        if held.shape != value.shape or held.dtype != value.dtype:
            return False
        others = [one for one in ends if place in self.made[one]]
        own = all(user in self.made or place in self.taken for user in place.users)
        return own and all(torch.equal(self.values[one], value) for one in others)

    def _stored(self, name: Any) -> Any:
        held = self.program.state_dict.get(name)
        return self.program.constants[name] if held is None else held

    def _is_left_over(self, node: Node) -> bool:
        return node in self.fresh or self.targets[node] in self.known

    def _drop(self, nodes: Sequence[Node]) -> None:
        signature, program = self.program.graph_signature, self.program
        gone = {str(self.targets[node]) for node in nodes}
        signature.input_specs[:] = [one for one in signature.input_specs if one.target not in gone]
        for node in nodes:
            program.graph.erase_node(node)
        for name in gone:
            program.constants.pop(name, None)
            program.state_dict.pop(name, None)


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
