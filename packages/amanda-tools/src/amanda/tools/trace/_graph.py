"""The graph of what was executed: ops, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import leaves
from amanda.tools.results import check_schema, made_of

if TYPE_CHECKING:
    import networkx

VERSION = 1
"""Of the schema `amanda.trace`."""

Position = int | None | tuple["int | None", ...]
"""One input or output: a tensor's index, None for a value that is no tensor, or a list of these."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value that flowed; what is written in place is another one afterwards.

    shape: None for an extent that is not known, and for all where the rank is not.
    kind: "parameter", "buffer", "constant", "input" (any other that no recorded op made), "activation",
    "gradient".  name: path of a parameter in its model, a graph's name of a tensor.
    producer: the op that made or wrote it.  consumers: the ops that read it, or write a part of its memory.
    alias_of: the tensor whose memory it shares: what it is a view of, what it was before it was written.
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

    def __str__(self) -> str:
        """Return element type and extents: `float32[8,3,224,224]`."""
        extents = "..." if self.shape is None else ",".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.dtype or '?'}[{extents}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One op.

    id: the op id, the same for all ops of one place in the program.  name: the framework's own.
    framework: position in the graph's `frameworks`.  source: the user's "file:line".
    inputs, outputs: in the order of the op's schema; of a backward op the gradients that enter and leave
    it, where those of a list are added up.  writes: what it wrote in memory that it was given, besides.
    forward: the forward op of a backward op.  calls: how often it was executed; None where that is not known.
    recomputations: how often it ran again in the backward pass, as in a checkpoint.
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
        """Return the indices of all tensors among the outputs, and of those written."""
        return (*indices_at(self.outputs), *self.writes)


def indices_at(positions: Sequence[Position]) -> Iterator[int]:
    """Yield the tensor indices at positions."""
    return (one for one in leaves(positions) if one is not None)


def each(function: Callable[[Any], int | None], value: Any, keep: bool = False) -> Position:
    """Return what a function gives for a value, or for each element of a list.

    keep: lists for whose elements the function gives None alone, instead of None for them.
    """
    if not isinstance(value, (list, tuple)):
        return None if value is None else function(value)
    found: Any = tuple(each(function, one, keep) for one in value)
    return found if keep or any(one is not None for one in found) else None


@dataclass(frozen=True)
class Graph:
    """Ops in the order of their execution, and tensors; indices refer into these.

    frameworks: namespaces of the ops, e.g. "pytorch/2.13.0/eager".
    executions: how many ops one place in the program may be.
    dropped: how many ops came after the limit.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    frameworks: tuple[str, ...] = ()
    executions: int = 1
    dropped: int = 0

    def inputs(self, op: Op) -> tuple[Tensor, ...]:
        """Return the tensors that an op reads, and those a part of whose memory it writes."""
        parts = (self.tensors[index].alias_of for index in op.writes)
        return tuple(self.tensors[index] for index in dict.fromkeys((*op.reads, *parts)) if index is not None)

    def outputs(self, op: Op) -> tuple[Tensor, ...]:
        """Return the tensors that an op makes or writes."""
        return tuple(self.tensors[index] for index in op.makes)

    def producers(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that made what an op reads."""
        return self._others(op, (tensor.producer for tensor in self.inputs(op)))

    def consumers(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that read what an op makes."""
        return self._others(op, (i for tensor in self.outputs(op) for i in tensor.consumers))

    def _others(self, op: Op, indices: Iterable[int | None]) -> tuple[Op, ...]:
        return tuple(self.ops[i] for i in dict.fromkeys(indices) if i is not None and i != op.index)

    def backward(self, op: Op) -> tuple[Op, ...]:
        """Return the backward ops of a forward op."""
        return tuple(one for one in self.ops if one.forward == op.index)

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """Return a node for each op, by its index, and edges for each tensor from its producer to consumers.

        Nodes have the op's fields as attributes; edges have the tensor's index as their key, and its fields.
        """
        import networkx

        made = networkx.MultiDiGraph(
            frameworks=self.frameworks, executions=self.executions, dropped=self.dropped
        )
        for op in self.ops:
            made.add_node(op.index, **_fields(op))
        for tensor in self.tensors:
            for consumer in tensor.consumers if tensor.producer is not None else ():
                if consumer != tensor.producer:
                    made.add_edge(tensor.producer, consumer, key=tensor.index, **_fields(tensor))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as files of the schema `amanda.trace` have it."""
        return {
            **_fields(self),
            "frameworks": list(self.frameworks),
            "ops": [{**_fields(op), "id": f"{op.id:016x}"} for op in self.ops],
            "tensors": [_fields(tensor) for tensor in self.tensors],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Graph:
        """Return a graph from what `to_dict` gave, also after JSON.

        Raises ValueError for another schema or a newer version.
        """
        check_schema({"schema": "amanda.trace", "version": VERSION, **found}, "trace", VERSION)
        ops = tuple(_made(Op, {**op, "id": int(op["id"], 16)}) for op in found["ops"])
        tensors = tuple(_made(Tensor, tensor) for tensor in found["tensors"])
        made = cls(ops, tensors, tuple(found["frameworks"]), found["executions"], found["dropped"])
        made._check()
        return made

    def _check(self) -> None:
        """Raise ValueError for an index that refers to nothing."""
        for op in self.ops:
            _check_indices(f"op {op.index}", (*op.reads, *op.makes, *op.writes), len(self.tensors))
            _check_indices(f"op {op.index}", (op.forward,), len(self.ops))
        for tensor in self.tensors:
            _check_indices(f"tensor {tensor.index}", (tensor.producer, *tensor.consumers), len(self.ops))
            _check_indices(f"tensor {tensor.index}", (tensor.alias_of,), len(self.tensors))


def _check_indices(what: str, indices: Iterable[Any], count: int) -> None:
    for index in indices:
        if index is not None and not (type(index) is int and 0 <= index < count):
            raise ValueError(f"{what} refers to {index!r}, and there are {count}")


def _fields(item: Op | Tensor | Graph) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _made(kind: type[Any], found: Mapping[str, Any]) -> Any:
    """Return an item of what JSON has of it: lists become tuples, unknown keys are left out."""
    names = [field.name for field in fields(kind) if field.name in found or field.name != "recomputations"]
    values = {name: found[name] if name == "attributes" else _tuples(found[name]) for name in names}
    return made_of(kind, values)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
