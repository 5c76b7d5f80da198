"""The quantizers of an op's inputs, created at its analysis, and values that transforms have wrapped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import ToolError
from amanda.tools.kit import Samples, tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import Groups, QuantizeError
from amanda.tools.quantize._lsq import LsqQuantizer
from amanda.tools.quantize._quantizer import DynamicQuantizer, QatQuantizer, Quantizer
from amanda.tools.weights import ParameterSlice, WeightInput, parameter_store, weight_input

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeOptions, QuantizeTool


OperandKey = tuple[int, int | None]
"""Position of an input, and index of the tensor where the input is a list of tensors, else None."""

PartQuantizer = Callable[[Any, "ParameterSlice | None"], "Quantizer | None"]
"""Returns the quantizer of a value, from the value and the part of a parameter that the op reads."""


LEARNED = "its scale is learned, and a transform such as vmap has wrapped the value"
"""Reason for leaving a value of LSQ within a transform."""


class OpQuantizers:
    """The quantizers of the tensors that an op reads, by OperandKey, created at the op's analysis.

    created: all quantizers of this op, also of other parts and models.  skip_reason: why a tensor has none.
    quantizers: of tensors that have one; `_part_quantizers` may find another for the part that is read.
    model_quantizers: of an ensemble, an op whose weight differs among the samples of a vmap.
    batched_weight: position of the weight of such an op; None for other ops.
    """

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool, options: QuantizeOptions) -> None:
        self._tool, self._options = tool, options
        self.name = f"{context['type']} of {context.get_scope() or context.get_source()}"
        self.skip_reason = ""
        self.created: list[Quantizer] = []
        self._part_quantizers: dict[OperandKey, PartQuantizer] = {}
        self.quantizers: dict[OperandKey, Quantizer] = {}
        self.model_quantizers: dict[OperandKey, ModelQuantizers] = {}
        self.batched_weight: int | None = None
        self._create_quantizers(context)

    def _create_quantizers(self, context: amanda.OpContext) -> None:
        """Create the quantizers of the op's operands, note why others have none, and set `batched_weight`."""
        read = weight_input(context)
        # In a file, a weight that cannot be followed is an activation as any other.
        if read is not None and read.is_lost and context.is_static():
            read = None
        model_levels: tuple[int, ...] = ()  # of vmaps whose samples have a weight each, as in an ensemble
        if read is not None and context.is_eager():
            value = context.get_inputs()[read.index]
            samples = tensors_of(value).samples(value)
            model_levels = () if samples is None else samples.levels
            self.batched_weight = read.index if model_levels else None
        for position in context["operands"]:
            value = context.get_inputs()[position]
            if not isinstance(value, (list, tuple)):
                self._create_quantizer(context, read, (position, None), value, model_levels)
                continue
            for list_index, tensor in enumerate(value):
                self._create_quantizer(context, read, (position, list_index), tensor, model_levels)

    def _create_quantizer(
        self, context: amanda.OpContext, read: WeightInput | None, key: OperandKey, tensor: Any,
        model_levels: Sequence[int],
    ) -> None:  # fmt: skip
        """Create the quantizer of a tensor, or a maker of quantizers for each model of an ensemble.

        Creates none for a tensor that is not quantised; sets `skip_reason` where a user would expect one.
        model_levels: of vmaps whose samples have a weight each.
        """
        weight = read if read is not None and key == (read.index, None) else None
        dtype = str(context["dtype"](tensor))
        if weight is not None and dtype.endswith("]"):
            self.skip_reason = f"it is packed, {dtype}"
        if not dtype.startswith(("float", "bfloat")) or getattr(tensor, "is_meta", False):
            return
        samples = tensors_of(tensor).samples(tensor) if context.is_eager() else None
        is_of_models = False
        if samples is not None:
            if self._options.method.startswith("lsq"):
                self.skip_reason = LEARNED
                return
            # A vmap over the weights maps this tensor too: each model of the ensemble has a scale.
            is_of_models = not {*model_levels}.isdisjoint(samples.levels)
            tensor = samples.first
        elif context.is_eager():
            unread_reason = tensors_of(tensor).unread(tensor)
            if unread_reason is not None:
                self.skip_reason = unread_reason
                return
        if self._options.bits(weight is not None) is None:
            return
        create: Callable[[str], Quantizer | None]  # takes the suffix of a model's name
        if weight is None:
            position, list_index = key
            name = f"input {position}" if list_index is None else f"input {position}.{list_index}"
            create = partial(self._create_activation_quantizer, context, read, name, key, tensor)
        else:
            create = partial(self._create_weight_quantizer, context, weight, tensor)
        if is_of_models:
            self.model_quantizers[key] = ModelQuantizers(create)
        else:
            quantizer = create("")
            if quantizer is not None:
                self.quantizers[key] = quantizer

    def _create_activation_quantizer(
        self, context: amanda.OpContext, read: WeightInput | None, name: str, key: OperandKey, value: Any,
        suffix: str = "",
    ) -> Quantizer:  # fmt: skip
        """Return the quantizer of an activation, which has a scale for each weight that the op reads.

        suffix: of its name, the number of a model of an ensemble.
        Registers the quantizers of slices or parts in `_part_quantizers`.
        """
        # Takes the suffix.  No `read` and no axes: an activation is no weight, and has one scale for all.
        make_quantizer = partial(self._make_quantizer, name, None, (), value, context)
        if read is not None:
            first_of_slices = self._create_slice_quantizers(read, make_quantizer, key)
            if first_of_slices is not None:
                return first_of_slices
        if read is None or not (read.is_part and read.is_followed):
            return make_quantizer(suffix)
        # A loop runs one line with several weights: activations have a scale for each weight at each line.
        line = context.get_scope(), context.get_op_type(), context.get_source(), key

        def quantizer_of_part(value: Any, part: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of a parameter; None where the op reads no part."""
            make = partial(self._make_activation_quantizer_of_part, context, name, value)
            quantizer: Quantizer | None = self._tool.parts.state_of(context, part, make, line)
            return quantizer

        self._part_quantizers[key] = quantizer_of_part
        # The first execution is at hand in the analysis; later ones are found in the routine.
        first_quantizer = quantizer_of_part(value, ParameterSlice.of_input(context, read.index))
        return make_quantizer() if first_quantizer is None else first_quantizer

    def _make_activation_quantizer_of_part(
        self, context: amanda.OpContext, name: str, value: Any, reader: amanda.OpContext, suffix: str
    ) -> Quantizer:
        """Create the quantizer of an activation that an op multiplies by a part of a parameter.

        reader, suffix: the op under which its state is saved, and the end of its name there.
        Raises QuantizeError for loaded state of an older version.
        """
        # The name under which older versions saved one scale for all rounds.
        old_name = f"{self._tool.place(context)}/{name}.scale".replace(" ", "")
        try:
            return self._make_quantizer(name, read=None, axes=(), value=value, reader=reader, suffix=suffix)
        except ToolError as error:
            if old_name not in self._tool.waiting_state():
                raise
            raise QuantizeError(
                f"the scale {old_name} that was loaded is of one round of a loop, as earlier versions "
                "saved it, and nothing tells which part of a parameter that round read: calibrate again"
            ) from error

    def _create_slice_quantizers(
        self, read: WeightInput, make: Callable[[str], Quantizer], key: OperandKey
    ) -> Quantizer | None:
        """Create quantizers for all slices of a stack; return that of the first, None without a stack.

        The op reads a slice at each execution, such as a layer of a scan, by which `_part_quantizers` finds
        its quantizer.
        """
        holder = read.holder
        slices = () if holder is None else parameter_store(holder).slices(holder)
        if not slices:
            return None
        quantizer_by_slice = {parameter: make(f" of {parameter.path}") for parameter in slices}
        # Value and part are not needed: the driver knows which slice is read.
        self._part_quantizers[key] = lambda _value, _part: quantizer_by_slice.get(
            parameter_store(holder).current_slice(holder)
        )
        return quantizer_by_slice[slices[0]]

    def _create_weight_quantizer(
        self, context: amanda.OpContext, read: WeightInput, value: Any, suffix: str = ""
    ) -> Quantizer | None:
        """Return the quantizer of the weight, or of the part of a parameter that is read; None if skipped.

        suffix: of its name, the number of a model of an ensemble.
        Registers the quantizers of slices or parts in `_part_quantizers`, or sets `skip_reason`.
        """
        # An optimizer takes its parameters before the training, when it is not known which rows data will
        # select.
        if read.varies and self._options.method.startswith("lsq"):
            self.skip_reason = "its scale is learned, and an index selects what it reads of a parameter"
            return None
        groups = None
        if self._options.group_size is not None:
            groups = self._find_groups(context, read, value)
            if groups is None:  # they do not fit
                return None
        # A transposed convolution in groups counts outputs along two axes, of which no product of axes gives
        # one scale each.
        if groups is None and self._options.per_channel:
            groups = _groups_of_outputs(context["shape"](value), _weight_layout(context, read))
        axes = self._find_scale_axes(context, read, value)
        # Takes a value, the op under which state is saved, and the suffix of the quantizer's name.
        make = partial(self._make_quantizer, f"weight{suffix}", read, axes, groups=groups)
        first_of_slices = self._create_slice_quantizers(
            read, partial(make, value, context), (read.index, None)
        )
        if first_of_slices is not None:
            return first_of_slices
        if not read.is_part:
            return make(value, context)

        def quantizer_of_part(value: Any, part: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of the parameter; None where the op reads no part."""
            quantizer: Quantizer | None = self._tool.parts.state_of(context, part, partial(make, value))
            return quantizer

        if read.is_followed:
            self._part_quantizers[read.index, None] = quantizer_of_part
        return quantizer_of_part(value, ParameterSlice.of_input(context, read.index))

    def _find_groups(self, context: amanda.OpContext, read: WeightInput, value: Any) -> Groups | None:
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

    def _find_scale_axes(self, context: amanda.OpContext, read: WeightInput, value: Any) -> tuple[int, ...]:
        """Return the axes of a weight along which scales differ: those of a batch of weights, and of outputs.

        Those of outputs if `per_channel`: O, and the axes I and M in a depthwise convolution.
        """
        layout = _weight_layout(context, read) or ""
        # Selected experts come as a batch of weights, each with scales of its own.
        batch_axes = len(context["shape"](value) or ()) - len(layout) if read.varies else 0
        output_letters = ("O" if "O" in layout else "IM") if self._options.per_channel else ""
        output_axes = (batch_axes + i for i, letter in enumerate(layout) if letter in output_letters)
        return (*range(batch_axes), *output_axes)

    def _make_quantizer(
        self, name: str, read: WeightInput | None, axes: Sequence[int], value: Any,
        reader: amanda.OpContext, suffix: str = "", groups: Groups | None = None,
    ) -> Quantizer:  # fmt: skip
        """Create a quantizer, of a weight if there is a `read`, whose state is saved under the op `reader`.

        Adds it to `created`.  Data that select a weight make it dynamic, without state.
        Raises QuantizeError for a learned scale that no optimizer can train.
        """
        if reader["is_called_back"] and self._options.method.startswith("lsq"):
            raise QuantizeError(
                f"{self.name} is of {reader.namespace[0]}, where no optimizer trains a tool's scales: "
                f'method {self._options.method!r} is for PyTorch and TensorFlow; let it be "qat"'
            )
        is_weight = read is not None
        quantizer_class, parts = QUANTIZERS[self._options.method, is_weight]
        # What data select has no scale that could be kept from one execution to the next.
        if read is not None and read.varies:
            quantizer_class, parts = DynamicQuantizer, {}
        keep = partial(self._tool.keep, reader)
        quantizer = quantizer_class(name + suffix, is_weight, axes, self._options, parts, value, keep, groups)
        self.created.append(quantizer)
        return quantizer


class ModelQuantizers:
    """Quantizers of an input of an op whose weight differs among the samples of a vmap, as in an ensemble.

    make: returns a new quantizer, whose name has a suffix, "[0]" of the first model; None if it is skipped.
    """

    def __init__(self, make: Callable[[str], Quantizer | None]) -> None:
        self._make = make
        self._quantizers: dict[tuple[int, ...], Quantizer | None] = {}

    def quantizer_of(self, numbers: tuple[int, ...]) -> Quantizer | None:
        """Return the quantizer of a model by its number in each batch, () without any; create it at first."""
        if numbers not in self._quantizers:
            self._quantizers[numbers] = self._make("".join(f"[{number}]" for number in numbers))
        return self._quantizers[numbers]


class SampledValue:
    """A value that transforms have wrapped, cut along some of its batches.

    levels: of these batches.
    """

    def __init__(self, value: Any, samples: Samples, levels: Collection[int]) -> None:
        self._value, self.samples = value, samples
        self._axes = [axis for axis, level in enumerate(samples.levels) if level in levels]
        self._sizes = tuple(samples.sizes[axis] for axis in self._axes)

    def parts(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield the number of each part in the batches, and the part, with axes of other batches in front."""
        data = do("moveaxis", self.samples.data, tuple(self._axes), tuple(range(len(self._axes))))
        for numbers in np.ndindex(self._sizes):
            yield numbers, data[numbers]

    def joined(self, parts: Sequence[Any]) -> Any:
        """Stack plain new values of the parts, and wrap them in the transforms again; without a gradient."""
        leading_axes = tuple(range(len(self._axes)))  # of the batches, once the parts are stacked
        # Within a transform the result of each operation belongs to its level.
        with self.samples.outside():
            data = do("reshape", do("stack", tuple(parts)), (*self._sizes, *shape(parts[0])))
            data = do("moveaxis", data, leading_axes, tuple(self._axes))
        return self.samples.wrapped(data)

    def straight_through(self, quantised: Any, passes: Any) -> Any:
        """Return quantised values with a gradient, which passes to the value where `passes` is true."""
        xp = tensors_of(self._value)
        unclipped = xp.where(passes, self._value, do("zeros_like", self._value))
        # A difference of 0 at every level of transforms, whose gradient is that of the value.
        return quantised + (unclipped - xp.detach(unclipped))


def _weight_layout(context: amanda.OpContext, read: WeightInput) -> str | None:
    """Return the axes of a weight, an embedding's rows as outputs; None where they are not known."""
    return "OI" if context["type"] == "embedding" else read.layout


def _groups_of_outputs(extents: Sequence[int] | None, layout: str | None) -> Groups | None:
    """Return a group for each output of a transposed convolution in groups; None where axes count outputs."""
    if layout is None or extents is None or "M" not in layout:
        return None
    is_depthwise = getattr(layout, "groups", 0) in (0, extents[layout.index("I") - len(layout)])
    return None if is_depthwise else Groups.of_outputs(extents, layout)


_FIXED, _LEARNED = {"scale": False, "zero_point": False}, {"scale": True}

QUANTIZERS: Mapping[tuple[str, bool], tuple[type[Quantizer], Mapping[str, bool]]] = {
    ("static", True): (Quantizer, _FIXED),
    ("static", False): (Quantizer, _FIXED),
    ("dynamic", True): (Quantizer, _FIXED),
    ("dynamic", False): (DynamicQuantizer, {}),
    ("qat", True): (QatQuantizer, _FIXED),
    ("qat", False): (QatQuantizer, {**_FIXED, "least": False, "most": False}),
    ("lsq", True): (LsqQuantizer, _LEARNED),
    ("lsq", False): (LsqQuantizer, {**_LEARNED, "low": False}),
    ("lsq+", True): (LsqQuantizer, _LEARNED),
    ("lsq+", False): (LsqQuantizer, {**_LEARNED, "offset": True}),
}
"""Quantizer class and parts of its state, by method and by whether the tensor is a weight."""
