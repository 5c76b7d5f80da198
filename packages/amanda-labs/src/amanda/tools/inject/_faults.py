"""Faults: number formats in memory, changes of elements, and the result: a row for each changed element."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from amanda.errors import AmandaError
from amanda.tools.kit import Tensors, tensors_of
from amanda.tools.libraries import ml_dtypes
from amanda.tools.libraries import numpy as np
from amanda.tools.results import Column, Result, count_of, shortened

if TYPE_CHECKING:
    from numpy.typing import NDArray

BitField = Literal["any", "sign", "exponent", "mantissa"]
"""A part of a number in memory."""

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")
_FLOATS = frozenset({"float16", "float32", "float64"})
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@cache
def bits_of(dtype: str | None, field: BitField = "any") -> tuple[int, ...]:
    """Return the positions of the bits of a field, 0 the least significant; () for an unknown type.

    A truth value has bit 0.  The real part of a complex number has the lower half of the bits.
    An integer's bits other than the sign are its mantissa.

    Args:
        dtype: Name of the element type, such as "float16"; None for an unknown one.
        field: "sign", "exponent", "mantissa" or "any".

    >>> bits_of("float16", "exponent")
    (10, 11, 12, 13, 14)
    """
    # Two floats lie side by side, the real part first.
    if dtype in _COMPLEX:
        part_dtype = _COMPLEX[dtype]
        bits_of_part, part_size = bits_of(part_dtype, field), len(bits_of(part_dtype))
        return (*bits_of_part, *(bit + part_size for bit in bits_of_part))
    mantissa, exponent, sign = _field_sizes(dtype or "")
    unsigned_size, size = mantissa + exponent, mantissa + exponent + sign
    fields = {"mantissa": (0, mantissa), "exponent": (mantissa, unsigned_size), "sign": (unsigned_size, size)}
    return tuple(range(*fields.get(field, (0, size))))


def _only_in_ml_dtypes(dtype: str) -> bool:
    """Return True for a type of floating numbers of ml_dtypes that NumPy lacks."""
    # By name: NumPy knows these types through ml_dtypes alone, if that is loaded.
    return dtype == "bfloat16" or (dtype.startswith("float8_") and hasattr(ml_dtypes, dtype))


def _is_float(dtype: str) -> bool:
    """Return True for a type of real floating numbers, of NumPy or of ml_dtypes."""
    return dtype in _FLOATS or _only_in_ml_dtypes(dtype)


def _field_sizes(dtype: str) -> tuple[int, int, int]:
    """Return the numbers of bits of mantissa, exponent and sign; all 0 for a type that is not known."""
    if _is_float(dtype):
        format_info = ml_dtypes.finfo(Tensors.numpy_type(dtype))  # type: ignore[no-untyped-call]
        return format_info.nmant, format_info.nexp, format_info.bits - format_info.nmant - format_info.nexp
    if integer := _INTEGER.fullmatch(dtype):
        sign = 0 if integer[1] else 1
        return int(integer[2]) - sign, 0, sign
    return int(dtype == "bool"), 0, 0


def from_bytes(rows: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return rows of bytes as numbers, floats in float64, complex32 in complex64.

    Args:
        rows: (numbers, bytes of a number), in the order of memory.
        dtype: Name of the element type.
    """
    # NumPy has no complex number of halves: it is read as two halves.
    if dtype == "complex32":
        return rows.view(np.float16).astype(np.float32).view(np.complex64)[:, 0]
    numbers: NDArray[Any] = rows.view(Tensors.numpy_type(dtype))[:, 0]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return numbers.astype(np.float64) if _is_float(dtype) else numbers


