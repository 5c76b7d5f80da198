"""Weights as integers: options, state and result that all methods share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import amanda
from amanda.options import PositiveInt, Range, checked
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._grid import Grid, QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedTool, CalibratedWeight
from amanda.tools.quantize.weights._grouping import Codes, dequantized
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


WeightBits: TypeAlias = Annotated[int, Range(2, 8)]

_PASSED_ON = frozenset({"detach", "data", "alias", "requires_grad"})
"""Ops that hand a parameter on as it is, as `state_dict` does: other ops read what they return."""


class QuantizedWeights(WeightResult):
    """The weights that were quantised, with their bits and the number of weights that share a scale.

    calibration: how they were calibrated; "" for none, and for integers that were loaded.
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
        return (*super().row(weight), bits, None if weight.is_skipped else self._tool.size(weight))

    def facts(self) -> Mapping[str, Any]:
        """Return totals, what was left, and how weights were calibrated."""
        return {**super().facts(), "calibration": self.calibration}

    def notes(self) -> Sequence[str]:
        """Return totals, how weights were calibrated, and what was left."""
        first, *further_notes = super().notes()
        return [first, *([f"Calibrated {self.calibration}."] if self.calibration else []), *further_notes]


class IntegerTool(WeightTool[CalibratedWeight]):
    """Base of tools whose ops compute with weights of integers, with a scale for each group of inputs."""

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
        """By parameter, an op that reads it otherwise than as the whole weight of a linear layer."""
        self._storages: dict[int, Hashable] = {}
        self.add_inst_for_op(self._record_other_readers)

    @property
    def result(self) -> QuantizedWeights:
        """The weights that were met, and those that are left."""
        return QuantizedWeights(self)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take what `state_dict` gave, also in another process."""
        super().load_state_dict(state, strict)
        self.other_readers.clear()
        self._storages.clear()

    def _record_other_readers(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward" or context.is_static() or not context.namespace.matches("pytorch"):
            return
        kind, place = context["type"], context.get_scope() or context.get_source()
        for position, value in enumerate(context.get_inputs()):
            for identity, part in self._parameters_in(context, position, value):
                is_weight_of_linear = kind == "linear" and position == 1 and part is None
                if kind not in _PASSED_ON and not is_weight_of_linear:
                    self.other_readers.setdefault(identity, f"{kind} of {place} reads it too")

    def _parameters_in(
        self, context: amanda.OpContext, position: int, value: Any
    ) -> Iterator[tuple[Hashable, Any]]:
        """Yield the parameters that an input has, and the part of each that it is; None for the whole."""
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
                self._storages[storage] = location[0]
                yield location
            elif storage in self._storages:  # of what `detach` gave, which is no view of the parameter
                yield self._storages[storage], parameter_store(tensor).whole(tensor)

    def size(self, weight: Weight) -> int:
        """Return the number of weights that share a scale."""
        return self.group_size or int(np.prod(weight.canonical_shape[1:]))

    def on_weight(self, weight: CalibratedWeight) -> str | None:
        """Make room for the integers of a weight, unless groups do not fit."""
        if weight.layout is None:
            return "which of its axes are inputs is not known"
        outputs, *inputs = weight.canonical_shape
        count, size = int(np.prod(inputs)), self.size(weight)
        if count % size:
            return f"its {count} inputs are no multiple of group_size {size}"
        weight.keep("codes", np.zeros((outputs, count), "int8" if self.grid.symmetric else "uint8"))
        weight.keep("scale", np.ones((outputs, count // size), "float32"))
        weight.keep("zero_point", np.zeros((outputs, count // size), "float32"))
        low, high = map(int, weight.keep("grid", np.array([self.grid.low, self.grid.high])))
        if (low, high) != (self.grid.low, self.grid.high):
            raise QuantizeError(
                f"the integers that were loaded for {weight.name} are from {low} to {high}, and those of "
                f"this {type(self).__name__} from {self.grid.low} to {self.grid.high}: give the same bits "
                "and symmetric"
            )
        weight.keep("sums", np.full(2, np.nan))
        return None

    def write(self, weight: CalibratedWeight, matrix: Tensor, codes: Codes) -> None:
        """Keep the integers of a weight, and what tells its value from another."""
        for name, value in codes._asdict().items():
            weight[name] = value
        weight["sums"] = sums_of(matrix)

    def check_model(self, model: Any) -> None:
        """Raise QuantizeError if a weight lacks integers, or its value in a model is another than theirs.

        It is as it was when they were chosen, or what they stand for.  Packed tensors are not compared.
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
        if not (weight.is_ready or weight.is_skipped):
            within = " and within tool.calibrating()" if isinstance(self, CalibratedTool) else ""
            raise QuantizeError(
                f"{weight.name} has no integers, since its last calibration was not completed: run the model "
                f"in a scope of this {type(self).__name__}{within}, or exclude it"
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
        """Write what the integers of some weights stand for into a model; computed weights stay.

        Raises QuantizeError where a parameter cannot be written; then all are as they were.
        """
        ready = [weight for weight in weights if weight.is_ready and weight.holder is not None]
        try:
            with amanda.disabled():
                self._write(model, ready)
        except ParameterError as error:
            raise QuantizeError(str(error)) from error

    def finalize(self, model: Any) -> Any:
        """Write what the integers stand for into the weights of a model, see `WeightTool.finalize`.

        Raises QuantizeError as that does, and where `check_model` does; then nothing is written.
        """
        self.check_model(model)
        return super().finalize(model)

    @amanda.traceable
    def transform(self, value: Any, codes: Any, scale: Any, zero_point: Any, smoothing: Any = None) -> Any:
        """Return what the integers stand for, divided by the scales of the inputs where there are some."""
        matrix = dequantized(codes, scale, zero_point)
        return (matrix if smoothing is None else matrix / smoothing).reshape(value.shape)


def has_factors(weight: Weight) -> bool:
    """Return True if the integers are of a weight whose inputs an op divides."""
    factors = weight.get("smoothing")
    return factors is not None and bool((factors != 1).any())


def _has_unchanged_value(tool: IntegerTool, weight: CalibratedWeight, whole: Tensor) -> bool:
    """Return True if a weight has the value that its integers were chosen for, or that they stand for."""
    if hasattr(whole, "__tensor_flatten__") or not weight["sums"].isfinite().all():
        return True
    value = whole if weight.part is None else whole.as_strided(*weight.part)
    # Elements that were cast to bfloat16 differ by up to 2 ** -9.
    share = 1e-9 if str(value.dtype).endswith(weight.dtype) else 2**-7
    present_sums = sums_of(weight.plain(value))
    return any(
        bool((present_sums - expected_sums).abs().max() <= share * expected_sums[1])
        for expected_sums in (
            weight["sums"].to(present_sums.device),
            sums_of(weight.plain(tool.finalized(weight, value))),
        )
    )


def sums_of(value: Tensor) -> Tensor:
    """Return the sum and the norm of a tensor."""
    import torch

    wide = value.double()
    return torch.stack([wide.sum(), wide.norm()])
