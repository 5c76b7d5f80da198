"""QuantizeTool: simulate quantisation of the weights and activations that ops read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import amanda
from amanda.options import Name, NonNegativeInt, PositiveInt, PositiveShare, Range, checked
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS, MappingTool, StandardMapping, product_of
from amanda.tools.quantize._fake_quantize import Bits, FloatGrid, Grid, QuantizeError, Rounding
from amanda.tools.quantize._observers import Observer, ObserverName, new_observer
from amanda.tools.quantize._op import QuantizedOp
from amanda.tools.quantize._quantizer import Quantizer
from amanda.tools.quantize._result import QuantizeResult, read_scales, write_scales
from amanda.tools.quantize._tensorflow import write_recompute
from amanda.tools.select import Globs, Paths, Patterns, Selection, as_remarks, listed, unmatched
from amanda.tools.weights import SharedState, WeightReads

Method = Literal["static", "dynamic", "qat", "lsq", "lsq+"]

# Some frameworks have convolutions that StandardMapping has no word for.
TYPES = ("conv[!e]*", *(kind for kind in PRODUCTS if kind not in SEVERAL_WEIGHTS))
"""Types of the ops whose inputs are quantised by default."""

_DATA_ALONE = frozenset({"batch_norm", "embedding", "layer_norm", "group_norm"})
"""Types of ops of which only the first input is quantised."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `QuantizeTool`, under the same names."""

    method: Method
    weight_bits: Bits | Mapping[str, Bits | None] | None
    activation_bits: Bits | Mapping[str, Bits | None] | None
    types: tuple[str, ...]
    observer: ObserverName
    weight_observer: ObserverName
    percentile: float
    per_channel: bool
    group_size: int | None
    symmetric_weights: bool
    symmetric_activations: bool
    rounding: Rounding
    averaging: float
    calibration: int

    def __post_init__(self) -> None:
        """Raise QuantizeError for options that contradict each other."""
        if self.weight_bits is None and self.activation_bits is None:
            raise QuantizeError("weight_bits and activation_bits are both None: nothing would be quantised")
        # Each value of a mapping is checked when the tool is made, also those whose glob matches no op of the
        # model.
        for option in (self.weight_bits, self.activation_bits):
            for bits in option.values() if isinstance(option, Mapping) else [option]:
                if bits is not None:
                    self._check_grid(Grid.of(bits, False))
        if self.group_size is not None and not self.per_channel:
            raise QuantizeError(
                f"group_size is {self.group_size}, and per_channel False: a group lies within a channel"
            )
        if self.method.startswith("lsq") and self.rounding != "half_even":
            raise QuantizeError(f"{self.method} rounds half to even; rounding is {self.rounding!r}")
        # These methods look at one batch, on the device of the tensor; observers need several, on the host.
        if self.method in ("dynamic", "qat") and self.observer != "minmax":
            raise QuantizeError(
                f"observer is {self.observer!r}, but {self.method} takes the extremes at each execution; "
                'leave it at "minmax", or let method be "static"'
            )

    def _check_grid(self, grid: Grid) -> None:
        """Raise QuantizeError for options that a grid of floating numbers does not support."""
        if not isinstance(grid, FloatGrid):
            return
        is_unfit = {"method": self.method.startswith("lsq"), "rounding": self.rounding != "half_even",
                    "observer": self.observer == "histogram",
                    "weight_observer": self.weight_observer == "histogram"}  # fmt: skip
        for name, unfit in is_unfit.items():
            if unfit:
                raise QuantizeError(
                    f"{name} is {getattr(self, name)!r}, which is for integers, and bits are {grid.dtype}"
                )

    @property
    def trains(self) -> bool:
        """True if gradients pass through quantised values."""
        return self.method not in ("static", "dynamic")

    def scale_options(self) -> dict[str, Any]:
        """Return the options that saved scales depend on, by name."""
        names = ("method", "weight_bits", "activation_bits", "per_channel", "group_size",
                 "symmetric_weights", "symmetric_activations")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def for_modules(self, paths: Sequence[str]) -> QuantizeOptions | None:
        """Return the options for an op in modules with these paths, whose globs then count as matched.

        None for no quantisation.
        """
        weight_bits, activation_bits = (_bits_for_paths(option, paths) for option in self._bits_options)
        if weight_bits is None and activation_bits is None:
            return None
        if (weight_bits, activation_bits) == (self.weight_bits, self.activation_bits):
            return self
        return replace(self, weight_bits=weight_bits, activation_bits=activation_bits)

    @cached_property
    def _bits_options(self) -> list[Any]:
        """Return `weight_bits` and `activation_bits`; a mapping as a list of (paths of a glob, bits)."""
        options = {"weight_bits": self.weight_bits, "activation_bits": self.activation_bits}
        return [
            [(Paths(name, glob), bits) for glob, bits in bits_option.items()]
            if isinstance(bits_option, Mapping) else bits_option
            for name, bits_option in options.items()
        ]  # fmt: skip

    def unmatched(self) -> list[str]:
        """Return sentences on globs of `weight_bits` and `activation_bits` that matched no op."""
        mappings = [option for option in self._bits_options if isinstance(option, list)]
        return unmatched(paths for mapping in mappings for paths, _ in mapping)

    def bits(self, weight: bool) -> Any:
        """Return the bits of weights, or of activations; None for no quantisation."""
        return self.weight_bits if weight else self.activation_bits

    def grid(self, weight: bool) -> Grid:
        """Return the grid of weights, or of activations."""
        learned = self.method.startswith("lsq")  # activations have an offset, or choose a sign
        symmetric = self.symmetric_weights if weight else self.symmetric_activations and not learned
        return Grid.of(self.bits(weight) or 8, symmetric)

    def make_observer(self, weight: bool, axes: Sequence[int]) -> Observer:
        """Return an observer that calibrates a tensor."""
        # LSQ+ starts the scale and offset of activations from the least squared error (Bhalgat et al. 2020).
        name = self.weight_observer if weight else "mse" if self.method == "lsq+" else self.observer
        return new_observer(name, self.grid(weight), axes, self.rounding, self.percentile)


