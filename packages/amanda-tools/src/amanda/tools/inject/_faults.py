"""What becomes of the elements that a fault hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amanda.tools.inject._elements import Bytes, Elements
from amanda.tools.inject._formats import Field, bits_of, is_number

Kind = Literal["bit_flip", "stuck_at_0", "stuck_at_1", "value", "zero", "gaussian", "uniform", "relative"]
OF_BITS = ("bit_flip", "stuck_at_0", "stuck_at_1")
OF_NOISE = ("gaussian", "uniform", "relative")


class Fault(NamedTuple):
    """One kind of fault and its parameters.

    bits: positions that may be hit, None for all.  field: which part of a number they are in.
    flips: bits that are hit in each element.  value: what "value" writes.
    scale: standard deviation of "gaussian" and of the factor of "relative", bound of "uniform".
    """

    kind: Kind = "bit_flip"
    bits: Sequence[int] | None = None
    field: Field = "any"
    flips: int = 1
    value: float = 0.0
    scale: float = 1.0

    def fits(self, dtype: str) -> bool:
        """Whether elements of a type can have it."""
        if self.kind in OF_BITS:
            return len(self.bits_in(dtype)) >= self.flips
        return is_number(dtype) or self.kind not in OF_NOISE

    def bits_in(self, dtype: str) -> list[int]:
        """Positions of the bits of a type that may be hit."""
        field = bits_of(dtype, self.field)
        return field if self.bits is None else [bit for bit in field if bit in self.bits]

    def applied(
        self, raw: Bytes, dtype: str, elements: Elements, random: np.random.Generator
    ) -> tuple[Bytes, NDArray[np.int64] | None]:
        """Elements (n, width) with the fault, and the bits (n, flips) that were hit."""
        if self.kind in OF_BITS:
            allowed = np.array(self.bits_in(dtype))
            order = random.random((len(raw), len(allowed))).argsort(axis=1, kind="stable")
            bits = allowed[np.sort(order[:, : self.flips], axis=1)]
            return self._with_bits(raw, bits), bits
        return elements.encoded(self._numbers(raw, dtype, elements, random), dtype), None

    def _with_bits(self, raw: Bytes, bits: NDArray[np.int64]) -> Bytes:
        masks = np.zeros_like(raw)
        rows = np.arange(len(raw))
        for column in bits.T:
            masks[rows, column // 8] |= (1 << (column % 8)).astype(np.uint8)
        if self.kind == "bit_flip":
            return raw ^ masks
        return raw & ~masks if self.kind == "stuck_at_0" else raw | masks

    def _numbers(
        self, raw: Bytes, dtype: str, elements: Elements, random: np.random.Generator
    ) -> NDArray[np.generic]:
        count = len(raw)
        if self.kind in ("value", "zero"):
            return np.full(count, self.value if self.kind == "value" else 0.0)
        old = elements.numbers(raw, dtype)
        if self.kind == "uniform":
            noise = random.uniform(-self.scale, self.scale, (count, 2))
        else:
            noise = random.normal(0.0, self.scale, (count, 2))
        drawn = noise[:, 0] + 1j * noise[:, 1] if np.iscomplexobj(old) else noise[:, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.kind == "relative":
                return np.asarray(old * (1 + drawn))
            return np.asarray(old + drawn)
