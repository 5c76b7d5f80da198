"""The forward operation of a gradient operation in a session's graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

_SUFFIX = "_grad/"


class ForwardOps:
    """The forward operations of those among some operations that compute gradients.

    of: by the name of the gradient operation.
    second: the names of those that compute gradients of gradients.
    by_name: whether names had to tell, as in graphs that were imported: TensorFlow's own record is gone.
    """

    def __init__(self, ops: Sequence[Any]) -> None:
        self.of: dict[str, Any] = {}
        self.second: set[str] = set()
        self.by_name = False
        for op in ops:
            forward = _recorded(op)
            if forward is not None:
                self.of[op.name] = forward
                if op._original_op is not forward:
                    self.second.add(op.name)
        scopes = self._scopes()
        self._by_names([op for op in ops if op.name not in self.of and not _is_in(op.name, scopes)])
        if self.of:
            self._sums(ops, self._scopes())

    def _scopes(self) -> set[str]:
        """The name scopes that gradients were built in."""
        found = (_scope(name, forward) for name, forward in self.of.items())
        return {scope for scope in found if scope is not None}

    def _by_names(self, ops: Sequence[Any]) -> None:
        graph = ops[0].graph if ops else None
        for op in ops:
            if _SUFFIX in op.name:
                forward = _named(graph, op.name)
                if forward is not None:
                    self.of[op.name] = forward
                    self.by_name = True

    def _sums(self, ops: Sequence[Any], scopes: set[str]) -> None:
        """Gradients that are added, and zeros in a gradient's place, have no record of their own."""
        readers: dict[str, list[Any]] = defaultdict(list)
        unmapped = [
            op for op in ops
            if op.name not in self.of and _is_accumulation(op) and _is_in(op.name, scopes)
        ]  # fmt: skip
        names = {op.name for op in unmapped}
        for op in ops:
            for tensor in op.inputs:
                if tensor.op.name in names:
                    readers[tensor.op.name].append(op)
        for op in reversed(unmapped):
            forward = self._read_for(readers[op.name]) or self._summed_for(op)
            if forward is not None:
                self.of[op.name] = forward

    def _read_for(self, readers: Sequence[Any]) -> Any:
        """The one operation for whose gradient something is read."""
        forwards = {self.of[reader.name] for reader in readers if reader.name in self.of}
        return forwards.pop() if len(forwards) == 1 else None

    def _summed_for(self, op: Any) -> Any:
        """The operation whose output all the added gradients are for."""
        if op.type != "AddN":
            return None
        common: set[Any] | None = None
        for tensor in op.inputs:
            forward = self.of.get(tensor.op.name)
            if forward is None:
                return None
            sources = {read.op for read in forward.inputs}
            common = sources if common is None else common & sources
        return common.pop() if common and len(common) == 1 else None


def _is_accumulation(op: Any) -> bool:
    return op.type in ("AddN", "ZerosLike") or "_gradient_sum/" in op.name


def _recorded(op: Any) -> Any:
    """Return what TensorFlow noted when it made the gradient; a gradient's gradient is of the first op."""
    forward = op._original_op
    while forward is not None and forward._original_op is not None:
        forward = forward._original_op
    return forward


def _named(graph: Any, name: str) -> Any:
    """The operation that "gradients/block/conv_grad/Conv2DBackpropInput" is named after."""
    for end in _ends(name):
        parts = name[:end].split("/")
        for first in range(1, len(parts)):
            try:
                return graph.get_operation_by_name("/".join(parts[first:]))
            except KeyError:
                continue
    return None


def _ends(name: str) -> Iterator[int]:
    """Return where what comes before "_grad/" ends, the last first."""
    end = name.rfind(_SUFFIX)
    while end >= 0:
        yield end
        end = name.rfind(_SUFFIX, 0, end)


def _scope(name: str, forward: Any) -> str | None:
    """The name scope that a gradient was built in: "gradients/"."""
    head, found, _ = name.partition(forward.name + _SUFFIX)
    return head if found else None


def _is_in(name: str, scopes: set[str]) -> bool:
    """Return True if a name lies in one of the scopes, which all end in "/"."""
    end = name.rfind("/") + 1
    while end:
        if name[:end] in scopes:
            return True
        end = name.rfind("/", 0, end - 1) + 1
    return False
