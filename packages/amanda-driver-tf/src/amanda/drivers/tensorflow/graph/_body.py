"""Input and result of a rewrite of a graph: a body of operations, the rewriting, the edited body."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from amanda import backend
from amanda.backend import digest
from amanda.graph import ValueHistory
from tensorflow.python.framework import tensor_util

from ._autodiff import Readers, SavedKey, SavedTensor
from ._facts import TensorFlowReads
from ._locations import LayerIndex, Location

if TYPE_CHECKING:
    from amanda.backend import OpFacts

    from ._nodes import Edge, Syntax

# Observers that share a node keep its tensors alive until the node runs, so the memory of a node is bounded.
# What the caches hold is read faster, and a call of Python takes less time than to compute so much.
DEFAULT_BUDGET = 4 << 20


@dataclass
class Body:
    """The operations of a graph or function that run.

    ops: the operations, in order.
    nodes: a NodeDef of each operation by name; these are copies, which the engine edits.
    syntax: the spelling of tensors in the inputs of these NodeDefs.
    number_ref: the input with the execution's number.
    identity: 64 bits that name the graph, the same in every process.
    forward_of: returns the forward operation of a gradient operation; None for others.
    outputs: the tensors that are fetched or returned.
    find_captured: returns the forward graph's tensor that a placeholder stands for; None for other tensors.
    node_name: returns the name of an operation in `nodes`, or among the arguments.
    read_value: returns the present value of a symbolic tensor.
    variable_of: returns the holder of the variable that a symbolic tensor was read from; None for others.
    find_function: returns the function that a node calls, by its name; None where it is out of reach.
    is_backward: True if all operations belong to a backward pass, also those without a forward operation.
    has_gradients_elsewhere: True if gradient operations of these operations may be in other graphs.
    stacked_names: names of operations whose gradients read values off stacks that others read, too.
    loop_depth: number of loops around the body, whose rounds the number contains.
    is_called: True if an operation calls the body, which may begin before all of its arguments are there.
    has_guessed_forwards: True if the forward operation of some gradient operation was inferred from names.
    gradient_order_of: returns 1 for a gradient operation, 2 for an operation of second gradients, and so on.
    forward_identity: identity of the graph that these are gradients of, if that is another graph.
    location_of: returns the layer around an operation.
    frames: control flow of version 1, in which the number and the depth depend on the operation.
    """

    ops: Sequence[tf.Operation]
    nodes: Mapping[str, Any]
    syntax: Syntax
    number_ref: str
    identity: int
    forward_of: Callable[[tf.Operation], tf.Operation | None] = lambda op: None
    outputs: Sequence[Edge] = ()
    find_captured: Callable[[Any], Any] = lambda tensor: None
    node_name: Callable[[tf.Operation], str] = lambda op: str(op.name)
    read_value: Callable[[Any], Any] = lambda tensor: constant_value(tensor)
    find_function: Callable[[str], Any] = lambda name: None
    is_backward: bool = False
    has_gradients_elsewhere: bool = False
    stacked_names: Collection[str] = ()
    loop_depth: int = 0
    is_called: bool = False
    has_guessed_forwards: bool = False
    gradient_order_of: Callable[[tf.Operation], int] = lambda op: 1
    variable_of: Callable[[Any], Any] = lambda tensor: None
    # None for functions: their loops and branches are operations that call functions, without frames.
    frames: Any = None
    location_of: Callable[[tf.Operation], Location] = Location.outside
    # Functions alone have their gradients in other graphs.
    forward_identity: int | None = None

    def forward_id(self, op: tf.Operation) -> int | None:
        """Return the id of a forward operation of this body or of its forward graph; None if unknown.

        A graph that is called at several places has other ids for its operations at each place.
        """
        is_in_body = bool(self.ops) and op.graph is self.ops[0].graph
        identity = self.identity if is_in_body else self.forward_identity
        return None if identity is None else digest(identity, op.name)

    def loop_depth_of(self, op: tf.Operation) -> int:
        """Return the number of loops around an operation whose rounds the execution's number contains."""
        return self.loop_depth if self.frames is None else int(self.frames.depth_at(op))

    def number_ref_at(self, op: tf.Operation, ahead: bool) -> str:
        """Return the number that nodes ahead of an operation, or behind it, read.

        Nodes ahead of the Merge of a loop are outside of the loop.
        """
        return self.number_ref if self.frames is None else str(self.frames.number_ref_at(op, ahead))


@dataclass
class RewrittenBody:
    """An edited body.

    nodes: all nodes; the inserted ones come last.
    outputs: the copy's spelling of each of the body's outputs.
    inserted_names_by_op: names of inserted nodes by the operation with which they must run, if it runs.
    replacement_by_name: by the name of a replaced operation's node, the node that runs instead.
    edited_call_names: names of the nodes whose functions were edited.
    is_changed: True if a node was inserted; if not, the vanilla graph may run.
    has_backward_ops: True if there are gradient operations in the body, or in functions that it calls.
    number_ref_by_name: the ref of the number that a node with routines reads, by the node's name.
    """

    nodes: list[Any]
    outputs: list[str]
    inserted_names_by_op: dict[str, list[str]]
    replacement_by_name: dict[str, str]
    is_changed: bool
    edited_call_names: Sequence[str] = ()
    has_backward_ops: bool = False
    number_ref_by_name: Mapping[str, str] = field(default_factory=dict)


