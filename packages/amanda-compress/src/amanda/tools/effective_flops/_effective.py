"""Multiply-accumulates that are left where weights are pruned and tensors quantised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.options import checked
from amanda.tools.flops import FlopsResult
from amanda.tools.results import Column, Result, amount, shortened

_Key = tuple[str, str, str]
FULL = 32
"""Bits of what is not quantised."""


@dataclass(frozen=True)
class Effective:
    """One op of the forward pass.

    macs: of all its calls.  density: share of its weight that is kept.  bits: of its two factors, the
    weight last where it has one.
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
        """MACs with weights that are kept: density times MACs."""
        return self.density * self.macs

    @property
    def bops(self) -> float:
        """Bit operations: effective MACs times the bits of both factors."""
        return self.effective_macs * self.bits[0] * self.bits[1]


class EffectiveResult(Result):
    """Multiply-accumulates and bit operations of each op of the forward pass that has any."""

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
        """Return the ops, in the order in which they were met."""
        return [
            ("forward", one.type, one.module, one.source, one.calls, one.macs, one.density, *one.bits,
             one.effective_macs, one.bops)
            for one in self.ops
        ]  # fmt: skip

    @property
    def share_of_macs(self) -> float:
        """Effective MACs as a share of all."""
        return sum(one.effective_macs for one in self.ops) / max(sum(one.macs for one in self.ops), 1)

    @property
    def share_of_bops(self) -> float:
        """Bit operations as a share of those with 32 bits and all weights."""
        return sum(one.bops for one in self.ops) / max(FULL**2 * sum(one.macs for one in self.ops), 1)

    def notes(self) -> Sequence[str]:
        """Return the convention and the shares."""
        return [
            "BOPs: effective MACs times the bits of both factors, 32 where nothing is quantised.",
            f"{self.share_of_macs:.2%} of the MACs, {self.share_of_bops:.2%} of the bit operations are left.",
        ]


@checked
def effective(
    flops: FlopsResult, prune: Result | None = None, quantize: Result | None = None
) -> EffectiveResult:
    """Return what pruning and quantisation leave of the forward pass, op by op.

    flops, prune, quantize: `result` of the three tools, of one scope or of several over the same model; ops
    are matched by type, module and source.
    Source of bit operations: van Baalen et al. 2020, "Bayesian Bits", sec. 3; Baskin et al. 2021, "UNIQ".
    """
    density, bits = _densities(prune), _bits(quantize)
    found: dict[_Key, list[int]] = {}
    for place in flops.places:
        if place.phase == "forward" and place.macs:
            sums = found.setdefault((place.type, place.module, place.source), [0, 0])
            sums[0] += place.calls
            sums[1] += place.calls * place.macs
    return EffectiveResult(
        Effective(*key, calls, macs, density.get(key, 1.0), bits.get(key, (FULL, FULL)))
        for key, (calls, macs) in found.items()
    )


def _densities(prune: Result | None) -> Mapping[_Key, float]:
    sums: dict[_Key, list[int]] = {}
    for key, row in _by_place(prune):
        one = sums.setdefault(key, [0, 0])
        one[0] += row["weights"]
        one[1] += row["zeros"]
    return {key: 1 - zeros / max(weights, 1) for key, (weights, zeros) in sums.items()}


def _bits(quantize: Result | None) -> Mapping[_Key, tuple[int, int]]:
    tensors: dict[_Key, dict[str, int]] = {}
    for key, row in _by_place(quantize):
        tensors.setdefault(key, {})[row["tensor"]] = row["bits"]
    found = {}
    for key, one in tensors.items():
        weight = one.pop("weight", None)
        inputs = [bits for _, bits in sorted(one.items())]
        first = inputs.pop(0) if inputs else FULL
        found[key] = first, weight or (inputs.pop(0) if inputs else FULL)
    return found


def _by_place(result: Result | None) -> Iterable[tuple[_Key, Mapping[str, Any]]]:
    for row in result.to_dict()["rows"] if result is not None else ():
        yield (row["type"], row["module"], row["source"]), row
