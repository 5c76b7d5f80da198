"""QuantizeTool: simulate quantisation of the weights and activations that ops read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import amanda
from amanda.files import write_file
from amanda.options import Name, NonNegativeInt, PositiveInt, PositiveShare, Range, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import SEVERAL_WEIGHTS, StandardMapping
from amanda.tools.quantize._grid import Bits, QuantizeError, Rounding
from amanda.tools.quantize._observers import ObserverName
from amanda.tools.quantize._op import QuantizedOp
from amanda.tools.quantize._options import TYPES, Method, QuantizeOptions, operand_rules
from amanda.tools.quantize._quantizer import Quantizer
from amanda.tools.quantize._result import QuantizeResult
from amanda.tools.results import check_file, check_schema, parsing, read_text, to_json
from amanda.tools.select import Globs, Patterns, Selection, as_remarks, listed
from amanda.tools.weights import SharedState, WeightReads

if TYPE_CHECKING:
    from numpy.typing import NDArray


_NAME, _VERSION = "quantize.scales", 1

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"


def write_scales(path: str | Path, arrays: Arrays, about: Mapping[str, Any]) -> Path:
    """Write arrays by name, and their description `about`, as .json or .safetensors.

    Raises QuantizeError for another suffix, and FileError; an error leaves an existing file unchanged.
    """
    path = Path(path)
    description = {"schema": f"amanda.{_NAME}", "version": _VERSION, **about}
    if path.suffix == ".json":
        array_values = {
            name: {"dtype": str(array.dtype), "values": array.tolist()} for name, array in arrays.items()
        }
        return write_file(path, to_json({**description, "arrays": array_values}, indent=1) + "\n")
    if path.suffix == ".safetensors":
        from safetensors.numpy import save

        plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
        return write_file(path, save(plain, {"amanda": to_json(description)}))
    raise QuantizeError(f"{path} has another suffix than .json and .safetensors")


def read_scales(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays in a file of `write_scales`, and their description.

    Raises QuantizeError for a file of another kind, or of a newer version, and FileError without one.
    """
    path = Path(path)
    with parsing(path, "file of scales", QuantizeError):
        if path.suffix == ".safetensors":
            check_file(path)
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["amanda"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            about = json.loads(read_text(path))
            arrays = {name: np.array(array["values"], _dtype(array["dtype"]))
                      for name, array in about.pop("arrays").items()}  # fmt: skip
        check_schema(about, _NAME, _VERSION)
        for name in ("options", "grids"):
            if not isinstance(about.get(name, {}), Mapping):
                raise ValueError(f"its {name} are {about[name]!r}")
    return arrays, about


def _dtype(name: str) -> str:
    if name not in ("float32", "int32"):
        raise ValueError(f"arrays of {name}")
    return name


class QuantizeTool(amanda.Tool):
    """Simulate quantisation of the weights and activations that ops read.

    method: where scales come from.  "static": a calibration, then they are fixed; "dynamic": for activations
        the values of each execution; "qat": training with the straight-through estimator, where scales
        follow the values until `freeze`; "lsq", "lsq+": learned scales, and offsets of activations.
    weight_bits, activation_bits: 2 to 16, or "e4m3" or "e5m2" for 8-bit floating-point types; None leaves
        weights or activations unquantised.  {"layer1": 8, "*": 4} gives bits by globs of module paths; the
        first matching glob applies, and an op without a match is not quantised.
    type: globs of op types, as StandardMapping or the framework names them; None for convolutions, linear
        layers, matrix products and attention.
    module, exclude: globs of module paths to quantise, and to skip; a path includes its submodules.
    observer, weight_observer: how a calibration chooses the range of activations, and of weights: "minmax",
        "percentile" (from 100 - `percentile` to `percentile`), "mse" (least squared error), "histogram" (as
        in torch.ao).
    per_channel: True for a scale for each output channel of a weight, False for one scale.
    group_size: number of consecutive input channels of a weight that share a scale, such as 32, 64 or 128;
        None for no groups.
    symmetric_weights, symmetric_activations: True for signed integers with zero point 0, False for unsigned
        integers with any zero point.
    rounding: "half_even" as in torch.ao; "half_up" as in TensorFlow's fake_quant ops; "half_away".
    averaging: weight of each new batch in the moving averages of "qat".
    calibration: number of executions that calibrate an op; 0: only executions in `with calibrating()`.
    sqnr: measure signal-to-quantisation-noise ratios; each op then runs twice.

    Raises QuantizeError for options that contradict each other.

    >>> quantize = QuantizeTool(activation_bits=None)
    """

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
            method, weight_bits, activation_bits, types, observer, weight_observer, percentile, per_channel,
            group_size, symmetric_weights, symmetric_activations, rounding, averaging, calibration,
        )  # fmt: skip
        self.measures, self.is_calibrating, self.is_frozen = sqnr, False, False
        self._ops: dict[str, QuantizedOp] = {}
        self._skipped_ops: dict[str, str] = {}
        self.parts = SharedState()
        self.depends_on(StandardMapping(), operand_rules(), WeightReads())
        self.add_inst_for_op(self._quantise_op)
        if self.options.trains:
            self.add_inst_for_op(self._clip_gradients_of_op, backward=True)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context in which executions calibrate scales and run unquantised.

        Use the context within a scope: `with amanda.apply(tool), tool.calibrating(): ...`.  An exception
        discards the calibration, and scales stay as they were before.
        """
        self.is_calibrating = True
        try:
            yield
        except BaseException:
            for op in self._ops.values():
                op.forget()
            raise
        finally:
            self.is_calibrating = False
        with amanda.disabled():
            for op in self._ops.values():
                op.finish_calibration()

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
        waiting = [name for name in self.waiting_state() if name.endswith(".scale")] if rows else []
        skipped = {op.name: op.skip_reason for op in ops if op.skip_reason}
        result = QuantizeResult(rows, self.options.method, waiting, skipped | self._skipped_ops)
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
        """Forget all scales and noise."""
        self.is_calibrating = self.is_frozen = False
        self.load_state_dict({})

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load scales that `state_dict` returned, as tensors or arrays."""
        self._ops, self.parts, self._skipped_ops = {}, SharedState(), {}
        super().load_state_dict(state, strict)

    def save(self, path: str | Path) -> Path:
        """Write scales, zero points and offsets, by "module/op/tensor", as .json or .safetensors.

        Zero points are integers; the file has the grid of each tensor and the axes of its channels.
        """
        names = {id(value): name for name, value in self.state_dict().items()}
        arrays, grids = {}, {}
        for quantizer in self._quantizers():
            for part, value in quantizer.state.items() if quantizer.has_scale else ():
                name = names[id(value)]
                arrays[name] = quantizer.array(part).astype("int32" if part == "zero_point" else "float32")
                grids[name.removesuffix(f".{part}")] = {
                    "low": quantizer.grid.low, "high": quantizer.grid.high, "axes": quantizer.axes,
                    "group_size": quantizer.group_size,
                    "dtype": getattr(quantizer.grid, "dtype", ""),
                }  # fmt: skip
        return write_scales(path, arrays, {"options": self.options.scale_options(), "grids": grids})

    def load(self, path: str | Path) -> None:
        """Load scales from a file that `save` wrote.

        Raises QuantizeError for a file that a tool with other options wrote.
        """
        arrays, about = read_scales(path)
        mine, theirs = self.options.scale_options(), about.get("options", {})
        unlike = [f"{name} {theirs.get(name)!r}, not {mine[name]!r}" for name in mine
                  if theirs.get(name) != mine[name]]  # fmt: skip
        if unlike:
            raise QuantizeError(f"{path} holds scales for {'; '.join(unlike)}")
        self.load_state_dict(arrays)

    def gradients(self) -> list[tuple[Any, Any]]:
        """Return pairs of a gradient and a learned scale or offset, for `optimizer.apply_gradients`.

        For TensorFlow, where no tape reaches the scales in graphs; each call resets the gradients.
        PyTorch's optimizers take the parameters that `parameters` returns.
        """
        pairs = []
        for quantizer in self._quantizers():
            pairs += [(gradient, quantizer.state[part]) for part, gradient in quantizer.collected.items()]
            quantizer.collected = {}
        return pairs

    def quantized_op(self, context: amanda.OpContext) -> QuantizedOp | None:
        """Return the quantizers of an analysed op; None for an op that is not quantised."""
        return self._ops.get(self.place(context))

    def _quantizers(self) -> Iterator[Quantizer]:
        for op in self._ops.values():
            yield from op.created

    def _quantise_op(self, context: amanda.OpContext) -> None:
        """Create the quantizers of a selected op at its first analysis, and insert their routines."""
        kind = context["type"]
        if context["phase"] != "forward" or WeightReads.computes_weight(context):
            return
        is_several = not self._selection.has_types and kind in SEVERAL_WEIGHTS
        if not (self._selection.has_types or is_several or self._types(kind, context.get_op_type())):
            return
        if not self._selection.fits(context):
            return
        if is_several:
            self._skipped_ops[f"{kind} of {context.get_scope() or context.get_source()}"] = (
                WeightReads.several_weights
            )
            return
        name = self.place(context)
        if name not in self._ops:
            options = self.options.for_modules(context.get_scopes())
            if options is None:
                return
            self._ops[name] = QuantizedOp(context, self, options)
        self._ops[name].insert(context)

    def _clip_gradients_of_op(self, context: amanda.OpContext) -> None:
        op = self.quantized_op(context) if context["is_called_back"] else None
        if op is not None:
            op.insert_backward(context)
