"""The forward operations of gradient operations in a session's graph, and the tensors on their stacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SUFFIX = "_grad/"


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
                if op._original_op is not forward:
                    self.second_order.add(op.name)
        scopes = self._scopes()
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
        """Map gradient operations without a record by their names."""
        graph = ops[0].graph if ops else None
        for op in ops:
            if _SUFFIX in op.name:
                forward = _forward_by_name(graph, op.name)
                if forward is not None:
                    self.by_gradient[op.name] = forward
                    self.guessed = True

    def _map_sums(self, ops: Sequence[Any], scopes: set[str]) -> None:
        """Map sums of gradients, and zeros in a gradient's place, for which TensorFlow has no record."""
        readers: dict[str, list[Any]] = defaultdict(list)
        unmapped = [
            op for op in ops
            if op.name not in self.by_gradient and _is_accumulation(op) and _is_in(op.name, scopes)
        ]  # fmt: skip
        names = {op.name for op in unmapped}
        for op in ops:
            for tensor in op.inputs:
                if tensor.op.name in names:
                    readers[tensor.op.name].append(op)
        # From the last to the first, since a sum may be read by another sum.
        for op in reversed(unmapped):
            forward = self._forward_of_readers(readers[op.name]) or self._forward_of_summands(op)
            if forward is not None:
                self.by_gradient[op.name] = forward

    def _forward_of_readers(self, readers: Sequence[Any]) -> Any:
        """Return the forward operation of all readers that are mapped; None if they differ."""
        forwards = {self.by_gradient[reader.name] for reader in readers if reader.name in self.by_gradient}
        return forwards.pop() if len(forwards) == 1 else None

    def _forward_of_summands(self, op: Any) -> Any:
        """Return the only operation whose output all summands are gradients of, or None."""
        if op.type != "AddN":
            return None
        common: set[Any] | None = None
        for tensor in op.inputs:
            forward = self.by_gradient.get(tensor.op.name)
            if forward is None:
                return None
            sources = {read.op for read in forward.inputs}
            common = sources if common is None else common & sources
        return common.pop() if common and len(common) == 1 else None


def _is_accumulation(op: Any) -> bool:
    return op.type in ("AddN", "ZerosLike") or "_gradient_sum/" in op.name


def _recorded_forward(op: Any) -> Any:
    """Return the forward operation that TensorFlow recorded; for gradients of gradients, the first one."""
    forward = op._original_op
    while forward is not None and forward._original_op is not None:
        forward = forward._original_op
    return forward


def _forward_by_name(graph: Any, name: str) -> Any:
    """Return the operation that a gradient is named after: "conv" for "gradients/conv_grad/..."."""
    for end in _suffix_positions(name):
        parts = name[:end].split("/")
        for first in range(1, len(parts)):
            try:
                return graph.get_operation_by_name("/".join(parts[first:]))
            except KeyError:
                continue
    return None


def _suffix_positions(name: str) -> Iterator[int]:
    """Yield the positions of "_grad/" in a name, the last first."""
    end = name.rfind(_SUFFIX)
    while end >= 0:
        yield end
        end = name.rfind(_SUFFIX, 0, end)


def _gradient_scope(name: str, forward: Any) -> str | None:
    """Return the name scope in which a gradient was built, such as "gradients/"; None if unknown."""
    head, suffix, _ = name.partition(forward.name + _SUFFIX)
    return head if suffix else None


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

    read: names of the forward operations whose gradients pop their inputs or outputs off stacks.
    """

    # A tensor has one stack for all its readers. So where a routine changes the tensor for one reader, that
    # reader keeps the changed value for its gradients itself.

    def __init__(self, ops: Sequence[Any], forward: Mapping[str, Any]) -> None:
        self._pushed = {}
        for op in ops:
            if op.type == "StackPushV2":
                self._pushed[self._stack(op.inputs[0])] = op.inputs[1]
        self.read = {
            forward_op.name for op in ops if (forward_op := forward.get(op.name)) is not None
            and any(self.captured(tensor) is not None for tensor in op.inputs)
        }  # fmt: skip

    def captured(self, tensor: Any) -> Any:
        """Return the tensor that was pushed, for a tensor that is popped off a stack; else None."""
        if not self._pushed or tensor.op.type != "StackPopV2":
            return None
        return self._pushed.get(self._stack(tensor.op.inputs[0]))

    def _stack(self, handle: Any) -> str:
        """Return the name of the stack of a handle, which in nested loops is itself popped off a stack."""
        while handle.op.type != "StackV2":
            pushed = self.captured(handle)
            if pushed is None and not handle.op.inputs:
                break
            handle = handle.op.inputs[0] if pushed is None else pushed
        return str(handle.op.name)