def to_bytes(numbers: NDArray[Any], dtype: str, like: Any) -> NDArray[np.uint8]:
    """Return a row of bytes for each number, rounded, and for integers clipped to the range of the type.

    Args:
        numbers: In one dimension.
        dtype: Name of the element type of the bytes.
        like: A tensor of the type, whose library rounds if NumPy lacks the type.

    Raises:
        ValueError: For NaN in integers.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        # The framework rounds as it does elsewhere; ml_dtypes may round ties otherwise.
        if _only_in_ml_dtypes(dtype) or dtype == "complex32":
            tensors = tensors_of(like)
            return tensors.bytes_at(tensors.cast(numbers, like), np.arange(len(numbers)))
        rounded = _clipped_integers(numbers, dtype) if _INTEGER.fullmatch(dtype) else numbers.astype(dtype)
    return rounded.reshape(-1, 1).view(np.uint8)


def _clipped_integers(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return numbers rounded to integers in the range of a type; raise ValueError for NaN."""
    if np.isnan(numbers).any():
        raise ValueError(f"NaN cannot be written into elements of type {dtype}")
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    # In Python's integers: a float64 cannot hold the ends of int64, and a cast beyond them is undefined.
    integers = [
        least if number < least else most if number > most else round(number) for number in numbers.tolist()
    ]
    return np.array(integers, dtype)


ElementBytes: TypeAlias = "NDArray[np.uint8]"
"""Elements of a tensor, a row of bytes for each."""
Kind = Literal[
    "bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1", "value", "zero", "nan", "gaussian", "uniform",
    "relative", "wrong_row",
]  # fmt: skip
BIT_FAULTS = ("bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1")
NOISE_FAULTS = ("gaussian", "uniform", "relative")


class InjectError(AmandaError, ValueError, module="amanda.tools.inject"):
    """An option of the tool or of a campaign is not valid."""


