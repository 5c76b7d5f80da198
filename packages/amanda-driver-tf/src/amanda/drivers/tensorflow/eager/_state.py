"""The state of a thread: marks of the running op, the running gradient function and backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from amanda.backend import State, Trace

MARK = "amanda"
"""Name of the attribute under which an op's mark is recorded on a tape."""


class TapeMark:
    """An op on a tape, with the trace of the execution that recorded the op.

    place: number of the op within its execution.  inputs: ids of the op's input tensors.
    order: 0 for a forward op, 1 for a backward op that a tape records, 2 for a backward op of such an op, ...
    """

    __slots__ = ("__weakref__", "inputs", "order", "place", "trace")

    # Weak, so that a mark, and the trace in it, dies with the record on the tape that holds the mark.
    by_output: ClassVar[WeakValueDictionary[int, TapeMark]] = WeakValueDictionary()
    """By a tensor's id, which TensorFlow never gives twice: the mark of the op that computed the tensor."""

    def __init__(self, place: int, order: int) -> None:
        self.trace: Trace | None = None
        self.place = place
        self.order = order
        self.inputs: tuple[int, ...] = ()

    def record_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Record the tensors that the op read and computed."""
        self.inputs = tuple([tensor._id for tensor in inputs])
        for tensor in outputs:
            self.by_output[tensor._id] = self


class Marking:
    """Context of an op's execution that marks the ops which a tape records in the meantime."""

    __slots__ = ("_outer", "marks", "order")

    def __init__(self, order: int = 0) -> None:
        self.marks: list[TapeMark] = []
        self.order = order

    def mark(self) -> TapeMark:
        """Return a mark for the next op."""
        mark = TapeMark(len(self.marks), self.order)
        self.marks.append(mark)
        return mark

    def __enter__(self) -> Marking:
        self._outer, local.marking = local.marking, self
        return self

    def __exit__(self, *_: object) -> None:
        local.marking = self._outer


class GradientCall:
    """A running call of a gradient function, whose ops are backward ops of the mark's execution.

    gradients: by id, the gradients that the function received and the tensors computed from them.
    count: number of ops so far.
    backward_trace: trace for the backward ops of these backward ops, where a tape records them.
    """

    __slots__ = ("_outer", "backward_trace", "count", "gradients", "mark", "state")

    def __init__(self, mark: TapeMark, state: State, gradients: Iterable[Any]) -> None:
        self.mark = mark
        self.state = state
        self.count = 0
        self.gradients = {tensor._id: tensor for tensor in tensors_of(gradients)}
        self.backward_trace: Trace | None = None

    def __enter__(self) -> GradientCall:
        self._outer, local.gradient_call = local.gradient_call, self
        return self

    def __exit__(self, *_: object) -> None:
        local.gradient_call = self._outer


class _Claim(NamedTuple):
    """The claim of an op on a gradient; claims are compared field by field.

    is_maker: True if the op computed the tensor that the gradient is of, False if the op read the tensor.
    calls: number of gradient functions called before.
    """

    is_maker: bool
    calls: int


