"""One op whose inputs are quantised, and the parts of parameters that it may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import ELSEWHERE, Origin, Parts, WeightInput, source, weight_input
from amanda.tools.quantize._fake import Scale
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._quantizer import QUANTIZERS, Fresh, Quantizer
from amanda.tools.quantize._result import Noise, Quantized

Where = tuple[int, int | None]
"""The position of an input, and the place in a list of tensors there."""


class Place:
    """The quantizers of what an op reads.

    positions: of those inputs.  made: the quantizers that were met here first.
    part: returns the quantizer of the part of a parameter that is read as the weight, where that may be
    another at each execution.
    calibrated, executions: how often it was calibrated, and quantised.
    left: why its weight is left as it is.
    recompute: the op as a function of its inputs; None where it cannot be repeated.
    """

    def __init__(
        self, context: amanda.OpContext, options: Options, keep: Callable[..., Any], parts: Parts
    ) -> None:
        self.phase, self.type = context["phase"], context["type"]
        self.module, self.source = context.get_scope(), context.get_source()
        self.recompute = _recompute(context)
        self.calibrated = self.executions = 0
        self.output, self.left = Noise(), ""
        self.made: list[Quantizer] = []
        self.part: Callable[[Any, Origin | None], Quantizer | None] | None = None
        self._options, self._keep = options, keep
        self.quantizers = dict(self._quantizers(context, parts))
        self.positions = sorted({position for position, _ in self.quantizers})

    def _quantizers(self, context: amanda.OpContext, parts: Parts) -> Iterator[tuple[Where, Quantizer]]:
        weight = weight_input(context)
        if weight is not None and weight.is_lost and context.is_static():
            weight = None
        for where, value in _tensors(context):
            read = weight if weight is not None and where == (weight.index, None) else None
            if self._is_wanted(context, value, read):
                quantizer = self._quantizer(context, where, value, read, parts)
                if quantizer is not None:
                    yield where, quantizer

    def _is_wanted(self, context: amanda.OpContext, value: Any, read: WeightInput | None) -> bool:
        kind = str(context["dtype"](value))
        if read is not None and kind.endswith("]"):
            self.left = f"it is packed, {kind}"
        if read is not None and read.varies and self._options.method.startswith("lsq"):
            self.left = "its scale is learned, and an index selects what it reads of a parameter"
            return False
        is_number = kind.startswith(("float", "bfloat")) and not getattr(value, "is_meta", False)
        return is_number and self._options.bits(read is not None) is not None

    def _quantizer(
        self, context: amanda.OpContext, where: Where, value: Any, read: WeightInput | None, parts: Parts
    ) -> Quantizer | None:
        """Return the quantizer of one tensor; None for a weight that is no part of a parameter at first."""
        if read is None:
            position, item = where
            name = f"input {position}" if item is None else f"input {position}.{item}"
            return self._made(None, name, (), value, context)
        make = partial(self._made, read, "weight", self._axes(context, read, value))
        if not read.is_part:
            return make(value, context)

        def part(value: Any, origin: Origin | None) -> Quantizer | None:
            found: Quantizer | None = parts.kept(context, origin, partial(make, value))
            return found

        self.part = part if read.is_followed else None
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
        keep = partial(self._keep, reader)
        self.made.append(kind(name + suffix, read is not None, axes, self._options, state, value, keep))
        return self.made[-1]

    @property
    def is_settled(self) -> bool:
        """True if everything that is to have a scale has one."""
        return all(one.settled for one in self.quantizers.values() if one.state)

    def settle(self) -> None:
        """Take the scales that follow from what was observed."""
        for quantizer in self.made:
            quantizer.settle()

    def observe(self, values: Sequence[Any], origin: Origin | None) -> None:
        """Observe what the op reads at its positions; origin: of its weight, if that is a part."""
        for quantizer, _, _, value in self._given(values, origin):
            quantizer.observe(value)
        self.calibrated += 1

    def quantized(self, values: Sequence[Any], frozen: bool, measure: bool, origin: Origin | None) -> Any:
        """Return what takes the place of the values at its positions, of a single one as itself."""
        results = list(values)
        for quantizer, index, item, value in self._given(values, origin):
            made = quantizer(value, frozen)
            if measure:
                quantizer.noise.add(value, made)
            if item is None:
                results[index] = made
            else:
                results[index] = [*results[index][:item], made, *results[index][item + 1 :]]
        self.executions += 1
        return results if len(results) > 1 else results[0]

    def _given(
        self, values: Sequence[Any], origin: Origin | None
    ) -> Iterator[tuple[Quantizer, int, int | None, Any]]:
        """Yield each quantizer with its tensor, where there is anything to quantise in that."""
        for (position, item), quantizer in self.quantizers.items():
            index = self.positions.index(position)
            value = values[index] if item is None else values[index][item]
            found = self.part(value, origin) if self.part and quantizer.is_weight else quantizer
            if found is None:
                self.left = ELSEWHERE
            elif found.xp.is_dense(value):
                yield found, index, item, value

    def fixed(self, position: int, value: Callable[[], Any]) -> dict[int | None, Scale]:
        """Return scales of what the op reads at a position; a weight without one has that of its `value`.

        Raises QuantizeError where an activation has none.
        """
        found = {}
        for item, quantizer in [(item, one) for (at, item), one in self.quantizers.items() if at == position]:
            if quantizer.is_weight and not quantizer.settled:
                quantizer.observe(quantizer.xp.detach(value()))
                quantizer.settle()
            qparams = quantizer.qparams()
            if qparams is None:
                raise QuantizeError(
                    f"{quantizer.name} has no scale, and nothing runs that it could come of: calibrate the "
                    "model that the file is of, and load what was saved (--state FILE)"
                )
            found[item] = Scale(*qparams, quantizer.grid, quantizer.axes)
        return found

    def compare(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Measure outputs against those of inputs that were not quantised."""
        with suppress(AmandaError):  # of an op that cannot be called by itself
            wanted = self.recompute(inputs)
            listed = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            for one, other in zip(listed, outputs, strict=True):
                self.output.add(one, other)

    def rows(self) -> Iterator[Quantized]:
        """Yield what is known of each tensor."""
        for one in self.made:
            scale, zero_point = map(_numbers, one.qparams() or (None, None))
            yield Quantized(
                self.phase, self.type, self.module, self.source, one.name, one.grid.bits, one.grid.symmetric,
                one.grid.low, one.grid.high, one.axes, scale, zero_point, self.executions, one.noise.sqnr,
                self.output.sqnr,
            )  # fmt: skip


def _numbers(array: Any) -> tuple[float, ...] | None:
    return None if array is None else tuple(map(float, array.reshape(-1)))


def _tensors(context: amanda.OpContext) -> Iterator[tuple[Where, Any]]:
    """Yield where what may be quantised is, and its value."""
    for position in context["operands"]:
        value = context.get_inputs()[position]
        listed = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
        yield from (((position, item), one) for item, one in listed)


def _recompute(context: amanda.OpContext) -> Any:
    """Return the op as a function of its inputs; None for one that draws numbers or writes its input."""
    attributes = context.get_attrs()
    if context["in_place"] or attributes.get("dropout_p") or "seed" in attributes:
        return None
    try:
        return context.get_computation()
    except AmandaError:
        return None
