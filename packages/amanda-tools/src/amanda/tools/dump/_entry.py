"""Entries of the index of a dump: ops, and what was kept of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.results import made_of
from amanda.tools.stats import Statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Op:
    """One op, forward or backward, in the order in which ops were met.

    id: that of its place in the program; a backward op has its forward op's in `of`.  layout, weight_layout:
    axes by StandardMapping; None where they have no fixed meaning.  in_place: True if it writes into its
    first input.  parameters: positions of inputs that are parameters of a model, and their paths.
    """

    phase: str
    type: str
    module: str
    source: str
    namespace: str
    id: int
    of: int | None = None
    layout: str | None = None
    weight_layout: str | None = None
    in_place: bool = False
    parameters: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Summary:
    """Facts of a tensor that is not kept, or kept beside them.

    sample: numbers at even distances in the order of indexing, magnitudes of complex ones.
    """

    statistics: Statistics
    sample: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no words for NaN and Inf."""
        sample = [one if math.isfinite(one) else str(one) for one in self.sample]
        return {"statistics": self.statistics.to_dict(), "sample": sample}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Summary:
        """Return the entry that `to_dict` described."""
        return cls(Statistics.from_dict(value["statistics"]), tuple(map(float, value["sample"])))


@dataclass(frozen=True)
class Entry:
    """One tensor at one execution of an op.

    op: index among the ops.  order: how many executions of ops had been seen before.  execution: of this op,
    from 0.  role: "input", "weight", "output", "gradient" (what a backward op gives) or "weight gradient".
    position: among the inputs, outputs or gradients.  file, key: where its numbers are; None if they are not
    kept, and then `left_out` names the option that says so.
    """

    op: int
    order: int
    execution: int
    role: str
    position: int
    shape: tuple[int, ...]
    dtype: str
    summary: Summary
    file: str | None = None
    key: str | None = None
    left_out: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "shape": list(self.shape),
            "summary": self.summary.to_dict(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Entry:
        """Return the entry that `to_dict` described."""
        known = {name: value[name] for name in cls.__dataclass_fields__}
        known.update(shape=tuple(value["shape"]), summary=Summary.from_dict(value["summary"]))
        if not all(type(extent) is int for extent in known["shape"]):
            raise ValueError(f"its shape is {value['shape']!r}")
        return made_of(cls, known)


class Kept(NamedTuple):
    """The facts of an `Entry` as they were measured: less memory, and made sooner, than the entry itself.

    numbers: the fields of `Statistics`.  sample: in the tensor's element type.
    """

    op: int
    order: int
    execution: int
    role: str
    position: int
    shape: tuple[int, ...]
    dtype: str
    numbers: Sequence[float]
    sample: NDArray[Any]
    left_out: str | None = None
    file: str | None = None
    key: str | None = None

    def entry(self) -> Entry:
        """Return the entry of these facts."""
        sample = self.sample
        with np.errstate(invalid="ignore"):  # a signalling NaN
            real = np.abs(sample) if np.iscomplexobj(sample) else sample
            summary = Summary(Statistics.of_vector(self.numbers), tuple(real.astype(np.float64).tolist()))
        return Entry(
            self.op, self.order, self.execution, self.role, self.position, self.shape, self.dtype, summary,
            self.file, self.key, self.left_out,
        )  # fmt: skip


def op_to_dict(op: Op) -> dict[str, Any]:
    """Plain values for JSON; ids as text, since 64 bits are more than some readers' numbers hold."""
    told = {name: getattr(op, name) for name in Op.__dataclass_fields__}
    return {**told, "id": f"{op.id:016x}", "of": None if op.of is None else f"{op.of:016x}"}


def op_from_dict(value: Mapping[str, Any]) -> Op:
    """Return the op that `op_to_dict` described."""
    known = {name: value[name] for name in Op.__dataclass_fields__ if name in value}
    known.update({name: known[name] and int(known[name], 16) for name in ("id", "of")})
    known["parameters"] = tuple((int(i), str(path)) for i, path in known.get("parameters", ()))
    return made_of(Op, known)