@dataclass
class AutodiffPlace:
    """A node with routines that take part in autodiff.

    side: "before", "instead" or "after" the operation; "reader" for an operation whose inputs the replacement
    of another operation reads, too.  replacement_id: the op id of that other operation.
    saved_key: the key under which the node saves its values.
    body_identity, node_name: the identity of the node's body, and the node's name.
    input_positions, output_positions: flat positions of its values among those of the operation.
    """

    side: str
    saved_key: SavedKey
    body_identity: int
    node_name: str
    input_positions: list[int]
    output_positions: list[int]
    replacement_id: int | None = None


@dataclass(kw_only=True)
class TensorFlowRewriting(backend.Rewriting):
    """The rewrite of a graph with the functions that it calls.

    budget: limit in bytes for the values that one call of observers gets.
    library: FunctionDefs that the copy calls.
    is_differentiated: True if gradients are computed, here or in a graph that is rewritten later: then
    routines save values for the backward pass.
    saved_tensor_by_read: by op id, name and index of a tensor, the saved tensor that the op's backward
    operations read instead.
    saved_tensors_by_input: likewise by position, for a tensor that is several inputs of an op; None for an
    input that no routine changes.
    autodiff_places: the nodes with routines of an op that take part in autodiff, by op id.
    readers_by_saved_key: the number of nodes that read saved values.
    loop_depth_by_op_id: number of loops around a forward op; 0 for others.
    callee_graphs_by_op: graphs of the functions that a forward operation calls, by the operation and place.
    facts_by_id_by_op: by an analysed forward operation, its facts by op id; an operation of a function that
    is called at several places has several ids.
    find_earlier_forward: returns op id and facts of a forward operation of a graph that was rewritten before,
    for an op id if that is known; None for other operations.
    find_function: returns a function by name that the runtime does not have; None if out of reach.
    has_several_devices: True if resources may be on several devices.
    ops_for_xla_alone: operations whose functions run uninstrumented, since XLA alone can run them.
    runs_without_xla: True if the graph has jit_compile, and a trial without XLA succeeded.
    layer_index: the layers that name scopes are looked up among.
    """

    budget: int = DEFAULT_BUDGET
    history: ValueHistory = field(default_factory=lambda: ValueHistory(TensorFlowReads))
    library: list[Any] = field(default_factory=list)
    facts_by_id_by_op: dict[tf.Operation, dict[int, OpFacts]] = field(default_factory=dict)
    callee_graphs_by_op: dict[tf.Operation, dict[str, Any]] = field(default_factory=dict)
    is_differentiated: bool = False
    saved_tensor_by_read: dict[Any, SavedTensor] = field(default_factory=dict)
    saved_tensors_by_input: dict[Any, dict[int, SavedTensor | None]] = field(default_factory=dict)
    autodiff_places: dict[int, list[AutodiffPlace]] = field(default_factory=dict)
    readers_by_saved_key: dict[Hashable, Readers] = field(default_factory=lambda: defaultdict(Readers))
    loop_depth_by_op_id: dict[int, int] = field(default_factory=dict)
    find_earlier_forward: Callable[[tf.Operation, int | None], Any] = lambda op, op_id: None
    find_function: Callable[[str], Any] | None = None
    has_several_devices: bool = False
    ops_for_xla_alone: set[tf.Operation] = field(default_factory=set)
    runs_without_xla: bool = False
    layer_index: LayerIndex = field(default_factory=LayerIndex)

    def find_forward(self, op: tf.Operation, op_id: int | None) -> tuple[int, OpFacts] | None:
        """Return op id and facts of a forward operation analysed here or in an earlier rewrite, else None.

        Facts of an earlier rewrite are copied into this one.
        op_id: the operation's id, where that is known; without facts of that id, those of the last id count.
        """
        facts_by_id = self.facts_by_id_by_op.get(op, {})
        if op_id in facts_by_id:
            return op_id, facts_by_id[op_id]
        if not facts_by_id or op_id is not None:
            earlier_forward: tuple[int, OpFacts] | None = self.find_earlier_forward(op, op_id)
            if earlier_forward is not None:
                earlier_id, earlier_facts = earlier_forward
                if not facts_by_id or earlier_id == op_id:
                    self.facts_by_id_by_op.setdefault(op, {})[earlier_id] = earlier_facts
                    return earlier_forward
        return next(reversed(facts_by_id.items()), None)


def op_id(body: Body, name: str) -> int:
    """Return the id of an operation of a body."""
    # Names of operations are unique in a graph, and the same in every process.
    return digest(body.identity, name)


def constant_value(tensor: Any) -> Any:
    """Return the value of a constant tensor, or the symbol of another tensor."""
    value = tensor_util.constant_value(tensor)
    return tensor if value is None else tf.convert_to_tensor(value, tensor.dtype)
