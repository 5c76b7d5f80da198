"""Nodes that call routines, inserted between an operation's values and their readers, in their order."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ._autodiff import SavedTensor
from ._body import Body, TensorFlowRewriting
from ._nodes import INT64, control_trigger, new_node, opaque_identity
from ._sides import dtype_enum, estimated_nbytes
from ._slots import RESOURCE, LentHandle, PackedObservers, RoutineNode, py_func

if TYPE_CHECKING:
    from ._routines import TracedRoutine


class _ObserverPack:
    """Observers that will share a node.

    members: the observers of an operation, with the indices of their tensors among those of the node.
    tensors: index and type of each tensor of the node, by its ref.
    waits_for: by the name of an observed operation, True if the node waits for the operation.
    nbytes: estimated memory of the tensors.
    """

    def __init__(self, number: str) -> None:
        self.number = number
        self.members: list[tuple[RoutineNode, Sequence[int]]] = []
        self.tensors: dict[str, tuple[int, int]] = {}
        self.waits_for: dict[str, bool] = {}
        self.nbytes = 0

    def add(
        self, place: RoutineNode, refs: Sequence[str], tensors: Sequence[Any], sizes: Mapping[str, int]
    ) -> None:
        """Add observers with their tensors, of which each becomes an input of the node once.

        sizes: memory of the tensors by ref.
        """
        for ref, tensor in zip(refs, tensors, strict=True):
            if ref not in self.tensors:
                self.tensors[ref] = len(self.tensors), dtype_enum(tensor)
                self.nbytes += sizes[ref]
        self.members.append((place, [self.tensors[ref][0] for ref in refs]))


class Insertions:
    """The nodes inserted into one body.

    nodes: the inserted nodes.  inserted: their names by the operation with which they run.
    ahead, behind: names of nodes that an operation waits for, or that wait for it.
    saved_tensors: by the ref of a value of a routine, its place among saved values.
    forward_names: by the name of a gradient operation, that of its forward operation, if in this body.
    dependencies: control dependencies between the nodes.
    """

    def __init__(self, body: Body, rewriting: TensorFlowRewriting) -> None:
        self.body = body
        self.rewriting = rewriting
        self.nodes: list[Any] = []
        self.inserted: dict[str, list[str]] = {}
        self.behind: dict[str, list[str]] = {}
        self.ahead: dict[str, list[str]] = {}
        self.saved_tensors: dict[str, SavedTensor] = {}
        self.forward_names: dict[str, str] = {}
        self.dependencies = ControlDependencies(body, self.nodes)
        self._packs: dict[Hashable, _ObserverPack] = {}
        self._flushed: dict[Hashable, str] = {}

    def saved_tensor(self, ref: str) -> SavedTensor | None:
        """Return the place of a value among saved values; None if it is not saved."""
        saved = self.saved_tensors.get(ref)
        return None if saved is None or saved.key is None else saved

    def pass_through(self, name: str, index: int, kind: int) -> str:
        """Return the ref of an output behind an identity that TensorFlow's optimizer keeps."""
        self.nodes.append(opaque_identity(f"{name}/{index}", [self.output_of(name, index)], kind))
        return self.output_of(f"{name}/{index}", 0)

    def call_function(
        self, op: tf.Operation, routine: TracedRoutine, refs: Sequence[str], result_types: Sequence[int],
        ahead: bool, control_inputs: Sequence[str],
    ) -> str:  # fmt: skip
        """Add a node that calls a traced routine; return its name."""
        self.rewriting.library += routine.definitions
        numbers = count(len(self.nodes))  # an instrumented file may have a node of that name already
        name = next(candidate for i in numbers if (candidate := f"amanda/traced{i}") not in self.body.nodes)
        if ahead and not refs:
            control_inputs = self._control_inputs_of(self.body.node_name(op), refs)
        output = "" if self.body.syntax.dead_values else ":output:0"
        self.nodes += routine.call(name, refs, control_inputs, result_types, output)
        return name

    def can_share_node(self, op: tf.Operation, tensors: Sequence[Any]) -> bool:
        """Return True if observers of some values of an operation share a node with others."""
        return self.body.frames is None or self.body.frames.group(op, tensors) is not None

    def observe(
        self, op: tf.Operation, place: RoutineNode, refs: Sequence[str], tensors: Sequence[Any], ahead: bool
    ) -> None:
        """Put observers into a pack, whose node is added once the pack is complete.

        Observers of values that cannot share a node get one of their own at once.
        """
        frames = self.body.frames
        group = () if frames is None else frames.group(op, tensors)
        if group is None:
            observers = PackedObservers([(place, range(len(refs)))])
            self.add_slot_call(op, observers, refs, [dtype_enum(tensor) for tensor in tensors], (), ahead)
            return
        name = self.body.node_name(op)
        self._flush_packs_before(name, group)
        sizes = {ref: estimated_nbytes(tensor) for ref, tensor in zip(refs, tensors, strict=True)}
        pack = self._pack_with_room(group, sizes) or _ObserverPack(self.body.number_at(op, ahead))
        self._packs[group] = pack
        pack.add(place, refs, tensors, sizes)
        # An op of control flow may be dead or in another frame, where the observed tensor is not.
        waits = frames is None or not frames.is_flow(op)
        pack.waits_for[name] = pack.waits_for.get(name, False) or waits

    def _flush_packs_before(self, name: str, group: Hashable) -> None:
        """Add the nodes of other groups that have to exist before observers of an operation are packed.

        name: of the operation.
        """
        forward = self.forward_names.get(name)
        frames = self.body.frames
        for other_group in [packed_group for packed_group in self._packs if packed_group != group]:
            # Routines at a gradient op wait for the node with the routines of its forward op, so that node
            # has to exist.
            if forward in self._packs[other_group].waits_for or frames.encloses(other_group, group):
                self._flush(other_group)

    def _pack_with_room(self, group: Hashable, sizes: Mapping[str, int]) -> _ObserverPack | None:
        """Return a group's pack if tensors of these sizes, by ref, fit in; else add the pack's node.

        Returns None then, and for a group without a pack.
        """
        pack = self._packs.get(group)
        if pack is None:
            return None
        added_nbytes = sum(nbytes for ref, nbytes in sizes.items() if ref not in pack.tensors)
        # A tensor that a later node reads cannot be freed or overwritten in the meantime.
        if pack.nbytes + added_nbytes <= self.rewriting.budget:
            return pack
        self._flush(group)
        return None

    def flush(self) -> None:
        """Add the nodes of all packed observers."""
        for group in list(self._packs):
            self._flush(group)

    def _flush(self, group: Hashable) -> None:
        """Add one node for a group's observers, with each observed tensor as an input once."""
        pack = self._packs.pop(group)
        refs, types = list(pack.tensors), [kind for _, kind in pack.tensors.values()]
        control_inputs = [f"^{name}" for name, waits in pack.waits_for.items() if waits]
        if group in self._flushed:  # observers run in the order of their ops
            control_inputs.append(f"^{self._flushed[group]}")
        control_inputs += [
            dependency
            for name in pack.waits_for
            for dependency in self._after_forward_routines(name, pack.number)
        ]
        node = self._add_slot_node(
            PackedObservers(pack.members), pack.number, refs, list(dict.fromkeys(control_inputs)), types, ()
        )
        # All operations of a pack run in the same rounds and branches, so the first stands for all.
        self.dependencies.add_node(node.name, next(iter(pack.waits_for)), pack.number)
        for name in pack.waits_for:
            self.inserted.setdefault(name, []).append(node.name)
        self._flushed[group] = node.name

    def add_slot_call(
        self, op: tf.Operation, inserted: Any, refs: Sequence[str], input_types: Sequence[int],
        result_types: Sequence[int], ahead: bool, instead: bool = False,
        control_inputs: Sequence[str] | None = None,
    ) -> str:  # fmt: skip
        """Add a node that calls a new slot; return its name.

        ahead: True if the operation comes after the node, False if the node comes after the operation.
        instead: True if no operation has to wait for the node.
        control_inputs: by default those that make the node run where the operation runs.
        """
        name = self.body.node_name(op)
        number = self.body.number_at(op, ahead)
        if control_inputs is None:
            control_inputs = self._control_inputs_of(name, refs) if ahead else [f"^{name}"]
        forward = self.forward_names.get(name)
        for group in [group for group, pack in self._packs.items() if forward in pack.waits_for]:
            self._flush(group)
        control_inputs = list(dict.fromkeys([*control_inputs, *self._after_forward_routines(name, number)]))
        node = self._add_slot_node(inserted, number, refs, control_inputs, input_types, result_types)
        self.dependencies.add_node(node.name, name, number)
        self.inserted.setdefault(name, []).append(node.name)
        # An operation that reads the node's results waits by that, and one that may end a loop cannot wait.
        needs_no_wait = instead or (ahead and (result_types or not refs or may_end_loop(op)))
        if not needs_no_wait:
            (self.ahead if ahead else self.behind).setdefault(name, []).append(node.name)
        return str(node.name)

    def _add_slot_node(
        self, inserted: Any, number: str, refs: Sequence[str], control_inputs: Sequence[str],
        input_types: Sequence[int], result_types: Sequence[int],
    ) -> Any:  # fmt: skip
        """Add a node that calls a new slot.

        With several devices, several handles are passed as numbers; see `LentHandle`.
        """
        slot, refs, input_types = self.rewriting.add_slot(inserted), list(refs), list(input_types)
        handles = [i for i, kind in enumerate(input_types) if kind == RESOURCE]
        if len(handles) > 1 and self.rewriting.several_devices:
            inserted.loaned_positions = handles
            for i in handles:
                loan = self.rewriting.add_slot(LentHandle())
                lender = py_func(f"amanda/{loan}", loan, [number, refs[i]], [RESOURCE], [INT64])
                self.nodes.append(lender)
                refs[i], input_types[i] = self.output_of(lender.name, 0), INT64
        node = py_func(f"amanda/{slot}", slot, [number, *refs, *control_inputs], input_types, result_types)
        self.nodes.append(node)
        return node

    def output_of(self, name: str, index: int) -> str:
        """Return the ref of an output of an inserted node."""
        if self.body.syntax.dead_values:
            return f"{name}:{index}" if index else name
        return f"{name}:output:{index}"

    def _after_forward_routines(self, name: str, number: str) -> list[str]:
        """Return control inputs for routines at a gradient operation.

        They wait for the routines at its forward operation, which may put values into `run`.
        """
        return self.dependencies.control_inputs_after(
            self.inserted.get(self.forward_names.get(name, ""), ()), number
        )

    def _control_inputs_of(self, name: str, refs: Sequence[str]) -> list[str]:
        """Return control inputs for a node that runs before an operation, and only where that runs."""
        inputs = self.body.nodes[name].input
        control_inputs = [text for text in inputs if text.startswith("^")]
        if self.body.syntax.dead_values:
            control_inputs += [f"^{self.body.syntax.parse(text).node}" for text in inputs
                      if not text.startswith("^") and text not in refs]  # fmt: skip
        return list(dict.fromkeys(control_inputs))


