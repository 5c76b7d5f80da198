"""Count effective MACs and bit operations of pruned and quantised models, op by op.

print(effective(flops.result, prune.result, quantize.result))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.options import checked
from amanda.tools.flops import FlopsResult
from amanda.tools.results import Column, Result, amount, shortened

__all__ = ["Effective", "EffectiveResult", "effective"]

_Key = tuple[str, str, str]
FULL = 32
"""Bits of a tensor that is not quantised."""


@dataclass(frozen=True)
class Effective:
    """One op of the forward pass.

    macs: of all calls.  density: share of the weight that is not zero.  bits: of the two factors, the weight
    last if there is one.
    """

    type: str
    module: str
    source: str
    calls: int
    macs: int
    density: float = 1.0
    bits: tuple[int, int] = (FULL, FULL)

    @property
    def effective_macs(self) -> float:
        """MACs with weights that are not zero: density times MACs."""
        return self.density * self.macs

    @property
    def bops(self) -> float:
        """Bit operations: effective MACs times the bits of both factors."""
        return self.effective_macs * self.bits[0] * self.bits[1]


class EffectiveResult(Result):
    """Effective MACs and bit operations of each product of the forward pass."""

    name: ClassVar[str] = "effective_flops"
    title = "Effective MACs and bit operations"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(key, show=partial(shortened, width=44)) for key in ("phase", "type", "module", "source")),
        Column("calls", show="{:,}".format, total=True), Column("MACs", show=amount, total=True),
        Column("density", show="{:.4f}".format, number=True, unit="share"),
        Column("activation bits", number=True), Column("weight bits", number=True),
        Column("effective MACs", show=amount, total=True), Column("BOPs", show=amount, total=True),
    )  # fmt: skip

    def __init__(self, ops: Iterable[Effective]) -> None:
        self.ops = tuple(ops)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, in the order of their first execution."""
        return [
            ("forward", op.type, op.module, op.source, op.calls, op.macs, op.density, *op.bits,
             op.effective_macs, op.bops)
            for op in self.ops
        ]  # fmt: skip

    @property
    def share_of_macs(self) -> float:
        """Effective MACs as a share of all MACs."""
        return sum(op.effective_macs for op in self.ops) / max(sum(op.macs for op in self.ops), 1)

    @property
    def share_of_bops(self) -> float:
        """Bit operations as a share of those of the dense model in 32 bits."""
        return sum(op.bops for op in self.ops) / max(FULL**2 * sum(op.macs for op in self.ops), 1)

    def notes(self) -> Sequence[str]:
        """Return the convention and the shares."""
        return [
            "BOPs: effective MACs times the bits of both factors, 32 for a tensor that is not quantised.",
            f"{self.share_of_macs:.2%} of the MACs, {self.share_of_bops:.2%} of the bit operations remain.",
        ]


@checked
def effective(
    flops: FlopsResult, prune: Result | None = None, quantize: Result | None = None
) -> EffectiveResult:
    """Return effective MACs and bit operations of each op of the forward pass, pruned and quantised.

    Ops are matched by type, module and source; ops without MACs are left out.
    Source of bit operations: van Baalen et al. 2020, "Bayesian Bits", sec. 3; Baskin et al. 2021, "UNIQ".

    Args:
        flops: `result` of the three tools, from one scope or from several over the same model.
        prune: See `flops`.
        quantize: See `flops`.
    """
    density, bits = _density_of_ops(prune), _bits_of_ops(quantize)
    calls: Counter[_Key] = Counter()
    macs: Counter[_Key] = Counter()
    for op in flops.ops:
        if op.phase == "forward" and op.macs:
            key = op.type, op.module, op.source
            calls[key] += op.calls
            # Shapes may differ between calls of one op, each of which has a row of its own.
            macs[key] += op.calls * op.macs
    return EffectiveResult(
        Effective(*key, calls[key], macs[key], density.get(key, 1.0), bits.get(key, (FULL, FULL)))
        for key in calls
    )


def _density_of_ops(prune: Result | None) -> Mapping[_Key, float]:
    """Return the share of weights that are not zero, by op."""
    elements: Counter[_Key] = Counter()
    zeros: Counter[_Key] = Counter()
    for key, row in _rows_by_op(prune):
        elements[key] += row["weights"]
        zeros[key] += row["zeros"]
    return {key: 1 - zeros[key] / max(elements[key], 1) for key in elements}


def _bits_of_ops(quantize: Result | None) -> Mapping[_Key, tuple[int, int]]:
    """Return the bits of the two factors of each op, the weight last, 32 for one that is not quantised."""
    bits_by_op: dict[_Key, dict[str, int]] = {}
    for key, row in _rows_by_op(quantize):
        # Results are read as tables, so that those that were loaded from a file work as well.
        bits_by_op.setdefault(key, {})[row["tensor"]] = row["bits"]
    factor_bits = {}
    for key, bits_by_tensor in bits_by_op.items():
        weight_bits = bits_by_tensor.pop("weight", None)
        # An op without a weight, such as matmul, has two activations in the order of positions.
        first_bits, second_bits, *_ = *(bits for _, bits in sorted(bits_by_tensor.items())), FULL, FULL
        factor_bits[key] = first_bits, weight_bits or second_bits
    return factor_bits


def _rows_by_op(result: Result | None) -> Iterable[tuple[_Key, Mapping[str, Any]]]:
    """Yield the rows of a result, each with the key of its op; nothing for None."""
    for row in result.to_dict()["rows"] if result is not None else ():
        yield (row["type"], row["module"], row["source"]), row
