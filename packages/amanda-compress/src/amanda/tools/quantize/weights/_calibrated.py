"""Base class of tools that change weights by the inputs that their ops read in a calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.options import deprecated
from amanda.tools.axes import canonical_extents
from amanda.tools.mapping import MATRIX_PRODUCTS
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.weights import ParameterSlice, Weight, WeightInput, WeightTool, weight_input

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from amanda.tools.weights import SelectionOptions

NOT_RUN = "no op that multiplies by it ran in the calibration"
INDEXED_ROWS = (
    "an index selects it out of a parameter, so that a calibration reaches a part of its inputs alone"
)


class InputSums:
    """Sums over the inputs of a weight in a calibration, of K weights for each output.

    No tensor is one of inference mode, so that calls outside of it add to them too.

    weight: as the op read it.  count: number of rows of inputs.  magnitudes: (K,), sum of magnitudes.
    max_magnitudes: (K,).  gram: (K, K), sum of products of pairs of inputs; None if not wanted.
    """

    def __init__(self, weight: Tensor, rows: Tensor, wants_gram: bool) -> None:
        import torch

        size = rows.shape[1]
        self.weight, self.count = weight.detach(), 0
        # Tensors of inference mode could not be added to outside of it.
        with torch.inference_mode(False):
            self.magnitudes, self.max_magnitudes = rows.new_zeros(size), rows.new_zeros(size)
            self.gram = rows.new_zeros(size, size) if wants_gram else None

    def add(self, rows: Tensor) -> None:
        """Add inputs (n, K)."""
        magnitudes = rows.abs()
        self.count += len(rows)
        self.magnitudes += magnitudes.sum(0)
        self.max_magnitudes = self.max_magnitudes.maximum(magnitudes.amax(0))
        if self.gram is not None:
            # In place: a gram matrix of 4096 inputs has 64 MB.
            self.gram.addmm_(rows.T, rows)


class CalibratedWeight(Weight):
    """A weight with the inputs of its ops in a running calibration.  skip_reason: why there are none."""

    input_sums: InputSums | None = None
    skip_reason: str = NOT_RUN

    def matrix(self, value: Tensor) -> Tensor:
        """Return a value of the weight as (outputs, K), in float32 or wider.

        Raises QuantizeError for NaN and infinity.
        """
        matrix: Tensor = self.canonical(self.plain(value)).flatten(1)
        if not matrix.isfinite().all():
            raise QuantizeError(f"NaN or Inf in {self.name}: integers stand for finite numbers")
        return matrix

    def check(self, input_sums: InputSums) -> None:
        """Raise QuantizeError for NaN and infinity in the inputs, or in their sums."""
        if not input_sums.max_magnitudes.isfinite().all():
            raise QuantizeError(f"NaN or Inf in what the {self.type} of {self.name} is given")
        # Finite inputs may have products that overflow.
        sums = input_sums.magnitudes if input_sums.gram is None else input_sums.gram
        if not sums.isfinite().all():
            raise QuantizeError(
                f"the {self.type} of {self.name} is given up to "
                f"{float(input_sums.max_magnitudes.max()):.3g}: products of that overflow {sums.dtype}; "
                "calibrate with smaller inputs, or exclude it"
            )


class CalibratedTool(WeightTool[CalibratedWeight]):
    """Change weights of products in PyTorch by the inputs of a calibration; a subclass has `solve`.

    finished: weights whose inputs in the running or last calibration are complete.
    """

    error = QuantizeError
    weight_type = CalibratedWeight
    framework = "PyTorch"
    leaves_rows = INDEXED_ROWS
    calibration: str
    """Sentence on the last calibration; "" before one is complete."""
    wants_gram: ClassVar[bool] = True
    """True if `solve` reads the gram matrix of inputs, which has the square of their number of elements."""

    def __init__(self, **selected: Unpack[SelectionOptions]) -> None:
        super().__init__(**selected)
        self.is_calibrating, self.calibration = False, ""
        self._is_finding_weights = False
        self.finished: set[CalibratedWeight] = set()
        self.add_inst_for_op(self._analyse_product)

    def solve(self, weight: CalibratedWeight, matrix: Tensor, input_sums: InputSums) -> None:
        """Compute the state of a weight from the inputs of its ops.

        matrix: the weight as (outputs, K), in float32 or wider.
        """
        raise NotImplementedError

    def prepare(self, model: Any, *example: Any, **kwargs: Any) -> Any:
        """Run `model` once on an example to find its weights; return the model's result.

        Before a calibration ops read unchanged weights; afterwards those of the calibration or loaded state.
        """
        has_state = any(weight.is_ready or weight.is_skipped for weight in self.weights)
        # Without state ops read unchanged weights in `prepare`, instead of an error about a missing
        # calibration.
        self._is_finding_weights = not (has_state or self.waiting_state())
        try:
            return super().prepare(model, *example, **kwargs)
        finally:
            self._is_finding_weights = False

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context in which executions calibrate, with unchanged weights; its end computes states.

        Use the context within a scope: `with amanda.apply(tool), tool.calibrating(): ...`.
        """
        with self._new_calibration():
            yield
            for weight in self.weights:
                self.finish_calibration(weight)
        self.calibration = "all weights by inputs from the model as it is"

    @deprecated(use="calibrating", since="amanda-compress 0.2", gone="0.4")
    def collecting(self) -> AbstractContextManager[None]:
        """Return a context that begins a calibration anew.  Deprecated: use `calibrating`."""
        return self._new_calibration()

    @contextmanager
    def _new_calibration(self) -> Iterator[None]:
        """Return a context of a new calibration; call `finish_calibration` for each weight within.

        State of earlier calibrations is outdated from the start, also if an exception ends this one.
        """
        self._expire()
        for weight in self.weights:
            weight.is_skipped = False
        self.is_calibrating, self.calibration, self.finished = True, "", set()
        try:
            yield
        finally:
            self.is_calibrating = False
            for weight in self.weights:
                # Grams are as large as the model, and go also after an error.
                weight.input_sums = None

    def calibrates_with(self, weight: CalibratedWeight, rows: Tensor) -> bool:
        """Return True if inputs (n, K) of a weight count in the calibration that goes on."""
        return True

    def on_read(self, weight: CalibratedWeight, present: Callable[[], Any]) -> None:
        """Mark the state of an earlier calibration as outdated, in a calibration.

        Raises QuantizeError for a weight that was not calibrated, outside of a calibration.
        """
        # Loaded integers would otherwise be read in the calibration that replaces them.
        if self.is_calibrating and weight.is_ready and weight not in self.finished:
            weight.expire()
        if not (weight.is_ready or weight.is_skipped or self.is_calibrating or self._is_finding_weights):
            raise QuantizeError(
                f"{weight.name} was not calibrated: run batches that execute its {weight.type} within `with "
                f"amanda.apply(tool), tool.calibrating(): ...` of this {type(self).__name__}, or exclude it"
            )

    def finish_calibration(self, weight: CalibratedWeight) -> None:
        """Finish a weight: compute its state from its collected inputs; without inputs skip it with a reason.

        Raises QuantizeError for NaN and infinity.
        """
        import torch

        input_sums = weight.input_sums
        self.finished.add(weight)
        # Any other reason than the one at the beginning is of an op whose inputs cannot be collected.
        is_supported = weight.skip_reason == NOT_RUN
        weight.is_skipped = input_sums is None or not is_supported
        place = f"{weight.type} of {weight.module or weight.source}"
        if input_sums is None or weight.is_skipped:
            self.weights.reasons[place] = weight.skip_reason
            return
        self.weights.reasons.pop(place, None)
        # The algorithms run thousands of ops, which are none of the program.
        with amanda.disabled(), torch.no_grad():
            matrix = weight.matrix(input_sums.weight)
            weight.check(input_sums)
            self.solve(weight, matrix, input_sums)
        weight.updated = 0

    def _analyse_product(self, context: amanda.OpContext) -> None:
        """Insert the routine that collects a weight's inputs, and call `on_product`; else record a reason."""
        read = weight_input(context) if context["phase"] == "forward" else None
        if read is None or context.is_static():
            return
        view, find_weight = self.weights.view_of_read(context, read)
        if view is None and find_weight is None:
            return
        multiplied_input = read.multiplied_input(context)
        reason = _why_unsupported(context, read, has_multiplied_input=multiplied_input is not None)
        if multiplied_input is None or reason:
            if isinstance(view, CalibratedWeight):
                view.skip_reason = reason
            return
        if find_weight is None:  # the op reads the same weight each time
            find_weight = partial(_fixed_weight, view)
        inputs = [multiplied_input.position, read.index]
        context.insert_before_op(
            self._add_inputs, inputs=inputs, find_weight=find_weight, make_rows=multiplied_input.rows,
            layout=read.layout,
        )  # fmt: skip
        self.on_product(context, inputs, multiplied_input.axis, find_weight)

    def on_product(
        self, context: amanda.OpContext, inputs: Sequence[int], axis: int, find_weight: Any
    ) -> None:
        """React to an op whose weight may be changed; called at analysis.  Does nothing unless overridden.

        inputs: positions of the input that is multiplied, whose channels are at `axis`, and of the weight.
        find_weight: returns the weight at an execution, from its value and the slice of a parameter that it
        is.
        """

    def _add_inputs(
        self, x: Any, value: Any, find_weight: Any, make_rows: Any, layout: str, run: dict[str, Any]
    ) -> None:
        """Add the input `x` of a weight's `value` to the sums of the weight, during its calibration.

        find_weight: see `on_product`.  make_rows: `MultipliedInput.rows`.  layout: of the weight.
        """
        weight = find_weight(value, ParameterSlice.of_execution(run)) if self.is_calibrating else None
        # A batch may send no token to an expert.
        if not isinstance(weight, CalibratedWeight) or weight in self.finished or not x.numel():
            return
        # Groups of convolutions were refused at analysis, so that there is one matrix.
        rows = make_rows(x, canonical_extents(tuple(value.shape), layout))[0]
        if not self.calibrates_with(weight, rows):
            return
        if weight.input_sums is None:
            weight.input_sums = InputSums(value, rows, self.wants_gram)
        weight.input_sums.add(rows)


def _fixed_weight(weight: Any, value: Any, source: Any) -> Any:
    """Return a weight, whichever value an op reads, and of whichever slice of a parameter."""
    return weight


def _why_unsupported(context: amanda.OpContext, read: WeightInput, has_multiplied_input: bool) -> str:
    """Return why an op is not a product with one matrix; "" for a product with one matrix."""
    kind, groups = context["type"], context["weight_groups"]
    rank = len(context["shape"](context.get_inputs()[read.index]) or ())
    if kind in MATRIX_PRODUCTS and rank != 2:
        return f"its weight has {rank} axes, and a product of matrices is expected"
    if not has_multiplied_input or read.layout is None:
        return f"it is a {kind}; the method is for linear layers, products of matrices and convolutions"
    return "" if groups == 1 else f"its convolution has {groups} groups, each of which reads other inputs"
