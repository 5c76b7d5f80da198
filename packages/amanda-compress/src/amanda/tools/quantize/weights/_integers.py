"""Weights as integers: rounding of groups, and options, state and result that all methods share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias

import amanda
from amanda.options import PositiveInt, Range, checked
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import Grid, QuantizeError, choose_qparams
from amanda.tools.quantize.weights._calibrated import INDEXED_ROWS, CalibratedTool, CalibratedWeight
from amanda.tools.results import Column
from amanda.tools.weights import (
    ParameterError,
    SelectionOptions,
    StoredParameter,
    Weight,
    WeightResult,
    WeightTool,
    parameter_store,
)

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack


class Codes(NamedTuple):
    """Integers (outputs, inputs) of a matrix; scale and zero point of each group, (outputs, groups)."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor


def group_qparams(matrix: Tensor, grid: Grid, size: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, (outputs, groups), of groups of so many inputs, by their extremes."""
    groups = matrix.reshape(len(matrix), -1, size)
    return choose_qparams(groups.amin(-1), groups.amax(-1), grid)


def nearest_codes(matrix: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return the integers nearest to a matrix, half to even: scale and zero point are those of its groups."""
    groups = matrix.reshape(*scale.shape, -1)
    # A product with the reciprocal, as in `fake_quantize`.
    codes = (groups * (1 / scale).unsqueeze(-1)).round() + zero_point.unsqueeze(-1)
    return codes.clamp(grid.low, grid.high).reshape(matrix.shape)


def quantized(matrix: Tensor, grid: Grid, size: int) -> Codes:
    """Quantise a matrix by rounding to nearest, with a scale for each group."""
    scale, zero_point = group_qparams(matrix, grid, size)
    return Codes(nearest_codes(matrix, scale, zero_point, grid), scale, zero_point)


def dequantized(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the dequantised matrix."""
    groups = codes.reshape(*scale.shape, -1)
    return ((groups - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(codes.shape)


WeightBits: TypeAlias = Annotated[int, Range(2, 8)]

_RETURN_THEIR_INPUT = frozenset({"detach", "data", "alias", "requires_grad"})
"""Ops that return their input unchanged, as in `state_dict`; only readers of their outputs count."""


class QuantizedWeights(WeightResult):
    """The quantised weights, with their bits and the number of elements that share a scale.

    calibration: how weights were calibrated; "" without a calibration, and for loaded integers.
    """

    name: ClassVar[str] = "quantized_weights"
    title = "Quantised weights"
    state = ("integers", ".codes")
    columns: ClassVar[Sequence[Column]] = (
        *WeightResult.columns, Column("bits", number=True), Column("group_size", number=True),
    )  # fmt: skip

    def __init__(self, tool: IntegerTool) -> None:
        self._tool = tool
        self.calibration = tool.calibration if isinstance(tool, CalibratedTool) else ""
        super().__init__(tool)
        del self._tool  # which cannot be copied

    def row(self, weight: Weight) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        bits = None if weight.is_skipped else self._tool.grid.bits
        return (*super().row(weight), bits, None if weight.is_skipped else self._tool.group_size_of(weight))

    def _facts(self) -> Mapping[str, Any]:
        """Return totals, reasons for skipped weights, and how weights were calibrated."""
        return {**super()._facts(), "calibration": self.calibration}

    def notes(self) -> Sequence[str]:
        """Return totals, how weights were calibrated, and reasons for skipped weights."""
        first, *further_notes = super().notes()
        return [first, *([f"Calibrated {self.calibration}."] if self.calibration else []), *further_notes]


class IntegerTool(WeightTool[CalibratedWeight]):
    """Base class of tools that quantise weights to integers, with a scale for each group of inputs."""

    error = QuantizeError
    weight_type = CalibratedWeight
    framework = "PyTorch"

    @checked(error=QuantizeError)
    def __init__(
        self,
        bits: WeightBits = 4,
        group_size: PositiveInt | None = 128,
        symmetric: bool = True,
        **selected: Unpack[SelectionOptions],
    ) -> None:
        super().__init__(**selected)
        self.grid = Grid.of(bits, symmetric)
        self.group_size = group_size
        self.other_readers: dict[Hashable, str] = {}
        """By parameter: an op that reads the parameter other than as the whole weight of a linear layer."""
        self._storages: dict[int, Hashable] = {}  # identities of parameters by their storages
        self.add_inst_for_op(self._record_other_readers)

    @property
    def result(self) -> QuantizedWeights:
        """The quantised weights, and reasons for skipped weights."""
        return QuantizedWeights(self)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load state that `state_dict` returned, also in another process; forget `other_readers`."""
        super().load_state_dict(state, strict)
        self.other_readers.clear()
        self._storages.clear()

    def _record_other_readers(self, context: amanda.OpContext) -> None:
        """Record in `other_readers` the first op that reads a parameter, unless as a linear layer's weight.

        Ops that return their input are left out.
        """
        if context["phase"] != "forward" or context.is_static() or not context.namespace.matches("pytorch"):
            return
        kind, place = context["type"], context.get_scope() or context.get_source()
        # `convert` replaces a weight by a tensor that only a linear layer can multiply: any other reader
        # would fail.
        for position, value in enumerate(context.get_inputs()):
            for identity, part in self._parameters_in(context, position, value):
                is_weight_of_linear = kind == "linear" and position == 1 and part is None
                if kind not in _RETURN_THEIR_INPUT and not is_weight_of_linear:
                    self.other_readers.setdefault(identity, f"{kind} of {place} reads it too")

    def _parameters_in(
        self, context: amanda.OpContext, position: int, value: Any
    ) -> Iterator[tuple[Hashable, Any]]:
        """Yield the parameters that an input has, and the part of each that it is; None for the whole.

        Yields nothing for a computed value.  Remembers storages of parameters, by which a detached tensor is
        known later.
        """
        if not context.namespace.matches("pytorch/*/eager"):
            holder = context.get_variable(position)
            if holder is not None:
                location = parameter_store(holder).locate(holder, value)
                if location is not None:
                    yield location
            return
        for tensor in leaves([value]):
            if not tensors_of(tensor).is_strided(tensor):
                continue
            holder, storage = parameter_store(tensor).owner(tensor), tensor.untyped_storage()._cdata
            if holder is not None:
                location = parameter_store(holder).locate(holder, tensor)
                assert location is not None  # the storage of a parameter that holds the tensor
                identity, _ = location
                self._storages[storage] = identity
                yield location
            elif storage in self._storages:  # of what `detach` gave, which is not a view of the parameter
                yield self._storages[storage], parameter_store(tensor).whole(tensor)

    def group_size_of(self, weight: Weight) -> int:
        """Return the number of weights that share a scale."""
        return self.group_size or int(np.prod(weight.canonical_shape[1:]))

    def on_weight(self, weight: CalibratedWeight) -> str | None:
        """Create the state for the integers of a weight; return a reason if groups do not fit.

        Raises QuantizeError for loaded integers of another grid.
        """
        if weight.layout is None:
            return "which of its axes are inputs is not known"
        outputs, *input_extents = weight.canonical_shape
        input_count, size = int(np.prod(input_extents)), self.group_size_of(weight)
        if input_count % size:
            return f"its {input_count} inputs are no multiple of group_size {size}"
        weight.keep("codes", np.zeros((outputs, input_count), "int8" if self.grid.symmetric else "uint8"))
        weight.keep("scale", np.ones((outputs, input_count // size), "float32"))
        weight.keep("zero_point", np.zeros((outputs, input_count // size), "float32"))
        # Saved with the integers, which mean nothing without it.
        low, high = map(int, weight.keep("grid", np.array([self.grid.low, self.grid.high])))
        if (low, high) != (self.grid.low, self.grid.high):
            raise QuantizeError(
                f"the integers that were loaded for {weight.name} are from {low} to {high}, and those of "
                f"this {type(self).__name__} from {self.grid.low} to {self.grid.high}: give the same bits "
                "and symmetric"
            )
        weight.keep("sums", np.full(2, np.nan))
        return None

    def store_codes(self, weight: CalibratedWeight, matrix: Tensor, codes: Codes) -> None:
        """Store the integers of a weight, and sums that identify the value they were computed from."""
        for name, value in codes._asdict().items():
            weight[name] = value
        # Sum and norm identify the value: a copy would double the memory of the weights.
        weight["sums"] = sum_and_norm_of(matrix)

    def check_model(self, model: Any) -> None:
        """Raise QuantizeError if a weight has no integers, or its value in a model has changed since.

        The dequantised value is valid too.  Packed tensors are not compared.
        """
        try:
            parameters = {
                parameter.identity: parameter for parameter in parameter_store("torch").parameters(model)
            }
            for weight in self.weights:
                self._check_weight(weight, parameters.get(weight.holder))
        except ParameterError as error:
            raise QuantizeError(str(error)) from error

    def _check_weight(self, weight: CalibratedWeight, parameter: StoredParameter | None) -> None:
        """Raise QuantizeError for a weight without integers, or of a changed value."""
        if not (weight.is_ready or weight.is_skipped):
            calibration = " and within tool.calibrating()" if isinstance(self, CalibratedTool) else ""
            raise QuantizeError(
                f"{weight.name} has no integers, since its last calibration was not completed: run the model "
                f"in a scope of this {type(self).__name__}{calibration}, or exclude it"
            )
        if (
            weight.is_ready
            and parameter is not None
            and not _has_unchanged_value(self, weight, parameter.read())
        ):
            raise QuantizeError(
                f"the integers of {weight.name} are of other values than it has: it was written after they "
                "were chosen, or another tool changed what ops read; finalize that tool first, or call "
                f"clear() of this {type(self).__name__} and run the model again"
            )

    def write_rounded(self, model: Any, weights: Iterable[CalibratedWeight]) -> None:
        """Write dequantised weights into a model; computed weights stay unchanged.

        Raises QuantizeError for a parameter that cannot be written; an error restores all parameters.
        """
        ready_weights = [weight for weight in weights if weight.is_ready and weight.holder is not None]
        try:
            with amanda.disabled():
                self._write_weights(model, ready_weights)
        except ParameterError as error:
            raise QuantizeError(str(error)) from error

    def finalize(self, model: Any) -> Any:
        """Write the dequantised weights into a model, see `WeightTool.finalize`.

        Raises QuantizeError as `WeightTool.finalize` and `check_model` do; then nothing is written.
        """
        # Before anything is written.
        self.check_model(model)
        return super().finalize(model)

    @amanda.traceable
    def transform(self, value: Any, codes: Any, scale: Any, zero_point: Any, smoothing: Any = None) -> Any:
        """Return the dequantised weight, divided by the scales of the inputs if there are any."""
        matrix = dequantized(codes, scale, zero_point)
        return (matrix if smoothing is None else matrix / smoothing).reshape(value.shape)


def has_factors(weight: Weight) -> bool:
    """Return True if a weight has scales of its inputs that are not 1."""
    factors = weight.get("smoothing")
    return factors is not None and bool((factors != 1).any())


def _has_unchanged_value(tool: IntegerTool, weight: CalibratedWeight, whole: Tensor) -> bool:
    """Return True if a weight has the value that was quantised, or the dequantised value.

    True also where the values cannot be compared: of packed tensors, and of state without sums.
    """
    # Packed tensors have no floating values to sum; the sums are NaN where loaded state had none.
    if hasattr(whole, "__tensor_flatten__") or not weight["sums"].isfinite().all():
        return True
    value = whole if weight.part is None else whole.as_strided(*weight.part)
    # Elements that were cast to bfloat16 differ by up to 2 ** -9; sums of float64 by their rounding alone.
    tolerance = 1e-9 if str(value.dtype).endswith(weight.dtype) else 2**-7
    present_sums = sum_and_norm_of(weight.plain(value))
    quantised_sums = weight["sums"].to(present_sums.device)  # of the value that was quantised
    dequantised_sums = sum_and_norm_of(weight.plain(tool.finalized(weight, value)))
    for expected_sums in (quantised_sums, dequantised_sums):
        _, norm = expected_sums
        if (present_sums - expected_sums).abs().max() <= tolerance * norm:
            return True
    return False


def sum_and_norm_of(value: Tensor) -> Tensor:
    """Return the sum and the norm of a tensor."""
    import torch

    wide = value.double()
    return torch.stack([wide.sum(), wide.norm()])


class NearestTool(IntegerTool):
    """Quantise weights by rounding to nearest, with a scale for each group of inputs.

    bits: 2 to 8.  group_size: number of consecutive inputs of an output that share a scale; None for all.
    symmetric: True for signed integers with zero point 0, False for unsigned integers.
    type: globs of op types; None for every convolution and product.
    module, exclude: globs of module paths to change, and to leave unchanged.

    Ops compute with the rounded weights, and `finalize` writes them into a model.
    Raises QuantizeError for invalid options.

    >>> nearest = NearestTool(bits=8, group_size=None)
    """

    leaves_rows = INDEXED_ROWS

    def on_read(self, weight: CalibratedWeight, present: Callable[[], Any]) -> None:
        """Round a weight to nearest at its first read."""
        if not weight.is_ready:
            matrix = weight.matrix(present())
            self.store_codes(weight, matrix, quantized(matrix, self.grid, self.group_size_of(weight)))
            weight.updated = 0