def _bits_for_paths(option: Any, paths: Sequence[str]) -> Any:
    """Return the bits that an option of bits gives to an op in modules with these paths; None for none.

    option: of `QuantizeOptions._bits_options`: pairs (paths of a glob, bits), or the bits of all ops.
    """
    if not isinstance(option, list):
        return option
    # The first glob that matches counts, so that "*" at the end is a default.
    return next((bits for matches, bits in option if matches(*paths)), None)


def operand_rules() -> MappingTool:
    """Return rules that write `operands`, the positions to quantise, `recompute` and `is_called_back`.

    Operands are the factors of a product, and all inputs of most other types.
    is_called_back: True if the program calls routines in Python (JAX); autodiff does not differentiate these,
    so that a routine after the backward op changes the gradients.
    """
    return MappingTool([
        # Rules in their order: the later one of a framework overwrites the general one.
        ["*", partial(_write_is_called_back, False)], ["jax", partial(_write_is_called_back, True)],
        ["*", _write_operands],
        ["tensorflow", write_recompute],
    ])  # fmt: skip


def _write_is_called_back(is_called_back: bool, context: amanda.OpContext) -> None:
    context["is_called_back"] = is_called_back


def _write_operands(context: amanda.OpContext) -> None:
    """Write `operands`: positions of a product's factors, of the only input with data, or of all inputs."""
    product, count = product_of(context), len(context.get_inputs())
    positions: Sequence[int] = range(count)
    if product and product.factors:  # the factors of an einsum are one list, and have no positions
        # A bias is added in the precision of the sum and stays as it is.
        positions = sorted(product.factors)
    elif context["type"] in _DATA_ALONE:
        positions = [0]
    context["operands"] = [position for position in positions if position < count]


