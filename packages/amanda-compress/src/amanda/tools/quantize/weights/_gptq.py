"""GPTQ: round columns one by one, and correct the following columns (Frantar et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from amanda.options import PositiveInt, Range, checked
from amanda.tools.quantize._fake_quantize import Grid, QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedTool, CalibratedWeight, InputSums
from amanda.tools.quantize.weights._integers import (
    Codes,
    IntegerTool,
    WeightBits,
    dequantized,
    group_qparams,
    nearest_codes,
)
from amanda.tools.trials import Progress
from amanda.tools.weights import SelectionOptions

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

Damping: TypeAlias = Annotated[float, Range(above=0, below=1)]


class GPTQTool(IntegerTool, CalibratedTool):
    """Quantise weights by GPTQ: the least error of outputs for the inputs of a calibration.

    The Hessian of each weight comes from a calibration of the unquantised model, or in `calibrate_in_order`
    of the model whose earlier weights are quantised.

    Args:
        bits: 2 to 8.
        group_size: Number of consecutive inputs of an output that share a scale; None for all.
        symmetric: True for signed integers with zero point 0, False for unsigned integers.
        damping: Share of the mean of the Hessian's diagonal that is added to the diagonal.
        block: Number of columns whose errors are passed on together.
        act_order: True to round columns with larger inputs first.  Groups stay groups of consecutive inputs,
            with scales of the unrounded weight, so that integers are stored in the order of the inputs.
        type: Globs of op types; None for every convolution and product.
        module: Globs of module paths to change, and to leave unchanged.
        exclude: See `module`.

    Raises:
        QuantizeError: For invalid options.

    >>> gptq = GPTQTool(bits=4, group_size=32)
    """

    @checked(error=QuantizeError)
    def __init__(
        self,
        bits: WeightBits = 4,
        group_size: PositiveInt | None = 128,
        symmetric: bool = True,
        damping: Damping = 0.01,
        block: PositiveInt = 128,
        act_order: bool = False,
        **selected: Unpack[SelectionOptions],
    ) -> None:
        super().__init__(bits, group_size, symmetric, **selected)
        self._damping, self._block, self._act_order = damping, block, act_order
        self._batch_run: _BatchRun | None = None  # of `calibrate_in_order`; None outside of it

    @checked(error=QuantizeError)
    def calibrate_in_order(self, run: Callable[[], object], progress: bool = True) -> None:
        """Quantise weights in the order of their first reads, each by inputs from already quantised weights.

        Use it inside of a scope of the tool.

        Source: Frantar et al. 2022, sec. 4; `true_sequential` of the authors' code.

        Args:
            run: Executes all batches with the model; it is called once for each weight, or for several
                weights that multiply one input, such as those of queries, keys and values.
            progress: True to show progress on stderr.

        Raises:
            QuantizeError: As `calibrating` does, and if a call runs no op whose weight waits; then no weight
                has integers.
        """
        batch_run: _BatchRun | None = None
        calls = done_count = 0
        try:
            with self._new_calibration(), Progress(progress) as display:
                # Each run shows one group of weights further: those behind it read changed inputs.
                while batch_run is None or batch_run.waiting:
                    self._batch_run = batch_run = _BatchRun()
                    run()
                    calls += 1
                    if not batch_run.weights:
                        raise QuantizeError(
                            f"call {calls} of run read no weight that waits for a calibration: use "
                            f"calibrate_in_order within `with amanda.apply(tool)` of this "
                            f"{type(self).__name__}, and a function that executes all batches each time"
                        )
                    done_count += len(batch_run.weights)
                    names = ", ".join(weight.name for weight in batch_run.weights)
                    display.begin(done_count + len(batch_run.waiting), names, done_count - 1)
                    are_quantised = self._quantise_after_run(batch_run.weights)
                    display.done("quantised" if are_quantised else "left")
                for weight in self.weights:
                    if weight not in self.finished:  # no run has read it: this records the reason
                        self.finish_calibration(weight)
        except BaseException:
            # No weight keeps integers of a calibration that others have not finished.
            self._expire()
            raise
        finally:
            self._batch_run = None
        self.calibration = f"in {calls} runs, each weight by inputs from weights quantised before"

    def _quantise_after_run(self, weights: Sequence[CalibratedWeight]) -> bool:
        """Quantise weights by the inputs of a run, and release these; return False if all were skipped."""
        for weight in weights:
            self.finish_calibration(weight)
            # The gram of a finished weight is released before the next run gathers.
            weight.input_sums = None
        return not all(weight.is_skipped for weight in weights)

    def calibrates_with(self, weight: CalibratedWeight, rows: Tensor) -> bool:
        """Return True if inputs (n, K) of a weight count: in `calibrating`, or in this weight's run.

        In `calibrate_in_order` adds the weight to the run or to those that wait.
        """
        return self._batch_run is None or self._batch_run.admit(weight, rows)

    def solve(self, weight: CalibratedWeight, matrix: Tensor, input_sums: InputSums) -> None:
        """Choose the integers of a weight; raise QuantizeError for a Hessian without a Cholesky factor."""
        import torch

        assert input_sums.gram is not None
        hessian = input_sums.gram * (2 / input_sums.count)
        options = self.grid, self.group_size_of(weight), self._damping, self._block, self._act_order
        try:
            self.store_codes(weight, matrix, gptq(matrix, hessian, *options))
        # Fewer rows than inputs give a singular matrix, which the damping makes regular, unless it is too
        # small.
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise QuantizeError(
                f"the Hessian of {weight.name}'s inputs has no Cholesky factor with damping {self._damping}: "
                "give more"
            ) from error


class _BatchRun:
    """Weights that one run of all batches calibrates: the first that is read, and all that share its input.

    weights: of this run, in the order of their reads.  waiting: weights that later runs calibrate.
    """

    def __init__(self) -> None:
        self.weights: list[CalibratedWeight] = []
        self.waiting: set[CalibratedWeight] = set()
        self._rows: Tensor | None = None  # inputs of the first weight; None before its first batch

    def admit(self, weight: CalibratedWeight, rows: Tensor) -> bool:
        """Add a weight to this run or to those that wait, by its inputs (n, K); return True for this run."""
        if weight in self.weights:
            return True
        if self._rows is None:
            self._rows = rows.clone()  # a program may write into its memory
        elif weight in self.waiting or not _is_equal(rows, self._rows):
            self.waiting.add(weight)
            return False
        self.weights.append(weight)
        return True


def _is_equal(first: Tensor, second: Tensor) -> bool:
    """Return True for equal numbers, of one shape and type on one device."""
    signature = first.shape, first.dtype, first.device
    return signature == (second.shape, second.dtype, second.device) and bool((first == second).all())


@checked(error=QuantizeError)
def gptq(
    matrix: Tensor,
    hessian: Tensor,
    grid: Grid,
    group_size: PositiveInt,
    damping: Damping = 0.01,
    block: PositiveInt = 128,
    act_order: bool = False,
) -> Codes:
    """Return the integers of a matrix of weights, column by column.

    Without `act_order`, the scales of a group that does not span the matrix are those of its columns when the
    block that it begins in has been reached, as in the authors' code.
    Integers and scales are in the order of the matrix.  Inputs that are always 0 have weights 0.

    Source: Frantar et al. 2022, algorithm 1.

    Args:
        matrix: (outputs, K).
        hessian: (K, K), 2 / n times the sum of products of pairs of the n inputs.
        act_order: True to round columns by decreasing diagonal of the Hessian, as `act_order` with
            `static_groups` of the authors' code does: the scales of all groups are those of the matrix before
            any column is rounded.

    Raises:
        torch.linalg.LinAlgError: If the damped Hessian has no Cholesky factor.
    """
    import torch

    has_whole_rows = group_size >= matrix.shape[1]
    is_dead = hessian.diagonal() == 0
    order = torch.arange(len(hessian), device=matrix.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True).to(matrix.device)
    # In float64: errors of all earlier columns add up in the last ones.
    remaining = matrix.double().masked_fill(is_dead, 0)
    # As in the authors' code, dead inputs count in the scales of whole rows, and not in those of groups.
    first_qparams = group_qparams(matrix if has_whole_rows else remaining.to(matrix.dtype), grid, group_size)
    scale, zero_point = (qparam.double() for qparam in first_qparams)
    factor = _inverse_factor(hessian.double()[order][:, order], damping)
    codes = torch.empty_like(remaining)
    # From here on columns are in the order of their rounding; inputs[column] is the input of a column.
    inputs = order.tolist()
    # The weights with the corrections by all earlier blocks.
    remaining = remaining[:, order]
    for start in range(0, len(inputs), block):
        end = min(start + block, len(inputs))
        # The block's columns, corrected by its own earlier ones too, and the errors of their rounding.
        corrected, errors = remaining[:, start:end].clone(), torch.empty_like(remaining[:, start:end])
        for i, column in enumerate(range(start, end)):
            group_index = inputs[column] // group_size
            group = slice(group_index, group_index + 1)  # a slice keeps the axis
            # The columns as they are now, with the corrections of earlier ones. With act_order groups are not
            # consecutive here, and have static scales.
            if column % group_size == 0 and not (has_whole_rows or act_order):
                columns = remaining[:, column : column + group_size].to(matrix.dtype)
                scale[:, group], zero_point[:, group] = group_qparams(columns, grid, group_size)
            qparams_of_group = scale[:, group], zero_point[:, group]
            column_weights = corrected[:, i : i + 1]
            code = nearest_codes(column_weights, *qparams_of_group, grid)
            codes[:, inputs[column]] = code[:, 0]
            error = (column_weights - dequantized(code, *qparams_of_group)) / factor[column, column]
            # Within the block alone: columns behind it are corrected at its end.
            corrected[:, i:] -= error * factor[column, column:end]
            errors[:, i : i + 1] = error
        # One product for a block instead of one for each column (lazy batch updates of the source).
        remaining[:, end:] -= errors @ factor[start:end, end:]
    return Codes(codes, scale.to(matrix.dtype), zero_point.to(matrix.dtype))


def _inverse_factor(hessian: Tensor, damping: float) -> Any:
    """Return the upper Cholesky factor of the inverse of a damped Hessian; 0 on the diagonal counts as 1."""
    import torch

    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    # Inputs that are always 0 would make the Hessian singular.
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean()
    # Row j of this factor is what the source gets by eliminating column after column from the inverse.
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
