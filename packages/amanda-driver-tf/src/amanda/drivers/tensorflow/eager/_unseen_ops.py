"""Reports of ops that tools do not see: those on tapes from before the scope, and those of datasets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.backend import report_unseen
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import backprop
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor

from ._calls import UNSTOPPABLE
from ._state import UNMARKED, local, tensors_of

if TYPE_CHECKING:
    from amanda.backend import Patches, State

_RECORDED_BEFORE = "it was recorded on a tape before the scope"
_SUMS_AND_ZEROS = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Ops that a tape adds itself."""


class EarlierTapes:
    """Distinguishes ops that a tape recorded before the scope from those recorded in the scope."""

    def __init__(self) -> None:
        self._first_new_uid = 0
        # Weak, since a tape holds all that it has recorded.
        self._new_tapes: weakref.WeakSet[Any] = weakref.WeakSet()

    def patch(self, patches: Patches) -> None:
        """Collect the tapes that are opened from now on, until `patches` are restored.

        Tensors that exist already count as recorded before the scope.
        """
        # Tensors take their ids from this counter: a smaller id is that of an older tensor.
        self._first_new_uid = ops.uid()
        push = backprop.GradientTape._push_tape

        @functools.wraps(push)
        def push_tape(tape: Any) -> None:
            """Stand-in for `GradientTape._push_tape`: notes a tape that was never pushed before."""
            # A tape gets its native tape at its first push; it is pushed again after `stop_recording`.
            if tape._tape is None:
                self._new_tapes.add(tape)
            push(tape)

        patches.set(backprop.GradientTape, "_push_tape", push_tape)

    def may_have_recorded_earlier(self, tape: Any) -> bool:
        """Return True if a native tape may have recorded ops before the scope: if it was opened before."""
        return not any(new_tape._tape is tape for new_tape in self._new_tapes)

    def report_op(self, type: str, tensors: Sequence[Any]) -> None:
        """Report an op without a mark whose backward ops tools would see had it been recorded in the scope.

        Ops in `UNSTOPPABLE`, which never get one, are always reported.
        tensors: those inputs and outputs of the op that the tape saved for the gradient.
        """
        activation = interceptor.active()
        if activation is None or local.gradient_call is UNMARKED:
            return
        saved_tensors = tensors_of(tensors)
        if type in UNSTOPPABLE:
            reason = "it computes its gradients by a tape of its own"
        elif self._was_recorded_earlier(saved_tensors) and not _may_need_no_mark(type, activation.state):
            reason = _RECORDED_BEFORE
        else:
            return
        activation.state.report(f"the backward ops of {type}", reason)

    def report_custom_gradient(self, type: str) -> None:
        """Report an op of a custom gradient whose forward op is unknown, if it was recorded before the scope.

        type: of the op; those that a tape adds itself, sums and zeros, are not reported.
        """
        backward_pass = local.backward_pass
        if backward_pass is not None and backward_pass.may_have_earlier_ops and type not in _SUMS_AND_ZEROS:
            report_unseen("the backward ops of a custom gradient", _RECORDED_BEFORE)

    def _was_recorded_earlier(self, saved_tensors: Sequence[Any]) -> bool:
        """Return True if an op was recorded before the scope; without tensors, if the tape may have been."""
        if saved_tensors:
            return all(tensor._id < self._first_new_uid for tensor in saved_tensors)
        return local.backward_pass is not None and local.backward_pass.may_have_earlier_ops


def _may_need_no_mark(type: str, state: State) -> bool:
    """Return True if an op of that type has no routines at its analysed backward ops.

    Such an op gets no mark on a tape, so a record without a mark may be of it.
    """
    for stack in () if state.stack is None else state.stack.chain:
        for plan_by_key in stack.plans.values():
            for plan in plan_by_key.values():
                is_without_routines = plan.backward.analysed_for and not any(plan.backward.actions.values())
                if is_without_routines and plan.context.get_op().type == type:
                    return True
    return False


DATASET_FUNCTIONS_REPORT = (
    "the functions of datasets (tf.data)",
    "TensorFlow's native code runs what they map, filter and generate by as it is",
)
"""The report's entry of datasets: the part that is not instrumented, and the reason."""


class Datasets:
    """Reports iteration in a scope over datasets that were built before it; those built in it are ops."""

    def __init__(self) -> None:
        self._first_new_uid = 0
        self._is_earlier_by_iterator: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def patch(self, patches: Patches) -> None:
        """Patch the iterators of datasets until `patches` are restored; present datasets count as earlier."""
        self._first_new_uid = ops.uid()
        self._is_earlier_by_iterator.clear()
        for name in ("_create_iterator", "_next_internal"):
            patches.set(iterator_ops.OwnedIterator, name, self._stand_in_for(name))

    def _stand_in_for(self, name: str) -> Any:
        """Stand-in for a method of OwnedIterator: reports the functions of earlier datasets."""
        original = getattr(iterator_ops.OwnedIterator, name)

        @functools.wraps(original)
        def report_earlier(iterator: Any, *args: Any) -> Any:
            """Call the method, report an earlier dataset, and return the method's result."""
            result = original(iterator, *args)
            activation = interceptor.active()
            # A dataset that is built in a scope is reported when its op is called.
            if activation is not None and self._reads_earlier_functions(iterator):
                activation.state.report(*DATASET_FUNCTIONS_REPORT)
            return result

        return report_earlier

    def _reads_earlier_functions(self, iterator: Any) -> bool:
        """Return True if a dataset with functions, below an iterator, was built before the scope; cached."""
        if iterator not in self._is_earlier_by_iterator:
            has_earlier_functions = False
            # From the dataset of the iterator through the datasets that it reads.
            datasets = [getattr(iterator, "_dataset", None)]
            while datasets:
                dataset = datasets.pop()
                if dataset is None:
                    continue
                datasets += dataset._inputs()
                variant = dataset._variant_tensor
                has_earlier_functions |= bool(
                    dataset._functions()
                    and isinstance(variant, EagerTensor)
                    and variant._id < self._first_new_uid
                )
            self._is_earlier_by_iterator[iterator] = has_earlier_functions
        return self._is_earlier_by_iterator[iterator]
