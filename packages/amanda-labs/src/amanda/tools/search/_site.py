"""One op with a choice: its candidates, their state, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import canonical_extents, tensors_of
from amanda.tools.mapping import itemsize, product_of
from amanda.tools.search._candidates import Candidate, Original
from amanda.tools.search._decision import Decision
from amanda.tools.search._gradients import Gradients
from amanda.tools.search._libraries import Library


class Writer(NamedTuple):
    """An op in place: its type, the path of its module, and its line."""

    type: str
    module: str
    source: str


class Site:
    """An op whose computation is chosen.

    name: the module's path and the op, by which architectures know it.  weight, bias: their positions among
    the inputs; None where the op has none.  layout, weight_shape: of the weight; the shape in the order of
    outputs, inputs, window.  channels: axis of the channels of the first input.
    shortcut, branch: of an addition that ends a residual block, the position of the block's input and the ids
    of the ops of the branch.  left: by label, why a candidate was left out.
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
        self.bias = self._bias(context)
        self.op_ids: set[int] = set()
        self.writers: dict[int, Writer] = {}
        self.executions = amanda.Tally()
        self.left: dict[str, str] = {}
        self._keep = keep
        self._gradients: dict[str, Gradients] = {}
        for one in candidates:
            reason = one.fit(context, self)
            if reason:
                self.left[one.label] = reason
        self.candidates = {one.label: one for one in candidates if one.label not in self.left}
        self.decision: Decision

    def _bias(self, context: amanda.OpContext) -> int | None:
        inputs, product = context.get_inputs(), product_of(context)
        bias = None if product is None or product.weight is None else product.bias
        is_given = bias is not None and bias < len(inputs) and context["dtype"](inputs[bias]) is not None
        return bias if is_given else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the candidates that may be chosen."""
        return self.decision.labels

    @property
    def chosen(self) -> str:
        """The label of the candidate that is chosen."""
        return self.decision.chosen

    def keep(self, name: str, make: Callable[[], Any], trained: bool) -> None:
        """Make state, or take that which was loaded."""

        def state(value: Any) -> Any:
            return self._xp.state(value, self._like, trained)

        self._states[name] = self._keep(name, lambda: state(make()), load=state, renew=self._xp.update)
        if trained:
            self._gradients[name] = self.library.gradient_sum(self._states[name], self.name)

    def close(self) -> None:
        """Drop the tensor and the function that candidates were made with, which hold the op."""
        del self._like, self._keep

    def state(self, name: str) -> Any:
        """Return state, such as a parameter, as it is kept."""
        return self._states[name]

    def read(self, name: str, like: Any, library: Library | None = None) -> Any:
        """Return state in the element type of a tensor.  library: of another mode than that of the site."""
        library = library or self.library
        value = self._xp.read(self._states[name])
        if name in self._gradients:
            value = library.collected(value, self._gradients[name], like)
        return library.cast(value, like)

    def take_gradient(self, name: str) -> Any:
        """Return the sum of a parameter's gradients since it was taken, None without one; forget it."""
        return self._gradients[name].take()

    def within(self, library: Library) -> Site:
        """Return the op with the functions of another mode of its framework, and the same state."""
        if library is self.library:
            return self
        other = copy(self)
        other.library = library
        return other

    def array(self, name: str) -> Any:
        """Return state as an array of NumPy."""
        value = self._xp.detach(self._xp.read(self._states[name]))
        return tensors_of(value).to_numpy(value)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates."""
        yield from (self._states[label] for label in self._gradients if label != "alpha")

    @property
    def parameters(self) -> Sequence[str]:
        """The names of its state that an optimizer trains."""
        return list(self._gradients)

    def compute(self, inputs: Sequence[Any], original: Original, mixed: bool) -> Any:
        """Return the output of the chosen candidate, or the mixture of all (Liu et al. 2019, eq. 2)."""
        if not mixed or self.decision.alpha is None:
            output = self.candidates[self.chosen].compute(inputs, self, original)
            is_input = not self.in_place and any(output is one for one in inputs)
            return self.library.fresh(output) if is_input else output
        outputs = {label: self.candidates[label].compute(inputs, self, original) for label in self.labels}
        shares = self.decision.shares(next(iter(outputs.values())), self.library)
        return sum(shares[label] * one for label, one in outputs.items())
