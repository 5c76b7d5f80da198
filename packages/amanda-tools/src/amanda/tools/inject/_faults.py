"""Faults: the changes of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from amanda.errors import AmandaError
from amanda.tools.inject._formats import BitField, bits_of, from_bytes, to_bytes
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
"""Elements: a row of bytes for each."""
Kind = Literal[
    "bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1", "value", "zero", "nan", "gaussian", "uniform",
    "relative", "wrong_row",
]  # fmt: skip
OF_BITS = ("bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1")
OF_NOISE = ("gaussian", "uniform", "relative")


class InjectError(AmandaError, ValueError):
    """An option of the tool or of a campaign is not valid."""


class Fault(NamedTuple):
    """One kind of fault and its parameters.

    bits: positions that may change, None for all.  field: the part of a number with these bits.
    flips: number of bits that change in an element; "multi_bit" changes adjacent bits.
    value: written by "value".
    scale: standard deviation of "gaussian" and of the factor of "relative", bound of "uniform".
    axis: faults are in slices, of all elements with one index of this axis; None for single elements.
    """

    kind: Kind
    bits: Sequence[int] | None
    field: BitField
    flips: int
    value: float
    scale: float
    axis: int | None = None

    def check(self) -> None:
        """Raise InjectError for parameters that do not go together."""
        if self.kind not in OF_BITS and (self.bits is not None or self.field != "any"):
            raise InjectError(
                f"bits and field are for faults of bits ({', '.join(OF_BITS)}), not for {self.kind}"
            )

    def fits(self, dtype: str | None, shape: Sequence[int]) -> bool:
        """Return True if a tensor can have the fault; bool has no noise, and integers have no NaN."""
        if self.axis is not None and not -len(shape) <= self.axis < len(shape):
            return False
        if self.kind in OF_BITS:
            return bool(len(self._choices(dtype)))
        if self.kind == "wrong_row":
            return bool(bits_of(dtype)) and self.axis is not None and shape[self.axis] > 1
        if self.kind == "nan":
            return bool(bits_of(dtype, "exponent"))
        return bool(bits_of(dtype)) and (dtype != "bool" or self.kind not in OF_NOISE)

    def _choices(self, dtype: str | None) -> NDArray[np.int64]:
        """Return the bits that may change: a row for each run of adjacent ones, or one row of single ones."""
        bits = np.array(
            [bit for bit in bits_of(dtype, self.field) if self.bits is None or bit in self.bits], np.int64
        )
        if len(bits) < self.flips:
            return bits[:0, None]
        if self.kind != "multi_bit":
            return bits[None]
        runs: NDArray[np.int64] = np.lib.stride_tricks.sliding_window_view(bits, self.flips)
        return np.asarray(runs[runs[:, -1] - runs[:, 0] == self.flips - 1])

    def applied(
        self, raw: Bytes, dtype: str, like: Any, random: np.random.Generator, unit: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64] | None]:
        """Return elements (n, width) with the fault, and the changed bits (n, flips).

        like: a tensor of the elements' type.  unit: number of the slice of each element, or of the element;
        in a slice the same bits change in all elements.
        """
        if self.kind not in OF_BITS:
            return to_bytes(self._numbers(raw, dtype, random), dtype, like), None
        choices, units = self._choices(dtype), int(unit.max()) + 1
        if self.kind == "multi_bit":
            drawn = choices[random.integers(len(choices), size=units)]
        else:
            order = random.random((units, choices.shape[1])).argsort(axis=1, kind="stable")
            drawn = choices[0][np.sort(order[:, : self.flips], axis=1)]
        bits, masks = drawn[unit], np.zeros_like(raw)
        for column in bits.T:
            masks[np.arange(len(raw)), column // 8] |= (1 << (column % 8)).astype(np.uint8)
        if self.kind in ("bit_flip", "multi_bit"):
            return raw ^ masks, bits
        return raw & ~masks if self.kind == "stuck_at_0" else raw | masks, bits

    def _numbers(self, raw: Bytes, dtype: str, random: np.random.Generator) -> NDArray[Any]:
        constants = {"value": self.value, "zero": 0.0, "nan": float("nan")}
        if self.kind in constants:
            return np.full(len(raw), constants[self.kind])
        old = from_bytes(raw, dtype)
        draw = random.uniform if self.kind == "uniform" else random.normal
        noise = draw(-self.scale if self.kind == "uniform" else 0.0, self.scale, (len(raw), 2))
        drawn = noise[:, 0] + 1j * noise[:, 1] if np.iscomplexobj(old) else noise[:, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(old * (1 + drawn) if self.kind == "relative" else old + drawn)
