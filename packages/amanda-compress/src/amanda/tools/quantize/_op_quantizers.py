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


PartQuantizer = Callable[[Any, "ParameterSlice | None"], "Quantizer | None"]
"""Returns the quantizer of a value, from the value and the part of a parameter that the op reads."""


LEARNED = "its scale is learned, and a transform such as vmap has wrapped the value"
"""Reason for leaving a value of LSQ within a transform."""


class OpQuantizers:
    """The quantizers of the inputs of an op.

    created: all quantizers of this op.  skip_reason: why the weight is not quantised.
    quantizers: by position of the input and index in a list of tensors there.
    model_quantizers: likewise, of an op whose weight differs among the samples of a vmap.
    batched_weight: position of the weight of such an op; None for other ops.
    """

    def __init__(self, context: amanda.OpContext, tool: QuantizeTool, options: QuantizeOptions) -> None:
        self._tool, self._options = tool, options
        self.name = f"{context['type']} of {context.get_scope() or context.get_source()}"
        self.skip_reason = ""
        self.created: list[Quantizer] = []
        self._part_quantizers: dict[tuple[int, int | None], PartQuantizer] = {}
        self.quantizers: dict[tuple[int, int | None], Quantizer] = {}
        self.model_quantizers: dict[tuple[int, int | None], ModelQuantizers] = {}
        self.batched_weight: int | None = None
        self._create_quantizers(context)

    def _create_quantizers(self, context: amanda.OpContext) -> None:
        """Create the quantizers of the op's operands, and note why others have none."""
        read = weight_input(context)
        # In a file, a weight that cannot be followed is an activation as any other.
        if read is not None and read.is_lost and context.is_static():
            read = None
        levels: tuple[int, ...] = ()
        if read is not None and context.is_eager():
            value = context.get_inputs()[read.index]
            samples = tensors_of(value).samples(value)
            levels = () if samples is None else samples.levels
            self.batched_weight = read.index if levels else None
        for position in context["operands"]:
            value = context.get_inputs()[position]
            for item, tensor in enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]:
                weight = read if read is not None and (position, item) == (read.index, None) else None
                self._create_quantizer(context, read, weight, (position, item), tensor, levels)

    def _create_quantizer(
        self, context: amanda.OpContext, read: WeightInput | None, weight: WeightInput | None,
        key: tuple[int, int | None], tensor: Any, levels: Sequence[int],
    ) -> None:  # fmt: skip
        """Create the quantizer of a tensor, or a maker of quantizers for each model of an ensemble.

        Creates none for a tensor that is not quantised; sets `skip_reason` where a user would expect one.
        weight: the weight input if it is the tensor, else None.  levels: of vmaps whose samples have a weight
        of their own each.
        """
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
            is_of_models = not {*levels}.isdisjoint(samples.levels)
            tensor = samples.first
        elif context.is_eager():
            unread_reason = tensors_of(tensor).unread(tensor)
            if unread_reason is not None:
                self.skip_reason = unread_reason
                return
        if self._options.bits(weight is not None) is None:
            return
        make: Callable[[str], Quantizer | None]
        if weight is None:
            name = f"input {key[0]}" if key[1] is None else f"input {key[0]}.{key[1]}"
            make = partial(self._create_activation_quantizer, context, read, name, key, tensor)
        else:
            make = partial(self._create_weight_quantizer, context, weight, tensor)
        if is_of_models:
            self.model_quantizers[key] = ModelQuantizers(make)
        else:
            quantizer = make("")
            if quantizer is not None:
                self.quantizers[key] = quantizer

    def _create_activation_quantizer(
        self, context: amanda.OpContext, read: WeightInput | None, name: str, key: tuple[int, int | None],
        value: Any, suffix: str = "",
    ) -> Quantizer:  # fmt: skip
        """Return the quantizer of an activation, which has a scale for each weight that the op reads.

        suffix: of its name, the number of a model of an ensemble.
        Registers the quantizers for other slices or parts in `_part_quantizers`.
        """
        # A function of the suffix: an activation is no weight, and has one scale for all channels.
        make_quantizer = partial(self._make_quantizer, name, None, (), value, context)
        if read is not None:
            first_of_slices = self._create_slice_quantizers(read, make_quantizer, key)
            if first_of_slices is not None:
                return first_of_slices
        if read is None or not (read.is_part and read.is_followed):
            return make_quantizer(suffix)
        # A loop runs one line with several weights: activations have a scale for each weight at each line.
        line = context.get_scope(), context.get_op_type(), context.get_source(), key

        def quantizer_of_part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of a parameter; None where the op reads no part."""
            make = partial(self._make_activation_quantizer_of_part, context, name, value)
            quantizer: Quantizer | None = self._tool.parts.state_of(context, part_of, make, line)
            return quantizer

        self._part_quantizers[key] = quantizer_of_part
        # The first execution is at hand in the analysis; later ones are found in the routine.
        first = quantizer_of_part(value, ParameterSlice.of_input(context, read.index))
        return make_quantizer() if first is None else first

    def _make_activation_quantizer_of_part(
        self, context: amanda.OpContext, name: str, value: Any, reader: amanda.OpContext, suffix: str
    ) -> Quantizer:
        """Create the quantizer of an activation that an op multiplies by a part of a parameter.

        reader, suffix: see `SharedState.state_of`.
        Raises QuantizeError for loaded state of an older version.
        """
        # The name under which older versions saved one scale for all rounds.
        old_name = f"{self._tool.place(context)}/{name}.scale".replace(" ", "")
        try:
            return self._make_quantizer(name, None, (), value, reader, suffix)
        except ToolError as error:
            if old_name not in self._tool.waiting_state():
                raise
            raise QuantizeError(
                f"the scale {old_name} that was loaded is of one round of a loop, as earlier versions "
                "saved it, and nothing tells which part of a parameter that round read: calibrate again"
            ) from error

    def _create_slice_quantizers(
        self, read: WeightInput, make: Callable[[str], Quantizer], key: tuple[int, int | None]
    ) -> Quantizer | None:
        """Create quantizers for all slices of a stack; return that of the first, None without a stack."""
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
        self, context: amanda.OpContext, read: WeightInput, value: Any, suffix: str = ""
    ) -> Quantizer | None:
        """Return the quantizer of the weight, or of the part of a parameter that is read; None if skipped.

        suffix: of its name, the number of a model of an ensemble.
        """
        # An optimizer takes its parameters before the training, when it is not known which rows data will
        # select.
        if read.varies and self._options.method.startswith("lsq"):
            self.skip_reason = "its scale is learned, and an index selects what it reads of a parameter"
            return None
        groups = None
        if self._options.group_size is not None:
            groups = self._find_groups(context, read, value)
            if groups is None:
                return None
        # A transposed convolution in groups counts outputs along two axes, of which no product of axes gives
        # one scale each.
        if groups is None and self._options.per_channel:
            groups = _output_groups(context["shape"](value), _weight_layout(context, read))
        axes = self._find_scale_axes(context, read, value)
        make = partial(self._make_quantizer, f"weight{suffix}", read, axes, groups=groups)
        first_of_slices = self._create_slice_quantizers(
            read, partial(make, value, context), (read.index, None)
        )
        if first_of_slices is not None:
            return first_of_slices
        if not read.is_part:
            return make(value, context)

        def quantizer_of_part(value: Any, part_of: ParameterSlice | None) -> Quantizer | None:
            """Return the quantizer for a part of the parameter; None where the op reads no part."""
            quantizer: Quantizer | None = self._tool.parts.state_of(context, part_of, partial(make, value))
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

        Outputs have the axis O, and the axes I and M in a depthwise convolution.
        """
        layout = _weight_layout(context, read) or ""
        # Selected experts come as a batch of weights, each with scales of its own.
        batch = len(context["shape"](value) or ()) - len(layout) if read.varies else 0
        letters = ("O" if "O" in layout else "IM") if self._options.per_channel else ""
        return (*range(batch), *(batch + i for i, letter in enumerate(layout) if letter in letters))

    def _make_quantizer(
        self, name: str, read: WeightInput | None, axes: Sequence[int], value: Any,
        reader: amanda.OpContext, suffix: str = "", groups: Groups | None = None,
    ) -> Quantizer:  # fmt: skip
        """Create a quantizer whose state is saved under the op `reader`.

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


class ModelQuantizers:
    """Quantizers of an input of an op whose weight differs among the samples of a vmap, as in an ensemble.

    make: returns a new quantizer, whose name has a suffix, "[0]" of the first model; None if it is skipped.
    """

    def __init__(self, make: Callable[[str], Quantizer | None]) -> None:
        self._make = make
        self._quantizers: dict[tuple[int, ...], Quantizer | None] = {}

    def quantizer_of(self, numbers: tuple[int, ...]) -> Quantizer | None:
        """Return the quantizer of a model by its number in each batch; () for a value that is not a batch."""
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
        front = tuple(range(len(self._axes)))
        # Within a transform the result of each operation belongs to its level.
        with self.samples.outside():
            data = do("reshape", do("stack", tuple(parts)), (*self._sizes, *shape(parts[0])))
            data = do("moveaxis", data, front, tuple(self._axes))
        return self.samples.wrapped(data)

    def straight_through(self, quantised: Any, passes: Any) -> Any:
        """Return quantised values with a gradient, which passes to the value where `passes` is true."""
        xp = tensors_of(self._value)
        passed = xp.where(passes, self._value, do("zeros_like", self._value))
        # A difference of 0 at every level of transforms, whose gradient is that of the value.
        return quantised + (passed - xp.detach(passed))


def _weight_layout(context: amanda.OpContext, read: WeightInput) -> str | None:
    """Return the axes of a weight, an embedding's rows as outputs; None where they are not known."""
    return "OI" if context["type"] == "embedding" else read.layout


def _output_groups(extents: Sequence[int] | None, layout: str | None) -> Groups | None:
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
