"""An op with a choice: its candidates, their state, their computation, and its residual block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import Dataflow, DataflowNode, canonical_extents, tensors_of
from amanda.tools.mapping import itemsize, product_of
from amanda.tools.search._candidates import Candidate, Original
from amanda.tools.search._decisions import Decision
from amanda.tools.search._gradients import Gradients
from amanda.tools.search._libraries import Library


class InPlaceWriter(NamedTuple):
    """An op in place that writes to the output of a site: its type, the path of its module, and its line."""

    type: str
    module: str
    source: str


class Site:
    """An op with a choice of candidates.

    name: the module's path and the op, as in architectures.  weight, bias: positions among the inputs, or
    None.  layout, weight_shape: of the weight; the shape is in the order outputs, inputs, window.
    channels: axis of the channels of the first input.
    shortcut, branch: for an addition that ends a residual block, the position of the block's input and the
    ids of the ops of the branch.  rejected: reasons of rejected candidates, by label.
    writers: ops in place that write to the output, by their ids.
    """

    def __init__(
        self, context: amanda.OpContext, name: str, candidates: Sequence[Candidate],
        residual: tuple[int, frozenset[int]] | None, keep: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.name, self.type, self.module = name, context["type"], context.get_scope()
        self.source, self.scopes = context.get_source(), tuple(context.get_scopes())
        self.library: Library = context["search"]
        self.in_place: bool = context["in_place"]
        self.shortcut: int | None = None if residual is None else residual[0]
        self.branch = frozenset[int]() if residual is None else residual[1]
        self._like = context.get_inputs()[0]
        self._xp = tensors_of(self._like)
        self._states: dict[str, Any] = {}
        self.weight: int | None = context["weight_index"]
        self.layout: str | None = context["weight_layout"]
        value = None if self.weight is None else context.get_inputs()[self.weight]
        extents = () if value is None else tuple(context["shape"](value))
        self.weight_shape = canonical_extents(extents, self.layout)
        self.channels: int = (context["layout"] or "C").index("C")
        self.itemsize = 4 if value is None else itemsize(context["dtype"](value)) or 4
        self.bias = self._find_bias(context)
        self.op_ids: set[int] = set()
        self.writers: dict[int, InPlaceWriter] = {}
        self.executions = amanda.Tally()
        self.rejected: dict[str, str] = {}
        self._keep = keep
        self._gradients: dict[str, Gradients] = {}
        for candidate in candidates:
            reason = candidate.fit(context, self)
            if reason:
                self.rejected[candidate.label] = reason
        self.candidates = {
            candidate.label: candidate for candidate in candidates if candidate.label not in self.rejected
        }
        self.decision: Decision

    def _find_bias(self, context: amanda.OpContext) -> int | None:
        inputs, product = context.get_inputs(), product_of(context)
        bias = None if product is None or product.weight is None else product.bias
        has_bias = bias is not None and bias < len(inputs) and context["dtype"](inputs[bias]) is not None
        return bias if has_bias else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the candidates that the op can have."""
        return self.decision.labels

    @property
    def chosen(self) -> str:
        """The label of the current candidate."""
        return self.decision.label

    def keep_state(self, name: str, make: Callable[[], Any], trained: bool) -> None:
        """Create a tensor of state, or take the one that was loaded.  trained: an optimizer trains it."""

        def state(value: Any) -> Any:
            return self._xp.state(value, self._like, trained)

        self._states[name] = self._keep(name, lambda: state(make()), load=state, renew=self._xp.update)
        if trained:
            self._gradients[name] = self.library.gradient_sum(self._states[name], self.name)

    def close(self) -> None:
        """Drop the tensor and the function that candidates were created with, which keep the op alive."""
        del self._like, self._keep

    def state(self, name: str) -> Any:
        """Return a tensor of state, such as a parameter, for an optimizer."""
        return self._states[name]

    def read(self, name: str, like: Any, library: Library | None = None) -> Any:
        """Return state in the element type of a tensor.  library: None for the site's library."""
        library = library or self.library
        value = self._xp.read(self._states[name])
        if name in self._gradients:
            value = library.with_gradient_sum(value, self._gradients[name], like)
        return library.cast(value, like)

    def take_gradient(self, name: str) -> Any:
        """Return the sum of a parameter's gradients and reset it; None if there was no gradient."""
        return self._gradients[name].take()

    def within(self, library: Library) -> Site:
        """Return the op with the functions of another mode of its framework, and the same state."""
        if library is self.library:
            return self
        clone = copy(self)
        clone.library = library
        return clone

    def array(self, name: str) -> Any:
        """Return state as an array of NumPy."""
        value = self._xp.detach(self._xp.read(self._states[name]))
        return tensors_of(value).to_numpy(value)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates."""
        yield from (self._states[label] for label in self._gradients if label != "alpha")

    @property
    def parameters(self) -> Sequence[str]:
        """The names of the state that an optimizer trains."""
        return list(self._gradients)

    def compute(self, inputs: Sequence[Any], original: Original, mixed: bool) -> Any:
        """Return the output of the chosen candidate, or the mixture of all (Liu et al. 2019, eq. 2)."""
        if not mixed or self.decision.alpha is None:
            output = self.candidates[self.chosen].compute(inputs, self, original)
            is_input = not self.in_place and any(output is value for value in inputs)
            # Autodiff, and ops in place after this one, expect an output that is no input.
            return self.library.as_output(output) if is_input else output
        outputs = {label: self.candidates[label].compute(inputs, self, original) for label in self.labels}
        shares = self.decision.mixture_shares(next(iter(outputs.values())), self.library)
        return sum(shares[label] * output for label, output in outputs.items())


_MAX_TENSORS = 1000
"""Tensors among which the input of a residual block is looked for."""


def find_residual_block(flow: Dataflow, node: DataflowNode) -> tuple[int, frozenset[int]] | None:
    """Return for an addition the position of the block's input, and the ids of the ops of its branch.

    None if no summand of the addition is the input of the branch that makes the other summand.
    """
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    for shortcut in (0, 1):
        start, branch = node.inputs[shortcut], node.inputs[1 - shortcut]
        visited, ops = _ancestors(flow, branch, start)
        if start in visited and ops and node.shapes[0] == node.shapes[1]:
            return shortcut, frozenset(ops - _ancestors(flow, start)[1])
    return None


def _ancestors(
    flow: Dataflow, number: int | None, until: int | None = None
) -> tuple[set[int | None], set[int]]:
    """Return the tensors from which a tensor is computed, back to `until`, and the ids of the ops."""
    waiting, visited, ops = [number], set[int | None](), set[int]()
    while waiting and len(visited) < _MAX_TENSORS:
        number_read = waiting.pop()
        producer = None if number_read in visited or number_read == until else flow.maker(number_read)
        visited.add(number_read)
        if producer is not None:
            ops.add(producer.op_id)
            waiting.extend(producer.reads)
    return visited, ops
