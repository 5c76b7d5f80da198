"""The operations that a session's run executes: their order, and the forward operations of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Endpoint = tuple[str, int]
"""A tensor of a graph: its op's name and its index among that op's outputs."""


class RunRequest(NamedTuple):
    """The fetches, targets and feeds of a run; each request has an instrumented copy of its own.

    fetches: tensors whose values are returned.  targets: names of ops that run without a result.
    feeds: tensors whose values the caller passes.
    """

    fetches: tuple[Endpoint, ...]
    targets: tuple[str, ...]
    feeds: frozenset[Endpoint]


def executed_ops(graph: Any, request: RunRequest) -> list[Any]:
    """Return the operations of a graph that a request executes, each after those that it reads.

    A loop is a cycle, which is cut at its NextIteration ops: they come after the ops that read them.
    """
    fetched_names = [name for name, index in request.fetches if (name, index) not in request.feeds]
    roots = [graph.get_operation_by_name(name) for name in (*fetched_names, *request.targets)]
    return _sort_topologically(roots, request.feeds)


def sort_forward_first(ops: Sequence[Any], request: RunRequest, forward: Mapping[str, Any]) -> list[Any]:
    """Return the operations with those that are differentiated, and what these read, first.

    The others keep the order in which the graph made them, as far as what they read allows. So the gradient
    operations of an operation come before the ops that are computed from its gradients.
    forward: by the name of a gradient operation, its forward operation.
    """
    executed_names = {op.name for op in ops}
    executed_forward = {name: op for name, op in forward.items() if op.name in executed_names}
    differentiated_names = {op.name for op in forward.values()}
    differentiated_ops = [op for op in ops if op.name in differentiated_names]
    graph_position = {op.name: i for i, op in enumerate(ops[0].graph.get_operations())} if ops else {}
    in_graph_order = sorted(ops, key=lambda op: graph_position[op.name])
    return _sort_topologically([*differentiated_ops, *in_graph_order], request.feeds, executed_forward)


def _sort_topologically(
    roots: Iterable[Any],
    feeds: Collection[Endpoint],
    forward_by_gradient: Mapping[str, Any] = MappingProxyType({}),
) -> list[Any]:
    """Return the roots and all that they read in topological order; fed tensors need nothing before them.

    forward_by_gradient: by the name of a gradient operation, its forward operation, which comes before it.
    """
    order: list[Any] = []
    visited_names: set[str] = set()
    remaining_roots = list(dict.fromkeys(roots))  # `_predecessors` appends the ends of loops
    while remaining_roots:
        root = remaining_roots.pop(0)
        if root.name in visited_names:
            continue
        visited_names.add(root.name)
        # Depth first, without recursion: graphs may be deeper than Python's limit.
        path = [(root, _predecessors(root, feeds, forward_by_gradient, remaining_roots))]
        while path:
            op, remaining_predecessors = path[-1]
            predecessor = next(
                (source for source in remaining_predecessors if source.name not in visited_names), None
            )
            if predecessor is None:  # all have been visited
                order.append(op)
                path.pop()
            else:
                visited_names.add(predecessor.name)
                predecessors = _predecessors(predecessor, feeds, forward_by_gradient, remaining_roots)
                path.append((predecessor, predecessors))
    return order


def _predecessors(
    op: Any, feeds: Collection[Endpoint], forward_by_gradient: Mapping[str, Any], loop_ends: list[Any]
) -> Iterator[Any]:
    """Return the operations that come before an operation; append NextIterations to `loop_ends` instead."""
    predecessors: list[Any] = []
    if op.name in forward_by_gradient:
        predecessors.append(forward_by_gradient[op.name])
    predecessors += op.control_inputs
    for tensor in op.inputs:
        if (tensor.op.name, tensor.value_index) not in feeds:
            predecessors.append(tensor.op)
    # NextIteration closes the cycle of a loop. No order exists unless the cycle is cut there.
    if op.type in ("Merge", "RefMerge"):
        loop_ends.extend(source for source in predecessors if source.type.endswith("NextIteration"))
        predecessors = [source for source in predecessors if not source.type.endswith("NextIteration")]
    return iter(predecessors)


_GRADIENT_SUFFIX = "_grad/"


class ForwardOps:
    """The forward operations of the gradient operations among some operations.

    by_gradient: the forward operation by the name of the gradient operation.
    second_order: names of the operations that compute gradients of gradients.
    guessed: True if some were inferred from names. TensorFlow's record (`_original_op`) is in no GraphDef, so
    an imported graph lacks it.
    """

    def __init__(self, ops: Sequence[Any]) -> None:
        self.by_gradient: dict[str, Any] = {}
        self.second_order: set[str] = set()
        self.guessed = False
        for op in ops:
            forward = _recorded_forward(op)
            if forward is not None:
                self.by_gradient[op.name] = forward
                # The record of a second gradient leads to a first gradient, and only from there to the
                # forward operation.
                if op._original_op is not forward:
                    self.second_order.add(op.name)
        scopes = self._scopes()
        # In scopes of recorded gradients an operation without a record is not a gradient, whatever its name.
        self._map_by_names(
            [op for op in ops if op.name not in self.by_gradient and not _is_in(op.name, scopes)]
        )
        if self.by_gradient:
            self._map_sums(ops, self._scopes())

    def _scopes(self) -> set[str]:
        """Return the name scopes in which gradients were built."""
        scopes = (_gradient_scope(name, forward) for name, forward in self.by_gradient.items())
        return {scope for scope in scopes if scope is not None}

    def _map_by_names(self, ops: Sequence[Any]) -> None:
        """Map gradient operations without a record by their names, and set `guessed` if there are some."""
        graph = ops[0].graph if ops else None
        for op in ops:
            if _GRADIENT_SUFFIX in op.name:
                forward = _forward_by_name(graph, op.name)
                if forward is not None:
                    self.by_gradient[op.name] = forward
                    self.guessed = True

    def _map_sums(self, ops: Sequence[Any], scopes: set[str]) -> None:
        """Map sums of gradients, and zeros in a gradient's place, for which TensorFlow has no record."""
        readers_by_name: dict[str, list[Any]] = defaultdict(list)
        unmapped_ops = [
            op for op in ops
            if op.name not in self.by_gradient and _is_accumulation(op) and _is_in(op.name, scopes)
        ]  # fmt: skip
        unmapped_names = {op.name for op in unmapped_ops}
        for op in ops:
            for tensor in op.inputs:
                if tensor.op.name in unmapped_names:
                    readers_by_name[tensor.op.name].append(op)
        # From the last to the first, since a sum may be read by another sum.
        for op in reversed(unmapped_ops):
            forward = self._forward_of_readers(readers_by_name[op.name]) or self._forward_of_summands(op)
            if forward is not None:
                self.by_gradient[op.name] = forward

    def _forward_of_readers(self, readers: Sequence[Any]) -> Any:
        """Return the forward operation of all readers that are mapped; None if they differ."""
        forwards = {self.by_gradient[reader.name] for reader in readers if reader.name in self.by_gradient}
        return forwards.pop() if len(forwards) == 1 else None

    def _forward_of_summands(self, op: Any) -> Any:
        """Return the only operation whose output the forward operations of all summands read, or None."""
        if op.type != "AddN":
            return None
        producers_by_summand: list[set[Any]] = []
        for tensor in op.inputs:
            forward = self.by_gradient.get(tensor.op.name)
            if forward is None:
                return None
            producers_by_summand.append({operand.op for operand in forward.inputs})
        common_producers = set.intersection(*producers_by_summand) if producers_by_summand else set()
        return common_producers.pop() if len(common_producers) == 1 else None


