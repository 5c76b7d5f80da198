"""Faults: the changes of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from amanda.errors import AmandaError
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import BitField, bits_of, check_one_of, from_bytes, to_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
"""Elements: a row of bytes for each."""
Kind = Literal["bit_flip", "stuck_at_0", "stuck_at_1", "value", "zero", "gaussian", "uniform", "relative"]
OF_BITS = ("bit_flip", "stuck_at_0", "stuck_at_1")
OF_NOISE = ("gaussian", "uniform", "relative")


class InjectError(AmandaError, ValueError):
    """An option of the tool or of a campaign is not valid."""


class Fault(NamedTuple):
    """One kind of fault and its parameters.

    bits: positions that may change, None for all.  field: the part of a number with these bits.
    flips: number of bits that change in an element.  value: written by "value".
    scale: standard deviation of "gaussian" and of the factor of "relative", bound of "uniform".
    """

    kind: Kind
    bits: Sequence[int] | None
    field: BitField
    flips: int
    value: float
    scale: float

    def check(self) -> None:
        """Raise InjectError for parameters that do not go together."""
        check_one_of("fault", self.kind, get_args(Kind), InjectError)
        check_one_of("field", self.field, get_args(BitField), InjectError)
        if self.bits is not None and (not self.bits or min(self.bits) < 0):
            raise InjectError(f"bits is {self.bits}; give positions, 0 for the least significant bit")
        if self.kind not in OF_BITS and (self.bits is not None or self.field != "any"):
            raise InjectError(
                f"bits and field are for faults of bits ({', '.join(OF_BITS)}), not for {self.kind}"
            )

    def fits(self, dtype: str | None) -> bool:
        """Return True if elements of a type can have the fault; bool has no noise."""
        if self.kind in OF_BITS:
            return len(self._bits_in(dtype)) >= self.flips
        return bool(bits_of(dtype)) and (dtype != "bool" or self.kind not in OF_NOISE)

    def _bits_in(self, dtype: str | None) -> list[int]:
        return [bit for bit in bits_of(dtype, self.field) if self.bits is None or bit in self.bits]

    def applied(
        self, raw: Bytes, dtype: str, like: Any, random: np.random.Generator
    ) -> tuple[Bytes, NDArray[np.int64] | None]:
        """Return elements (n, width) with the fault, and the changed bits (n, flips).

        like: a tensor of the elements' type.
        """
        if self.kind not in OF_BITS:
            return to_bytes(self._numbers(raw, dtype, random), dtype, like), None
        allowed = np.array(self._bits_in(dtype))
        order = random.random((len(raw), len(allowed))).argsort(axis=1, kind="stable")
        bits = allowed[np.sort(order[:, : self.flips], axis=1)]
        masks = np.zeros_like(raw)
        for column in bits.T:
            masks[np.arange(len(raw)), column // 8] |= (1 << (column % 8)).astype(np.uint8)
        if self.kind == "bit_flip":
            return raw ^ masks, bits
        return raw & ~masks if self.kind == "stuck_at_0" else raw | masks, bits

    def _numbers(self, raw: Bytes, dtype: str, random: np.random.Generator) -> NDArray[Any]:
        if self.kind in ("value", "zero"):
            return np.full(len(raw), self.value if self.kind == "value" else 0.0)
        old = from_bytes(raw, dtype)
        draw = random.uniform if self.kind == "uniform" else random.normal
        noise = draw(-self.scale if self.kind == "uniform" else 0.0, self.scale, (len(raw), 2))
        drawn = noise[:, 0] + 1j * noise[:, 1] if np.iscomplexobj(old) else noise[:, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(old * (1 + drawn) if self.kind == "relative" else old + drawn)
