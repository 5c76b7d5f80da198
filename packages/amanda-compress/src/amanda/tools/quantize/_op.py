"""One op whose inputs are quantised: its quantizers, and the routines that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.kit import tensors_of
from amanda.tools.quantize._fake import Scale, fake_quantize_for_good
from amanda.tools.quantize._grid import Groups, QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._quantizer import QUANTIZERS, Fresh, Quantizer
from amanda.tools.quantize._result import Noise, Quantized
from amanda.tools.weights import ParameterSlice, WeightInput, WeightReads, parameter_store, weight_input

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeTool

_HELD, _KEPT = "amanda.tools.quantize", "amanda.tools.quantize: values"


@dataclass
class _Execution:
    """One execution of an op, for recomputations of it.

    calibrates: whether it computed without quantisation.  used: by which each value was quantised.
    """

    calibrates: bool
    used: list[tuple[Any, ...]]


class QuantizedOp:
    """An op, with the quantizers of its inputs.

    made: the quantizers that were made at this op.  left: the reason why the weight is not quantised.
    quantizers: by the position of the input, and the index in a list of tensors there.
    """

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool, options: Options) -> None:
        self._tool, self._options = tool, options
        self._where = context["phase"], context["type"], context.get_scope(), context.get_source()
        self.name, self.left = f"{context['type']} of {context.get_scope() or context.get_source()}", ""
        self.made: list[Quantizer] = []
        self._executions = 0
        self._output = Noise()
        self._recompute: Any = _recompute(context) if tool.measures else None
        self._parts: dict[tuple[int, int | None], _OfPart] = {}
        self.quantizers = dict(self._found(context))
        self._positions = sorted({position for position, _ in self.quantizers})

    def _found(self, context: amanda.OpContext) -> Iterator[tuple[tuple[int, int | None], Quantizer]]:
        """Yield quantizers, each with the position of its input and the index in a list of tensors there."""
        read = weight_input(context)
        if read is not None and read.is_lost and context.is_static():
            read = None
        for position in context["operands"]:
            value = context.get_inputs()[position]
            for item, one in enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]:
                weight = read if read is not None and (position, item) == (read.index, None) else None
                kind = str(context["dtype"](one))
                if weight is not None and kind.endswith("]"):
                    self.left = f"it is packed, {kind}"
                is_number = kind.startswith(("float", "bfloat")) and not getattr(one, "is_meta", False)
                if is_number and context.is_eager() and (unread := tensors_of(one).unread(one)) is not None:
                    self.left, is_number = unread, False
                if not is_number or self._options.bits(weight is not None) is None:
                    continue
                if weight is None:
                    name = f"input {position}" if item is None else f"input {position}.{item}"
                    yield (position, item), self._of_activation(context, read, name, (position, item), one)
                elif (found := self._of_weight(context, weight, one)) is not None:
                    yield (position, item), found

    def _of_activation(
        self, context: amanda.OpContext, read: WeightInput | None, name: str, key: tuple[int, int | None],
        value: Any,
    ) -> Quantizer:  # fmt: skip
        """Return the quantizer of an activation, which is of the weight too that the op reads with it."""
        of_slice = partial(self._made, name, None, (), value, context)
        if read is not None and (of_slices := self._of_slices(read, of_slice, key)) is not None:
            return of_slices
        if read is None or not (read.is_part and read.is_followed):
            return self._made(name, None, (), value, context)
        line = context.get_scope(), context.get_op_type(), context.get_source(), key

        def make(value: Any, reader: amanda.OpContext, suffix: str) -> Quantizer:
            earlier = f"{self._tool.place(context)}/{name}.scale".replace(" ", "")
            try:
                return self._made(name, None, (), value, reader, suffix)
            except ToolError as error:
                if earlier not in self._tool.waiting_state():
                    raise
                raise QuantizeError(
                    f"the scale {earlier} that was loaded is of one round of a loop, as earlier versions "
                    "saved it, and nothing tells which part of a parameter that round read: calibrate again"
                ) from error

        def of_part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            found: Quantizer | None = self._tool.parts.state_of(context, part_of, partial(make, value), line)
            return found

        self._parts[key] = of_part
        first = of_part(value, ParameterSlice.of_input(context, read.index))
        return self._made(name, None, (), value, context) if first is None else first

    def _of_slices(
        self, read: WeightInput, make: Callable[[str], Quantizer], key: tuple[int, int | None]
    ) -> Quantizer | None:
        """Return the quantizer for the first slice of a stack, and keep those of all; None elsewhere."""
        holder = read.holder
        parts = () if holder is None else parameter_store(holder).slices(holder)
        if not parts:
            return None
        made = {one: make(f" of {one.path}") for one in parts}
        self._parts[key] = lambda value, origin: made.get(parameter_store(holder).current_slice(holder))
        return made[parts[0]]

    def _of_weight(self, context: amanda.OpContext, read: WeightInput, value: Any) -> Quantizer | None:
        """Return the quantizer of the weight, or of the part of a parameter that is read, or None."""
        if read.varies and self._options.method.startswith("lsq"):
            self.left = "its scale is learned, and an index selects what it reads of a parameter"
            return None
        groups = None
        if self._options.group_size is not None:
            groups = self._groups(context, read, value)
            if groups is None:
                return None
        if groups is None and self._options.per_channel:
            groups = _channels(context["shape"](value), _layout(context, read))
        make = partial(self._made, "weight", read, self._axes(context, read, value), groups=groups)
        if (
            of_slices := self._of_slices(read, partial(make, value, context), (read.index, None))
        ) is not None:
            return of_slices
        if not read.is_part:
            return make(value, context)

        def part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            found: Quantizer | None = self._tool.parts.state_of(context, part_of, partial(make, value))
            return found

        if read.is_followed:
            self._parts[read.index, None] = part
        return part(value, ParameterSlice.of_input(context, read.index))

    def _groups(self, context: amanda.OpContext, read: WeightInput, value: Any) -> Groups | None:
        """Return the groups of a weight; None for one that has none, with the reason in `left`."""
        shape, size = context["shape"](value), self._options.group_size
        layout = _layout(context, read)
        if layout is None or shape is None or size is None:
            self.left = "which of its axes are inputs is not known, so that it has no groups"
            return None
        groups = Groups(size, layout)
        if groups.fit(shape):
            return groups
        told = "x".join(map(str, shape))
        self.left = f"the inputs of each output are no multiple of group_size {size}: it is {told}, {layout}"
        return None

    def _axes(self, context: amanda.OpContext, read: WeightInput, value: Any) -> tuple[int, ...]:
        """Return the axes of a weight along which scales differ: those of a batch of weights, and of outputs.

        Outputs have the axis O, and the axes I and M in a depthwise convolution.
        """
        layout = _layout(context, read) or ""
        batch = len(context["shape"](value) or ()) - len(layout) if read.varies else 0
        letters = ("O" if "O" in layout else "IM") if self._options.per_channel else ""
        return (*range(batch), *(batch + i for i, letter in enumerate(layout) if letter in letters))

    def _made(
        self, name: str, read: WeightInput | None, axes: Sequence[int], value: Any,
        reader: amanda.OpContext, suffix: str = "", groups: Groups | None = None,
    ) -> Quantizer:  # fmt: skip
        """Return a quantizer that keeps its state at `reader`.

        Raises QuantizeError where no optimizer could train it.
        """
        if reader["is_called_back"] and self._options.method.startswith("lsq"):
            raise QuantizeError(
                f"{self.name} is of {reader.namespace[0]}, where no optimizer trains a tool's scales: "
                f'method {self._options.method!r} is for PyTorch and TensorFlow; let it be "qat"'
            )
        known = QUANTIZERS[self._options.method, read is not None]
        kind, state = (Fresh, {}) if read is not None and read.varies else known
        keep = partial(self._tool.keep, reader)
        self.made.append(kind(
            name + suffix, read is not None, axes, self._options, state, value, keep, groups,
        ))  # fmt: skip
        return self.made[-1]

    def forget(self) -> None:
        """Forget the values that were observed."""
        for quantizer in self.made:
            quantizer.observer = None

    def settle(self) -> None:
        """Fix the scales of the ranges that were observed."""
        for quantizer in self.made:
            quantizer.settle()

    def insert(self, context: amanda.OpContext) -> None:
        """Insert the routines that quantise the inputs of the op."""
        if context.is_static():
            self._insert_for_good(context)
        elif self._positions:
            called = context["is_called_back"]
            if self._recompute is not None:
                context.insert_before_op(self._hold)
            routine: Any = self._read_in_eager_mode if context.is_eager() else self._read
            if self._options.trains and called:
                routine = self._read_and_keep
            elif self._options.trains:
                routine = amanda.differentiable(routine)
            context.insert_before_op(routine, inputs=self._positions)
            if self._recompute is not None:
                context.insert_after_op(self._compare)

    def _insert_for_good(self, context: amanda.OpContext) -> None:
        """Insert traceable routines with fixed scales, for the file of a model."""
        if self._positions and self._options.method not in ("static", "qat"):
            method = self._options.method
            raise QuantizeError(
                f'method {method!r} is for models that run; write a file with "static" or "qat"'
            )
        scales: dict[int, dict[int | None, Scale]] = {}
        for (position, item), quantizer in self.quantizers.items():
            if quantizer.is_weight and not quantizer.settled:
                quantizer.observe(quantizer.xp.detach(context.get_value(position)))
                quantizer.settle()
            scale = quantizer.scale()
            if scale is None:
                raise QuantizeError(
                    f"{quantizer.name} has no scale, and nothing runs that it could come of: calibrate the "
                    "model that the file is of, and load what was saved (--state FILE)"
                )
            scales.setdefault(position, {})[item] = scale
        for position, found in scales.items():
            kwargs = {"scales": found, "rounding": self._options.rounding}
            context.insert_before_op(fake_quantize_for_good, inputs=[position], **kwargs)

    def _read(self, *values: Any) -> Any:
        """Return the quantised values of the positions; None while the values calibrate."""
        read = self._values_read(values, None)
        if self._calibrates(read):
            self._calibrate(read)
            return None
        return self._quantised(values, read, [()] * len(read))

    def _read_in_eager_mode(self, *values: Any, run: dict[Any, Any], recomputed: bool = False) -> Any:
        """Do the same; a recomputation does what the first execution has done."""
        read, first = self._values_read(values, ParameterSlice.of_execution(run)), run.get(self)
        if first is None:
            first = run[self] = _Execution(self._calibrates(read), [()] * len(read))
            if first.calibrates:
                self._calibrate(read)
        if first.calibrates:
            return None
        made = self._quantised(values, read, first.used, recomputed)
        first.used = [quantizer.used for *_, quantizer in read]
        return made

    def _values_read(self, values: Sequence[Any], part_of: ParameterSlice | None) -> list[_Read]:
        """Return the values to quantise, each with its index, its item there, and its quantizer."""
        read: list[_Read] = []
        for (position, item), quantizer in self.quantizers.items():
            index = self._positions.index(position)
            value = values[index] if item is None else values[index][item]
            of_part = self._parts.get((position, item))
            found = quantizer if of_part is None else of_part(value, part_of)
            if found is None and quantizer.is_weight:
                self.left = WeightReads.unknown_part
                continue
            found = quantizer if found is None else found
            try:
                if found.xp.is_dense(value):
                    read.append((index, item, value, found))
            except Exception as error:  # whatever the class of a tensor refuses
                self.left = f"{type(value).__name__} refuses to be read: {error}"
        return read

    def _calibrates(self, read: Sequence[_Read]) -> bool:
        wanted = self._options.calibration
        waiting = (one for *_, one in read if one.state and not one.settled)
        return self._tool.is_calibrating or any(one.calibrated < wanted for one in waiting)

    def _calibrate(self, read: Sequence[_Read]) -> None:
        for _, _, value, quantizer in read:
            quantizer.observe(value)
            quantizer.calibrated += 1
            if not self._tool.is_calibrating and quantizer.calibrated == self._options.calibration:
                quantizer.settle()

    def _quantised(
        self, values: Sequence[Any], read: Sequence[_Read], used: Sequence[tuple[Any, ...]],
        recomputed: bool = False,
    ) -> Any:  # fmt: skip
        """Return the quantised values.  used: by which the first execution did it, in a recomputation."""
        tool, results = self._tool, list(values)
        for (index, item, value, quantizer), one in zip(read, used, strict=True):
            made = quantizer(value, tool.is_frozen, one)
            quantizer.executions += not recomputed
            if tool.measures and not recomputed:
                quantizer.noise.add(value, made)
            if item is not None:
                made = [*results[index][:item], made, *results[index][item + 1 :]]
            results[index] = made
        self._executions += not recomputed
        return results if len(results) > 1 else results[0]

    def insert_backward(self, context: amanda.OpContext) -> None:
        """Insert the routine that stops gradients where a value was clipped, beside the backward op."""
        if self._positions:
            context.insert_after_backward_op(self._stop, grad_inputs=self._positions)

    def _read_and_keep(self, *values: Any, run: dict[str, Any]) -> Any:
        made = self._read(*values)
        quantizers = {position: one for (position, item), one in self.quantizers.items() if item is None}
        run[_KEPT] = [] if made is None else [
            partial(quantizers[position].stopped, value, *quantizers[position].used)
            if position in quantizers else None
            for position, value in zip(self._positions, values, strict=True)
        ]  # fmt: skip
        return made

    def _stop(self, *gradients: Any, run: dict[str, Any]) -> Any:
        given = list(gradients)
        for i, stop in enumerate(run.pop(_KEPT, ())):
            if stop is not None and given[i] is not None:
                given[i] = stop(gradient=given[i])
        return given if len(given) > 1 else given[0]

    def _hold(self, *values: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        if not recomputed:
            run[_HELD] = values

    def _compare(self, *outputs: Any, run: dict[str, Any], recomputed: bool = False) -> None:
        """Compare outputs with the outputs for unquantised inputs."""
        if recomputed:
            return
        inputs = run.pop(_HELD)
        if self._executions and not self._tool.is_calibrating:
            wanted = self._recompute(inputs)
            listed = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            for one, other in zip(listed, outputs, strict=True):
                self._output.add(one, other)

    def rows(self) -> Iterator[Quantized]:
        """Yield the row of each tensor."""
        for one in self.made:
            grid, known = one.grid, (one.scale() or (None, None))[:2]
            scale, zero_point = (None if a is None else tuple(map(float, a.reshape(-1))) for a in known)
            yield Quantized(
                *self._where, one.name, grid.bits, grid.symmetric, grid.low, grid.high, one.axes, scale,
                zero_point, one.group_size, getattr(grid, "dtype", ""),
                one.executions, one.noise.sqnr, self._output.sqnr,
            )  # fmt: skip


_OfPart = Callable[[Any, "ParameterSlice | None"], "Quantizer | None"]
"""Gives the quantizer of a value, by the part of a parameter that the op reads."""
_Read = tuple[int, "int | None", Any, Quantizer]


def _layout(context: amanda.OpContext, read: WeightInput) -> str | None:
    return "OI" if context["type"] == "embedding" else read.layout


def _channels(extents: Sequence[int] | None, layout: str | None) -> Groups | None:
    """Return a group for each output of a transposed convolution in groups; None where axes count outputs."""
    if layout is None or extents is None or "M" not in layout:
        return None
    is_depthwise = getattr(layout, "groups", 0) in (0, extents[layout.index("I") - len(layout)])
    return None if is_depthwise else Groups.of_outputs(extents, layout)


def _recompute(context: amanda.OpContext) -> Any:
    """Return the op as a function of its inputs; None for an op that is random or in place."""
    if "recompute" in context:
        return context["recompute"]
    if context["in_place"] or context.get_attrs().get("dropout_p"):
        return None
    try:
        return context.get_computation()
    except AmandaError:
        return None
