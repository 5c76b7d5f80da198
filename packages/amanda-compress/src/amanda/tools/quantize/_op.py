"""One op whose inputs are quantised: its quantizers, and the routines that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import amanda
from amanda.errors import ToolError
from amanda.tools.kit import tensors_of
from amanda.tools.quantize._fake_quantize import Groups, QuantizeError, Scale, fake_quantize_fixed
from amanda.tools.quantize._kernels import recompute_function
from amanda.tools.quantize._quantizer import QUANTIZERS, DynamicQuantizer, Noise, Quantizer
from amanda.tools.quantize._result import Quantized
from amanda.tools.weights import ParameterSlice, WeightInput, WeightReads, parameter_store, weight_input

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeOptions, QuantizeTool


_INPUTS, _CLIPPING = "amanda.tools.quantize", "amanda.tools.quantize: values"


@dataclass
class _FirstExecution:
    """How an op first ran in an execution of the program, which recomputations of the op repeat.

    calibrates: True if the op ran unquantised.  qparams: scale and zero point of each value.
    """

    calibrates: bool
    qparams: list[tuple[Any, ...]]


class QuantizedOp:
    """An op, with the quantizers of its inputs.

    created: all quantizers of this op.  skip_reason: why the weight is not quantised.
    quantizers: by position of the input and index in a list of tensors there (`item`, None for a tensor).
    An op that reads several slices or parts of a parameter has one quantizer here for the first of them;
    `_part_quantizers` then finds that of an execution.
    """

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool, options: QuantizeOptions) -> None:
        self._tool, self._options = tool, options
        self._columns = context["phase"], context["type"], context.get_scope(), context.get_source()
        self.name = f"{context['type']} of {context.get_scope() or context.get_source()}"
        self.skip_reason = ""
        self.created: list[Quantizer] = []
        self._execution_count = 0
        self._output_noise = Noise()
        # Only for measurements: the computation of an op keeps its attributes alive.
        self._run_unquantised: Any = recompute_function(context) if tool.measures else None
        self._part_quantizers: dict[tuple[int, int | None], _PartQuantizer] = {}
        self.quantizers = dict(self._create_quantizers(context))
        # One routine reads all positions: a routine for each would cost a call of Python more at each
        # execution.
        self._positions = sorted({position for position, _ in self.quantizers})

    def _create_quantizers(
        self, context: amanda.OpContext
    ) -> Iterator[tuple[tuple[int, int | None], Quantizer]]:
        """Create the quantizers of an op at its analysis; set `skip_reason` for values that have none.

        Yields each with the position of its input and the index in a list of tensors there.
        """
        read = weight_input(context)
        # In a file, a weight that cannot be followed is an activation as any other.
        if read is not None and read.is_lost and context.is_static():
            read = None
        for position in context["operands"]:
            value = context.get_inputs()[position]
            items = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for item, tensor in items:
                weight = read if read is not None and (position, item) == (read.index, None) else None
                is_quantised = self._options.bits(weight is not None) is not None
                if not self._has_floats(context, tensor, weight is not None) or not is_quantised:
                    continue
                key = position, item
                if weight is None:
                    name = f"input {position}" if item is None else f"input {position}.{item}"
                    yield key, self._create_activation_quantizer(context, read, name, key, tensor)
                elif (weight_quantizer := self._create_weight_quantizer(context, weight, tensor)) is not None:
                    yield key, weight_quantizer

    def _has_floats(self, context: amanda.OpContext, tensor: Any, is_weight: bool) -> bool:
        """Return True if a tensor has floats that can be read; else set `skip_reason` if that is unexpected.

        Integers, and tensors without data (meta), are no surprise.
        """
        dtype = str(context["dtype"](tensor))
        # The type of packed numbers has the class of the tensor in front, as "Int4Tensor[bfloat16]".
        if is_weight and dtype.endswith("]"):
            self.skip_reason = f"it is packed, {dtype}"
        if not dtype.startswith(("float", "bfloat")) or getattr(tensor, "is_meta", False):
            return False
        unreadable = tensors_of(tensor).unread(tensor) if context.is_eager() else None
        if unreadable is not None:
            self.skip_reason = unreadable
        return unreadable is None

    def _create_activation_quantizer(
        self, context: amanda.OpContext, read: WeightInput | None, name: str, key: tuple[int, int | None],
        value: Any,
    ) -> Quantizer:  # fmt: skip
        """Create the quantizers of an activation: one for each weight that the op reads; return the first.

        Registers in `_part_quantizers` the function that finds those of other slices or parts.
        """
        make_for_slice = partial(self._create_quantizer, name, None, (), value, context)
        first = None if read is None else self._create_slice_quantizers(read, make_for_slice, key)
        if first is not None:
            return first
        if read is None or not (read.is_part and read.is_followed):
            return self._create_quantizer(name, None, (), value, context)
        # A loop runs one line with several weights: activations have a scale for each weight at each line.
        line = context.get_scope(), context.get_op_type(), context.get_source(), key

        def make_for_part(value: Any, reader: amanda.OpContext, suffix: str) -> Quantizer:
            """Return a new quantizer; raise QuantizeError for loaded state of an older version."""
            # The name under which older versions saved one scale for all rounds.
            old_name = f"{self._tool.place(context)}/{name}.scale".replace(" ", "")
            try:
                return self._create_quantizer(name, None, (), value, reader, suffix)
            except ToolError as error:
                if old_name not in self._tool.waiting_state():
                    raise
                raise QuantizeError(
                    f"the scale {old_name} that was loaded is of one round of a loop, as earlier versions "
                    "saved it, and nothing tells which part of a parameter that round read: calibrate again"
                ) from error

        def quantizer_of_part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of a parameter; None where the op reads no part."""
            quantizer: Quantizer | None = self._tool.parts.state_of(
                context, part_of, partial(make_for_part, value), line
            )
            return quantizer

        self._part_quantizers[key] = quantizer_of_part
        # The first execution is at hand in the analysis; later ones are found in the routine.
        first = quantizer_of_part(value, ParameterSlice.of_input(context, read.index))
        return self._create_quantizer(name, None, (), value, context) if first is None else first

    def _create_slice_quantizers(
        self, read: WeightInput, make: Callable[[str], Quantizer], key: tuple[int, int | None]
    ) -> Quantizer | None:
        """Create quantizers for all slices of a stack; return that of the first, None without a stack.

        Registers in `_part_quantizers` the function that finds that of the present slice.
        """
        holder = read.holder
        slices = () if holder is None else parameter_store(holder).slices(holder)
        if not slices:
            return None
        quantizers = {parameter: make(f" of {parameter.path}") for parameter in slices}
        self._part_quantizers[key] = lambda value, origin: quantizers.get(
            parameter_store(holder).current_slice(holder)
        )
        return quantizers[slices[0]]

    def _create_weight_quantizer(
        self, context: amanda.OpContext, read: WeightInput, value: Any
    ) -> Quantizer | None:
        """Create the quantizer of the weight, or of the part of a parameter that is read, and return it.

        Returns None, and sets `skip_reason`, for a weight that cannot be quantised.
        """
        # An optimizer takes its parameters before the training, when it is not known which rows data will
        # select.
        if read.varies and self._options.method.startswith("lsq"):
            self.skip_reason = "its scale is learned, and an index selects what it reads of a parameter"
            return None
        groups = None
        if self._options.group_size is not None:
            groups = self._groups_of_inputs(context, read, value)
            if groups is None:
                return None
        # A transposed convolution in groups counts outputs along two axes, of which no product of axes gives
        # one scale each.
        if groups is None and self._options.per_channel:
            groups = _groups_of_outputs(context["shape"](value), _weight_layout(context, read))
        make = partial(
            self._create_quantizer, "weight", read, self._scale_axes(context, read, value), groups=groups
        )
        first = self._create_slice_quantizers(read, partial(make, value, context), (read.index, None))
        if first is not None:
            return first
        if not read.is_part:
            return make(value, context)

        def quantizer_of_part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of the parameter; None where the op reads no part."""
            quantizer: Quantizer | None = self._tool.parts.state_of(context, part_of, partial(make, value))
            return quantizer

        if read.is_followed:
            self._part_quantizers[read.index, None] = quantizer_of_part
        return quantizer_of_part(value, ParameterSlice.of_input(context, read.index))

    def _groups_of_inputs(self, context: amanda.OpContext, read: WeightInput, value: Any) -> Groups | None:
        """Return the groups of a weight; None, and set `skip_reason`, if groups do not fit."""
        shape, size = context["shape"](value), self._options.group_size
        layout = _weight_layout(context, read)
        if layout is None or shape is None or size is None:
            self.skip_reason = "which of its axes are inputs is not known, so that it has no groups"
            return None
        groups = Groups(size, layout)
        if groups.fit(shape):
            return groups
        shape_text = "x".join(map(str, shape))
        self.skip_reason = (
            f"the inputs of each output are no multiple of group_size {size}: it is {shape_text}, {layout}"
        )
        return None

    def _scale_axes(self, context: amanda.OpContext, read: WeightInput, value: Any) -> tuple[int, ...]:
        """Return the axes of a weight along which scales differ: those of a batch of weights, and of outputs.

        Outputs have the axis O, and the axes I and M in a depthwise convolution.  Without `per_channel`, and
        for an unknown layout, outputs share a scale.
        """
        layout = _weight_layout(context, read) or ""
        # Selected experts come as a batch of weights, each with scales of its own.
        batch = len(context["shape"](value) or ()) - len(layout) if read.varies else 0
        letters = ("O" if "O" in layout else "IM") if self._options.per_channel else ""
        return (*range(batch), *(batch + i for i, letter in enumerate(layout) if letter in letters))

    def _create_quantizer(
        self, name: str, read: WeightInput | None, axes: Sequence[int], value: Any,
        reader: amanda.OpContext, suffix: str = "", groups: Groups | None = None,
    ) -> Quantizer:  # fmt: skip
        """Create a quantizer whose state is saved under the op `reader`; append it to `created`.

        Raises QuantizeError for a learned scale that no optimizer can train.
        """
        if reader["is_called_back"] and self._options.method.startswith("lsq"):
            raise QuantizeError(
                f"{self.name} is of {reader.namespace[0]}, where no optimizer trains a tool's scales: "
                f'method {self._options.method!r} is for PyTorch and TensorFlow; let it be "qat"'
            )
        default = QUANTIZERS[self._options.method, read is not None]
        # What data select has no scale that could be kept from one execution to the next.
        quantizer_class, state = (DynamicQuantizer, {}) if read is not None and read.varies else default
        keep = partial(self._tool.keep, reader)
        self.created.append(quantizer_class(
            name + suffix, read is not None, axes, self._options, state, value, keep, groups,
        ))  # fmt: skip
        return self.created[-1]

    def forget(self) -> None:
        """Drop the observed values of a calibration that is not complete."""
        for quantizer in self.created:
            quantizer.observer = None

    def finish_calibration(self) -> None:
        """Set the scales from the observed ranges."""
        for quantizer in self.created:
            quantizer.finish_calibration()

    def insert(self, context: amanda.OpContext) -> None:
        """Insert the routines that quantise the inputs of the op; none for an op without quantizers."""
        if context.is_static():
            self._insert_fixed(context)
        elif self._positions:
            is_called_back = context["is_called_back"]
            # Inputs are recorded before they are quantised, in the order of insertion.
            if self._run_unquantised is not None:
                context.insert_before_op(self._record_inputs)
            routine: Any = self._quantise_in_eager_mode if context.is_eager() else self._quantise_in_graph
            # Autodiff does not pass through a routine that the program calls back (JAX).
            if self._options.trains and is_called_back:
                routine = self._quantise_for_callbacks
            elif self._options.trains:
                routine = amanda.differentiable(routine)
            context.insert_before_op(routine, inputs=self._positions)
            if self._run_unquantised is not None:
                context.insert_after_op(self._measure_outputs)

    def _insert_fixed(self, context: amanda.OpContext) -> None:
        """Insert traceable routines with fixed scales, for the file of a model."""
        if self._positions and self._options.method not in ("static", "qat"):
            method = self._options.method
            raise QuantizeError(
                f'method {method!r} is for models that run; write a file with "static" or "qat"'
            )
        scales: dict[int, dict[int | None, Scale]] = {}
        for (position, item), quantizer in self.quantizers.items():
            if quantizer.is_weight and not quantizer.has_scale:
                # A weight's value is in the file, so that no calibration is needed for it.
                quantizer.observe(quantizer.xp.detach(context.get_value(position)))
                quantizer.finish_calibration()
            scale = quantizer.scale()
            if scale is None:
                raise QuantizeError(
                    f"{quantizer.name} has no scale, and nothing runs that it could come of: calibrate the "
                    "model that the file is of, and load what was saved (--state FILE)"
                )
            scales.setdefault(position, {})[item] = scale
        for position, item_scales in scales.items():
            kwargs = {"scales": item_scales, "rounding": self._options.rounding}
            context.insert_before_op(fake_quantize_fixed, inputs=[position], **kwargs)

    def _quantise_in_graph(self, *values: Any) -> Any:
        """Return the quantised inputs at `_positions`; None, for no change, while the values calibrate."""
        to_quantise = self._find_values(values, None)
        if self._is_calibrating(to_quantise):
            self._calibrate(to_quantise)
            return None
        return self._quantise_values(values, to_quantise, [()] * len(to_quantise))

    def _quantise_in_eager_mode(self, *values: Any, run: dict[Any, Any], recomputed: bool = False) -> Any:
        """Quantise or calibrate as `_quantise_in_graph`; a recomputation repeats the first execution."""
        to_quantise = self._find_values(values, ParameterSlice.of_execution(run))
        first_execution = run.get(self)
        if first_execution is None:
            first_execution = run[self] = _FirstExecution(
                self._is_calibrating(to_quantise), [()] * len(to_quantise)
            )
            if first_execution.calibrates:
                self._calibrate(to_quantise)
        if first_execution.calibrates:
            return None
        # Checkpointing runs an op twice: other scales would give other values in the backward pass.
        quantised = self._quantise_values(values, to_quantise, first_execution.qparams, recomputed)
        # Kept by execution, as the moving averages of "qat" have moved on when the op is recomputed.
        first_execution.qparams = [quantizer.qparams for *_, quantizer in to_quantise]
        return quantised

    def _find_values(self, values: Sequence[Any], part_of: ParameterSlice | None) -> list[_ValueToQuantise]:
        """Return the values to quantise with their quantizers; set `skip_reason` for unreadable values."""
        to_quantise: list[_ValueToQuantise] = []
        for (position, item), quantizer in self.quantizers.items():
            # Values come in the order of positions, quantizers in that of operands.
            index = self._positions.index(position)
            value = values[index] if item is None else values[index][item]
            find_quantizer = self._part_quantizers.get((position, item))
            part_quantizer = quantizer if find_quantizer is None else find_quantizer(value, part_of)
            if part_quantizer is None:
                if quantizer.is_weight:
                    self.skip_reason = WeightReads.unknown_part
                    continue
                # An activation beside an unknown part has the scale of the first part.
                part_quantizer = quantizer
            try:
                if part_quantizer.xp.is_dense(value):
                    to_quantise.append(_ValueToQuantise(index, item, value, part_quantizer))
            except Exception as error:  # whatever the class of a tensor refuses
                self.skip_reason = f"{type(value).__name__} refuses to be read: {error}"
        return to_quantise

    def _is_calibrating(self, to_quantise: Sequence[_ValueToQuantise]) -> bool:
        """Return True within `calibrating`, and for the first `calibration` executions of the op."""
        # A quantizer without state, of "dynamic", never waits; loaded scales are not calibrated over.
        waiting = (quantizer for *_, quantizer in to_quantise if quantizer.state and not quantizer.has_scale)
        return self._tool.is_calibrating or any(
            quantizer.calibrated < self._options.calibration for quantizer in waiting
        )

    def _calibrate(self, to_quantise: Sequence[_ValueToQuantise]) -> None:
        """Observe values, and set scales after the last of `calibration` executions."""
        for _, _, value, quantizer in to_quantise:
            quantizer.observe(value)
            quantizer.calibrated += 1
            if not self._tool.is_calibrating and quantizer.calibrated == self._options.calibration:
                quantizer.finish_calibration()

    def _quantise_values(
        self, values: Sequence[Any], to_quantise: Sequence[_ValueToQuantise],
        first_qparams: Sequence[tuple[Any, ...]], recomputed: bool = False,
    ) -> Any:  # fmt: skip
        """Return the values with those of `to_quantise` quantised; count executions and measure noise.

        first_qparams: of the first execution, for a recomputation.
        """
        tool, results = self._tool, list(values)
        for (index, item, value, quantizer), qparams in zip(to_quantise, first_qparams, strict=True):
            quantised = quantizer(value, tool.is_frozen, qparams)
            quantizer.executions += not recomputed
            if tool.measures and not recomputed:
                quantizer.noise.add(value, quantised)
            if item is not None:
                quantised = [*results[index][:item], quantised, *results[index][item + 1 :]]
            results[index] = quantised
        self._execution_count += not recomputed
        # A routine of one position returns its value alone, as routines do.
        return results if len(results) > 1 else results[0]

    def insert_backward(self, context: amanda.OpContext) -> None:
        """Insert the routine that stops gradients where a value was clipped, beside the backward op."""
        if self._positions:
            context.insert_after_backward_op(self._clip_gradients, grad_inputs=self._positions)

    def _quantise_for_callbacks(self, *values: Any, run: dict[str, Any]) -> Any:
        """Quantise as `_quantise_in_graph`; save for each value a function that clips its gradient."""
        quantised = self._quantise_in_graph(*values)
        quantizers = {
            position: quantizer for (position, item), quantizer in self.quantizers.items() if item is None
        }
        run[_CLIPPING] = [] if quantised is None else [
            partial(quantizers[position].clipped_gradient, value, *quantizers[position].qparams)
            # A list of tensors has no gradient at its position.
            if position in quantizers else None
            for position, value in zip(self._positions, values, strict=True)
        ]  # fmt: skip
        return quantised

    def _clip_gradients(self, *gradients: Any, run: dict[str, Any]) -> Any:
        """Set gradients to 0 where the forward values were clipped; others stay unchanged."""
        clipped = list(gradients)
        # Popped: the functions hold the values of the forward pass.
        for i, clip in enumerate(run.pop(_CLIPPING, ())):
            if clip is not None and clipped[i] is not None:
                clipped[i] = clip(gradient=clipped[i])
        return clipped if len(clipped) > 1 else clipped[0]

    def _record_inputs(self, *values: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        """Record unquantised inputs for `_measure_outputs`."""
        if not recomputed:
            run[_INPUTS] = values

    def _measure_outputs(self, *outputs: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        """Compare outputs with those for unquantised inputs, unless they calibrate or are recomputed."""
        if recomputed:
            return
        inputs = run.pop(_INPUTS)
        if self._execution_count and not self._tool.is_calibrating:
            # With all inputs unquantised, so that the noise is that of the op as a whole.
            exact = self._run_unquantised(inputs)
            exact_outputs = exact if isinstance(exact, (list, tuple)) else [exact]
            for exact_output, output in zip(exact_outputs, outputs, strict=True):
                self._output_noise.add(exact_output, output)

    def rows(self) -> Iterator[Quantized]:
        """Yield a result row for each quantised tensor."""
        for quantizer in self.created:
            grid, qparams = quantizer.grid, (quantizer.scale() or (None, None))[:2]
            scale, zero_point = (
                None if array is None else tuple(map(float, array.reshape(-1))) for array in qparams
            )
            yield Quantized(
                *self._columns, quantizer.name, grid.bits, grid.symmetric, grid.low, grid.high,
                quantizer.axes, scale, zero_point, quantizer.group_size, grid.dtype,
                quantizer.executions, quantizer.noise.sqnr, self._output_noise.sqnr,
            )  # fmt: skip


_PartQuantizer = Callable[[Any, "ParameterSlice | None"], "Quantizer | None"]
"""Returns the quantizer of a value, from the value and the part of a parameter that the op reads."""


class _ValueToQuantise(NamedTuple):
    """A value that a routine got, its index among the routine's values, and its index in a list there."""

    value_index: int
    item: int | None
    value: Any
    quantizer: Quantizer


def _weight_layout(context: amanda.OpContext, read: WeightInput) -> str | None:
    """Return the axes of a weight, an embedding's rows as outputs; None where they are not known."""
    return "OI" if context["type"] == "embedding" else read.layout


def _groups_of_outputs(extents: Sequence[int] | None, layout: str | None) -> Groups | None:
    """Return a group for each output of a transposed convolution in groups; None where axes count outputs."""
    if layout is None or extents is None or "M" not in layout:
        return None
    # Counted from the end, as axes of a batch may lie in front of those of the layout.
    input_count = extents[layout.index("I") - len(layout)]
    # A layout without a number of groups is one of a depthwise convolution, as is one with a group for each
    # input: the axes I and M then count the outputs.
    is_depthwise = getattr(layout, "groups", 0) in (0, input_count)
    return None if is_depthwise else Groups.of_outputs(extents, layout)
