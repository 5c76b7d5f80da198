"""The graph of the executed ops and the tensors between them, while it is recorded and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda import interceptor
from amanda.tools.kit import leaves
from amanda.tools.results import check_schema, field_values, made_of

if TYPE_CHECKING:
    import networkx

VERSION = 1
"""Version of the schema `amanda.trace`."""
UNRECORDED = -1
"""Index of an op or a framework before the recorder sets it."""

Position = int | None | tuple["int | None", ...]
"""One input or output: a tensor's index, None for a value that is not a tensor, or a list of these."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor between ops; a tensor that is written in place becomes a new one.

    shape: None for an unknown extent; None for all if the rank is unknown.
    kind: "parameter", "buffer", "constant", "activation", "gradient", or "input" for all others that no
    recorded op made.  name: path of a parameter in its model, or a graph's name of a tensor.
    producer: the op that made or wrote the tensor.  consumers: the ops that read the tensor, or write a part
    of its memory.  alias_of: the tensor whose memory a view shares, or the tensor before it was written.
    batches: numbers of samples of the vmaps that the tensor has a batch of; shape is that of one sample.
    """

    index: int
    shape: tuple[int | None, ...] | None
    dtype: str | None
    device: str | None
    bytes: int | None
    kind: str
    name: str | None = None
    producer: int | None = None
    consumers: tuple[int, ...] = ()
    alias_of: int | None = None
    batches: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return element type and extents: `float32[8,3,224,224]`, `float32[vmap 8,3,224,224]`."""
        shape = ["..."] if self.shape is None else ["?" if n is None else str(n) for n in self.shape]
        return f"{self.dtype or '?'}[{','.join([*(f'vmap {n}' for n in self.batches), *shape])}]"


