"""Tensors of PyTorch, their memory, and the edges of autograd's graph."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.kit import RequiredNames
from amanda.tools.trace._values import Ask, Facts, Span, Values

_REQUIRED = RequiredNames(
    "amanda.tools.trace",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._version",
    "torch:_C._current_autograd_node",
    "torch:_C._current_graph_task_id",
    "torch:_C._functions.AccumulateGrad._sequence_nr",
    "torch:autograd._get_sequence_nr",
)

_PASSES_KEPT = 16
_AVERAGES = (3, 4)
"""Positions of the running mean and variance among the inputs of normalisations."""


class FrameworkValues(Values):
    """Answers of PyTorch.

    A weak reference to a tensor or a storage lasts as long as C++ has the object, also while Python has none.
    """

    def __init__(self, shape: Ask, dtype: Ask) -> None:
        import torch

        super().__init__(shape, dtype)
        _REQUIRED.check()
        self._torch = torch
        self._leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
        self._names: weakref.WeakKeyDictionary[Any, dict[int, tuple[str, str]]] = weakref.WeakKeyDictionary()
        self._sent: dict[int, dict[Hashable, list[int]]] = {}

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor."""
        return isinstance(value, self._torch.Tensor)

    def version(self, tensor: Any) -> int | None:
        """Return autograd's count of writes; None for a tensor of the inference mode."""
        version: int | None = None if tensor.is_inference() else tensor._version
        return version

    def facts(self, context: amanda.OpContext) -> Facts:
        """Return the facts of an op: of a normalisation also that it writes averages, whose version stays."""
        found = super().facts(context)
        if context.is_forward() and context["type"] in ("batch_norm", "instance_norm"):
            attributes = context.get_attrs()
            if attributes.get("training") or attributes.get("use_input_stats"):
                return found._replace(written=_AVERAGES)
        return found

    def memory(self, tensor: Any) -> tuple[Any, Span] | None:
        """Return the storage and the place in it; None for a sparse tensor, or where a transform hides it."""
        try:
            storage, start = tensor.untyped_storage(), tensor.storage_offset()
            return storage, Span(start, tuple(tensor.shape), tensor.stride(), tensor.element_size())
        except (NotImplementedError, RuntimeError):
            return None

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and path of a parameter or buffer of the outermost module that is being called."""
        parameter = isinstance(tensor, self._torch.nn.Parameter)
        modules = [one for one in interceptor.subjects() if isinstance(one, self._torch.nn.Module)]
        for root in modules[:1]:
            found = self._named(root).get(id(tensor))
            if (found is None and parameter) or (found and attrgetter(found[1])(root) is not tensor):
                del self._names[root]  # it has changed since
                found = self._named(root).get(id(tensor))
            if found is not None:
                return found
        return ("parameter" if parameter else "input"), None

    def _named(self, root: Any) -> dict[int, tuple[str, str]]:
        """Return kinds and paths of a model's parameters and buffers, by their ids."""
        if root not in self._names:
            kinds = {"buffer": root.named_buffers(), "parameter": root.named_parameters()}
            self._names[root] = {
                id(tensor): (kind, name) for kind, pairs in kinds.items() for name, tensor in pairs
            }
        return self._names[root]

    def next_number(self) -> int | None:
        """Return the number that autograd gives this thread's next node."""
        number: int = self._torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return number

    def arrived(self, count: int, take: bool = True) -> tuple[int | None, Sequence[Sequence[int]]]:
        """Return the number of the node that runs, which leaves have not, and what was sent to the node."""
        node = self._torch._C._current_autograd_node()
        number = None if node is None or isinstance(node, self._leaf) else int(node._sequence_nr())
        sent = self._sent.get(self._torch._C._current_graph_task_id())
        if node is None or sent is None:
            return number, [()] * count
        name, look = self._name_of(node), sent.pop if take else sent.get
        return number, [look((name, position), ()) for position in range(count)]

    def send(self, gradients: Sequence[int | None]) -> Any:
        """Send gradients on to the nodes that come next; return the gradient of a leaf."""
        node = self._torch._C._current_autograd_node()
        if node is None:
            return None
        sent = self._sent.setdefault(self._torch._C._current_graph_task_id(), {})
        for (after, position), gradient in zip(node.next_functions, gradients, strict=False):
            if after is not None and gradient is not None:
                sent.setdefault((self._name_of(after), position), []).append(gradient)
        while len(self._sent) > _PASSES_KEPT:
            del self._sent[next(iter(self._sent))]
        return node.variable.grad if isinstance(node, self._leaf) else None

    def _name_of(self, node: Any) -> Hashable:
        """Return what tells a node from the others of its pass: leaves have no number of their own."""
        return id(node.variable) if isinstance(node, self._leaf) else (type(node), node._sequence_nr())
