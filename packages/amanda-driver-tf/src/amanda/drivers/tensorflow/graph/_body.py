"""The data that a mode hands to the engine, and what it gets back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from amanda import backend
from amanda.backend import digest
from amanda.graph import History
from tensorflow.python.framework import tensor_util

from ._locations import Layers, Location
from ._reads import TensorFlowReads
from ._taping import Readers

if TYPE_CHECKING:
    from amanda.backend import OpFacts

    from ._syntax import Edge, Syntax

DEFAULT_BUDGET = 64 << 20


@dataclass
class Body:
    """The nodes of one graph or function that run.

    ops: the operations, in order.
    nodes: by name, a NodeDef of each operation: copies, which the engine edits.
    syntax: how the inputs of these NodeDefs name tensors.
    number: the input that carries the execution's number.
    identity: 64 bits that name the graph, the same in every process.
    forward_of: the forward operation of a gradient operation; None for others.
    outputs: the tensors that are fetched or returned.
    captured: of a placeholder's output, the forward graph's tensor that it stands for; None for others.
    node_name: the name in `nodes`, or the argument, of an operation.
    read_value: the present value of a symbolic tensor.
    variable_of: what holds the variable that a symbolic tensor was read of; None for others.
    functions: the body of a function that a node calls, by its name; None where it is out of reach.
    backward: whether all operations belong to a backward pass, also those of no forward operation.
    apart: whether gradient operations of these operations may be in other graphs.
    stacked: names of the operations whose gradients read their values where others read them too.
    depth: how many loops are around it, whose rounds the number tells.
    guessed: whether names tell the forward operation of some gradient operation.
    order_of: 1 for a gradient operation, 2 for one of gradients of gradients, and so on.
    forward_identity: of the graph that this one has gradients of, as it was called, if it is another.
    place_of: the layer that an operation lies in.
    frames: of control flow of version 1, in which the number and the depth depend on the operation.
    """

    ops: Sequence[tf.Operation]
    nodes: Mapping[str, Any]
    syntax: Syntax
    number: str
    identity: int
    forward_of: Callable[[tf.Operation], tf.Operation | None] = lambda op: None
    outputs: Sequence[Edge] = ()
    captured: Callable[[Any], Any] = lambda tensor: None
    node_name: Callable[[tf.Operation], str] = lambda op: str(op.name)
    read_value: Callable[[Any], Any] = lambda tensor: constant_value(tensor)
    functions: Callable[[str], Any] = lambda name: None
    backward: bool = False
    apart: bool = False
    stacked: Collection[str] = ()
    depth: int = 0
    guessed: bool = False
    order_of: Callable[[tf.Operation], int] = lambda op: 1
    variable_of: Callable[[Any], Any] = lambda tensor: None
    frames: Any = None
    place_of: Callable[[tf.Operation], Location] = Location.outside
    forward_identity: int | None = None

    def forward_id(self, op: tf.Operation) -> int | None:
        """Id of a forward operation of this body or of the graph that it has gradients of, if it is known.

        A graph that is called at several places has other ids for its operations at each.
        """
        own = bool(self.ops) and op.graph is self.ops[0].graph
        identity = self.identity if own else self.forward_identity
        return None if identity is None else digest(identity, op.name)

    def depth_of(self, op: tf.Operation) -> int:
        """Return how many loops are around an operation, whose rounds the number tells."""
        return self.depth if self.frames is None else int(self.frames.depth_at(op))

    def number_at(self, op: tf.Operation, ahead: bool) -> str:
        """The number that nodes read ahead of an operation or behind it.

        Those of the Merge of a loop are ahead of what enters the loop.
        """
        return self.number if self.frames is None else str(self.frames.number_at(op, ahead))


@dataclass
class Rewritten:
    """An edited body.

    nodes: all nodes, those inserted last.
    outputs: for each of the body's outputs, how the copy names it as an input.
    inserted: the names of inserted nodes by the operation that they must run with, if it runs.
    removed: by the name of a replaced operation's node, the node that runs instead.
    called: names of the nodes whose functions were edited.
    changed: whether anything was inserted; if not, the vanilla graph may run.
    backward: whether there are gradient operations in it, or in what it calls.
    numbers: the number that nodes with routines read, by their names.
    """

    nodes: list[Any]
    outputs: list[str]
    inserted: dict[str, list[str]]
    removed: dict[str, str]
    changed: bool
    called: Sequence[str] = ()
    backward: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Taped:
    """A place where routines take part in autodiff.

    side: "before", "instead" or "after" the operation, or "past" it: it is one whose inputs are read by what
    replaces another one, the maker, by its op id.  place: the name that it keeps its values under.
    node: the body that it is in, by its number, and its name there.
    given, gave: flat positions of these values on the operation's side.
    """

    side: str
    place: Any
    node: tuple[int, str]
    given: list[int]
    gave: list[int]
    maker: int | None = None


@dataclass(kw_only=True)
class Rewriting(backend.Rewriting):
    """One rewrite of a graph with the functions it calls: functions made, and what the backward pass needs.

    budget: how many bytes observers may hold that run together.
    library: FunctionDefs that the copy calls.
    differentiated: whether gradients are computed, here or in a graph that is rewritten later: then
    routines keep what the backward pass needs.
    kept: where what the backward operations of an op read instead of a tensor is kept: by op id, name and
    index of the tensor, the place, its side and position.
    shared: the same where an op is given a tensor several times, by position; None where it is read as it is.
    taped: the places where routines of an op take part in autodiff, by op id.
    readers: by a place, the nodes that read what is kept there.
    depths: how many loops are around a forward op, by op id; 0 for others.
    callees: graphs of the functions that a forward operation calls, by the operation and place.
    ids: facts of the forward operations that were analysed by their op ids: of a function that is called
    at several places an operation has several.
    origin: op id and facts of a forward operation of another graph, which was rewritten before, by the id
    that it has if that is known; None of others.
    find: a function by its name, where it is not one of the runtime; None where it is out of reach.
    several_devices: whether resources may be on several devices.
    compiled: operations whose functions run as they are, since XLA alone can run them.
    runs_without_xla: whether XLA was to run the whole graph, and a trial without it succeeded.
    layers: those whose names the scopes of the graph tell.
    """

    budget: int = DEFAULT_BUDGET
    history: History = field(default_factory=lambda: History(TensorFlowReads))
    library: list[Any] = field(default_factory=list)
    ids: dict[tf.Operation, dict[int, OpFacts]] = field(default_factory=dict)
    callees: dict[tf.Operation, dict[str, Any]] = field(default_factory=dict)
    differentiated: bool = False
    kept: dict[Any, tuple[Any, int, int]] = field(default_factory=dict)
    shared: dict[Any, dict[int, tuple[Any, int, int] | None]] = field(default_factory=dict)
    taped: dict[int, list[Taped]] = field(default_factory=dict)
    readers: dict[Hashable, Readers] = field(default_factory=lambda: defaultdict(Readers))
    depths: dict[int, int] = field(default_factory=dict)
    origin: Callable[[tf.Operation, int | None], Any] = lambda op, op_id: None
    find: Callable[[str], Any] | None = None
    several_devices: bool = False
    compiled: set[tf.Operation] = field(default_factory=set)
    runs_without_xla: bool = False
    layers: Layers = field(default_factory=Layers)

    def known(self, op: tf.Operation, op_id: int | None) -> tuple[int, OpFacts] | None:
        """Op id and facts of a forward operation that was analysed; None of others.

        op_id: the id that it has, where that is known; else its last one is meant.
        """
        own = self.ids.get(op, {})
        if op_id in own:
            return op_id, own[op_id]
        if not own or op_id is not None:
            found: tuple[int, OpFacts] | None = self.origin(op, op_id)
            if found is not None and (not own or found[0] == op_id):
                self.ids.setdefault(op, {})[found[0]] = found[1]
                return found
        return next(reversed(own.items()), None)


def op_id(body: Body, name: str) -> int:
    """Id of an operation of a body."""
    return digest(body.identity, name)


def constant_value(tensor: Any) -> Any:
    """The value of a tensor that a constant makes; the symbol itself where it is no constant."""
    value = tensor_util.constant_value(tensor)
    return tensor if value is None else tf.convert_to_tensor(value, tensor.dtype)
