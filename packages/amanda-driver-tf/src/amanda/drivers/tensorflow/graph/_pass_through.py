"""Operations that pass a gradient through unchanged, and so have no backward operations for pullbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._gradients import is_differentiable

if TYPE_CHECKING:
    import tensorflow as tf

    from ._rewrite import BodyRewriter

_PASS_THROUGH_INPUTS = {
    "Identity": (0,), "Snapshot": (0,), "EnsureShape": (0,), "BiasAdd": (0,), "Sub": (0,),
    "Add": (0, 1), "AddV2": (0, 1),
}  # fmt: skip
"""By op type, positions of the inputs whose gradient is the output's, unless an operation computes it."""


class PassThroughOps:
    """Redirects readers of gradients that pass through operations unchanged."""

    def __init__(self, rewriter: BodyRewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._edges = rewriter.gradients
        self._crossed: set[tf.Operation] = set()

    def positions(self, op: tf.Operation) -> list[int]:
        """Return the positions of the inputs whose gradient is the output's gradient."""
        positions = _PASS_THROUGH_INPUTS.get(op.type, ())
        computed = self._edges.input_gradients(op) if positions and op in self._edges.groups else {}
        return [i for i in positions if i not in computed and is_differentiable(op.inputs[i])]

    def redirect_gradient(self, op: tf.Operation, value: Any, gradient: Any, ref: str, vanilla: str) -> None:
        """Make the readers of a forward value's gradient read `ref`, also behind pass-through operations.

        op: the backward operation that is being edited.  vanilla: the ref of the unchanged gradient.
        """
        maker = value.op
        if ref != vanilla:
            self._redirect_gradient_readers(maker, gradient, ref)
        positions = self.positions(maker)
        if not positions or maker in self._edges.groups:
            return  # the maker's last backward operation continues from there
        self._crossed.add(maker)
        analysed = self._rewriter.analysed_forward(maker)
        if analysed is None:
            return
        refs = self._rewriter.pullbacks.insert_past(op, analysed[0], gradient, ref, positions)
        for i in positions:
            self.redirect_gradient(op, maker.inputs[i], gradient, refs.get(i, ref), vanilla)

    def _redirect_gradient_readers(self, maker: tf.Operation, gradient: Any, ref: str) -> None:
        """Make backward operations of `maker` read `ref`; for the last maker, also sums and results."""
        is_last = maker not in self._edges.groups and not self.positions(maker)
        for reader, i in self._edges.readers(gradient):
            forward = self._rewriter.forward.get(reader)
            if forward is maker or (is_last and (forward is None or reader.type == "AddN")):
                self._rewriter.redirect(reader, i, ref)
        if is_last:
            self._rewriter.returned_refs[self._rewriter.edge(gradient)] = ref

    def report_missed(self, backward: bool) -> None:
        """Report routines at pass-through operations whose gradients no backward operation carries.

        backward: True if the gradients come from another graph.
        """
        groups = self._edges.groups
        candidates = [consumer for op in groups for output in op.outputs for consumer in output.consumers()]
        for op in dict.fromkeys(candidates):
            if op.type not in _PASS_THROUGH_INPUTS or op in self._crossed or op in groups:
                continue
            analysed = self._rewriter.analysed_forward(op)
            is_read_on = any(consumer in groups for output in op.outputs for consumer in output.consumers())
            if (
                analysed is not None
                and analysed[0] in self._rewriting.autodiff_places
                and (is_read_on or backward)
            ):
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are, and has no backward op where it could go",
                )

    def report_guessed(self, ops: Sequence[tf.Operation]) -> None:
        """Report routines at pass-through operations of a body whose gradients are inferred from names."""
        for op in ops:
            analysed = (
                self._rewriter.analysed_forward(op)
                if op.type in _PASS_THROUGH_INPUTS and op not in self._rewriter.forward
                else None
            )
            if analysed is not None and analysed[0] in self._rewriting.autodiff_places:
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are; whose these are only names tell, which may err",
                )
