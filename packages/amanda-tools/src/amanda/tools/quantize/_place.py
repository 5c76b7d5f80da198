"""One op whose inputs are quantised: its quantizers, and the routines that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import ELSEWHERE, Origin, WeightInput, origin, source, weight_input
from amanda.tools.quantize._fake import Scale, fake_quantize_for_good
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._quantizer import QUANTIZERS, Fresh, Quantizer
from amanda.tools.quantize._result import Noise, Quantized

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeTool

_HELD = "amanda.tools.quantize"


class Place:
    """An op, with the quantizers of what it reads.

    made: the quantizers that were met here first.  left: why its weight is left as it is.
    """

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool) -> None:
        self._tool, self._options = tool, tool.options
        self._where = context["phase"], context["type"], context.get_scope(), context.get_source()
        self.name, self.left = f"{context['type']} of {context.get_scope() or context.get_source()}", ""
        self.made: list[Quantizer] = []
        self._calibrated = self._executions = 0
        self._output = Noise()
        self._recompute = _recompute(context) if tool.measures else None
        self._part: Callable[[Any, Origin | None], Quantizer | None] | None = None
        self._quantizers = dict(self._found(context))
        self._positions = sorted({position for position, _ in self._quantizers})

    def _found(self, context: amanda.OpContext) -> Iterator[tuple[tuple[int, int | None], Quantizer]]:
        """Yield quantizers with the position of the input, and the place in a list of tensors there."""
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
                if not kind.startswith(("float", "bfloat")) or getattr(one, "is_meta", False):
                    continue
                if self._options.bits(weight is not None) is None:
                    continue
                name = f"input {position}" if item is None else f"input {position}.{item}"
                found = (
                    self._made(None, name, (), one, context)
                    if weight is None
                    else self._of_weight(context, weight, one)
                )
                if found is not None:
                    yield (position, item), found

    def _of_weight(self, context: amanda.OpContext, read: WeightInput, value: Any) -> Quantizer | None:
        """Return the quantizer of the weight, or of the part of a parameter that is read first; or None."""
        if read.varies and self._options.method.startswith("lsq"):
            self.left = "its scale is learned, and an index selects what it reads of a parameter"
            return None
        make = partial(self._made, read, "weight", self._axes(context, read, value))
        if not read.is_part:
            return make(value, context)

        def part(value: Any, part_of: Origin | None) -> Quantizer | None:
            found: Quantizer | None = self._tool.parts.kept(context, part_of, partial(make, value))
            return found

        self._part = part if read.is_followed else None
        return part(value, source(context, read.index))

    def _axes(self, context: amanda.OpContext, read: WeightInput, value: Any) -> tuple[int, ...]:
        """Return the axes of a weight that have scales of their own: of a batch of weights, and outputs.

        Those are O; I and M of a depthwise convolution.
        """
        layout = ("OI" if context["type"] == "embedding" else read.layout) or ""
        batch = len(context["shape"](value) or ()) - len(layout) if read.varies else 0
        letters = ("O" if "O" in layout else "IM") if self._options.per_channel else ""
        return (*range(batch), *(batch + i for i, letter in enumerate(layout) if letter in letters))

    def _made(
        self, read: WeightInput | None, name: str, axes: Sequence[int], value: Any,
        reader: amanda.OpContext, suffix: str = "",
    ) -> Quantizer:  # fmt: skip
        """Return a quantizer that keeps its state at `reader`."""
        kind, state = QUANTIZERS[self._options.method, read is not None]
        if read is not None and read.varies:
            kind, state = Fresh, {}
        keep = partial(self._tool.keep, reader)
        self.made.append(kind(name + suffix, read is not None, axes, self._options, state, value, keep))
        return self.made[-1]

    def settle(self) -> None:
        """Take the scales that follow from what was observed."""
        for quantizer in self.made:
            quantizer.settle()

    def insert(self, context: amanda.OpContext) -> None:
        """Insert what quantises the inputs of the op."""
        if context.is_static():
            self._insert_for_good(context)
        elif self._positions:
            if self._recompute is not None:
                context.insert_before_op(self._hold)
            routine: Any = self._read_part if self._part else self._read
            if self._options.trains:
                routine = amanda.differentiable(routine)
            context.insert_before_op(routine, inputs=self._positions)
            if self._recompute is not None:
                context.insert_after_op(self._compare)

    def _insert_for_good(self, context: amanda.OpContext) -> None:
        """Put what an op of a file reads on grids that do not change any more."""
        if self._positions and self._options.method not in ("static", "qat"):
            method = self._options.method
            raise QuantizeError(
                f'method {method!r} is for models that run; write a file with "static" or "qat"'
            )
        scales: dict[int, dict[int | None, Scale]] = {}
        for (position, item), quantizer in self._quantizers.items():
            if quantizer.is_weight and not quantizer.settled:
                quantizer.observe(quantizer.xp.detach(context.get_value(position)))
                quantizer.settle()
            qparams = quantizer.qparams()
            if qparams is None:
                raise QuantizeError(
                    f"{quantizer.name} has no scale, and nothing runs that it could come of: calibrate the "
                    "model that the file is of, and load what was saved (--state FILE)"
                )
            scales.setdefault(position, {})[item] = Scale(*qparams, quantizer.grid, quantizer.axes)
        for position, found in scales.items():
            kwargs = {"scales": found, "rounding": self._options.rounding}
            context.insert_before_op(fake_quantize_for_good, inputs=[position], **kwargs)

    def _read(self, *values: Any, part_of: Origin | None = None) -> Any:
        """Return what takes the place of the values at the positions; None while they calibrate."""
        tool, results = self._tool, list(values)
        calibrates = self._calibrated < self._options.calibration and not self._is_settled
        if tool.is_calibrating or calibrates:
            for quantizer, _, _, value in self._given(values, part_of):
                quantizer.observe(value)
            self._calibrated += 1
            if not tool.is_calibrating and self._calibrated == self._options.calibration:
                self.settle()
            return None
        for quantizer, index, item, value in self._given(values, part_of):
            made = quantizer(value, tool.is_frozen)
            if tool.measures:
                quantizer.noise.add(value, made)
            if item is None:
                results[index] = made
            else:
                results[index] = [*results[index][:item], made, *results[index][item + 1 :]]
        self._executions += 1
        return results if len(results) > 1 else results[0]

    def _read_part(self, *values: Any, run: dict[str, Any]) -> Any:
        return self._read(*values, part_of=origin(run))

    @property
    def _is_settled(self) -> bool:
        """True if everything that is to have a scale has one."""
        return all(one.settled for one in self._quantizers.values() if one.state)

    def _given(
        self, values: Sequence[Any], part_of: Origin | None
    ) -> Iterator[tuple[Quantizer, int, int | None, Any]]:
        """Yield each quantizer with its tensor, where there is anything to quantise in that."""
        for (position, item), quantizer in self._quantizers.items():
            index = self._positions.index(position)
            value = values[index] if item is None else values[index][item]
            found = self._part(value, part_of) if self._part and quantizer.is_weight else quantizer
            if found is None:
                self.left = ELSEWHERE
            elif found.xp.is_dense(value):
                yield found, index, item, value

    def _hold(self, *values: Any, run: dict[str, Any]) -> None:
        run[_HELD] = values

    def _compare(self, *outputs: Any, run: dict[str, Any]) -> None:
        """Measure outputs against those of inputs that were not quantised."""
        inputs = run.pop(_HELD)
        if self._executions and not self._tool.is_calibrating:
            with suppress(AmandaError):  # of an op that cannot be called by itself
                wanted = self._recompute(inputs)
                listed = wanted if isinstance(wanted, (list, tuple)) else [wanted]
                for one, other in zip(listed, outputs, strict=True):
                    self._output.add(one, other)

    def rows(self) -> Iterator[Quantized]:
        """Yield what is known of each tensor."""
        for one in self.made:
            scale, zero_point = map(_numbers, one.qparams() or (None, None))
            yield Quantized(
                *self._where, one.name, one.grid.bits, one.grid.symmetric, one.grid.low, one.grid.high,
                one.axes, scale, zero_point, self._executions, one.noise.sqnr, self._output.sqnr,
            )  # fmt: skip


def _numbers(array: Any) -> tuple[float, ...] | None:
    return None if array is None else tuple(map(float, array.reshape(-1)))


def _recompute(context: amanda.OpContext) -> Any:
    """Return the op as a function of its inputs; None for one that draws numbers or writes its input."""
    attributes = context.get_attrs()
    if context["in_place"] or attributes.get("dropout_p") or "seed" in attributes:
        return None
    try:
        return context.get_computation()
    except AmandaError:
        return None