def _is_accumulation(op: Any) -> bool:
    """Return True for a sum of gradients, or for zeros in the place of a gradient."""
    return op.type in ("AddN", "ZerosLike") or "_gradient_sum/" in op.name


def _recorded_forward(op: Any) -> Any:
    """Return the forward operation that TensorFlow recorded; for gradients of gradients, the first one."""
    forward = op._original_op
    while forward is not None and forward._original_op is not None:
        forward = forward._original_op
    return forward


def _forward_by_name(graph: Any, name: str) -> Any:
    """Return the operation that a gradient is named after: "conv" for "gradients/conv_grad/..."."""
    for end in _gradient_suffix_positions(name):
        parts = name[:end].split("/")
        # The scopes in front are those of the gradients, so the longest rest that names an operation counts.
        for first in range(1, len(parts)):
            try:
                return graph.get_operation_by_name("/".join(parts[first:]))
            except KeyError:
                continue
    return None


def _gradient_suffix_positions(name: str) -> Iterator[int]:
    """Yield the positions of "_grad/" in the name of a gradient operation, the last first."""
    end = name.rfind(_GRADIENT_SUFFIX)
    while end >= 0:
        yield end
        end = name.rfind(_GRADIENT_SUFFIX, 0, end)


def _gradient_scope(name: str, forward: Any) -> str | None:
    """Return the name scope in which a gradient was built, such as "gradients/"; None if unknown."""
    scope, suffix, _ = name.partition(forward.name + _GRADIENT_SUFFIX)
    return scope if suffix else None


def _is_in(name: str, scopes: set[str]) -> bool:
    """Return True if a name lies in one of the scopes, which all end in "/"."""
    end = name.rfind("/") + 1
    while end:
        if name[:end] in scopes:
            return True
        end = name.rfind("/", 0, end - 1) + 1
    return False


class Stacks:
    """The tensors that operations push onto stacks.

    forward_names_read: of the forward operations whose gradients pop their inputs or outputs off stacks.
    """

    # A tensor has one stack for all its readers. So where a routine changes the tensor for one reader, that
    # reader keeps the changed value for its gradients itself.

    def __init__(self, ops: Sequence[Any], forward: Mapping[str, Any]) -> None:
        self._pushed_by_stack = {}
        for op in ops:
            if op.type == "StackPushV2":
                self._pushed_by_stack[self._stack_name(op.inputs[0])] = op.inputs[1]
        self.forward_names_read = {
            forward_op.name for op in ops if (forward_op := forward.get(op.name)) is not None
            and any(self.captured(tensor) is not None for tensor in op.inputs)
        }  # fmt: skip

    def captured(self, tensor: Any) -> Any:
        """Return the tensor that was pushed, for a tensor that is popped off a stack; else None."""
        if not self._pushed_by_stack or tensor.op.type != "StackPopV2":
            return None
        return self._pushed_by_stack.get(self._stack_name(tensor.op.inputs[0]))

    def _stack_name(self, handle: Any) -> str:
        """Return the name of the op that made the stack of a handle, or the op at which the search ends."""
        while handle.op.type != "StackV2":
            # In nested loops a handle is itself popped off a stack.
            pushed_tensor = self.captured(handle)
            if pushed_tensor is not None:
                handle = pushed_tensor
            elif handle.op.inputs:
                handle = handle.op.inputs[0]
            else:
                break
        return str(handle.op.name)
