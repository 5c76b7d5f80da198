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
from ._waiting import SafeWaits

if TYPE_CHECKING:
    from ._routines import TracedRoutine


class _ObserverPack:
    """Observers that will share a node.

    number_ref: the ref of the execution's number that the node reads.
    members: the observers of an operation, with the indices of their tensors among those of the node.
    dtype_by_ref: the dtype of each tensor of the node, in their order.
    waits_by_op: by the name of an observed operation, True if the node waits for the operation.
    nbytes: estimated memory of the tensors.
    """

    def __init__(self, number_ref: str) -> None:
        self.number_ref = number_ref
        self.members: list[tuple[RoutineNode, Sequence[int]]] = []
        self.dtype_by_ref: dict[str, int] = {}
        self.waits_by_op: dict[str, bool] = {}
        self.nbytes = 0
        self._index_by_ref: dict[str, int] = {}

    def add(
        self, observers: RoutineNode, refs: Sequence[str], tensors: Sequence[Any],
        nbytes_by_ref: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Add the observers of an operation, and their tensors as inputs of the node, each ref once."""
        for ref, tensor in zip(refs, tensors, strict=True):
            if ref not in self.dtype_by_ref:
                self._index_by_ref[ref] = len(self._index_by_ref)
                self.dtype_by_ref[ref] = dtype_enum(tensor)
                self.nbytes += nbytes_by_ref[ref]
        self.members.append((observers, [self._index_by_ref[ref] for ref in refs]))


class Insertions:
    """Adds nodes that call routines to one body, with control inputs that keep the order of the routines.

    nodes: the inserted nodes.
    inserted_names_by_op: their names, by the name of the operation with which they run.
    ahead, behind: by the name of an operation, nodes that it waits for, and nodes that wait for it.
    safe_waits: operations that wait for the observers of earlier ones; None in sessions, and where several
    devices work at the same time.
    saved_tensor_by_ref: by the ref of a value of a routine, its place among saved values.
    forward_names: by the name of a gradient operation, that of its forward operation, if in this body.
    dependencies: control dependencies between the nodes.
    """

    def __init__(self, body: Body, rewriting: TensorFlowRewriting) -> None:
        self.body = body
        self.rewriting = rewriting
        self.nodes: list[Any] = []
        self.inserted_names_by_op: dict[str, list[str]] = {}
        self.behind: dict[str, list[str]] = {}
        self.ahead: dict[str, list[str]] = {}
        self.saved_tensor_by_ref: dict[str, SavedTensor] = {}
        self.forward_names: dict[str, str] = {}
        self.dependencies = ControlDependencies(body, self.nodes)
        is_safe = body.frames is None and not rewriting.has_several_devices
        self.safe_waits = SafeWaits(body) if is_safe else None
        self._pack_by_group: dict[Hashable, _ObserverPack] = {}
        self._last_node_by_group: dict[Hashable, str] = {}

    def saved_tensor(self, ref: str) -> SavedTensor | None:
        """Return the place of a value among saved values; None if it is not saved."""
        saved_tensor = self.saved_tensor_by_ref.get(ref)
        return None if saved_tensor is None or saved_tensor.key is None else saved_tensor

    def pass_through(self, name: str, index: int, dtype: int) -> str:
        """Add an identity that TensorFlow's optimizer keeps behind a node's output; return the new ref.

        dtype: its enum.
        """
        self.nodes.append(opaque_identity(f"{name}/{index}", [self.output_of(name, index)], dtype))
        return self.output_of(f"{name}/{index}", 0)

    def add_traced_call(
        self, op: tf.Operation, routine: TracedRoutine, refs: Sequence[str], result_types: Sequence[int],
        ahead: bool, control_inputs: Sequence[str],
    ) -> str:  # fmt: skip
        """Add a node that calls a traced routine's function, ahead of `op` or behind; return its name.

        Adds the function to the library.
        """
        self.rewriting.library += routine.definitions
        numbers = count(len(self.nodes))  # an instrumented file may have a node of that name already
        name = next(candidate for i in numbers if (candidate := f"amanda/traced{i}") not in self.body.nodes)
        if ahead and not refs:
            control_inputs = self._control_inputs_of(self.body.node_name(op), refs)
        output_suffix = "" if self.body.syntax.dead_values else ":output:0"
        self.nodes += routine.call_nodes(name, refs, control_inputs, result_types, output_suffix)
        return name

    def can_share_node(self, op: tf.Operation, tensors: Sequence[Any]) -> bool:
        """Return True if observers of some values of an operation share a node with others."""
        return self.body.frames is None or self.body.frames.group(op, tensors) is not None

    def observe(
        self, op: tf.Operation, observers: RoutineNode, refs: Sequence[str], tensors: Sequence[Any],
        ahead: bool,
    ) -> None:  # fmt: skip
        """Put observers into a pack, whose node is added once the pack is complete.

        Observers of values that cannot share a node get one of their own at once.
        """
        frames = self.body.frames
        # The key of a pack; without frames all observers may share a node.
        group = () if frames is None else frames.group(op, tensors)
        if group is None:
            packed_observers = PackedObservers([(observers, range(len(refs)))])
            self.add_slot_call(
                op, packed_observers, refs, [dtype_enum(tensor) for tensor in tensors], (), ahead
            )
            return
        name = self.body.node_name(op)
        self._flush_packs_before(name, group)
        nbytes_by_ref = {ref: estimated_nbytes(tensor) for ref, tensor in zip(refs, tensors, strict=True)}
        pack = self._pack_with_room(group, nbytes_by_ref)
        if pack is None:
            pack = self._pack_by_group[group] = _ObserverPack(self.body.number_ref_at(op, ahead))
        pack.add(observers, refs, tensors, nbytes_by_ref)
        if self.safe_waits is not None:
            self.safe_waits.add_op(op)
        # An op of control flow may be dead or in another frame, where the observed tensor is not.
        waits = frames is None or not frames.is_flow(op)
        pack.waits_by_op[name] = pack.waits_by_op.get(name, False) or waits

    def _flush_packs_before(self, name: str, group: Hashable) -> None:
        """Add the nodes of other groups that have to exist before observers of an operation are packed.

        name: of the operation.
        """
        forward_name = self.forward_names.get(name)
        frames = self.body.frames
        for other_group in [packed_group for packed_group in self._pack_by_group if packed_group != group]:
            # Routines at a gradient op wait for the node with the routines of its forward op, and the node of
            # a group around comes first.
            has_forward_op = forward_name in self._pack_by_group[other_group].waits_by_op
            if has_forward_op or frames.encloses(other_group, group):
                self._flush(other_group)

    def _pack_with_room(self, group: Hashable, nbytes_by_ref: Mapping[str, int]) -> _ObserverPack | None:
        """Return a group's pack if more tensors fit in; else add the pack's node, and return None.

        Returns None also for a group without a pack.
        """
        pack = self._pack_by_group.get(group)
        if pack is None:
            return None
        added_nbytes = sum(nbytes for ref, nbytes in nbytes_by_ref.items() if ref not in pack.dtype_by_ref)
        # A tensor that a later node reads cannot be freed or overwritten in the meantime.
        if pack.nbytes + added_nbytes <= self.rewriting.budget:
            return pack
        self._flush(group)
        return None

    def flush(self) -> None:
        """Add the nodes of all packed observers."""
        for group in list(self._pack_by_group):
            self._flush(group)

    def _flush(self, group: Hashable) -> None:
        """Add the node of a group's pack, with each observed tensor as an input once, and drop the pack."""
        pack = self._pack_by_group.pop(group)
        refs, dtypes = list(pack.dtype_by_ref), list(pack.dtype_by_ref.values())
        control_inputs = [f"^{name}" for name, waits in pack.waits_by_op.items() if waits]
        if group in self._last_node_by_group:  # observers run in the order of their ops
            control_inputs.append(f"^{self._last_node_by_group[group]}")
        for name in pack.waits_by_op:
            control_inputs += self._after_forward_routines(name, pack.number_ref)
        observers, control_inputs = PackedObservers(pack.members), list(dict.fromkeys(control_inputs))
        node = self._add_slot_node(observers, pack.number_ref, refs, control_inputs, dtypes, result_types=())
        # All operations of a pack run in the same rounds and branches, so the first stands for all.
        first_op_name = next(iter(pack.waits_by_op))
        self.dependencies.add_node(node.name, first_op_name, pack.number_ref)
        for name in pack.waits_by_op:
            self.inserted_names_by_op.setdefault(name, []).append(node.name)
        self._last_node_by_group[group] = node.name
        if self.safe_waits is not None:
            self.safe_waits.add_node(node.name)

    def add_slot_call(
        self, op: tf.Operation, inserted: Any, refs: Sequence[str], input_types: Sequence[int],
        result_types: Sequence[int], ahead: bool, is_unawaited: bool = False,
        control_inputs: Sequence[str] | None = None,
    ) -> str:  # fmt: skip
        """Add a node that calls `inserted` at a new slot; return the node's name.

        Nodes of packed observers at the forward operation of `op` are added first.
        ahead: True if the operation comes after the node, False if the node comes after the operation.
        is_unawaited: True if no operation has to wait for the node.
        control_inputs: by default those that make the node run where the operation runs.
        """
        name = self.body.node_name(op)
        number_ref = self.body.number_ref_at(op, ahead)
        if control_inputs is None:
            control_inputs = self._control_inputs_of(name, refs) if ahead else [f"^{name}"]
        # The node waits for the nodes with the routines of the forward op, so these have to exist.
        forward_name = self.forward_names.get(name)
        for group, pack in list(self._pack_by_group.items()):
            if forward_name in pack.waits_by_op:
                self._flush(group)
        control_inputs = [*control_inputs, *self._after_forward_routines(name, number_ref)]
        control_inputs = list(dict.fromkeys(control_inputs))
        node = self._add_slot_node(inserted, number_ref, refs, control_inputs, input_types, result_types)
        self.dependencies.add_node(node.name, name, number_ref)
        self.inserted_names_by_op.setdefault(name, []).append(node.name)
        # An operation that reads the node's results waits by that, and one that may end a loop cannot wait.
        needs_no_wait = is_unawaited or (ahead and (result_types or not refs or may_end_loop(op)))
        if not needs_no_wait:
            waiting_names_by_op = self.ahead if ahead else self.behind
            waiting_names_by_op.setdefault(name, []).append(node.name)
        return str(node.name)

    def _add_slot_node(
        self, inserted: Any, number_ref: str, refs: Sequence[str], control_inputs: Sequence[str],
        input_types: Sequence[int], result_types: Sequence[int],
    ) -> Any:  # fmt: skip
        """Add a node that calls `inserted` at a new slot; return the node.

        With several devices, several handles are passed as numbers; see `LentHandle`.
        """
        slot, refs, input_types = self.rewriting.add_slot(inserted), list(refs), list(input_types)
        handle_positions = [i for i, dtype in enumerate(input_types) if dtype == RESOURCE]
        if len(handle_positions) > 1 and self.rewriting.has_several_devices:
            inserted.lent_positions = handle_positions
            for i in handle_positions:
                lender_slot = self.rewriting.add_slot(LentHandle())
                lender_inputs = [number_ref, refs[i]]
                lender = py_func(f"amanda/{lender_slot}", lender_slot, lender_inputs, [RESOURCE], [INT64])
                self.nodes.append(lender)
                refs[i], input_types[i] = self.output_of(lender.name, 0), INT64
        inputs = [number_ref, *refs, *control_inputs]
        node = py_func(f"amanda/{slot}", slot, inputs, input_types, result_types)
        self.nodes.append(node)
        return node

    def output_of(self, name: str, index: int) -> str:
        """Return the ref of an output of an inserted node."""
        if self.body.syntax.dead_values:
            return f"{name}:{index}" if index else name
        return f"{name}:output:{index}"

    def _after_forward_routines(self, name: str, number_ref: str) -> list[str]:
        """Return control inputs for routines at a gradient operation.

        They wait for the routines at its forward operation, which may put values into `run`.
        """
        return self.dependencies.control_inputs_after(
            self.inserted_names_by_op.get(self.forward_names.get(name, ""), ()), number_ref
        )

    def _control_inputs_of(self, name: str, refs: Sequence[str]) -> list[str]:
        """Return control inputs by which a node that reads `refs` runs before an operation, if that runs."""
        inputs = self.body.nodes[name].input
        control_inputs = [text for text in inputs if text.startswith("^")]
        # Where an input is dead, the operation does not run.
        if self.body.syntax.dead_values:
            unread_inputs = [text for text in inputs if not text.startswith("^") and text not in refs]
            control_inputs += [f"^{self.body.syntax.parse(text).node}" for text in unread_inputs]
        return list(dict.fromkeys(control_inputs))


def may_end_loop(op: tf.Operation) -> bool:
    """Return True if an operation may be the condition of a loop.

    TensorFlow's loop optimizer fails if such an operation has control inputs, or reads a second output.
    """
    return any(output.dtype == tf.bool for output in op.outputs)


class ControlDependencies:
    """The control dependencies between the nodes of a body.

    inserted_nodes: a list to which additional nodes are appended.
    number_ref_by_name: by a node's name, the ref of the number that it reads, which tells the loop around.
    conditional_names: names of operations behind control flow of version 1, which may not run.
    """

    def __init__(self, body: Body, inserted_nodes: list[Any]) -> None:
        self.number_ref_by_name: dict[str, str] = {}
        self.conditional_names: Collection[str] = ()
        self._body = body
        self._inserted_nodes = inserted_nodes
        self._conditional_nodes: set[str] = set()
        self._merge_by_nodes: dict[tuple[str, ...], str] = {}
        self._added_number_count = 0

    def add_node(self, node_name: str, op_name: str, number_ref: str) -> None:
        """Add a node for others to wait for; it reads a number, and runs where the operation runs."""
        self.number_ref_by_name[node_name] = number_ref
        if op_name in self.conditional_names:
            self._conditional_nodes.add(node_name)

    def control_inputs_after(self, nodes: Iterable[str], number_ref: str) -> list[str]:
        """Return control inputs for a node that reads `number_ref`, so that it runs after other nodes.

        Nodes in a loop of gradients get none for nodes in the forward loop: the whole loop waits.  For nodes
        that may not run a trigger is added, which runs in any case.
        """
        frames = self._body.frames
        if frames is None:
            return [f"^{node_name}" for node_name in nodes]
        nodes = list(nodes)
        # Nodes in the same loop read the same number.
        nodes_in_frame = [node for node in nodes if self.number_ref_by_name[node] == number_ref]
        awaited_names: list[str | None] = [
            node for node in nodes_in_frame if node not in self._conditional_nodes
        ]
        conditional_nodes = tuple(node for node in nodes_in_frame if node in self._conditional_nodes)
        if conditional_nodes:
            awaited_names.append(self._add_trigger_after(conditional_nodes, number_ref))
        # For a node in an inner loop, the end of the loop.
        other_nodes = [node for node in nodes if node not in nodes_in_frame]
        awaited_names += [frames.end_of(self.number_ref_by_name[node], number_ref) for node in other_nodes]
        return [f"^{name}" for name in awaited_names if name is not None]

    def add_number_after(self, number_ref: str, rank: int, control_inputs: Sequence[str]) -> str:
        """Add a node that passes a number on after other nodes have run; return its ref.

        rank: 0 for a number alone, 1 for a vector with rounds.
        """
        # A control input of the call itself would not do. If another input waits for the same node,
        # TensorFlow's optimizer drops the control input, and inlined nodes that do not read that input run
        # too early.
        self._added_number_count += 1
        name = f"amanda/after{self._added_number_count}"
        self._inserted_nodes.append(opaque_identity(name, [number_ref, *control_inputs], INT64, rank))
        return name if self._body.syntax.dead_values else f"{name}:output:0"

    def _add_trigger_after(self, nodes: tuple[str, ...], number_ref: str) -> str:
        """Return the name of a node, added if needed, that runs when each of these has run or is dead."""
        # TensorFlow's optimizer drops a control input that another control input depends on. With a plain
        # ControlTrigger a node would then run although a node that it waits for is dead. The optimizer does
        # not look past a Merge.
        if nodes not in self._merge_by_nodes:
            name = f"amanda/either{len(self._merge_by_nodes)}"
            number_after = new_node(f"{name}/number", "Identity", [number_ref, f"^{name}"], T=INT64)
            merge = new_node(f"{name}/merge", "Merge", [number_after.name], 1, T=INT64)
            self._inserted_nodes += [control_trigger(name, nodes), number_after, merge]
            self._merge_by_nodes[nodes] = merge.name
        return self._merge_by_nodes[nodes]
