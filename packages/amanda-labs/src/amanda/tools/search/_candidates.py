"""Candidates of ops: other activations, windows, groups, widths and bits, and choices among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import amanda
from amanda.errors import AmandaError
from amanda.options import Length, Name, checked
from amanda.tools.axes import canonical, restored, windows_of
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MATRIX_PRODUCTS, product_of
from amanda.tools.quantize import Grid, choose_qparams, extremes, fake_quantize, fake_quantize_gradient
from amanda.tools.select import Globs, Selection

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


class SearchError(AmandaError, ValueError, module="amanda.tools.search"):
    """A choice, an architecture, a budget or a model with which nothing can be searched."""


ACTIVATIONS = ("relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "elu", "softplus")
"""Words of StandardMapping, with the frameworks' usual settings."""

_SHAPE_KEEPING_TYPES = {*ACTIVATIONS, "dropout", "layer_norm", "softmax"}

Original = Callable[..., Any]


class OpCandidate:
    """A way to compute an op.

    label: its name in architectures.  skips: True if the op's branch of a residual block is not computed.
    """

    skips = False

    def __init__(self, label: str) -> None:
        self.label = label

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Create the candidate's state at an op; return why the op cannot have it, "" if the op can."""
        return ""

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the output of the op.  original: the op of the program, as a function of its inputs."""
        raise NotImplementedError

    def cost_shares(self, site: Site) -> tuple[float, float]:
        """Return FLOPs and bytes of the weight, as shares of those of the op itself."""
        return 1.0, 1.0


class KeepCandidate(OpCandidate):
    """The op itself."""

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops in place without an equivalent that is not in place."""
        is_known = site.type == "add" or site.type in ACTIVATIONS
        return "" if is_known or not context["in_place"] else f"{site.type} writes into its input"

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the op's output; an op in place, which PyTorch alone has, writes into a copy."""
        # In a mixture other candidates read the same input, which must not change before.
        return original(inputs[0].clone(), *inputs[1:]) if site.in_place else original(*inputs)


class SkipCandidate(OpCandidate):
    """The op's input; for an addition that ends a residual block, the input of the block."""

    skips = True

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops whose output may have another shape than their input."""
        # The branch is not computed either, so that a residual block becomes its shortcut.
        if site.type == "add":
            return "" if site.shortcut is not None else "it does not add a branch to what the branch reads"
        shape = context["shape"](context.get_inputs()[0])
        if site.type in _SHAPE_KEEPING_TYPES or (
            site.weight is not None and self._keeps_shape(context, site, shape)
        ):
            return ""
        return "its output may have another shape than its input"

    @staticmethod
    def _keeps_shape(context: amanda.OpContext, site: Site, shape: Sequence[int | None]) -> bool:
        """Return True for a product with a weight whose output has the shape of its first input, `shape`."""
        weight_shape = site.weight_shape
        product = product_of(context)
        # The first input takes the op's place: it has to be the factor that is not a weight.
        if product is None or product.factors != (0, site.weight):
            return False
        if site.type in MATRIX_PRODUCTS:
            # A square matrix keeps the last axis, and all others stay.
            return len(weight_shape) == 2 and weight_shape[0] == weight_shape[1]
        layout: str | None = context["layout"]
        if layout is None or None in shape:
            return False
        out_channels, _, *kernel = weight_shape
        # Spatial axes keep their sizes only with a fitting padding and a stride of 1.
        sizes = [shape[i] or 0 for i, axis in enumerate(layout) if axis not in "NC"]
        windows = windows_of(context.get_attrs(), layout, kernel)
        keeps_sizes = all(window.places(size) == size for window, size in zip(windows, sizes, strict=True))
        return keeps_sizes and shape[layout.index("C")] == out_channels

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the first input, or the block's input for an addition."""
        return inputs[site.shortcut or 0]

    def cost_shares(self, site: Site) -> tuple[float, float]:
        """Return 0: a skipped op costs nothing."""
        return 0.0, 0.0


class ActivationCandidate(OpCandidate):
    """Another activation."""

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse an op that is not an activation."""
        return "" if site.type in ACTIVATIONS else f"{site.type} is no activation"

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the activation of the first input."""
        return site.library.activation(self.label)(inputs[0])


