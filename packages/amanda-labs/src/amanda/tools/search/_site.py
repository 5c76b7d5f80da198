"""An op with a choice, its decision, the state of its candidates, and the gradients of that state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from zlib import crc32

import amanda
from amanda.tools.axes import canonical_extents
from amanda.tools.dataflow import Dataflow, DataflowNode
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import itemsize, product_of
from amanda.tools.search._candidates import OpCandidate, Original, SearchError

if TYPE_CHECKING:
    from amanda.tools.search._libraries import SearchLibrary


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
        self, context: amanda.OpContext, name: str, candidates: Sequence[OpCandidate],
        residual: tuple[int, frozenset[int]] | None, keep: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.name, self.type, self.module = name, context["type"], context.get_scope()
        self.source, self.scopes = context.get_source(), tuple(context.get_scopes())
        self.library: SearchLibrary = context["search"]
        self.in_place: bool = context["in_place"]
        self.shortcut: int | None = None if residual is None else residual[0]
        self.branch = frozenset[int]() if residual is None else residual[1]
        # The state is created on the device and in the library of the op's first input.
        self._like = context.get_inputs()[0]
        self._xp = tensors_of(self._like)
        self._states: dict[str, Any] = {}
        self._set_weight(context)
        self.op_ids: set[int] = set()
        # Of interest when the op is skipped: they would write into its input.
        self.writers: dict[int, InPlaceWriter] = {}
        self.executions = amanda.Tally()
        self.rejected: dict[str, str] = {}
        self._keep = keep
        self._gradients: dict[str, Gradients] = {}
        for candidate in candidates:
            reason = candidate.set_up(context, self)
            if reason:
                self.rejected[candidate.label] = reason
        self.candidates = {
            candidate.label: candidate for candidate in candidates if candidate.label not in self.rejected
        }
        self.decision: Decision  # set by the tool once a decision has admitted the op

    def _set_weight(self, context: amanda.OpContext) -> None:
        """Set the facts of the op's weight, channels and bias; an op without a weight has the shape ()."""
        self.weight: int | None = context["weight_index"]
        self.layout: str | None = context["weight_layout"]
        value = None if self.weight is None else context.get_inputs()[self.weight]
        extents = () if value is None else tuple(context["shape"](value))
        self.weight_shape = canonical_extents(extents, self.layout)
        self.channels: int = (context["layout"] or "C").index("C")
        self.itemsize = 4 if value is None else itemsize(context["dtype"](value)) or 4
        self.bias = self._find_bias(context)

    def _find_bias(self, context: amanda.OpContext) -> int | None:
        """Return the position of the op's bias among its inputs; None without one."""
        inputs, product = context.get_inputs(), product_of(context)
        bias = None if product is None or product.weight is None else product.bias
        # An input that the call leaves out has no element type.
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
        """Create a tensor of state, or take the one that was loaded into the tool.

        Args:
            name: Name under which `state` and `read` find it.
            make: Function that returns the first value, an array or a number.
            trained: True for a parameter of an optimizer, which also has a sum of gradients.
        """

        def to_state(value: Any) -> Any:
            return self._xp.state(value, self._like, trained)

        # The tool keeps it under the op's place, so that state dicts and later models find it.
        self._states[name] = self._keep(name, lambda: to_state(make()), load=to_state, renew=self._xp.update)
        if trained:
            self._gradients[name] = self.library.gradient_sum(self._states[name], self.name)

    def close(self) -> None:
        """Drop the tensor and the function that candidates were created with, which keep the op alive."""
        del self._like, self._keep

    def state(self, name: str) -> Any:
        """Return a tensor of state, such as a parameter, for an optimizer."""
        return self._states[name]

    def read(self, name: str, like: Any, library: SearchLibrary | None = None) -> Any:
        """Return state in the element type of a tensor; its gradient is added to a sum, if one is kept.

        Args:
            name: Name of the state.
            like: Tensor whose element type the value gets.
            library: None for the site's library.
        """
        library = library or self.library
        # Read within the op, so that autodiff sees the parameter.
        value = self._xp.read(self._states[name])
        if name in self._gradients:
            value = library.with_gradient_sum(value, self._gradients[name], like)
        return library.cast(value, like)

    def take_gradient(self, name: str) -> Any:
        """Return the sum of a parameter's gradients and reset it; None if there was no gradient."""
        return self._gradients[name].take()

    def within(self, library: SearchLibrary) -> Site:
        """Return the op with the functions of another mode of its framework, and the same state."""
        if library is self.library:
            return self
        # Shallow: state, decision and counters are shared.
        clone = copy(self)
        clone.library = library
        return clone

    def array(self, name: str) -> Any:
        """Return state as an array of NumPy."""
        value = self._xp.detach(self._xp.read(self._states[name]))
        return tensors_of(value).to_numpy(value)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates, without mixture weights."""
        yield from (self._states[name] for name in self._gradients if name != "alpha")

    @property
    def parameters(self) -> Sequence[str]:
        """The names of the state that an optimizer trains."""
        return list(self._gradients)

    def compute(self, inputs: Sequence[Any], original: Original, mixed: bool) -> Any:
        """Return the output of the chosen candidate, or the mixture of all (Liu et al. 2019, eq. 2).

        Args:
            inputs: Inputs of the op.
            original: Function that computes the op itself.
            mixed: True for the mixture of all candidates, False for the chosen one.
        """
        if not mixed or self.decision.alpha is None:
            output = self.candidates[self.chosen].compute(inputs, self, original)
            # `skip` gives back the input itself.
            is_input = not self.in_place and any(output is value for value in inputs)
            # Autodiff, and ops in place after this one, expect an output that is not an input.
            return self.library.as_output(output) if is_input else output
        # All candidates run: their outputs are weighted by differentiable shares.
        outputs = {label: self.candidates[label].compute(inputs, self, original) for label in self.labels}
        shares = self.decision.mixture_shares(next(iter(outputs.values())), self.library)
        return sum(shares[label] * output for label, output in outputs.items())


_MAX_TENSORS = 1000
"""Tensors among which the input of a residual block is looked for."""


def find_residual_block(flow: Dataflow, node: DataflowNode) -> tuple[int, frozenset[int]] | None:
    """Return for an addition the position of the block's input, and the ids of the ops of its branch.

    None if no summand of the addition is the input of the branch that makes the other summand, or if their
    shapes differ.
    """
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    for shortcut in (0, 1):
        block_input, branch_output = node.inputs[shortcut], node.inputs[1 - shortcut]
        ancestors, branch_ops = _ancestors(flow, branch_output, until=block_input)
        # Equal shapes: a broadcast addition is not a shortcut that could take the block's place.
        if block_input in ancestors and branch_ops and node.shapes[0] == node.shapes[1]:
            # Ops that the shortcut needs as well are computed in any case.
            _, shortcut_ops = _ancestors(flow, block_input)
            return shortcut, frozenset(branch_ops - shortcut_ops)
    return None


def _ancestors(
    flow: Dataflow, number: int | None, until: int | None = None
) -> tuple[set[int | None], set[int]]:
    """Return the tensors from which a tensor is computed, itself and `until` too, and the ids of the ops.

    Tensors are numbers of the dataflow.  After 1000 tensors the search ends.
    """
    pending, visited, op_ids = [number], set[int | None](), set[int]()
    # Bounded: every addition of a large model would otherwise walk back to its input.
    while pending and len(visited) < _MAX_TENSORS:
        tensor = pending.pop()
        producer = None if tensor in visited or tensor == until else flow.maker(tensor)
        visited.add(tensor)
        if producer is not None:
            op_ids.add(producer.op_id)
            pending.extend(producer.reads)
    return visited, op_ids


_SPREAD = 1e-3
"""Standard deviation of the mixture weights at the start, as in the code of Liu et al. 2019."""


class Decision:
    """A decision of an architecture: a label for an op, or for all ops that share a choice.

    name: in architectures.  sites: its ops.  labels: those that each of its ops can have.
    label: the current one.  rejected: reasons of rejected candidates, by label.
    """

    def __init__(self, name: str, is_shared: bool) -> None:
        self.name, self.is_shared = name, is_shared
        self.sites: list[Site] = []
        self.labels: tuple[str, ...] = ()
        self.label = ""
        self.rejected: dict[str, str] = {}
        self._mixture_labels: tuple[str, ...] = ()
        """The labels of the mixture weights; a later op may have rejected some of them."""

    def admit(self, site: Site) -> bool:
        """Add an op, and drop the labels that it cannot have; if fewer than two remain, only return False.

        Reasons go into `rejected`; the first label takes the place of a current one that is dropped.
        """
        # A decision without an op yet has no labels.
        labels = [label for label in self.labels or site.candidates if label in site.candidates]
        if len(labels) < 2:
            return False
        prefix = f"{site.name} cannot have it: " if self.is_shared else ""
        for label, reason in site.rejected.items():
            self.rejected.setdefault(label, f"{prefix}{reason}")
        self.sites.append(site)
        self.labels = tuple(labels)
        if self.label not in labels:
            self.label = labels[0]
        return True

    def check(self, label: Any) -> None:
        """Raise SearchError for a label that the decision does not have."""
        if label not in self.labels:
            reason = f", since {self.rejected[label]}" if label in self.rejected else ""
            explanation = f"{reason}; it has {', '.join(self.labels)}"
            raise SearchError(f"SearchTool: {label!r} is no candidate of {self.name}{explanation}")

    def start_mixture(self, seed: int) -> None:
        """Create the mixture weights, as state of the first op; no effect if they exist."""
        if not self._mixture_labels:
            self._mixture_labels = self.labels
            # By name: the start does not depend on the order in which ops are met.
            generator = np.random.default_rng([seed, crc32(self.name.encode())])
            initial_weights = _SPREAD * generator.standard_normal(len(self.labels))
            # State belongs to an op; a shared decision keeps it at its first one.
            self.sites[0].keep_state("alpha", lambda: initial_weights, True)

    @property
    def alpha(self) -> Any:
        """The mixture weights ahead of softmax; None if there are none."""
        return self.sites[0].state("alpha") if self._mixture_labels else None

    def mixture_shares(self, like: Any, library: SearchLibrary) -> Mapping[str, Any]:
        """Return softmax of the mixture weights, in the element type of a tensor, by label."""
        alpha = self.sites[0].read("alpha", like, library)
        if self._mixture_labels != self.labels:  # -inf gives a label that was dropped the share 0
            # The weights stay as they are: an optimizer holds them.
            mask = np.array(
                [0.0 if label in self.labels else -np.inf for label in self._mixture_labels], np.float32
            )
            alpha = alpha + library.cast(mask, like)
        shares = library.softmax(alpha)
        return {label: shares[self._mixture_labels.index(label)] for label in self.labels}

    def probabilities(self) -> dict[str, float]:
        """Return softmax of the mixture weights as numbers, by label; an empty dict if there are none."""
        if not self._mixture_labels:
            return {}
        alpha = self.sites[0].array("alpha")[[self._mixture_labels.index(label) for label in self.labels]]
        exponents = np.exp(alpha - alpha.max())
        return dict(zip(self.labels, map(float, exponents / exponents.sum()), strict=True))


class Gradients(Protocol):
    """Sum of the gradients of a parameter since the last `take`."""

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""


class GradientSum:
    """Sum to which Python adds; it has a lock, since programs call it from any thread."""

    def __init__(self) -> None:
        self._sum: Any = None
        # TensorFlow calls back from threads of its executor.
        self._lock = Lock()

    def add(self, gradient: Any) -> None:
        """Add the gradient of one execution."""
        with self._lock:
            self._sum = gradient if self._sum is None else self._sum + gradient

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock:
            total, self._sum = self._sum, None
        return total


class JaxGradientSum:
    """Sum of the gradients of a parameter, and their number, in references of JAX.

    op: name of the parameter's op, for errors.
    """

    def __init__(self, parameter: Any, op: str) -> None:
        self._lock, self._op = Lock(), op
        # Mutable arrays of JAX: jitted programs add to them as a side effect that is not optimised away.
        reference = tensors_of(parameter).reference
        self._total = reference(np.zeros(parameter.shape, parameter.dtype))
        self._count = reference(np.int32(0))

    def collect(self, value: Any, like: Any) -> Any:
        """Return the parameter's value, whose gradient is added to the sum where `like` is differentiated.

        JAX differentiates by values that the program passes to `grad`, and the parameter is none of them.
        """
        return _collecting_function()(value, like, self._total, self._count, self._op)

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock, amanda.disabled():
            if not int(self._count[...]):
                return None
            total = self._total[...]
            self._total[...] = np.zeros(self._total.shape, self._total.dtype)
            self._count[...] = np.int32(0)
        return total


@cache
def _collecting_function() -> Callable[..., Any]:
    """Return a function that returns a value, and whose backward pass adds gradients to two references."""
    import jax

    @partial(jax.custom_vjp, nondiff_argnums=(4,))
    def collect(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        return value  # total, count: references; op: for the error

    def forward(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        _refuse_differentiated_branches(op)
        return value, (total, count)

    def backward(op: str, references: tuple[Any, Any], gradient: Any) -> Any:
        """Add the gradient of the value to the references, and return it."""
        _add_to_references(*references, gradient)
        # References have no gradient; `like` makes JAX differentiate this function.
        return gradient, None, None, None

    collect.defvjp(forward, backward)
    return cast("Callable[..., Any]", collect)


def _refuse_differentiated_branches(op: str) -> None:
    """Raise SearchError while a branch of `cond` or `switch` is differentiated.

    JAX gives no hint of it, so its functions are looked for among the callers.
    """
    from jax._src.lax.control_flow.conditionals import _cond_jvp, _cond_linearize

    # JAX lets no write to a reference out of a branch, so the gradients would be lost.
    codes, frame = (_cond_jvp.__code__, _cond_linearize.__code__), sys._getframe()
    while frame.f_back is not None and frame.f_code not in codes:
        frame = frame.f_back
    if frame.f_back is not None:
        raise SearchError(
            f"SearchTool: {op} is in a branch of jax.lax.cond or switch that is differentiated, and its "
            "candidates have parameters, whose gradients JAX lets out of no branch; compute all branches and "
            "select by jax.numpy.where, or give the op candidates without parameters and mixture=False"
        )


def _add_to_references(total: Any, count: Any, gradient: Any) -> None:
    """Add a gradient to a sum, and 1 to its count; under `vmap` add the gradient's sum over the rows.

    A batched trace cannot write to a reference of an outer trace, so the write is made in the outer trace.
    """
    from jax._src import core
    from jax._src.interpreters import batching

    gradient = _identity_with_vmap_sum()(gradient)
    trace: Any = core.trace_ctx.trace
    # vmap nests, and the reference belongs to a trace outside of all of them.
    while isinstance(trace, batching.BatchTrace):
        trace = trace.parent_trace
    with core.set_current_trace(trace):
        total[...] += gradient
        count[...] += 1


@cache
def _identity_with_vmap_sum() -> Callable[..., Any]:
    """Return a function of JAX that returns its argument, and under `vmap` the sum over the batch."""
    from jax.custom_batching import custom_vmap

    @custom_vmap  # type: ignore[untyped-decorator]
    def sum_rows(gradient: Any) -> Any:
        return gradient

    @sum_rows.def_vmap  # type: ignore[untyped-decorator]
    def _(axis_size: int, in_batched: Any, gradient: Any) -> Any:
        # One parameter serves all rows of the batch, so its gradient is their sum.
        return sum_rows(gradient.sum(0)), False

    return cast("Callable[..., Any]", sum_rows)
