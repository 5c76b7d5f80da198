"""Marks that tell a tape's records which execution they are of, and the running backward pass of a thread."""

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

    place: number of the op within its execution.  input_ids: ids of the op's input tensors.
    trace: None until the execution has ended, and for an execution that no scope has seen.
    order: 0 for a forward op, 1 for a backward op that a tape records, 2 for a backward op of such an op, ...
    """

    __slots__ = ("__weakref__", "input_ids", "order", "place", "trace")

    # Weak, so that a mark, and the trace in it, dies with the record on the tape that holds the mark.
    by_output_id: ClassVar[WeakValueDictionary[int, TapeMark]] = WeakValueDictionary()
    """By a tensor's id, which TensorFlow never gives twice: the mark of the op that computed the tensor."""

    def __init__(self, place: int, order: int) -> None:
        self.trace: Trace | None = None
        self.place = place
        self.order = order
        self.input_ids: tuple[int, ...] = ()

    def record_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Record the ids of the tensors that the op read, and this mark as that of those that it computed."""
        self.input_ids = tuple([tensor._id for tensor in inputs])
        for tensor in outputs:
            self.by_output_id[tensor._id] = self


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

    gradient_by_id: the gradients that the function received and the tensors computed from them.
    op_count: number of ops so far.
    backward_trace: trace for the backward ops of these backward ops, where a tape records them.
    """

    __slots__ = ("_outer", "backward_trace", "gradient_by_id", "mark", "op_count", "state")

    def __init__(self, mark: TapeMark, state: State, gradients: Iterable[Any]) -> None:
        self.mark = mark
        self.state = state
        self.op_count = 0
        self.gradient_by_id = {tensor._id: tensor for tensor in tensors_of(gradients)}
        self.backward_trace: Trace | None = None

    def __enter__(self) -> GradientCall:
        self._outer, local.gradient_call = local.gradient_call, self
        return self

    def __exit__(self, *_: object) -> None:
        local.gradient_call = self._outer


class _Claim(NamedTuple):
    """The claim of an op on a gradient; claims are compared field by field.

    is_maker: True if the op computed the tensor that the gradient is of, False if the op read the tensor.
    call_count: number of gradient functions called before.
    """

    is_maker: bool
    call_count: int


class TapePass:
    """A running backward pass.

    is_nested: True if another tape records the pass.
    may_have_earlier_ops: True if the pass's tape may have recorded ops before the scope.
    state: the state of the scope.
    call_count: number of gradient functions called so far.
    claims_by_gradient_id: the claims of the ops that a gradient may belong to, by their mark.
    trace_by_id: the traces of the ops whose gradient functions were called.
    sum_count_by_mark_id: the number of sums of gradients that belong to a mark's op.
    """

    __slots__ = (
        "_outer", "_outer_call", "call_count", "claims_by_gradient_id", "is_nested", "may_have_earlier_ops",
        "state", "sum_count_by_mark_id", "trace_by_id",
    )  # fmt: skip

    def __init__(self, state: State, is_nested: bool, may_have_earlier_ops: bool) -> None:
        self.state = state
        self.is_nested = is_nested
        self.may_have_earlier_ops = may_have_earlier_ops
        self.claims_by_gradient_id: dict[int, dict[TapeMark, _Claim]] = {}
        self.call_count = 0
        self.trace_by_id: dict[int, Trace] = {}
        self.sum_count_by_mark_id: dict[int, int] = {}

    def claim(self, gradient: Any, mark: TapeMark, is_maker: bool) -> None:
        """Add an op that a gradient may belong to.

        is_maker: True if the op computed the gradient's tensor, False if the op read the tensor.
        """
        self.claims_by_gradient_id.setdefault(gradient._id, {})[mark] = _Claim(is_maker, self.call_count)

    def claim_returned(self, gradients: Iterable[Any], ids: Iterable[int], reader: TapeMark | None) -> None:
        """Claim the gradients that a gradient function returned, for the ops that computed their tensors.

        Counts the call of that function.
        ids: of the tensors that these are gradients of.  reader: the op that read these tensors,
        which gets a gradient whose tensor no op on record computed; None to claim no such gradient.
        """
        self.call_count += 1
        for gradient, tensor_id in zip(gradients, ids, strict=False):
            maker = TapeMark.by_output_id.get(tensor_id)
            # Without a trace the op that computed the tensor was not seen, and cannot own the gradient.
            is_maker = maker is not None and maker.trace is not None
            owner = maker if is_maker else reader
            if owner is not None:
                for tensor in tensors_of([gradient]):
                    self.claim(tensor, owner, is_maker)

    def find_owner(self, summands: Iterable[Any]) -> TapeMark | None:
        """Return the mark of the op that a sum of gradients belongs to; None if no summand was claimed.

        An op that passes a gradient on unchanged makes the gradient belong to several tensors. The sum
        belongs to the op that all its summands have in common, or else to the op that was claimed last.
        """
        claims_of_summands: list[dict[TapeMark, _Claim]] = []
        makers_of_summands: list[set[TapeMark]] = []
        for summand in summands:
            claim_by_mark = self.claims_by_gradient_id.get(summand._id)
            if claim_by_mark is None:
                continue
            claims_of_summands.append(claim_by_mark)
            makers = {mark for mark, claim in claim_by_mark.items() if claim.is_maker}
            if makers:
                makers_of_summands.append(makers)
        if not claims_of_summands:
            return None
        common_makers = set.intersection(*makers_of_summands) if makers_of_summands else set()
        candidates: dict[TapeMark, _Claim] = {}
        for claim_by_mark in claims_of_summands:
            for mark, claim in claim_by_mark.items():
                if not common_makers or mark in common_makers:
                    candidates[mark] = claim
        # Claims compare field by field: an op that computed the tensor wins over any that read it, and among
        # equals the last claim does.
        return max(candidates, key=lambda mark: candidates[mark])

    def __enter__(self) -> TapePass:
        """Become the thread's running pass, outside of all gradient functions."""
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
    op_is_recorded: True if the last call of `execute` has recorded its op on the tapes.
    recorded_outputs: outputs of that op, which the caller of `execute` would record a second time.
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
