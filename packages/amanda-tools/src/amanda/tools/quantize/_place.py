"""One op whose inputs are quantised, and the parts of parameters that it may read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import amanda
from amanda import interceptor
from amanda.errors import AmandaError
from amanda.tools.kit import Origin, source, tensors_of, weight_input
from amanda.tools.kit._parts import Parts, form_of
from amanda.tools.kit._weight_input import is_part_in_graph
from amanda.tools.kit._weights import ELSEWHERE
from amanda.tools.quantize._fake import FixedScale
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._quantizer import QUANTIZERS, Fresh, Quantizer, Static
from amanda.tools.quantize._result import Noise, Quantized

Keep = Callable[..., Any]


class PartQuantizers:
    """Quantizers of weights that are parts of parameters, by the part; an op may read another each time."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Quantizer | None] = {}
        self.parts = Parts()


class Place:
    """The quantizers of what an op reads, by the input and by the place in a list of tensors there.

    positions: of those inputs.  made: the quantizers that were met here first.
    calibrated, executions: how often it was calibrated, and quantised.
    left: why its weight is left as it is.
    recompute: the op as a function of its inputs; None where it cannot be repeated.
    has_parts: True if each execution tells which part of a parameter its weight is.
    """

    def __init__(
        self, context: amanda.OpContext, options: Options, keep: Keep, parts: PartQuantizers
    ) -> None:
        self.phase, self.type = context["phase"], context["type"]
        self.module, self.source = context.get_scope(), context.get_source()
        self.recompute = _recompute(context)
        self._options, self._keep, self._of_parts = options, keep, parts
        self.calibrated = self.executions = 0
        self.output, self.left = Noise(), ""
        self.made: list[Quantizer] = []
        self._index: int | None = None
        self._axes: tuple[int, ...] = ()
        self._varies = False
        self._part: Callable[..., Quantizer | None] | None = None
        self._find_weight(context)
        self.has_parts = self._part is not None and not context.namespace.matches("*/*/graph")
        self.quantizers = dict(self._quantizers(context))
        self.positions = sorted({position for position, _ in self.quantizers})

    def _find_weight(self, context: amanda.OpContext) -> None:
        """Find the weight, axes that have scales of their own, and what gives the quantizer of each part."""
        read = weight_input(context)
        if read is None or (read.is_lost and context.is_static()):
            return
        self._index, self._varies = read.index, read.varies
        layout = "OI" if context["type"] == "embedding" else read.layout
        rank = len(context["shape"](context.get_inputs()[read.index]) or ())
        batch = rank - len(layout or "") if read.varies else 0
        axes = _channel_axes(layout) if self._options.per_channel else ()
        self._axes = (*range(batch), *(batch + axis for axis in axes))
        if not read.varies and (read.is_followed or is_part_in_graph(context, read.index)):
            self._part = partial(self._quantizer_of_part, context, read.index)

    def _quantizer_of_part(
        self, context: amanda.OpContext, index: int, value: Any, origin: Origin | None
    ) -> Quantizer | None:
        """Return the quantizer of the part of a parameter that is read; None where it stays as it is."""
        if origin is None or origin.form is None:
            return None
        identity, form, known = interceptor.ordinal(origin.holder), origin.form, self._of_parts
        reader, suffix = known.parts.place(context, identity, form, form_of(origin.holder))
        key = reader, identity, form
        if key not in known.found:
            known.found[key] = self._make(context, index, None, value, reader, suffix)
        return known.found[key]

    def _quantizers(self, context: amanda.OpContext) -> Iterator[tuple[tuple[int, int | None], Quantizer]]:
        for position in context["operands"]:
            value, is_weight = context.get_inputs()[position], position == self._index
            if is_weight and str(context["dtype"](value)).endswith("]"):
                self.left = f"it is packed, {context['dtype'](value)}"
            if is_weight and self._varies and self._options.method.startswith("lsq"):
                self.left = "its scale is learned, and an index selects what it reads of a parameter"
                continue
            listed = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for item, one in listed:
                if self._part is not None and is_weight and item is None:
                    quantizer = self._part(one, source(context, position))
                else:
                    quantizer = self._make(context, position, item, one, context, "")
                if quantizer is not None:
                    yield (position, item), quantizer

    def _make(
        self, context: amanda.OpContext, position: int, item: int | None, value: Any,
        reader: amanda.OpContext, suffix: str,
    ) -> Quantizer | None:  # fmt: skip
        """Return the quantizer of one tensor, which keeps state at `reader`; None where it stays as it is."""
        options, kind = self._options, context["dtype"](value)
        weight = item is None and position == self._index
        bits = options.weight_bits if weight else options.activation_bits
        if kind is None or not kind.startswith(("float", "bfloat")) or bits is None:
            return None
        if getattr(value, "is_meta", False):
            return None
        axes, xp = self._axes if weight else (), tensors_of(value)
        channels = prod(context["shape"](value)[axis] for axis in axes)
        name = f"weight{suffix}" if weight else f"input {position}{'' if item is None else f'.{item}'}"
        own = Static if weight and options.method == "dynamic" else QUANTIZERS[options.method]
        quantizer = (Fresh if weight and self._varies else own)(name, weight, axes, channels, options, xp)

        def kept(part: str, start: Any, trained: bool) -> Any:
            def make(loaded: Any = start) -> Any:
                return xp.state(loaded, value, trained)

            return self._keep(reader, part.replace(" ", ""), make, load=make, renew=xp.update)

        quantizer.keep(kept)
        self.made.append(quantizer)
        return quantizer

    @property
    def is_settled(self) -> bool:
        """True if everything that is to have a scale has one."""
        return all(one.settled for one in self.quantizers.values() if one.parts)

    def settle(self) -> None:
        """Take the scales that follow from what was observed."""
        for quantizer in self.made:
            quantizer.settle()

    def observe(self, values: Sequence[Any], origin: Origin | None) -> None:
        """Observe what the op reads at its positions; origin: of its weight, if it has parts."""
        for quantizer, _, _, value in self._given(values, origin):
            quantizer.observe(value)
        self.calibrated += 1

    def quantized(
        self, values: Sequence[Any], frozen: bool, measure: bool, origin: Origin | None
    ) -> list[Any]:
        """Return what takes the place of the values at its positions; origin: of its weight, in parts."""
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
        return results

    def _given(
        self, values: Sequence[Any], origin: Origin | None
    ) -> Iterator[tuple[Quantizer, int, int | None, Any]]:
        """Yield each quantizer with its tensor, where there is anything to quantise in that."""
        for (position, item), quantizer in self.quantizers.items():
            index = self.positions.index(position)
            value = values[index] if item is None else values[index][item]
            if self.has_parts and quantizer.is_weight:
                assert self._part is not None
                part = self._part(value, origin)
                if part is None:
                    self.left = ELSEWHERE
                    continue
                quantizer = part
            if quantizer.xp.is_dense(value):
                yield quantizer, index, item, value

    def fixed(self, position: int, value: Callable[[], Any]) -> list[FixedScale]:
        """Return scales of what the op reads at a position; a weight without one has that of its `value`.

        Raises QuantizeError where an activation has none.
        """
        found = []
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
            found.append(FixedScale(item, *qparams, quantizer.grid, quantizer.axes))
        return found

    def compare(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Measure outputs against those of inputs that were not quantised."""
        wanted = self.recompute(inputs)
        listed = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        for one, other in zip(listed, outputs, strict=True):
            self.output.add(one, other)

    def rows(self) -> Iterator[Quantized]:
        """Yield what is known of each tensor."""
        for one in self.made:
            scale, zero_point = one.qparams() or (None, None)
            yield Quantized(
                self.phase, self.type, self.module, self.source, one.name, one.grid.bits, one.grid.symmetric,
                one.grid.low, one.grid.high, one.axes, _numbers(scale), _numbers(zero_point), self.executions,
                one.noise.sqnr, self.output.sqnr,
            )  # fmt: skip


def _numbers(array: Any) -> tuple[float, ...] | None:
    return None if array is None else tuple(map(float, array.reshape(-1)))


def _recompute(context: amanda.OpContext) -> Any:
    """Return the op as a function of its inputs; None for one that draws numbers or writes its input."""
    if "recompute" in context:
        return context["recompute"]
    if context["in_place"] or context.get_attrs().get("dropout_p"):
        return None
    try:
        return context.get_computation()
    except AmandaError:
        return None


def _channel_axes(layout: str | None) -> tuple[int, ...]:
    """Return the axes of a weight's output channels: O; I and M of a depthwise convolution."""
    letters = "O" if layout and "O" in layout else "IM"
    return tuple(i for i, letter in enumerate(layout or "") if letter in letters)
