"""One op whose inputs are quantised, and the parts of parameters that it may read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda import interceptor
from amanda.tools.kit import Origin, source, tensors_of, weight_input
from amanda.tools.kit._parts import Parts, form_of
from amanda.tools.kit._weight_input import is_part_in_graph
from amanda.tools.kit._weights import ELSEWHERE
from amanda.tools.quantize._fake import FixedScale
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._noise import Noise
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._quantizer import Quantizer, make_quantizer
from amanda.tools.quantize._result import Quantized

Keep = Callable[..., Any]
Make = Callable[..., "Quantizer | None"]
"""Makes the quantizer of a value whose state is kept at an op, with something added to its names."""


class PartQuantizers:
    """Quantizers of weights that are parts of parameters, by the part; an op may read another each time."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Quantizer | None] = {}
        self._parts = Parts()

    def of(
        self, context: amanda.OpContext, make: Make, made: list[Quantizer], value: Any, origin: Origin | None
    ) -> Quantizer | None:
        """The quantizer of a weight, added to `made` where it is new; None where it stays as it is."""
        if origin is None or origin.form is None:
            return None
        identity, form = interceptor.ordinal(origin.holder), origin.form
        reader, suffix = self._parts.place(context, identity, form, form_of(origin.holder))
        key = reader, identity, form
        if key not in self._found:
            quantizer = self._found[key] = make(value, reader, suffix)
            made += [] if quantizer is None else [quantizer]
        return self._found[key]


class Weight(NamedTuple):
    """Which input of an op is its weight, if any.

    axes: of what has scales of its own: its output channels, rows of an embedding, and each in a batch of
    weights that were selected.
    varies: whether the data may choose the elements of the parameter that it has each time.
    is_followed: whether each execution tells which part of a parameter it is.
    """

    position: int | None
    axes: tuple[int, ...]
    varies: bool
    is_followed: bool


class Place:
    """The quantizers of what an op reads, by the input and by the place in a list of tensors there.

    positions: of those inputs.  made: the quantizers that were met here first.
    calibrated, executions: how often it was calibrated, and quantised.
    left: why its weight is left as it is.
    recompute: the op as a function of its inputs; None where it cannot be repeated.
    """

    def __init__(
        self, context: amanda.OpContext, options: Options, keep: Keep, parts: PartQuantizers
    ) -> None:
        self.phase, self.type = context["phase"], context["type"]
        self.module, self.source = context.get_scope(), context.get_source()
        self.recompute = context["recompute"]
        self._is_fixed = context.namespace.matches("*/*/graph")
        self._is_learned = options.method in ("lsq", "lsq+")
        self.calibrated = self.executions = 0
        self.output = Noise()
        self.made: list[Quantizer] = []
        self.left, self._weight = "", _weight_of(context, options)
        make = partial(_quantizer, context, options, keep, self._weight)
        self._part = self._find_part(context, make, parts)
        self.quantizers = dict(self._quantizers(context, make))
        self.positions = sorted({position for position, _ in self.quantizers})

    def _find_part(
        self, context: amanda.OpContext, make: Make, parts: PartQuantizers
    ) -> Callable[[Any, Origin | None], Quantizer | None] | None:
        """Return what finds the quantizer of the weight that is read; None if the weight never changes."""
        index = self._weight.position
        if index is None or self._weight.varies:
            return None
        if not self._weight.is_followed and not is_part_in_graph(context, index):
            return None
        return partial(parts.of, context, partial(make, index, None), self.made)

    def _quantizers(
        self, context: amanda.OpContext, make: Make
    ) -> Iterator[tuple[tuple[int, int | None], Quantizer]]:
        inputs, weight = context.get_inputs(), self._weight
        for position in context["operands"]:
            value = inputs[position]
            if position == weight.position and str(context["dtype"](value)).endswith("]"):
                self.left = f"it is packed, {context['dtype'](value)}"
            if position == weight.position and weight.varies and self._is_learned:
                self.left = "its scale is learned, and an index selects what it reads of a parameter"
                continue
            parts = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for item, one in parts:
                if self._part is not None and (position, item) == (weight.position, None):
                    quantizer = self._part(one, source(context, position))
                else:
                    quantizer = make(position, item, one, context, "")
                    self.made += [] if quantizer is None else [quantizer]
                if quantizer is not None:
                    yield (position, item), quantizer

    @property
    def is_settled(self) -> bool:
        """True if every quantised tensor has a scale."""
        return all(one.settled for one in self.quantizers.values() if one.parts)

    def settle(self) -> None:
        """Take the scales that follow from what was seen."""
        for quantizer in self.made:
            quantizer.settle()

    @property
    def has_parts(self) -> bool:
        """True if the weight is a part of a parameter, and the op may read another part each time."""
        return self._part is not None and not self._is_fixed

    def observe(self, values: Sequence[Any], origin: Origin | None = None) -> None:
        """See what the op reads at its positions; origin: of its weight, if it has parts."""
        for quantizer, _, _, value in self._given(values, origin):
            quantizer.observe(value)
        self.calibrated += 1

    def quantized(
        self, values: Sequence[Any], frozen: bool, measure: bool, origin: Origin | None = None
    ) -> list[Any]:
        """Return quantised values for the positions of the op; origin: of the weight, if it has parts."""
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
        """Each quantizer with its tensor, where there is anything to quantise in that."""
        for (position, item), quantizer in self.quantizers.items():
            index = self.positions.index(position)
            value = values[index] if item is None else values[index][item]
            if quantizer.is_weight and self._part is not None and not self._is_fixed:
                part = self._part(value, origin)
                if part is None:
                    self.left = ELSEWHERE
                    continue
                quantizer = part
            if quantizer.xp.is_dense(value):
                yield quantizer, index, item, value

    def fixed(self, position: int, value: Callable[[], Any]) -> list[FixedScale]:
        """Scales of what the op reads at a position, which is a weight's `value` where it has none yet.

        Raises QuantizeError where an activation has none.
        """
        found = []
        for (where, item), quantizer in self.quantizers.items():
            if where != position:
                continue
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
        for one, other in zip(
            wanted if isinstance(wanted, (list, tuple)) else [wanted], outputs, strict=True
        ):
            self.output.add(one, other)

    def rows(self) -> Iterator[Quantized]:
        """Return a row for each tensor."""
        for one in self.made:
            scale, zero_point = one.qparams() or (None, None)
            yield Quantized(
                self.phase, self.type, self.module, self.source, one.name, one.grid.bits,
                one.grid.symmetric, one.grid.low, one.grid.high, one.axes, _numbers(scale),
                _numbers(zero_point), self.executions, one.noise.sqnr, self.output.sqnr,
            )  # fmt: skip