class FunctionCandidate(OpCandidate):
    """A function of the user, of all inputs of the op."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "__name__", str(function)))
        self._function = function

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the result of the function."""
        return self._function(*inputs)


class WeightCandidate(OpCandidate):
    """Base for candidates that give the op another weight."""

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight that replaces the op's weight."""
        raise NotImplementedError

    def bias(self, value: Any, site: Site) -> Any:
        """Return the bias that replaces the op's bias: the same unless a candidate overrides it."""
        return value

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops without a weight that has output channels."""
        # Masks and scales are by output channel.
        is_known = site.weight is not None and site.layout is not None and "O" in site.layout
        return "" if is_known else f"{site.type} has no weight with output channels"

    def original_weight(self, context: amanda.OpContext, site: Site) -> Any:
        """Return the op's weight as an array of NumPy: outputs, inputs, window."""
        assert site.weight is not None
        value = context.get_value(site.weight)
        return canonical(tensors_of(value).to_numpy(value), site.layout)

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the output of the op with the other weight."""
        return original(*self.with_other_weight(inputs, site))

    def with_other_weight(self, inputs: Sequence[Any], site: Site) -> list[Any]:
        """Return the inputs with the other weight and bias."""
        # A copy: other candidates of a mixture read the inputs as they are.
        values = list(inputs)
        values[site.weight or 0] = self.weight(values[site.weight or 0], site)
        if site.bias is not None:
            values[site.bias] = self.bias(values[site.bias], site)
        return values


class ConvolutionCandidate(WeightCandidate):
    """A convolution with another kernel size or groups, with a weight of its own and the op's bias.

    The weight starts as the op's weight, cropped around the centre or padded with zeros; with groups, it
    starts as the blocks on the diagonal.
    """

    def __init__(self, label: str, kernel: int, groups: int) -> None:
        super().__init__(label)
        self.kernel, self.groups = kernel, groups

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Create the weight; refuse ops other than convolutions, and a window or channels that do not fit."""
        reason = super().set_up(context, site)
        layout: str | None = context["layout"]
        if reason or layout is None or not re.fullmatch("conv[123]d", site.type):
            return reason or f"{site.type} is no convolution"
        channels = context["shape"](context.get_inputs()[0])[layout.index("C")]
        outputs, channels_of_group, *window = site.weight_shape
        # Each group has as many channels as every other one.
        if channels % self.groups or outputs % self.groups:
            return f"{channels} to {outputs} channels are not {self.groups} groups"
        # An odd growth could not be shared evenly between both sides, and would shift the output by half an
        # element.
        if any((size - self.kernel) % 2 for size in window):
            return f"windows of {window[0]} and {self.kernel} have no common centre"
        kernel_growth = [self.kernel - size for size in window]
        op_groups = channels // channels_of_group
        reason = site.library.weight_obstacle(context, site) or site.library.convolution_obstacle(
            context, kernel_growth, op_groups
        )
        if not reason:
            site.keep_state(self.label, lambda: self._initial_weight(context, site, channels), trained=True)
        return reason

    def _initial_weight(self, context: amanda.OpContext, site: Site, channels: int) -> Any:
        """Return the op's weight with the candidate's window and groups.

        channels: of the input, from which follow the groups of the op itself.
        """
        # From the trained weight, not at random: the candidate starts near the op that it replaces.
        weight = self.original_weight(context, site)
        op_groups = channels // weight.shape[1]
        dense = _regroup_weight(weight, op_groups, 1)
        regrouped = _regroup_weight(_resize_window(dense, self.kernel), 1, self.groups)
        return restored(regrouped, site.layout, regrouped.shape)

    def weight(self, value: Any, site: Site) -> Any:
        """Return the candidate's weight."""
        return site.read(self.label, value)

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the convolution with a fitting padding; the library computes it by `original` if it can."""
        kernel_growth = [self.kernel - size for size in site.weight_shape[2:]]
        return site.library.convolve(
            original, self.with_other_weight(inputs, site), site, kernel_growth, self.groups
        )

    def cost_shares(self, site: Site) -> tuple[float, float]:
        """Return the share of elements of the weight."""
        # FLOPs and bytes of a convolution are in proportion to the elements of its weight.
        share = np.size(site.array(self.label)) / np.prod(site.weight_shape)
        return share, share


class WidthCandidate(WeightCandidate):
    """A share of the output channels, those with the largest weights; the other channels are zero."""

    def __init__(self, label: str, share: float) -> None:
        super().__init__(label)
        self._share = share

    def set_up(self, context: amanda.OpContext, site: Site) -> str:
        """Create the mask of output channels; refuse ops without a weight that has a value."""
        reason = super().set_up(context, site) or site.library.weight_obstacle(context, site)
        if not reason:
            site.keep_state(self.label, lambda: self._channel_mask(context, site), trained=False)
        return reason

    def _channel_mask(self, context: amanda.OpContext, site: Site) -> Any:
        """Return 1 for the output channels with the largest weights, and 0 for the rest."""
        weight = self.original_weight(context, site)
        norms = np.abs(weight).reshape(len(weight), -1).sum(1)
        mask = np.zeros(len(weight), np.float32)
        # Stable: of equal channels the first ones stay, on every machine.
        mask[np.argsort(-norms, kind="stable")[: ceil(self._share * len(weight))]] = 1
        return mask

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight with zeros."""
        mask = site.read(self.label, value)
        extents = [-1 if axis == "O" else 1 for axis in site.layout or ""]
        return value * tensors_of(mask).reshape(mask, extents)

    def bias(self, value: Any, site: Site) -> Any:
        """Return the bias with zeros."""
        return value * site.read(self.label, value)

    def cost_shares(self, site: Site) -> tuple[float, float]:
        """Return the share of channels."""
        share = float(np.mean(site.array(self.label)))
        return share, share


