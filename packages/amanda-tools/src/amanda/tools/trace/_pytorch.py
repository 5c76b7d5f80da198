"""Tensors of PyTorch: weak references to them, their memory, and the edges of autograd's graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.kit._requirements import check
from amanda.tools.trace._values import Description, Forget, Span, Values

_PASSES_KEPT = 16
_AVERAGES = (3, 4)
"""Positions of the running mean and variance among the inputs of normalisations."""


class PyTorchValues(Values):
    """Tensors by the address of what they are in C++.

    A weak reference keeps the address from being given to another, and knows the tensor also while
    no object of Python stands for it.
    """

    def __init__(self, shape: Callable[[Any], Any], dtype: Callable[[Any], Any]) -> None:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        super().__init__(shape, dtype)
        check("trace", "torch")
        self._torch = torch
        self._weak = torch._C._WeakTensorRef  # type: ignore[attr-defined]
        self._leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
        self._weak_storage = StorageWeakRef
        self._names: weakref.WeakKeyDictionary[Any, dict[int, tuple[str, str]]] = weakref.WeakKeyDictionary()
        self._arriving: dict[int, dict[Hashable, list[int]]] = {}

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor."""
        return isinstance(value, self._torch.Tensor)

    def key(self, tensor: Any) -> Hashable:
        """Its address in C++."""
        address: int = tensor._cdata
        return address

    def hold(self, tensor: Any, key: Hashable, forget: Forget) -> Any:
        """A weak reference of C++'s, which does not tell by itself."""
        return self._weak(tensor)

    def is_gone(self, held: Any) -> bool:
        """Return True if the tensor is freed."""
        return bool(held.expired())

    def describe(self, tensor: Any) -> Description:
        """Extents, element type, device and size."""
        device, kind = str(tensor.device), self._dtype(tensor)
        extents = self._shape(tensor)
        if extents is not None:  # a ragged one is a symbol
            extents = tuple(extent if isinstance(extent, int) else None for extent in extents)
        known = extents is not None and None not in extents
        return Description(extents, kind, device, tensor.numel() * tensor.element_size() if known else None)

    def version(self, tensor: Any) -> int | None:
        """Grows with each write; None of a tensor of the inference mode."""
        version: int | None = None if tensor.is_inference() else tensor._version
        return version

    def written(self, context: amanda.OpContext) -> Sequence[int]:
        """Running averages are written, but their versions stay."""
        if context["type"] in ("batch_norm", "instance_norm"):
            attributes = context.get_attrs()
            if attributes.get("training") or attributes.get("use_input_stats"):
                return _AVERAGES
        return super().written(context)

    def span(self, tensor: Any) -> Span | None:
        """Where its elements are; None of a sparse one, and where a transform hides it."""
        try:
            memory, start = tensor.untyped_storage()._cdata, tensor.storage_offset()
            return Span(memory, start, tuple(tensor.shape), tensor.stride(), tensor.element_size())
        except (NotImplementedError, RuntimeError):
            return None

    def hold_memory(self, tensor: Any) -> Any:
        """A weak reference to its storage."""
        return self._weak_storage(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def is_memory_gone(self, held: Any) -> bool:
        """Return True if the storage is freed."""
        return bool(held.expired())

    # ---- parameters ----

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Parameters and buffers by their path in the outermost module that is being called."""
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
        """By the ids of a model's parameters and buffers, their kinds and paths."""
        known = self._names.get(root)
        if known is None:
            known = self._names[root] = {}
            for kind, pairs in (("buffer", root.named_buffers()), ("parameter", root.named_parameters())):
                known.update({id(tensor): (kind, name) for name, tensor in pairs})
        return known

    # ---- the backward pass ----

    numbers_nodes = True

    def in_backward(self) -> bool:
        """Return True if a backward pass runs in this thread."""
        return bool(self._torch._C._current_graph_task_id() != -1)

    def next_number(self) -> int | None:
        """Return the sequence number of this thread's next node."""
        number: int = self._torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return number

    def node_number(self) -> int | None:
        """Return the sequence number of the node that runs; leaves have none."""
        node = self._torch._C._current_autograd_node()
        return None if node is None or isinstance(node, self._leaf) else int(node._sequence_nr())

    def entering(self, count: int, take: bool = True) -> list[list[int]] | None:
        """Return the gradients that were sent to the node that runs; None without any."""
        node = self._torch._C._current_autograd_node()
        sent = self._arriving.get(self._torch._C._current_graph_task_id())
        if node is None or sent is None:
            return None
        name = self._node(node)
        found = [sent.get((name, position), []) for position in range(count)]
        for position in range(count) if take else ():
            sent.pop((name, position), None)
        return found

    def leave(self, gradients: Sequence[int | None]) -> None:
        """Send gradients on to the nodes that come next."""
        node = self._torch._C._current_autograd_node()
        if node is None:
            return
        task = self._torch._C._current_graph_task_id()
        if task not in self._arriving:
            while len(self._arriving) >= _PASSES_KEPT:
                del self._arriving[next(iter(self._arriving))]
            self._arriving[task] = {}
        sent = self._arriving[task]
        for (after, position), gradient in zip(node.next_functions, gradients, strict=False):
            if after is not None and gradient is not None:
                sent.setdefault((self._node(after), position), []).append(gradient)

    def _node(self, node: Any) -> Hashable:
        """Tells the nodes of one pass apart: leaves have no number of their own."""
        if isinstance(node, self._leaf):
            return int(node.variable._cdata)
        return type(node), node._sequence_nr()

    def accumulated(self) -> Any:
        """The gradient of the leaf at which gradients are added up."""
        node = self._torch._C._current_autograd_node()
        if isinstance(node, self._leaf):
            return node.variable.grad
        return None