class TapePass:
    """A running backward pass.

    nested: True if another tape records the pass.
    may_be_earlier: True if the pass's tape may have recorded ops before the scope.
    state: the state of the scope.
    calls: number of gradient functions called so far.
    claims: by a gradient's id, the claims of the ops that it may belong to, by their mark.
    traces: the traces of the ops whose gradient functions were called, by id.
    counts: by the id of a mark, the number of sums of gradients that belong to its op.
    """

    __slots__ = (
        "_outer", "_outer_call", "calls", "claims", "counts", "may_be_earlier", "nested", "state", "traces",
    )  # fmt: skip

    def __init__(self, state: State, nested: bool, may_be_earlier: bool) -> None:
        self.state = state
        self.nested = nested
        self.may_be_earlier = may_be_earlier
        self.claims: dict[int, dict[TapeMark, _Claim]] = {}
        self.calls = 0
        self.traces: dict[int, Trace] = {}
        self.counts: dict[int, int] = {}

    def claim(self, gradient: Any, mark: TapeMark, is_maker: bool) -> None:
        """Add an op that a gradient may belong to.

        is_maker: True if the op computed the gradient's tensor, False if the op read the tensor.
        """
        self.claims.setdefault(gradient._id, {})[mark] = _Claim(is_maker, self.calls)

    def claim_returned(self, gradients: Iterable[Any], inputs: Iterable[int], mark: TapeMark | None) -> None:
        """Claim the gradients that a gradient function returned, for the ops that computed their tensors.

        inputs: the ids of the tensors that these are gradients of.  mark: of the op that read these tensors,
        which gets a gradient whose tensor no op on record computed; None to claim no such gradient.
        """
        self.calls += 1
        for gradient, tensor_id in zip(gradients, inputs, strict=False):
            maker = TapeMark.by_output.get(tensor_id)
            # Without a trace the op that computed the tensor was not seen, and cannot own the gradient.
            is_maker = maker is not None and maker.trace is not None
            owner = maker if is_maker else mark
            if owner is not None:
                for tensor in tensors_of([gradient]):
                    self.claim(tensor, owner, is_maker)

    def owner(self, gradients: Iterable[Any]) -> TapeMark | None:
        """Return the op that a sum of gradients belongs to; None if no gradient was claimed.

        An op that passes a gradient on unchanged makes the gradient belong to several tensors. The sum
        belongs to the op that all its gradients have in common, or else to the op that was claimed last.
        """
        claims_by_gradient = [
            self.claims[gradient._id] for gradient in gradients if gradient._id in self.claims
        ]
        if not claims_by_gradient:
            return None
        makers_by_gradient = [
            {mark for mark, claim in claims.items() if claim.is_maker} for claims in claims_by_gradient
        ]
        makers_by_gradient = [makers for makers in makers_by_gradient if makers]
        common_makers = set.intersection(*makers_by_gradient) if makers_by_gradient else set()
        candidates: dict[TapeMark, _Claim] = {}
        for claims in claims_by_gradient:
            for mark, claim in claims.items():
                if not common_makers or mark in common_makers:
                    candidates[mark] = claim
        # An op that computed the tensor comes before any that read it, and then the last claim counts.
        return max(candidates, key=lambda mark: candidates[mark])

    def __enter__(self) -> TapePass:
        self._outer, local.backward_pass = local.backward_pass, self
        # A gradient function may start a pass of its own, whose ops are not those of that function.
        self._outer_call, local.gradient_call = local.gradient_call, None
        return self

    def __exit__(self, *_: object) -> None:
        local.backward_pass, local.gradient_call = self._outer, self._outer_call


class ForwardContext:
    """Context within a backward pass in which ops are forward ops again, for recomputation."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = local.backward_pass, local.gradient_call, local.marking
        local.backward_pass = local.gradient_call = local.marking = None

    def __exit__(self, *_: object) -> None:
        local.backward_pass, local.gradient_call, local.marking = self._outer


class _Local(threading.local):
    """marking: marks for the op that is running, if a tool has routines for its backward ops.
    gradient_call: the gradient function that is running.  backward_pass: the backward pass that is running.
    op_is_recorded: True if the driver has recorded the last op.
    recorded_outputs: outputs of that op, which TensorFlow would record a second time.
    """

    marking: Marking | None = None
    gradient_call: GradientCall | None = None
    backward_pass: TapePass | None = None
    op_is_recorded = False
    recorded_outputs: Any = None


local = _Local()
# Without `__init__`, since it is only compared by identity: a check of the hot path stays one `is`.
UNMARKED: Any = GradientCall.__new__(GradientCall)
"""A gradient function of an op that no scope has seen; its ops run as without tools."""


def tensors_of(gradients: Iterable[Any]) -> list[Any]:
    """Return the tensors among gradients, and the values of sparse gradients."""
    tensors: list[Any] = []
    for gradient in gradients:
        if gradient is None:
            continue
        if hasattr(gradient, "_id"):
            tensors.append(gradient)
        elif hasattr(gradient, "values") and hasattr(gradient.values, "_id"):
            tensors.append(gradient.values)
    return tensors