class Fault(NamedTuple):
    """A kind of fault and its parameters.

    bits: positions that may change, None for all.  field: the part of a number with these bits.
    flips: number of bits that change in an element; "multi_bit" changes adjacent bits.
    value: written by "value".
    scale: standard deviation of "gaussian" and of the factor of "relative", bound of "uniform".
    axis: a fault hits all elements with one index of this axis; None for single elements.
    """

    kind: Kind
    bits: Sequence[int] | None
    field: BitField
    flips: int
    value: float
    scale: float
    axis: int | None = None

    def check(self) -> None:
        """Raise InjectError for `bits` or `field` with a kind that changes no bits."""
        if self.kind not in BIT_FAULTS and (self.bits is not None or self.field != "any"):
            raise InjectError(
                f"bits and field are for faults of bits ({', '.join(BIT_FAULTS)}), not for {self.kind}"
            )

    def fits(self, dtype: str | None, shape: Sequence[int]) -> bool:
        """Return True if a tensor can have the fault: bool can have no noise, and integers no NaN.

        Its type has to have enough bits to change, its shape the axis, which for a wrong row has several.
        """
        if self.axis is not None and not -len(shape) <= self.axis < len(shape):
            return False
        if self.kind in BIT_FAULTS:
            return bool(len(self._bit_choices(dtype)))
        if self.kind == "wrong_row":
            return bool(bits_of(dtype)) and self.axis is not None and shape[self.axis] > 1
        if self.kind == "nan":
            return bool(bits_of(dtype, "exponent"))
        return bool(bits_of(dtype)) and (dtype != "bool" or self.kind not in NOISE_FAULTS)

    def _bit_choices(self, dtype: str | None) -> NDArray[np.int64]:
        """Return the bits that may change: a row for each run of adjacent bits, or one row of single bits.

        No row if the type has fewer such bits than change: the fault does not fit.
        """
        bits = np.array(
            [bit for bit in bits_of(dtype, self.field) if self.bits is None or bit in self.bits], np.int64
        )
        if len(bits) < self.flips:
            return bits[:0, None]
        if self.kind != "multi_bit":
            return bits[None]
        # Runs of adjacent bits alone: `bits` may have gaps, which a burst does not jump.
        runs: NDArray[np.int64] = np.lib.stride_tricks.sliding_window_view(bits, self.flips)
        return np.asarray(runs[runs[:, -1] - runs[:, 0] == self.flips - 1])

    def apply(
        self, raw: ElementBytes, dtype: str, like: Any, random: np.random.Generator,
        slice_numbers: NDArray[np.int64],
    ) -> tuple[ElementBytes, NDArray[np.int64] | None]:  # fmt: skip
        """Return elements (n, width) with the fault, and the changed bits (n, flips); None for whole numbers.

        Not for "wrong_row".  Raises ValueError for NaN in integers.
        like: a tensor of the elements' type.  slice_numbers: of each element, from 0; the same bits change in
        all elements of a slice.  Without an axis each element is a slice.
        """
        if self.kind not in BIT_FAULTS:
            return to_bytes(self._faulty_numbers(raw, dtype, random), dtype, like), None
        bits_of_slices = self._draw_bits(dtype, int(slice_numbers.max()) + 1, random)
        bits = bits_of_slices[slice_numbers]
        masks, elements = np.zeros_like(raw), np.arange(len(raw))
        # One bit of each element at a time: two bits of an element may lie in one byte.
        for bit_of_elements in bits.T:
            byte, bit_in_byte = bit_of_elements // 8, bit_of_elements % 8
            masks[elements, byte] |= (1 << bit_in_byte).astype(np.uint8)
        if self.kind in ("bit_flip", "multi_bit"):
            return raw ^ masks, bits
        return raw & ~masks if self.kind == "stuck_at_0" else raw | masks, bits

    def _draw_bits(self, dtype: str, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Return random bits to change, different ones in a row: (count, flips)."""
        choices = self._bit_choices(dtype)
        if self.kind == "multi_bit":  # each row is a run of adjacent bits
            return choices[random.integers(len(choices), size=count)]
        single_bits = choices[0]
        # Sorting random keys draws bits without replacement for all elements at once.
        order = random.random((count, len(single_bits))).argsort(axis=1, kind="stable")
        return np.asarray(single_bits[np.sort(order[:, : self.flips], axis=1)])

    def _faulty_numbers(self, raw: ElementBytes, dtype: str, random: np.random.Generator) -> NDArray[Any]:
        """Return the numbers that replace elements: a constant, or elements with noise."""
        constants = {"value": self.value, "zero": 0.0, "nan": float("nan")}
        if self.kind in constants:
            return np.full(len(raw), constants[self.kind])
        numbers = from_bytes(raw, dtype)
        # Two columns always, so that real and complex tensors draw the same numbers.
        if self.kind == "uniform":
            columns = random.uniform(-self.scale, self.scale, (len(raw), 2))
        else:
            columns = random.normal(0.0, self.scale, (len(raw), 2))
        noise = columns[:, 0] + 1j * columns[:, 1] if np.iscomplexobj(numbers) else columns[:, 0]
        # Overflow to infinity is a fault like others.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(numbers * (1 + noise) if self.kind == "relative" else numbers + noise)


class Site(NamedTuple):
    """An execution of an op that can have faults.  elements: number of elements of its tensors."""

    op: int
    execution: int
    elements: int
    phase: str
    type: str
    module: str
    source: str


class OpLabels(NamedTuple):
    """Phase, type, module and line by which results name an op."""

    phase: str
    type: str
    module: str
    source: str


@dataclass(eq=False)
class SelectedOp:
    """A selected op, forward or backward.

    op: its id.  number: in the order of analysis.  dtype: returns the name of a tensor's element type.
    executions: how many there were.  remarks: sentences on tensors that cannot be read.
    """

    op: int
    labels: OpLabels
    number: int
    dtype: Any
    executions: int = 0
    remarks: dict[str, None] = field(default_factory=dict)


class TargetTensor(NamedTuple):
    """A tensor that may have faults: the value of a routine at a position, or an item of a list there."""

    value: Any
    dtype: str
    name: str
    position: int
    item: int | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.value.shape)

    def unit_count(self, axis: int | None) -> int:
        """Return the number of units of a fault: of slices along an axis, or of elements for None."""
        return self.size if axis is None else int(self.value.shape[axis])

    def positions(self, units: NDArray[np.int64], axis: int | None) -> NDArray[np.int64]:
        """Return the flat positions of units: an array (elements before the axis, units, elements after)."""
        if axis is None:
            return units[None, :, None]
        extents = self.value.shape
        axis %= len(extents)  # a negative one counts from the end
        outer, inner = np.arange(prod(extents[:axis])), np.arange(prod(extents[axis + 1 :]))
        # A flat position is (outer * extent + index) * inner extent + inner.
        rows = outer[:, None, None] * extents[axis] + units[:, None]
        return np.asarray(rows * len(inner) + inner)


def tensors_in(
    value: Any, name: str, position: int, fault: Fault, selected_op: SelectedOp
) -> Iterator[TargetTensor]:
    """Yield the dense tensors in a value, or in a list, whose element type can have the fault.

    A tensor that cannot be read is left out, with a remark at the op.
    """
    # An op may read or give a list of tensors at one position.
    is_list = isinstance(value, (list, tuple))
    for item, tensor in enumerate(value if is_list else (value,)):
        dtype = selected_op.dtype(tensor)
        reason = None if dtype is None else tensors_of(tensor).unread(tensor)
        if reason is not None:
            labels = selected_op.labels
            remark = f"{name} of {labels.type} of {labels.module or labels.source} is skipped: {reason}."
            selected_op.remarks[remark] = None
        elif dtype is not None and tensors_of(tensor).is_dense(tensor) and fault.fits(dtype, tensor.shape):
            if is_list:
                yield TargetTensor(tensor, dtype, f"{name}[{item}]", position, item)
            else:
                yield TargetTensor(tensor, dtype, name, position, item=None)


@dataclass(frozen=True)
class Injection:
    """One changed element.

    op: id of the op, forward or backward.  execution: number of the op's execution, from 0.
    tensor: e.g. "outputs[0]".  element: index in the tensor.  bits: positions of changed bits, 0 the least
    significant; empty for faults of values.  old, new: the element before and after.
    """

    phase: str
    type: str
    module: str
    source: str
    op: int
    execution: int
    tensor: str
    dtype: str
    element: tuple[int, ...]
    bits: tuple[int, ...]
    old: Any
    new: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON; `op` in hex, complex numbers, NaN and Inf are strings."""
        fields = {**asdict(self), "op": f"{self.op:#018x}"}
        for name in ("old", "new"):
            if isinstance(fields[name], complex) or not math.isfinite(fields[name]):
                fields[name] = str(fields[name])
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Injection:
        """Return the injection that `to_dict` described."""
        numbers = {name: _number(fields[name]) for name in ("old", "new")}
        indices = {name: tuple(fields[name]) for name in ("element", "bits")}
        return cls(**{**fields, "op": int(fields["op"], 16), **numbers, **indices})


def _number(value: Any) -> Any:
    """Return a number that `Injection.to_dict` may have written as a string."""
    if not isinstance(value, str):
        return value
    return complex(value) if "j" in value else float(value)


class InjectResult(Result):
    """A row for each changed element, in the order of injection.

    total: number of changed elements.  unselected_types: types of the analysed ops, if none was selected.
    """

    name: ClassVar[str] = "inject"
    title = "Injected faults"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)), Column("op"), Column("execution", number=True),
        Column("tensor"), Column("dtype"), Column("element"), Column("bits"),
        Column("old", number=True), Column("new", number=True),
    )  # fmt: skip

    def __init__(
        self, injections: Sequence[Injection], total: int, executions: int,
        unselected_types: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.injections = tuple(injections)
        self.total = total
        self.executions = executions
        self._unselected_types = sorted(unselected_types)

    def counts(self, key: str) -> dict[Any, int]:
        """Return the number of listed injections by the value of a field.

        Args:
            key: Name of the field, such as "phase", "type", "module" or "bits".
        """
        return dict(Counter(getattr(injection, key) for injection in self.injections))

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each element, with tuples as texts."""
        return [
            tuple(
                " ".join(map(str, value)) if isinstance(value, tuple) else value for value in fields.values()
            )
            for fields in (injection.to_dict() for injection in self.injections)
        ]

    def _facts(self) -> Mapping[str, Any]:
        """Return the numbers of changed elements, also beyond `limit`, and of executions."""
        return {"injected": self.total, "executions": self.executions}

    def notes(self) -> Sequence[str]:
        """Return sentences on the number of elements, and on a table that `limit` cut.

        If no op was selected, a sentence names the types that ops had.
        """
        elements, executions = count_of(self.total, "element"), count_of(self.executions, "execution")
        notes = [f"{elements} changed in {executions} of the selected ops."]
        if self.total > len(self.injections):
            notes.append(
                f"The table has the first {len(self.injections):,} elements; raise `limit` for more."
            )
        if self._unselected_types:
            notes.append(f"No op was selected; the ops' types were {', '.join(self._unselected_types)}.")
        return notes