def _numbers(array: Any) -> tuple[float, ...] | None:
    return None if array is None else tuple(map(float, array.reshape(-1)))


def _quantizer(
    context: amanda.OpContext, options: Options, keep: Keep, weight_of: Weight, position: int,
    item: int | None, value: Any, reader: amanda.OpContext, suffix: str,
) -> Quantizer | None:  # fmt: skip
    """The quantizer of one tensor, whose state is kept at `reader`; None where it stays as it is."""
    kind = context["dtype"](value)
    weight = item is None and position == weight_of.position
    bits = options.weight_bits if weight else options.activation_bits
    if kind is None or not kind.startswith(("float", "bfloat")) or bits is None:
        return None
    if getattr(value, "is_meta", False):
        return None
    axes = weight_of.axes if weight else ()
    channels = prod(context["shape"](value)[axis] for axis in axes)
    name = (
        f"weight{suffix}" if weight else f"input {position}" if item is None else f"input {position}.{item}"
    )
    quantizer = make_quantizer(
        name, weight, axes, channels, options, tensors_of(value), weight and weight_of.varies
    )

    def kept(part: str, start: Any, trained: bool) -> Any:
        def make(loaded: Any = start) -> Any:
            return quantizer.xp.state(loaded, value, trained)

        return keep(reader, part.replace(" ", ""), make, load=make, renew=quantizer.xp.update)

    quantizer.keep(kept)
    return quantizer


def _weight_of(context: amanda.OpContext, options: Options) -> Weight:
    read = weight_input(context)
    if read is None or (read.is_lost and context.is_static()):
        return Weight(None, (), False, False)
    layout = "OI" if context["type"] == "embedding" else read.layout
    rank = len(context["shape"](context.get_inputs()[read.index]) or ())
    batch = rank - len(layout or "") if read.varies else 0
    axes = _channel_axes(layout) if options.per_channel else ()
    axes = (*range(batch), *(batch + axis for axis in axes))
    return Weight(read.index, axes, read.varies, read.is_followed)


def _channel_axes(layout: str | None) -> tuple[int, ...]:
    """Axes of a weight's output channels: O; I and M of a depthwise convolution."""
    letters = "O" if layout and "O" in layout else "IM"
    return tuple(i for i, letter in enumerate(layout or "") if letter in letters)
