"""Tensors, which are flat lists of numbers, and their tape: nodes that operators leave, walked backwards."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from math import prod
from typing import Any, TypeAlias, cast

Number: TypeAlias = "float | complex"

_TYPE_CODES = {"float64": "d", "float32": "f", "int64": "q"}


class Tensor:
    """Numbers of one dtype ("float64", "float32", "int64", "complex128") in a shape.

    node, slot: the node that made it, None for a leaf, and which of the node's outputs it is.
    accumulator: the node of a leaf, once an operator on the tape has read it.
    """

    requires_grad: bool

    def __init__(
        self,
        numbers: Sequence[Number],
        shape: Sequence[int],
        dtype: str = "float64",
        requires_grad: bool = False,
    ) -> None:
        if len(numbers) != prod(shape):
            raise ValueError(f"{len(numbers)} numbers do not fill shape {tuple(shape)}")
        self.numbers = numbers_in_dtype(numbers, dtype)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.version = 0
        self.grad: Tensor | None = None
        self.node: Node | None = None
        self.slot = 0
        self.accumulator: AccumulateGrad | None = None

    @property
    def is_leaf(self) -> bool:
        """Return True if no operator on the tape made the tensor."""
        return self.node is None

    def detach(self) -> Tensor:
        """Return the same numbers, off the tape."""
        return Tensor(self.numbers, self.shape, self.dtype)

    def astype(self, dtype: str) -> Tensor:
        """Return the numbers in another type, off the tape."""
        return Tensor(self.numbers, self.shape, dtype)

    def assign(self, tensor: Tensor) -> None:
        """Take the numbers of another tensor of this shape, in this dtype; count the write in `version`."""
        if tensor.shape != self.shape:
            raise ValueError(f"shape {tensor.shape} does not fit into {self.shape}")
        self.numbers = numbers_in_dtype(tensor.numbers, self.dtype)
        self.version += 1

    def backward(self) -> None:
        """Add the gradient of the sum of the numbers to each leaf that the tensor was computed from."""
        run_backward([self], [Tensor([1.0] * len(self.numbers), self.shape, self.dtype)])

    def __add__(self, other: Tensor | Number) -> Tensor:
        return cast(Tensor, _operators().add(self, other))

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return cast(Tensor, _operators().mul(self, other))

    def __matmul__(self, other: Tensor) -> Tensor:
        return cast(Tensor, _operators().matmul(self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        options = () if isinstance(self, Parameter) else (self.requires_grad,)
        return type(self), (self.numbers, self.shape, self.dtype, *options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.numbers}, {self.shape}, {self.dtype})"


def _operators() -> Any:
    from amanda.testing.fake import _operators  # which imports this module

    return _operators


class Parameter(Tensor):
    """A tensor that is trained."""

    def __init__(self, numbers: Sequence[Number], shape: Sequence[int], dtype: str = "float64") -> None:
        super().__init__(numbers, shape, dtype, requires_grad=True)


def tensor(nested: Any, dtype: str = "float64", requires_grad: bool = False) -> Tensor:
    """Return a tensor of nested lists of numbers, or of one number."""
    shape: list[int] = []
    first = nested
    while isinstance(first, (list, tuple)):
        shape.append(len(first))
        first = first[0]
    numbers = list(nested) if shape else [nested]
    for _ in shape[1:]:  # each round removes one level of lists
        numbers = [item for row in numbers for item in row]
    return Tensor(numbers, shape, dtype, requires_grad)


def numbers_in_dtype(numbers: Sequence[Number], dtype: str) -> list[Any]:
    """Return numbers as tensors of a dtype hold them: rounded, cut to integers, or complex."""
    if dtype == "complex128":
        return [complex(number) for number in numbers]
    if dtype == "int64":
        return [int(number.real) for number in numbers]
    return array(_TYPE_CODES[dtype], [number.real for number in numbers]).tolist()


def apply_elementwise(function: Callable[..., Number], first: Tensor, *operands: Tensor | Number) -> Tensor:
    """Return a function of numbers for each element of tensors of one shape; plain numbers are repeated.

    The result is off the tape, in the first's dtype.  Raises ValueError for another shape.
    """
    operand_numbers = [
        operand.numbers if isinstance(operand, Tensor) else [operand] * len(first.numbers)
        for operand in operands
    ]
    for operand in operands:
        if isinstance(operand, Tensor) and operand.shape != first.shape:
            raise ValueError(f"shapes {first.shape} and {operand.shape} differ")
    numbers = [function(*elements) for elements in zip(first.numbers, *operand_numbers, strict=True)]
    return Tensor(numbers, first.shape, first.dtype)


Gradients = Sequence[Tensor | None]
Formula = Callable[[Gradients], Gradients]

# Shared by all threads: a driver knows an operator's nodes by a number before and one after its call.
_node_numbers = count(1)


class _Mode(threading.local):
    enabled = True


_mode = _Mode()


def next_number() -> int:
    """Return a number between those of the nodes made before and after."""
    return next(_node_numbers)


class Node:
    """One step of the tape: from the gradients of its outputs to those of its inputs.

    edges: for each input the node that its gradient goes to, and which output of that node it is.
    outputs: how many there are.  number: grows in the order of making.  metadata: a driver's.
    pre_hooks, hooks: called with (grad_outputs), (grad_inputs, grad_outputs); return others, or None.
    """

    def __init__(
        self, edges: Sequence[tuple[Node, int] | None], formula: Formula, outputs: int, number: int
    ) -> None:
        self.edges = edges
        self.formula = formula
        self.outputs = outputs
        self.number = number
        self.metadata: dict[str, Any] = {}
        self.pre_hooks: list[Callable[[Gradients], Gradients | None]] = []
        self.hooks: list[Callable[[Gradients, Gradients], Gradients | None]] = []


class AccumulateGrad(Node):
    """The end of the tape at a leaf, which stores the leaf's gradient."""

    def __init__(self, leaf: Tensor) -> None:
        super().__init__([], self._accumulate, 1, 0)  # made when first needed, and so in no order
        self.leaf = leaf

    def _accumulate(self, grads: Gradients) -> Gradients:
        """Add the gradient, the only one in `grads`, to the leaf's; there are no inputs with gradients."""
        (grad,) = grads
        if grad is not None:
            self.leaf.grad = _sum_of(self.leaf.grad, grad)
        return []


