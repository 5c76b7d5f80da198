"""Control dependencies between nodes with routines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._nodes import INT64, control_trigger, new_node, opaque_identity

if TYPE_CHECKING:
    from ._body import Body


class ControlDependencies:
    """The control dependencies between the nodes of a body.

    inserted_nodes: a list to which additional nodes are appended.
    numbers: by the name of a node, the number that it reads, which identifies the loop around it.
    in_flow: names of operations behind control flow of version 1, which may not run.
    """

    def __init__(self, body: Body, inserted_nodes: list[Any]) -> None:
        self.numbers: dict[str, str] = {}
        self.in_flow: Collection[str] = ()
        self._body = body
        self._inserted_nodes = inserted_nodes
        self._may_be_left_out: set[str] = set()
        self._triggers: dict[tuple[str, ...], str] = {}
        self._number_count = 0

    def add_node(self, node: str, name: str, number: str) -> None:
        """Add a node that reads a number and runs where the operation `name` runs, for others to wait for."""
        self.numbers[node] = number
        if name in self.in_flow:
            self._may_be_left_out.add(node)

    def control_inputs_after(self, nodes: Iterable[str], number: str) -> list[str]:
        """Return control inputs for a node that reads `number`, so that it runs after other nodes.

        Nodes in a loop of gradients get none for nodes in the forward loop: the whole loop waits.
        """
        frames = self._body.frames
        if frames is None:
            return [f"^{node_name}" for node_name in nodes]
        nodes = list(nodes)
        in_frame = [node for node in nodes if self.numbers[node] == number]
        waited: list[str | None] = [node for node in in_frame if node not in self._may_be_left_out]
        unsure = tuple(node for node in in_frame if node in self._may_be_left_out)
        if unsure:
            waited.append(self._trigger_after(unsure, number))
        waited += [frames.end_of(self.numbers[node], number) for node in nodes if node not in in_frame]
        return [f"^{node}" for node in waited if node is not None]

    def number_after(self, number: str, rank: int, control_inputs: Sequence[str]) -> str:
        """Add a node that passes a number on after other nodes have run; return its ref.

        rank: 0 for a number alone, 1 for a vector with rounds.
        """
        # A control input of the call itself would not do. If another input waits for the same node,
        # TensorFlow's optimizer drops the control input, and inlined nodes that do not read that input run
        # too early.
        self._number_count += 1
        name = f"amanda/after{self._number_count}"
        self._inserted_nodes.append(opaque_identity(name, [number, *control_inputs], INT64, rank))
        return name if self._body.syntax.dead_values else f"{name}:output:0"

    def _trigger_after(self, nodes: tuple[str, ...], number: str) -> str:
        """Return the name of a node that runs when each of these nodes has run or is dead."""
        # TensorFlow's optimizer drops a control input that another control input depends on. With a plain
        # ControlTrigger a node would then run although a node that it waits for is dead. The optimizer does
        # not look past a Merge.
        if nodes not in self._triggers:
            name = f"amanda/either{len(self._triggers)}"
            read = new_node(f"{name}/number", "Identity", [number, f"^{name}"], T=INT64)
            merge = new_node(f"{name}/merge", "Merge", [read.name], 1, T=INT64)
            self._inserted_nodes += [control_trigger(name, nodes), read, merge]
            self._triggers[nodes] = merge.name
        return self._triggers[nodes]
