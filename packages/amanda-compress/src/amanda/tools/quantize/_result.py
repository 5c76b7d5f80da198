"""Result of quantisation, a row for each tensor of each op; files of scales."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from amanda.files import write_file
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.results import (
    Column,
    Result,
    check_file,
    check_schema,
    count_of,
    not_met,
    parsing,
    read_text,
    shortened,
    to_json,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


_number = partial(Column, show="{:.4g}".format, number=True)
_decibels = partial(Column, show="{:.1f}".format, number=True, unit="dB")


def sqnr(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) in dB.

    Args:
        signal: Sum of the squares of the values.
        noise: Sum of the squares of their errors.

    >>> sqnr(100.0, 1.0)
    20.0
    """
    if noise == 0:
        # No noise: also for a signal of 0, which is exact.
        return inf
    return 10 * log10(signal / noise) if signal else -inf


@dataclass(frozen=True)
class Quantized:
    """One quantised tensor that an op reads.

    tensor: "weight", or "input 0" by its position in the op's schema.  scale, zero_point: one number, or one
    per channel; None before a calibration, and if each execution computes a new scale.
    low, high: ends of the grid.  group_size: of a weight with scales for groups.
    dtype: of a floating type, "" for integers.
    sqnr, output_sqnr: in dB, of the tensor and of the op's outputs; None if not measured.
    """

    phase: str
    type: str
    module: str
    source: str
    tensor: str
    bits: int
    symmetric: bool
    low: int
    high: int
    axes: tuple[int, ...]
    scale: tuple[float, ...] | None
    zero_point: tuple[float, ...] | None
    group_size: int | None
    dtype: str
    executions: int
    sqnr: float | None
    output_sqnr: float | None

    @property
    def scheme(self) -> str:
        """Return "symmetric", "affine" or a floating type, and the size of groups."""
        kind = self.dtype or ("symmetric" if self.symmetric else "affine")
        return kind if self.group_size is None else f"{kind}, groups of {self.group_size}"


class QuantizeResult(Result):
    """A row for each quantised tensor, in the order in which ops were analysed.

    waiting: names of loaded scales that no analysed op has.
    left: reasons why selected weights are not quantised, by the type and module of the op.
    """

    name: ClassVar[str] = "quantize"
    title = "Quantised tensors"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(name, show=partial(shortened, width=24)) for name in ("phase", "type", "module", "source")),
        Column("tensor"), Column("bits", number=True), Column("scheme"), Column("channels", number=True),
        _number("scale"), _number("zero_point"), _number("least"), _number("most"),
        Column("executions", show="{:,}".format, number=True), _decibels("SQNR"), _decibels("output SQNR"),
    )  # fmt: skip

    def __init__(
        self,
        tensors: Iterable[Quantized],
        method: str = "static",
        waiting: Sequence[str] = (),
        left: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.method, self.waiting, self.left = method, tuple(waiting), dict(left or {})

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each tensor, with its largest scale and the zero point of that channel."""
        return [
            (tensor.phase, tensor.type, tensor.module, tensor.source, tensor.tensor, tensor.bits,
             tensor.scheme, len(tensor.scale or ()) if tensor.axes else None,
             *_range_of_largest_scale(tensor), tensor.executions, _finite(tensor.sqnr),
             _finite(tensor.output_sqnr))
            for tensor in self.tensors
        ]  # fmt: skip

    def worst(self, count: int | None = None) -> list[tuple[str, str, float]]:
        """Return module, type and SQNR of outputs in dB of the measured ops, the least SQNR first.

        Args:
            count: Number of ops; None for all.
        """
        ops = dict.fromkeys(
            (tensor.module, tensor.type, tensor.source, tensor.output_sqnr) for tensor in self.tensors
        )
        measured = [(module, kind, ratio) for module, kind, _, ratio in ops if ratio is not None]
        return sorted(measured, key=lambda row: row[2])[:count]

    @property
    def _leading(self) -> int:
        """Number of notes at the top: the summary."""
        return bool(self.tensors)

    def _summary(self) -> str:
        """Return the number of tensors, their bits, and the op with the most noise."""
        bits = " and ".join(sorted({f"{tensor.bits} bits" for tensor in self.tensors}))
        ops = len({(tensor.phase, tensor.type, tensor.module, tensor.source) for tensor in self.tensors})
        text = f"{count_of(len(self.tensors), 'tensor')} of {count_of(ops, 'op')} in {bits}, {self.method}"
        for module, kind, ratio in self.worst(1):  # none without measurements
            place = f"{kind} in {module}" if module else kind
            text += f"; the least output SQNR is {ratio:.1f} dB, {place}"
        return f"{text}."

    def notes(self) -> Sequence[str]:
        """Return sentences on the columns, and on weights that are not quantised."""
        skipped = [f"Skipped the weight of {place}: {why}." for place, why in self.left.items()]
        if not self.tensors:
            return skipped or ["No op of the types that are to be quantised was met."]
        notes = [self._summary()]
        notes += [
            "scale: the largest of a tensor's channels; least and most: the range that this scale represents."
        ]
        if any(tensor.output_sqnr is not None for tensor in self.tensors):
            notes.append(
                "SQNR: signal-to-quantisation-noise ratio of the tensor; output SQNR: of the op's outputs, "
                "against those of unquantised inputs; empty without noise."
            )
        return [*notes, *not_met("scales", self.waiting), *skipped]

    def _facts(self) -> Mapping[str, Any]:
        """Return the method, all scales and zero points, and reasons for skipped weights."""
        qparams = [
            {"axes": tensor.axes, "low": tensor.low, "high": tensor.high, "scale": tensor.scale,
             "zero_point": tensor.zero_point} for tensor in self.tensors
        ]  # fmt: skip
        return {"method": self.method, "qparams": qparams, "left": self.left}


def _finite(ratio: float | None) -> float | None:
    """Return a ratio that JSON can represent; None for others."""
    return ratio if ratio is not None and isfinite(ratio) else None


def _range_of_largest_scale(tensor: Quantized) -> tuple[float | None, ...]:
    """Return the largest scale, its zero point, and the ends of its range; None for each without a scale."""
    if tensor.scale is None or tensor.zero_point is None:
        return None, None, None, None
    # The channel with the largest scale has the coarsest steps.
    scale, zero_point = max(zip(tensor.scale, tensor.zero_point, strict=True))
    return scale, zero_point, (tensor.low - zero_point) * scale, (tensor.high - zero_point) * scale


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

        # safetensors writes memory as it lies; ascontiguousarray makes a scalar an array of one, which the
        # reshape undoes.
        contiguous_arrays = {
            name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
        }
        return write_file(path, save(contiguous_arrays, {"amanda": to_json(description)}))
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
            arrays = {name: np.array(array["values"], _checked_dtype(array["dtype"]))
                      for name, array in about.pop("arrays").items()}  # fmt: skip
        # Before anything in the file is used.
        check_schema(about, _NAME, _VERSION)
        for name in ("options", "grids"):
            if not isinstance(about.get(name, {}), Mapping):
                raise ValueError(f"its {name} are {about[name]!r}")
    return arrays, about


def _checked_dtype(name: str) -> str:
    """Return the type of an array of a file; raise ValueError for a type that no scale has."""
    # Files come from elsewhere: NumPy would take a type such as "object".
    if name not in ("float32", "int32"):
        raise ValueError(f"arrays of {name}")
    return name