@cache
def _node_type(name: str) -> type[Node]:
    # Cached, so that nodes of one operator have one type, as in real frameworks.
    return type(name, (Node,), {})


def is_grad_enabled() -> bool:
    """Return True if operators leave nodes on this thread."""
    return _mode.enabled


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Enter a context in which operators leave nodes on this thread, or leave none."""
    outer_mode, _mode.enabled = _mode.enabled, enabled
    try:
        yield
    finally:
        _mode.enabled = outer_mode


def no_grad() -> Any:
    """Context in which operators leave no nodes."""
    return _grad_mode(False)


def enable_grad() -> Any:
    """Context in which operators leave nodes."""
    return _grad_mode(True)


def record(name: str, inputs: Sequence[Any], outputs: Sequence[Tensor], formula: Formula) -> None:
    """Leave a node on the tape for outputs made from inputs, if the mode is on and one requires a gradient.

    name: of the node's type.  formula: returns the gradients of the inputs for those of the outputs.
    """
    edges = [_edge(value) for value in inputs]
    # Without an edge there is no leaf to reach, so no node is needed.
    if not _mode.enabled or not any(edges):
        return
    node = _node_type(name)(edges, formula, len(outputs), next_number())
    for slot, output in enumerate(outputs):
        output.node, output.slot, output.requires_grad = node, slot, True


def _edge(value: Any) -> tuple[Node, int] | None:
    """Return the node to which a tensor's gradient goes, and which of its outputs the tensor is.

    None for a value that needs no gradient; a leaf gets its node here.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    if value.node is not None:
        return value.node, value.slot
    # Made when first needed and kept with the leaf, as PyTorch's are.
    if value.accumulator is None:
        value.accumulator = AccumulateGrad(value)
    return value.accumulator, 0


def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Walk the tape backwards from outputs with these gradients; leaves at its ends get theirs.

    Raises RuntimeError for an output that requires no gradient.
    """
    grads_by_node: dict[Node, list[Tensor | None]] = {}
    for output, grad in zip(outputs, grads, strict=True):
        edge = _edge(output)
        if edge is None:
            raise RuntimeError("the tensor does not require a gradient")
        _add_gradient(grads_by_node, edge, grad)
    # A node runs once all gradients of its outputs have come, so they are counted first.
    missing_counts = _incoming_counts(list(grads_by_node))
    ready_nodes = [node for node in grads_by_node if not missing_counts[node]]
    with no_grad():
        while ready_nodes:
            node = ready_nodes.pop()
            grad_inputs = _run_node(node, grads_by_node.pop(node))
            for edge, grad_input in zip(node.edges, grad_inputs, strict=True):
                if edge is None:
                    continue
                if grad_input is not None:
                    _add_gradient(grads_by_node, edge, grad_input)
                next_node, _ = edge
                missing_counts[next_node] -= 1
                if not missing_counts[next_node]:
                    grads_by_node.setdefault(next_node, [None] * next_node.outputs)
                    ready_nodes.append(next_node)


def _run_node(node: Node, grad_outputs: Gradients) -> Gradients:
    """Run a node's formula between its hooks."""
    for pre_hook in list(node.pre_hooks):
        grad_outputs = pre_hook(grad_outputs) or grad_outputs
    grad_inputs = node.formula(grad_outputs)
    for hook in list(node.hooks):
        grad_inputs = hook(grad_inputs, grad_outputs) or grad_inputs
    return grad_inputs


def _incoming_counts(roots: list[Node]) -> dict[Node, int]:
    """Return how many edges lead to each node that can be reached from the roots."""
    counts = dict.fromkeys(roots, 0)
    unvisited = list(roots)
    while unvisited:
        for edge in unvisited.pop().edges:
            if edge is None:
                continue
            next_node, _ = edge
            if next_node not in counts:
                counts[next_node] = 0
                unvisited.append(next_node)
            counts[next_node] += 1
    return counts


def _add_gradient(
    grads_by_node: dict[Node, list[Tensor | None]], edge: tuple[Node, int], grad: Tensor
) -> None:
    """Add a gradient to that of the output of a node to which an edge leads."""
    node, slot = edge
    grads = grads_by_node.setdefault(node, [None] * node.outputs)
    grads[slot] = _sum_of(grads[slot], grad)


def _sum_of(total: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient.detach() if total is None else apply_elementwise(lambda a, b: a + b, total, gradient)