def may_end_loop(op: tf.Operation) -> bool:
    """Return True if an operation may be the condition of a loop.

    TensorFlow's loop optimizer fails if such an operation has control inputs, or reads a second output.
    """
    return any(output.dtype == tf.bool for output in op.outputs)


class ControlDependencies:
    """The control dependencies between the nodes of a body.

    inserted_nodes: a list to which additional nodes are appended.
    numbers: by the name of a node, the number that it reads, which identifies the loop around it.
    conditional_names: names of operations behind control flow of version 1, which may not run.
    """

    def __init__(self, body: Body, inserted_nodes: list[Any]) -> None:
        self.numbers: dict[str, str] = {}
        self.conditional_names: Collection[str] = ()
        self._body = body
        self._inserted_nodes = inserted_nodes
        self._may_be_left_out: set[str] = set()
        self._triggers: dict[tuple[str, ...], str] = {}
        self._number_count = 0

    def add_node(self, node: str, name: str, number: str) -> None:
        """Add a node that reads a number and runs where the operation `name` runs, for others to wait for."""
        self.numbers[node] = number
        if name in self.conditional_names:
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
        names: list[str | None] = [node for node in in_frame if node not in self._may_be_left_out]
        conditional_nodes = tuple(node for node in in_frame if node in self._may_be_left_out)
        if conditional_nodes:
            names.append(self._trigger_after(conditional_nodes, number))
        names += [frames.end_of(self.numbers[node], number) for node in nodes if node not in in_frame]
        return [f"^{name}" for name in names if name is not None]

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