@dataclass(frozen=True, slots=True)
class Op:
    """An executed op.

    id: the op id, the same for all ops of one place in the program.  name: the framework's name.
    framework: position in the graph's `frameworks`.  source: the user's "file:line".
    inputs, outputs: in the order of the op's schema; of a backward op the gradients that enter and leave;
    autodiff adds up the gradients of a list.  writes: inputs after the op wrote their memory.
    forward: the forward op of a backward op.  calls: number of executions; None if unknown.
    recomputations: number of executions again in the backward pass, as in a checkpoint.
    """

    index: int
    id: int
    phase: str
    type: str
    name: str
    framework: int
    module: str
    source: str
    inputs: tuple[Position, ...]
    outputs: tuple[Position, ...]
    writes: tuple[int, ...] = ()
    forward: int | None = None
    calls: int | None = None
    recomputations: int = 0
    in_place: bool = False
    attributes: Mapping[str, Any] | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the indices of all tensors among the inputs."""
        return tuple(indices_at(self.inputs))

    @property
    def makes(self) -> tuple[int, ...]:
        """Return the indices of all tensors among the outputs, and of written tensors."""
        return (*indices_at(self.outputs), *self.writes)


def indices_at(positions: Sequence[Position]) -> list[int]:
    """Return the tensor indices at positions."""
    return [index for index in leaves(positions) if index is not None]


def map_position(function: Callable[[Any], int | None], value: Any, keep: bool = False) -> Position:
    """Return the result of a function for a value, or a tuple of results for a list.

    keep: keep a tuple of None alone, instead of returning None.
    """
    if not isinstance(value, (list, tuple)):
        return None if value is None else function(value)
    indices: Any = tuple([map_position(function, item, keep) for item in value])
    return indices if keep or any(item is not None for item in indices) else None


@dataclass(frozen=True)
class Graph:
    """Ops in the order of their execution, and tensors; indices refer into these.

    frameworks: namespaces of the ops, e.g. "pytorch/2.13.0/eager".
    executions: most ops for one place in the program.  dropped: number of ops after the limit.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    frameworks: tuple[str, ...] = ()
    executions: int = 1
    dropped: int = 0

    def inputs(self, op: Op) -> tuple[Tensor, ...]:
        """Return the tensors that an op reads, or of whose memory it writes a part."""
        # A write into a part of the memory leaves the rest, which the op thus reads.
        earlier_indices = (self.tensors[index].alias_of for index in op.writes)
        indices = dict.fromkeys((*op.reads, *earlier_indices))
        return tuple(self.tensors[index] for index in indices if index is not None)

    def outputs(self, op: Op) -> tuple[Tensor, ...]:
        """Return the tensors that an op makes or writes."""
        return tuple(self.tensors[index] for index in op.makes)

    def producers(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that made the inputs of an op."""
        return self._ops_at(op, (tensor.producer for tensor in self.inputs(op)))

    def consumers(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that read the outputs of an op."""
        return self._ops_at(op, (i for tensor in self.outputs(op) for i in tensor.consumers))

    def _ops_at(self, op: Op, indices: Iterable[int | None]) -> tuple[Op, ...]:
        """Return ops by their indices, each once, without None and the op itself."""
        return tuple(self.ops[i] for i in dict.fromkeys(indices) if i is not None and i != op.index)

    def backward(self, op: Op) -> tuple[Op, ...]:
        """Return the backward ops of a forward op."""
        return tuple(candidate for candidate in self.ops if candidate.forward == op.index)

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """Return a node for each op, by its index, and edges for each tensor from its producer to consumers.

        Nodes have the op's fields as attributes; edges have the tensor's index as their key, and its fields.
        """
        import networkx

        graph = networkx.MultiDiGraph(
            frameworks=self.frameworks, executions=self.executions, dropped=self.dropped
        )
        for op in self.ops:
            graph.add_node(op.index, **field_values(op))
        for tensor in self.tensors:
            # Tensors from outside have no node to begin an edge.
            for consumer in tensor.consumers if tensor.producer is not None else ():
                if consumer != tensor.producer:
                    graph.add_edge(tensor.producer, consumer, key=tensor.index, **field_values(tensor))
        return graph

    def to_dict(self) -> dict[str, Any]:
        """Return the graph in the schema `amanda.trace`."""
        return {
            **field_values(self),
            "frameworks": list(self.frameworks),
            # Ids have 64 bits, and JSON's readers often hold numbers as floats.
            "ops": [{**field_values(op), "id": f"{op.id:016x}"} for op in self.ops],
            "tensors": [field_values(tensor) for tensor in self.tensors],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Graph:
        """Return the graph that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema({"schema": "amanda.trace", "version": VERSION, **content}, "trace", VERSION)
        ops = tuple(_from_json(Op, {**op, "id": int(op["id"], 16)}) for op in content["ops"])
        tensors = tuple(_from_json(Tensor, tensor) for tensor in content["tensors"])
        graph = cls(ops, tensors, tuple(content["frameworks"]), content["executions"], content["dropped"])
        graph._check_indices()
        return graph

    def _check_indices(self) -> None:
        """Raise ValueError for an index without an op or tensor."""
        for op in self.ops:
            _check_indices(f"op {op.index}", (*op.reads, *op.makes, *op.writes), len(self.tensors))
            _check_indices(f"op {op.index}", (op.forward,), len(self.ops))
        for tensor in self.tensors:
            _check_indices(f"tensor {tensor.index}", (tensor.producer, *tensor.consumers), len(self.ops))
            _check_indices(f"tensor {tensor.index}", (tensor.alias_of,), len(self.tensors))


def _check_indices(owner: str, indices: Iterable[Any], count: int) -> None:
    """Raise ValueError for an index that is neither None nor below `count`.  owner: for the message."""
    for index in indices:
        if index is not None and not (type(index) is int and 0 <= index < count):
            raise ValueError(f"{owner} refers to {index!r}, and there are {count}")


def _from_json(kind: type[Any], content: Mapping[str, Any]) -> Any:
    """Return an op or tensor from JSON: lists become tuples, unknown keys are dropped."""
    # Files of earlier versions lack these; every other key is needed.
    added_later = ("recomputations", "batches")
    names = [field.name for field in fields(kind) if field.name in content or field.name not in added_later]
    values = {key: content[key] if key == "attributes" else _lists_to_tuples(content[key]) for key in names}
    return made_of(kind, values)


def _lists_to_tuples(value: Any) -> Any:
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


class TraceFacts(NamedTuple):
    """Facts of an op besides the words of StandardMapping.

    name: the framework's name.  makes: kind of the outputs; "" for the kind of the first input.
    written: positions of inputs that the op writes without a new version.
    brings_in: the outputs are new data from outside at each execution, as of an iterator.
    """

    name: str
    makes: str
    written: Sequence[int] = ()
    brings_in: bool = False


UNKNOWN = -1
"""Root of a tensor that fits any other, such as new data from outside."""


class OpenExecution(NamedTuple):
    """An execution under way.

    repeated_op: index of the recorded op that the execution repeats; None for a new op.
    forward_op: index of the recorded forward op of a backward op.
    input_states: tensors among the inputs by flat position.  write_serial: of the last write before the op.
    next_node_number: of autodiff's next node before the op.
    """

    inputs: tuple[Position, ...]
    repeated_op: int | None
    forward_op: int | None = None
    input_states: Sequence[Any] = ()
    write_serial: int = 0
    next_node_number: int | None = None


@dataclass(slots=True, eq=False)
class ProgramOp:
    """An op of the program, forward or backward, and the recorded ops that are executions of it.

    op: has the fields that all executions share.  framework: its namespace.  forward: of a backward op.
    symbolic: an op of a graph, analysed on symbols.
    records: executions under way, those that native code repeats, and the nodes that they made.
    ops: indices of the recorded ops.  last_executed: the one of these that was executed last.
    resumed_forward_op: recorded forward op of the backward op under way, where `run` leads to it.
    op_by_forward_op: recorded backward ops by the index of their forward op.
    """

    op: Op
    facts: TraceFacts
    framework: str
    symbolic: bool
    forward: ProgramOp | None
    live: InitVar[interceptor.LiveTensors]
    records: interceptor.ExecutionRecords = field(init=False)
    ops: list[int] = field(default_factory=list)
    last_executed: int | None = None
    is_dropped: bool = False
    resumed_forward_op: int | None = None
    op_by_forward_op: dict[int | None, int] = field(default_factory=dict)

    def __post_init__(self, live: interceptor.LiveTensors) -> None:
        """Create the records."""
        forward = None if self.forward is None else self.forward.records
        self.records = interceptor.ExecutionRecords(live, self.ops, tuple(self.facts.written), forward)

    @property
    def position(self) -> int:
        """Return the position in `ops` of the execution under way in this thread; 0 without one."""
        execution = self.records.current()
        if execution is None:
            return 0
        op = execution.repeated_op if isinstance(execution, OpenExecution) else execution
        return len(self.ops) if op is None else self.ops.index(op)

    def op_of_node(self, node_number: int | None) -> int | None:
        """Return the recorded op that made a node; if none did, the first one; None without recorded ops."""
        op = None if node_number is None else self.records.op_of_node(node_number)
        return op if op is not None or not self.ops else self.ops[0]


@dataclass(slots=True, eq=False)
class RecordedOp:
    """A recorded op.

    op: has the fields that all executions share.  index: in the graph.  framework: position in `frameworks`.
    inputs: at the begin of the first execution.  input_roots: by which ops of one place are told apart.
    written_inputs: index of each written input after the op, by flat position.
    record: the same for native code, which counts further executions there.
    other_versions: new versions of tensors in written memory that were read since, or of a leaf's gradient.
    """

    op: Op
    index: int
    framework: int
    inputs: tuple[Position, ...]
    forward: int | None
    calls: int | None
    input_roots: tuple[Position, ...]
    recomputations: int = 0
    outputs: tuple[Position, ...] = ()
    written_inputs: dict[int, int] = field(default_factory=dict)
    other_versions: list[int] = field(default_factory=list)
    record: interceptor.ExecutionRecord | None = None


@dataclass(slots=True, eq=False)
class RecordedTensor:
    """A recorded tensor, with the fields of `Tensor` but its index.

    consumers: the ops that read it, or write a part of its memory, as keys.
    root: the tensor before it was first written; UNKNOWN for new data from outside.
    """

    shape: tuple[int | None, ...] | None
    dtype: str | None
    device: str | None
    bytes: int | None
    kind: str
    name: str | None = None
    producer: int | None = None
    alias_of: int | None = None
    batches: tuple[int, ...] = ()
    root: int = UNKNOWN
    consumers: dict[int, None] = field(default_factory=dict)


class GraphRecorder:
    """Ops and tensors in the order of execution.

    executions: most ops of one place; further executions are counted at the last.  limit: most ops.
    live: live tensors of each framework.
    """

    def __init__(self, executions: int, limit: int) -> None:
        self.executions, self._limit = executions, limit
        self._framework_numbers: dict[str, int] = {}
        self.ops: list[RecordedOp] = []
        self.tensors: list[RecordedTensor] = []
        self._dropped = 0
        # As `graph` returned it; None after a change.
        self._graph: Graph | None = None
        self._counted = 0
        self.live: list[interceptor.LiveTensors] = []

    def add_tensor(
        self, new_tensor: RecordedTensor, is_same_tensor: bool = False, from_outside: bool = False
    ) -> int:
        """Add a tensor, and set its root; return its index.

        is_same_tensor: it is its alias after a write, or handed on.  from_outside: new data each time.
        """
        index = root = len(self.tensors)
        if is_same_tensor and new_tensor.alias_of is not None:
            root = self.tensors[new_tensor.alias_of].root
        new_tensor.root = UNKNOWN if from_outside else root
        self.tensors.append(new_tensor)
        self._graph = None
        return index

    def add_op(
        self, program_op: ProgramOp, inputs: tuple[Position, ...], forward_op: int | None, recomputed: bool
    ) -> int:
        """Add an op, as a reader of its inputs, and its first execution; return its index."""
        index = len(self.ops)
        framework = self._framework_numbers.setdefault(program_op.framework, len(self._framework_numbers))
        calls = None if program_op.symbolic else int(not recomputed)
        self.ops.append(RecordedOp(
            program_op.op, index, framework, inputs, forward_op, calls, self._roots(inputs), int(recomputed)
        ))  # fmt: skip
        program_op.ops.append(index)
        for tensor in indices_at(inputs):
            self.tensors[tensor].consumers[index] = None
        self._graph = None
        return index

    def _roots(self, positions: tuple[Position, ...]) -> tuple[Any, ...]:
        return tuple([
            self._roots(position) if isinstance(position, tuple)  # a list of tensors
            else None if position is None else self.tensors[position].root
            for position in positions
        ])  # fmt: skip

    def add_record(self, program_op: ProgramOp, recorded: RecordedOp, writes: Mapping[int, int]) -> None:
        """Add a recorded op to those of which native code counts further executions.

        writes: index of each written input after the op, by flat position, or of the gradient of a leaf.
        """
        written = [(i, index, self.tensors[index].root) for i, index in writes.items()]
        recorded.record = interceptor.ExecutionRecord(
            recorded.index, recorded.inputs, recorded.input_roots, recorded.outputs,
            self._roots(recorded.outputs), tuple(written),
            -1 if recorded.forward is None else recorded.forward,
        )  # fmt: skip
        program_op.records.add(recorded.record)

    def count(self, op: int, recomputed: bool = False) -> None:
        """Count a further execution of an op, or a recomputation."""
        recorded = self.ops[op]
        if recomputed:
            recorded.recomputations += 1
        else:
            recorded.calls = (recorded.calls or 0) + 1
        self._graph = None

    @property
    def is_full(self) -> bool:
        """Return True if no further op is recorded."""
        return len(self.ops) >= self._limit

    def drop_if_full(self, program_op: ProgramOp) -> bool:
        """Return True for an op without records after the limit, which is counted as dropped, once."""
        if program_op.ops or not self.is_full:
            return False
        if not program_op.is_dropped:
            program_op.is_dropped = True
            self._dropped += 1
            self._graph = None
        return True

    def op(self, index: int) -> Op:
        """Return a recorded op as it is now."""
        recorded = self.ops[index]
        outputs = set(indices_at(recorded.outputs))
        writes = (*recorded.written_inputs.values(), *recorded.other_versions)
        calls, recomputations, record = recorded.calls, recorded.recomputations, recorded.record
        if calls is not None and record is not None:
            calls, recomputations = calls + record.calls, recomputations + record.recomputations
        return replace(
            recorded.op, index=index, framework=recorded.framework, inputs=recorded.inputs,
            outputs=recorded.outputs, forward=recorded.forward, calls=calls, recomputations=recomputations,
            writes=tuple(tensor for tensor in writes if tensor not in outputs),
        )  # fmt: skip

    def tensor(self, index: int) -> Tensor:
        """Return a recorded tensor as it is now."""
        recorded = self.tensors[index]
        return Tensor(
            index, recorded.shape, recorded.dtype, recorded.device, recorded.bytes, recorded.kind,
            recorded.name, recorded.producer, tuple(recorded.consumers), recorded.alias_of, recorded.batches,
        )  # fmt: skip

    def producers(self, op: Op) -> list[Op]:
        """Return the ops that made the tensors that a recorded op reads or writes, each once."""
        # The tensors before the writes.
        aliases = [self.tensors[index].alias_of for index in op.writes]
        tensors = [*op.reads, *(index for index in aliases if index is not None)]
        producers = dict.fromkeys(self.tensors[index].producer for index in tensors)
        return [self.op(producer) for producer in producers if producer is not None and producer != op.index]

    def graph(self) -> Graph:
        """Return the graph so far; the same object as long as nothing is added."""
        counted = sum(live.counted for live in self.live)
        if self._graph is None or counted != self._counted:
            self._counted = counted
            ops = tuple(map(self.op, range(len(self.ops))))
            tensors = tuple(map(self.tensor, range(len(self.tensors))))
            self._graph = Graph(ops, tensors, tuple(self._framework_numbers), self.executions, self._dropped)
        return self._graph
