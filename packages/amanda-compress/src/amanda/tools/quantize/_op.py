"""One op whose inputs are quantised: its routines, which calibrate and call its quantizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do
from amanda.tools.quantize._fake_quantize import QuantizeError, Scale, fake_quantize_fixed
from amanda.tools.quantize._op_quantizers import LEARNED, OperandKey, OpQuantizers, SampledValue
from amanda.tools.quantize._quantizer import Noise, Quantizer
from amanda.tools.quantize._result import Quantized
from amanda.tools.weights import ParameterSlice, WeightReads

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeOptions, QuantizeTool


_INPUTS, _CLIPPING = "amanda.tools.quantize", "amanda.tools.quantize: values"
"""Keys of executions: unquantised inputs, and functions that clip gradients for the backward routine."""


@dataclass
class _FirstExecution:
    """The first execution of an op, which recomputations repeat.

    calibrates: True if the op ran unquantised.  qparams: of each read value, see `Quantizer.qparams`; None
    before the values are quantised.
    """

    calibrates: bool
    qparams: list[tuple[Any, ...]] | None = None


class QuantizedOp(OpQuantizers):
    """An op whose inputs are quantised, with a quantizer for each tensor that it reads."""

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool, options: QuantizeOptions) -> None:
        super().__init__(context, tool, options)
        self._columns = context["phase"], context["type"], context.get_scope(), context.get_source()
        self._executions = 0
        self._output_noise = Noise()
        # None unless noise is measured: the computation of an op keeps its attributes alive.
        self._recompute: Any = recompute_function(context) if tool.measures else None
        # One routine reads the inputs at all positions: a routine for each would cost a call of Python more
        # at each execution.
        self._positions = sorted({position for position, _ in (*self.quantizers, *self.model_quantizers)})

    def forget_observations(self) -> None:
        """Forget the values that were observed."""
        for quantizer in self.created:
            quantizer.forget_observations()

    def finish_calibration(self) -> None:
        """Set the scales from the observed ranges."""
        for quantizer in self.created:
            quantizer.finish_calibration()

    def insert_routines(self, context: amanda.OpContext) -> None:
        """Insert the routines that quantise the inputs of the op, and measure its noise if the tool does.

        An op without quantizers gets no routine.  A file gets fixed scales, see `_insert_fixed_scales`.
        """
        if context.is_static():
            self._insert_fixed_scales(context)
            return
        if not self._positions:
            return
        # Inputs are recorded before they are quantised, in the order of insertion.
        if self._recompute is not None:
            context.insert_before_op(self._record_inputs)
        routine: Any = self._quantise_in_eager_mode if context.is_eager() else self._quantise_in_graph
        # Autodiff does not pass through a routine that the program calls back (JAX).
        if self._options.trains and context["is_called_back"]:
            routine = self._quantise_and_save_clipping
        elif self._options.trains:
            routine = amanda.differentiable(routine)
        context.insert_before_op(routine, inputs=self._positions)
        if self._recompute is not None:
            context.insert_after_op(self._measure_outputs)

    def _insert_fixed_scales(self, context: amanda.OpContext) -> None:
        """Insert traceable routines with fixed scales, for the file of a model; set those of weights before.

        Raises QuantizeError for a method without fixed scales, and for an activation without a scale.
        """
        if self._positions and self._options.method not in ("static", "qat"):
            method = self._options.method
            raise QuantizeError(
                f'method {method!r} is for models that run; write a file with "static" or "qat"'
            )
        scales_by_position: dict[int, dict[int | None, Scale]] = {}
        for (position, list_index), quantizer in self.quantizers.items():
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
            scales_by_position.setdefault(position, {})[list_index] = scale
        for position, scales in scales_by_position.items():
            kwargs = {"scales": scales, "rounding": self._options.rounding}
            context.insert_before_op(fake_quantize_fixed, inputs=[position], **kwargs)

    def _quantise_in_graph(self, *values: Any) -> Any:
        """Return the quantised values of the positions; or calibrate and return None, for no change."""
        read_values, _ = self._values_to_quantise(values, part=None)
        if self._must_calibrate(read_values):
            self._calibrate(read_values)
            return None
        return self._quantise_values(values, read_values, sampled={}, first_qparams=None)

    def _quantise_in_eager_mode(self, *values: Any, run: dict[Any, Any], recomputed: bool = False) -> Any:
        """Quantise or calibrate as `_quantise_in_graph`; a recomputation repeats the execution in `run`."""
        read_values, sampled = self._values_to_quantise(values, part=ParameterSlice.of_execution(run))
        first_execution = run.get(self)
        if first_execution is None:
            first_execution = run[self] = _FirstExecution(calibrates=self._must_calibrate(read_values))
            if first_execution.calibrates:
                with _outside(sampled):
                    self._calibrate(read_values)
        if first_execution.calibrates:
            return None
        # Checkpointing runs an op twice: other scales would give other values in the backward pass.
        first_qparams = first_execution.qparams
        quantised = self._quantise_values(values, read_values, sampled, first_qparams, recomputed)
        # Kept by execution, as the moving averages of "qat" have moved on when the op is recomputed.
        first_execution.qparams = [quantizer.qparams for *_, quantizer in read_values]
        return quantised

    def _values_to_quantise(
        self, values: Sequence[Any], part: ParameterSlice | None
    ) -> tuple[list[_ReadValue], dict[_ValueKey, SampledValue]]:
        """Return the values to quantise with their quantizers; of a value that transforms wrap each part.

        Returns the wrapped values whole beside them.  Leaves out unreadable values, and sets `skip_reason`.
        part: of a parameter, which the op reads as its weight; None where that is not followed.
        """
        read_values: list[_ReadValue] = []
        sampled: dict[_ValueKey, SampledValue] = {}
        model_levels = self._levels_of_models(values)
        for operand_key in (*self.quantizers, *self.model_quantizers):
            position, list_index = operand_key
            # Values come in the order of positions, quantizers in that of operands.
            index = self._positions.index(position)
            value = values[index] if list_index is None else values[index][list_index]
            samples = tensors_of(value).samples(value)
            if samples is not None:
                # Other batches share the scale of an activation, as a batch without vmap does.
                quantizer = self.quantizers.get(operand_key)
                is_shared_weight = quantizer is not None and quantizer.is_weight
                whole = SampledValue(value, samples, samples.levels if is_shared_weight else model_levels)
                parts = self._parts_to_quantise(operand_key, index, whole)
                if parts:
                    read_values += parts
                    sampled[index, list_index] = whole
                continue
            quantizer = self._quantizer_of(operand_key, value, part)
            try:
                if quantizer is not None and quantizer.xp.is_dense(value):
                    read_values.append((index, list_index, value, quantizer))
            except Exception as error:  # whatever the class of a tensor refuses
                self.skip_reason = f"{type(value).__name__} refuses to be read: {error}"
        return read_values, sampled

    def _quantizer_of(self, key: OperandKey, value: Any, part: ParameterSlice | None) -> Quantizer | None:
        """Return the quantizer of a value that no transform wraps, for the part of a parameter that is read.

        None, and `skip_reason` is set, for an unknown part of a weight; an activation then has the op's.
        """
        quantizer = self.quantizers.get(key)
        if quantizer is None:
            # Without a vmap an op of an ensemble has one model.
            return self.model_quantizers[key].quantizer_of(())
        find_part_quantizer = self._part_quantizers.get(key)
        if find_part_quantizer is None:
            return quantizer
        part_quantizer = find_part_quantizer(value, part)
        if part_quantizer is None and quantizer.is_weight:
            self.skip_reason = WeightReads.unknown_part
            return None
        return part_quantizer or quantizer

    def _parts_to_quantise(self, key: OperandKey, index: int, whole: SampledValue) -> list[_ReadValue]:
        """Return the parts of a value that transforms have wrapped, each with its quantizer.

        None of a skipped one; `skip_reason` is set for a learned scale.
        index: of the value among those that the routine gets.
        """
        _, list_index = key
        if self._options.method.startswith("lsq"):
            self.skip_reason = LEARNED
            return []
        parts: list[_ReadValue] = []
        with whole.samples.outside():
            for numbers, part in whole.parts():
                quantizer = self.quantizers.get(key) or self.model_quantizers[key].quantizer_of(numbers)
                if quantizer is None:
                    return []
                parts.append((index, list_index, part, quantizer))
        return parts

    def _levels_of_models(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the levels of the vmaps whose samples have a weight each, models of an ensemble; else ()."""
        if self.batched_weight not in self._positions:
            return ()
        weight = values[self._positions.index(self.batched_weight)]
        samples = tensors_of(weight).samples(weight)
        return () if samples is None else samples.levels

    def _must_calibrate(self, read_values: Sequence[_ReadValue]) -> bool:
        """Return True within `calibrating`, and for the first `calibration` executions that lack a scale."""
        execution_count = self._options.calibration
        # A quantizer without state, of "dynamic", never waits; loaded scales are not calibrated over.
        waiting = (quantizer for *_, quantizer in read_values if quantizer.state and not quantizer.has_scale)
        return self._tool.is_calibrating or any(
            quantizer.calibrated < execution_count for quantizer in waiting
        )

    def _calibrate(self, read_values: Sequence[_ReadValue]) -> None:
        """Observe values; outside `calibrating`, set scales after the last of `calibration` executions."""
        for _, _, value, quantizer in read_values:
            # Another tensor of the op may lack a scale; this one keeps the scale that it has.
            if quantizer.has_scale and not self._tool.is_calibrating:
                continue
            quantizer.observe(value)
            quantizer.calibrated += 1
            if not self._tool.is_calibrating and quantizer.calibrated == self._options.calibration:
                quantizer.finish_calibration()

    def _quantise_values(
        self, values: Sequence[Any], read_values: Sequence[_ReadValue],
        sampled: Mapping[_ValueKey, SampledValue], first_qparams: Sequence[tuple[Any, ...]] | None,
        recomputed: bool = False,
    ) -> Any:  # fmt: skip
        """Return the values of the routine, a single one alone, with those that have a quantizer quantised.

        sampled: the values that transforms have wrapped, of which `read_values` has the parts.
        first_qparams: of the first execution, for a recomputation; None for the first execution itself.
        Counts the execution, and adds to the noise if the tool measures it, unless `recomputed`.
        """
        tool, results = self._tool, list(values)
        quantised_parts: dict[_ValueKey, list[Any]] = {}  # one, but for a sampled value
        pass_masks: dict[_ValueKey, list[Any]] = {}  # of sampled values: where the gradients of parts pass
        with _outside(sampled):
            qparams_of_values = [()] * len(read_values) if first_qparams is None else first_qparams
            for read_value, qparams in zip(read_values, qparams_of_values, strict=True):
                index, list_index, value, quantizer = read_value
                quantised = quantizer(value, tool.is_frozen, qparams)
                quantizer.executions += not recomputed
                if tool.measures and not recomputed:
                    quantizer.noise.add(value, quantised)
                quantised_parts.setdefault((index, list_index), []).append(quantised)
                if self._options.trains and (index, list_index) in sampled:
                    ones = do("ones_like", value)
                    gradient_of_ones = quantizer.clipped_gradient(value, *quantizer.qparams, gradient=ones)
                    pass_masks.setdefault((index, list_index), []).append(gradient_of_ones > 0)
        for key, parts in quantised_parts.items():
            index, list_index = key
            if key in sampled:
                quantised = _join_parts(sampled[key], parts, pass_masks.get(key))
            else:
                (quantised,) = parts
            if list_index is not None:  # the routine gets a list at this index
                quantised = [*results[index][:list_index], quantised, *results[index][list_index + 1 :]]
            results[index] = quantised
        self._executions += not recomputed
        # A routine of one position returns its value alone, as routines do.
        return results if len(results) > 1 else results[0]

    def insert_backward(self, context: amanda.OpContext) -> None:
        """Insert the routine that stops gradients where a value was clipped, beside the backward op."""
        if self._positions:
            context.insert_after_backward_op(self._clip_gradients, grad_inputs=self._positions)

    def _quantise_and_save_clipping(self, *values: Any, run: dict[str, Any]) -> Any:
        """Quantise as `_quantise_in_graph`; save in `run` a function for each value that clips gradients."""
        quantised = self._quantise_in_graph(*values)
        # For `_clip_gradients`, in the order of `_positions`.
        clip_functions: list[Any] = []
        run[_CLIPPING] = clip_functions
        if quantised is None:  # the values calibrate
            return None
        for position, value in zip(self._positions, values, strict=True):
            # Tensors of a list have no gradient of their own position.
            quantizer = self.quantizers.get((position, None))
            clip = quantizer and partial(quantizer.clipped_gradient, value, *quantizer.qparams)
            clip_functions.append(clip)
        return quantised

    def _clip_gradients(self, *gradients: Any, run: dict[str, Any]) -> Any:
        """Set gradients to 0 where forward values were clipped, by functions that are taken out of `run`."""
        clipped_gradients = list(gradients)
        # Popped: the functions hold the values of the forward pass.
        for i, clip in enumerate(run.pop(_CLIPPING, ())):
            if clip is not None and clipped_gradients[i] is not None:
                clipped_gradients[i] = clip(gradient=clipped_gradients[i])
        return clipped_gradients if len(clipped_gradients) > 1 else clipped_gradients[0]

    def _record_inputs(self, *values: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        """Record unquantised inputs for `_measure_outputs`."""
        if not recomputed:
            run[_INPUTS] = values

    def _measure_outputs(self, *outputs: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        """Run the op on its unquantised inputs, and add the error of `outputs` to the noise.

        Does nothing while the inputs calibrate, and for recomputed outputs.
        """
        if recomputed:
            return
        inputs = run.pop(_INPUTS)
        if self._executions and not self._tool.is_calibrating:
            # With all inputs unquantised, so that the noise is that of the op as a whole.
            exact = self._recompute(inputs)
            exact_outputs = exact if isinstance(exact, (list, tuple)) else [exact]
            for exact_output, output in zip(exact_outputs, outputs, strict=True):
                self._output_noise.add(_data_of(exact_output), _data_of(output))

    def rows(self) -> Iterator[Quantized]:
        """Yield a result row for each quantised tensor."""
        for quantizer in self.created:
            grid, fixed_scale = quantizer.grid, quantizer.scale()
            yield Quantized(
                *self._columns, quantizer.name, grid.bits, grid.symmetric, grid.low, grid.high,
                quantizer.axes,
                None if fixed_scale is None else tuple(map(float, fixed_scale.scale.reshape(-1))),
                None if fixed_scale is None else tuple(map(float, fixed_scale.zero_point.reshape(-1))),
                quantizer.group_size, grid.dtype,
                quantizer.executions, quantizer.noise.sqnr, self._output_noise.sqnr,
            )  # fmt: skip


_ValueKey = tuple[int, int | None]
"""Index of a value among those that the routine gets, and index of the tensor in a list there, else None."""
_ReadValue = tuple[int, "int | None", Any, Quantizer]
"""A value to quantise: the two indices of its _ValueKey, the value or a part of it, and its quantizer."""


def _join_parts(whole: SampledValue, quantised_parts: Sequence[Any], pass_masks: Any) -> Any:
    """Return the quantised value of its parts, wrapped as `whole`.

    pass_masks: of each part, where its gradient passes to `whole`; None without training.
    """
    quantised = whole.joined(quantised_parts)
    return quantised if pass_masks is None else whole.straight_through(quantised, whole.joined(pass_masks))


def _outside(sampled: Mapping[Any, SampledValue]) -> AbstractContextManager[None]:
    """Return a context outside of the transforms that have wrapped values; a null context without any."""
    return next((value.samples.outside() for value in sampled.values()), nullcontext())


def _data_of(value: Any) -> Any:
    """Return the numbers of a value, of all samples where transforms have wrapped it."""
    samples = tensors_of(value).samples(value)
    return value if samples is None else samples.data


def recompute_function(context: amanda.OpContext) -> Any:
    """Return the op as a function of its inputs; None for one that is random, in place, or not repeatable."""
    if "recompute" in context:
        return context["recompute"]
    # A second run would write twice, or draw other numbers.
    if context["in_place"] or context.get_attrs().get("dropout_p"):
        return None
    try:
        return context.get_computation()
    except AmandaError:
        return None