class BitsCandidate(WeightCandidate):
    """The weight on a grid of integers, each output channel with a scale; gradients pass straight through.

    The numbers are those of `QuantizeTool(method="dynamic", activation_bits=None)`.
    """

    def __init__(self, label: str, bits: int) -> None:
        super().__init__(label)
        # Symmetric, so that zero weights stay zero and no zero point is needed.
        self._grid = Grid.of(bits, symmetric=True)

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight on the grid."""
        xp, axes = tensors_of(value), ((site.layout or "").index("O"),)
        # From the weight of this execution: it is trained meanwhile.
        scale_and_zero_point = choose_qparams(*extremes(xp.detach(value), axes), self._grid)
        grid_arguments = (*scale_and_zero_point, self._grid, axes)

        def backward(gradient: Any, x: Any) -> tuple[Any]:
            return (fake_quantize_gradient(gradient, x, *grid_arguments),)

        return xp.with_gradient(lambda x: fake_quantize(x, *grid_arguments, kernel=False), backward, [value])

    def cost_shares(self, site: Site) -> tuple[float, float]:
        """Return the share of bits."""
        # Fake quantisation computes as many FLOPs as before; only the stored weight shrinks.
        return 1.0, self._grid.bits / (8 * site.itemsize)


def _regroup_weight(weight: Any, groups: int, target_groups: int) -> Any:
    """Return a weight (O, I, ...) with another number of groups: fewer add zeros, more drop elements."""
    output_count, group_size, *window = weight.shape
    dense = np.zeros((output_count, group_size * groups, *window), weight.dtype)
    for output, output_weight in enumerate(weight):
        group = output * groups // output_count
        # With groups each output sees the inputs of its group; in a dense weight all others are zero.
        dense[output, group * group_size : (group + 1) * group_size] = output_weight
    target_size = dense.shape[1] // target_groups
    starts = [output * target_groups // output_count * target_size for output in range(output_count)]
    return np.stack([dense[output, start : start + target_size] for output, start in enumerate(starts)])


def _resize_window(weight: Any, kernel: int) -> Any:
    """Return a weight (O, I, ...) with a window of another size around the same centre."""
    for axis in range(2, weight.ndim):
        size = weight.shape[axis]
        if kernel >= size:
            margin = (kernel - size) // 2
            pads = [(margin, margin) if i == axis else (0, 0) for i in range(weight.ndim)]
            weight = np.pad(weight, pads)
        else:
            margin = (size - kernel) // 2
            weight = weight.take(range(margin, size - margin), axis)
    return weight


_CANDIDATE_FORMS = "keep, skip, conv5, conv3g2 (kernel 3, 2 groups), width0.5, bits4"
_SHARED_PREFIX = "all "


class Choice:
    """Candidates for the ops of a selection; the first candidate is the default.

    Args:
        candidates: "keep", the op itself; "skip", its input, or for an addition that ends a residual block
            the input of the block; an activation, such as "gelu"; "conv5", another kernel size, and
            "conv3g2", other groups too; "width0.5", half of the output channels, the rest masked; "bits4",
            the weight quantised; or a function of the op's inputs that returns its output.
        type: See `amanda.tools.select.Selection`.
        module: See `type`.
        exclude: See `type`.
        shared: True if all ops have the same candidate, among those that each of them can have; `name` is
            then the name of the decision in architectures. Otherwise each op has a decision of its own.

    Raises:
        SearchError: For an unknown candidate.
        SelectionError: For a selection that fits no op.

    >>> choice = Choice(["keep", "conv5", "conv3g2"], type="conv2d", module="features")
    """

    @checked(error=SearchError)
    def __init__(
        self,
        candidates: Annotated[Sequence[Name | Callable[..., Any]], Length(2)],
        type: Globs = None,
        module: Globs = None,
        shared: bool = False,
        exclude: Globs = None,
    ) -> None:
        self.selection, self.shared = Selection(type, module, exclude=exclude), shared
        self.name = f"all {self.selection}"
        where = f"the choice at {self.selection}"
        self.candidates = [make_candidate(label_or_function, where) for label_or_function in candidates]
        labels = [candidate.label for candidate in self.candidates]
        # Architectures name candidates by their labels.
        repeated = {label for label in labels if labels.count(label) > 1}
        if repeated:
            raise SearchError(f"SearchTool: {where} has {', '.join(sorted(repeated))} twice; name each once")

    @classmethod
    @checked(error=SearchError)
    def of(cls, text: Name) -> Choice:
        """Return the choice that a string describes.

        Args:
            text: Op type, module and labels of candidates: "conv2d@features=keep|conv5"; "all
                sigmoid=keep|relu" is one choice for all ops.

        Raises:
            SearchError: For another text.
        """
        selection, equals_sign, candidates = text.partition("=")
        shared = selection.startswith(_SHARED_PREFIX)
        type, _, module = selection.removeprefix(_SHARED_PREFIX).partition("@")
        if not equals_sign or not (type or module) or "|" not in candidates:
            raise SearchError(f"SearchTool: choices has {text!r}; write type@module=candidate|candidate")
        return cls(candidates.split("|"), type or None, module or None, shared)


def make_candidate(label_or_function: str | Callable[..., Any], where: str) -> OpCandidate:
    """Return the candidate of a label or of a function.  where: the choice, for errors.

    Raises SearchError for an unknown label.
    """
    if callable(label_or_function):
        return FunctionCandidate(label_or_function)
    if label_or_function == "keep":
        return KeepCandidate(label_or_function)
    if label_or_function == "skip":
        return SkipCandidate(label_or_function)
    if label_or_function in ACTIVATIONS:
        return ActivationCandidate(label_or_function)
    match = re.fullmatch(r"conv([1-9]\d*)(?:g([1-9]\d*))?", str(label_or_function))
    if match:
        return ConvolutionCandidate(label_or_function, int(match[1]), int(match[2] or 1))
    match = re.fullmatch(r"bits([2-8])", str(label_or_function))
    if match:
        return BitsCandidate(label_or_function, int(match[1]))
    match = re.fullmatch(r"width(0?\.\d+|1)", str(label_or_function))
    # Not "width0.0", a layer without channels.
    if match and float(match[1]) > 0:
        return WidthCandidate(label_or_function, float(match[1]))
    allowed = f"{_CANDIDATE_FORMS}, {', '.join(ACTIVATIONS)}, or a function"
    raise SearchError(f"SearchTool: a candidate of {where} is {label_or_function!r}; it is one of {allowed}")