class QuantizeTool(amanda.Tool):
    """Simulate quantisation of the weights and activations that ops read.

    Args:
        method: Where scales come from.  "static": a calibration, then they are fixed; "dynamic": for
            activations the values of each execution; "qat": training with the straight-through estimator,
            where scales follow the values until `freeze`; "lsq", "lsq+": learned scales, and offsets of
            activations.
        weight_bits: 2 to 16, or "e4m3" or "e5m2" for 8-bit floating-point types; None leaves weights or
            activations unquantised.  {"layer1": 8, "*": 4} gives bits by globs of module paths; the first
            matching glob applies, and an op without a match is not quantised.
        activation_bits: See `weight_bits`.
        type: Globs of op types, as StandardMapping or the framework names them; None for convolutions, linear
            layers, matrix products and attention.
        module: Globs of module paths to quantise, and to skip; a path includes its submodules.
        exclude: See `module`.
        observer: How a calibration chooses the range of activations, and of weights: "minmax", "percentile"
            (from 100 - `percentile` to `percentile`), "mse" (least squared error), "histogram" (as in
            torch.ao).
        weight_observer: See `observer`.
        percentile: Of observer "percentile", above 50.
        per_channel: True for a scale for each output channel of a weight, False for one scale.
        group_size: Number of consecutive input channels of a weight that share a scale, such as 32, 64 or
            128; None for no groups.
        symmetric_weights: True for signed integers with zero point 0, False for unsigned integers with any
            zero point.
        symmetric_activations: See `symmetric_weights`.
        rounding: "half_even" as in torch.ao; "half_up" as in TensorFlow's fake_quant ops; "half_away".
        averaging: Weight of each new batch in the moving averages of "qat".
        calibration: Number of executions that calibrate an op; 0: only executions in `with calibrating()`, so
            that the command line takes method "dynamic" then.
        sqnr: Measure signal-to-quantisation-noise ratios; each op then runs twice.

    Raises:
        QuantizeError: For options that contradict each other.

    >>> quantize = QuantizeTool(activation_bits=None)
    """

    purpose = "compress"

    @classmethod
    def command_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options with method "dynamic" unless a method, or executions to calibrate, are given.

        Unchanged too if activations are not quantised.

        Raises QuantizeError for method "static" without such executions: activations would have no scale.
        """
        if options.get("calibration") or options.get("activation_bits", 8) is None:
            return options
        if options.get("method") == "static":
            raise QuantizeError(
                "method=static needs calibration=N, executions to calibrate each op; method=dynamic does not"
            )
        return {"method": "dynamic", **options}

    @checked(error=QuantizeError)
    def __init__(
        self,
        method: Method = "static",
        weight_bits: Bits | Mapping[Name, Bits | None] | None = 8,
        activation_bits: Bits | Mapping[Name, Bits | None] | None = 8,
        type: Globs = None,
        observer: ObserverName = "minmax",
        weight_observer: ObserverName = "minmax",
        percentile: Annotated[float, Range(above=50, most=100)] = 99.99,
        per_channel: bool = True,
        symmetric_weights: bool = True,
        symmetric_activations: bool = False,
        rounding: Rounding = "half_even",
        averaging: PositiveShare = 0.01,
        calibration: NonNegativeInt = 0,
        sqnr: bool = False,
        group_size: PositiveInt | None = None,
        module: Globs = None,
        exclude: Globs = None,
    ) -> None:
        super().__init__()
        types = TYPES if type is None else tuple(listed("type", type, QuantizeError) or ())
        self._types = Patterns("type", types)
        self._selection = Selection(type, module, exclude=exclude)
        self.options = QuantizeOptions(
            method=method, weight_bits=weight_bits, activation_bits=activation_bits, types=types,
            observer=observer, weight_observer=weight_observer, percentile=percentile,
            per_channel=per_channel, group_size=group_size, symmetric_weights=symmetric_weights,
            symmetric_activations=symmetric_activations, rounding=rounding, averaging=averaging,
            calibration=calibration,
        )  # fmt: skip
        # `measures` is the option `sqnr`, whose name is that of a function here.
        self.measures, self.is_calibrating, self.is_frozen = sqnr, False, False
        self._ops: dict[str, QuantizedOp] = {}
        self._skipped_ops: dict[str, str] = {}
        self.parts = SharedState()
        self.depends_on(StandardMapping(), operand_rules(), WeightReads())
        self.add_inst_for_op(self._quantise_op)
        # Autodiff of PyTorch and TensorFlow differentiates the routines; the backward routine is for programs
        # that call them back (JAX).
        if self.options.trains:
            self.add_inst_for_op(self._clip_gradients_of_op, backward=True)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context in which executions calibrate and run unquantised; its end sets the scales.

        Use the context within a scope: `with amanda.apply(tool), tool.calibrating(): ...`.  An exception
        discards the calibration, and scales stay as they were before.
        """
        self.is_calibrating = True
        try:
            yield
        except BaseException:
            # Half a calibration would give scales that look like whole ones.
            for op in self._ops.values():
                op.forget_observations()
            raise
        finally:
            self.is_calibrating = False
        # Computing scales runs ops, which tools of the scope, this one among them, would quantise.
        with amanda.disabled():
            for op in self._ops.values():
                op.finish_calibration()

    def prepare(self, model: Callable[..., Any], *example: Any, **kwargs: Any) -> Any:
        """Run `model` once, so that scales are made; "static" calibrates by it if `calibration` is 0.

        A model that was calibrated before, or whose scales were loaded, keeps its scales.

        Args:
            model: A module or another callable.
            *example: What it is called with, such as a batch.
            **kwargs: Keyword arguments of the call.

        Returns:
            What the model returns.
        """
        has_scales = any(quantizer.has_scale and not quantizer.is_weight for quantizer in self._quantizers())
        needs_scales = self.options.method == "static" and not (has_scales or self.waiting_state())
        calibrates = needs_scales and not self.options.calibration
        with self.calibrating() if calibrates else nullcontext():
            return super().prepare(model, *example, **kwargs)

    def freeze(self) -> None:
        """Fix the scales of "qat"."""
        self.is_frozen = True

    def unfreeze(self) -> None:
        """Make the scales of "qat" follow the values again."""
        self.is_frozen = False

    @property
    def result(self) -> QuantizeResult:
        """Scale, zero point and noise of each quantised tensor."""
        ops = self._ops.values()
        rows = [row for op in ops for row in op.rows()]
        # Before the first execution all loaded state is waiting, which is not a fault.
        waiting_names = [name for name in self.waiting_state() if name.endswith(".scale")] if rows else []
        skipped = {op.name: op.skip_reason for op in ops if op.skip_reason}
        result = QuantizeResult(rows, self.options.method, waiting_names, skipped | self._skipped_ops)
        result.remarks = as_remarks(self.unmatched())
        return result

    def unmatched(self) -> list[str]:
        """Return sentences on options that matched no op."""
        return [
            *super().unmatched(),
            *self.options.unmatched(),
            *self._selection.unmatched(),
        ]

    def clear(self) -> None:
        """Forget all scales and noise, and unfreeze."""
        self.is_calibrating = self.is_frozen = False
        self.load_state_dict({})

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load scales that `state_dict` returned; forget noise, executions and skipped ops.

        Args:
            state: Scales by key, as tensors or arrays.
            strict: As in `amanda.Tool.load_state_dict`.
        """
        # Quantizers take their state when they are created: after a load they are created anew.
        self._ops, self.parts, self._skipped_ops = {}, SharedState(), {}
        super().load_state_dict(state, strict)

    def save(self, path: str | Path) -> Path:
        """Write scales, zero points and offsets, by "module/op/tensor".

        Zero points are integers; the file has the grid of each tensor and the axes of its channels.  Tensors
        without a scale are left out.

        Args:
            path: File to write, whose suffix is .json or .safetensors.

        Returns:
            The path of the file.

        Raises:
            QuantizeError: For another suffix.
        """
        # Only the core knows under which names state is saved.
        name_by_id = {id(value): name for name, value in self.state_dict().items()}
        arrays, grids = {}, {}
        for quantizer in self._quantizers():
            for part, value in quantizer.state.items() if quantizer.has_scale else ():
                name = name_by_id[id(value)]
                arrays[name] = quantizer.array(part).astype("int32" if part == "zero_point" else "float32")
                grids[name.removesuffix(f".{part}")] = {
                    "low": quantizer.grid.low, "high": quantizer.grid.high, "axes": quantizer.axes,
                    "group_size": quantizer.group_size,
                    "dtype": quantizer.grid.dtype,
                }  # fmt: skip
        return write_scales(path, arrays, {"options": self.options.scale_options(), "grids": grids})

    def load(self, path: str | Path) -> None:
        """Load scales from a file that `save` wrote.

        Args:
            path: File that `save` wrote.

        Raises:
            QuantizeError: For another file, and one that a tool with other options wrote.
        """
        arrays, about = read_scales(path)
        options, file_options = self.options.scale_options(), about.get("options", {})
        differences = [
            f"{name} {file_options.get(name)!r}, not {option!r}"
            for name, option in options.items() if file_options.get(name) != option
        ]  # fmt: skip
        if differences:
            raise QuantizeError(f"{path} holds scales for {'; '.join(differences)}")
        self.load_state_dict(arrays)

    def gradients(self) -> list[tuple[Any, Any]]:
        """Return pairs of a gradient and a learned scale or offset, for `optimizer.apply_gradients`.

        For TensorFlow, where no tape reaches the scales in graphs; each call resets the gradients.
        PyTorch's optimizers take the parameters that `parameters` returns.
        """
        pairs = []
        for quantizer in self._quantizers():
            pairs += [(gradient, quantizer.state[part]) for part, gradient in quantizer.collected.items()]
            # Each call hands gradients over once, as an optimizer's step uses them.
            quantizer.collected = {}
        return pairs

    def quantized_op(self, context: amanda.OpContext) -> QuantizedOp | None:
        """Return the quantizers of an analysed op; None for an op that is not quantised."""
        return self._ops.get(self.place(context))

    def _quantizers(self) -> Iterator[Quantizer]:
        for op in self._ops.values():
            yield from op.created

    def _quantise_op(self, context: amanda.OpContext) -> None:
        """Create the quantizers of a selected op at its first analysis, and insert their routines.

        An op of several weights, such as an LSTM, is recorded as skipped.
        """
        kind = context["type"]
        if context["phase"] != "forward" or WeightReads.computes_weight(context):
            return
        # A recurrent layer is named in the result, since users expect it among the default types.
        has_several_weights = not self._selection.has_types and kind in SEVERAL_WEIGHTS
        is_of_type = self._selection.has_types or self._types(kind, context.get_op_type())
        if not (is_of_type or has_several_weights) or not self._selection.fits(context):
            return
        if has_several_weights:
            self._skipped_ops[f"{kind} of {context.get_scope() or context.get_source()}"] = (
                WeightReads.several_weights
            )
            return
        name = self.place(context)
        # By place and not by op: a graph that is traced again has new ops in the same places, and keeps its
        # scales.
        if name not in self._ops:
            options = self.options.for_modules(context.get_scopes())
            if options is None:
                return
            self._ops[name] = QuantizedOp(context, self, options)
        self._ops[name].insert_routines(context)

    def _clip_gradients_of_op(self, context: amanda.OpContext) -> None:
        """Insert the routine that clips gradients, where the program calls routines back."""
        op = self.quantized_op(context) if context["is_called_back"] else None
        if op is not None:
            op.insert_backward(context)
