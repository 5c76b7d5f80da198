"""What the tool is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from amanda.errors import AmandaError
from amanda.tools.inject._faults import OF_BITS, Fault, Kind
from amanda.tools.inject._formats import Field
from amanda.tools.select import Patterns

Target = Literal["outputs", "inputs", "weights", "grad_outputs", "grad_inputs", "weight_grads"]
TARGETS: tuple[str, ...] = get_args(Target)


class InjectError(AmandaError, ValueError):
    """An option of the tool, or of a campaign, that makes no sense."""


@dataclass(frozen=True)
class Options:
    """The arguments of InjectTool, checked.

    Raises InjectError for those that do not go together.
    """

    fault: Fault
    target: str
    types: Patterns
    modules: Patterns
    index: int | None
    probability: float | None
    count: int | None
    seed: int
    permanent: bool
    start: int
    end: int | None
    frequency: int

    def __post_init__(self) -> None:
        fault = self.fault
        _check_known("fault", fault.kind, get_args(Kind))
        _check_known("target", self.target, TARGETS)
        _check_known("field", fault.field, get_args(Field))
        if self.count is not None and self.probability is not None:
            raise InjectError("give either a count of elements or the probability of each, not both")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise InjectError(f"probability is {self.probability}; it lies between 0 and 1")
        if not 0 <= self.seed < 1 << 64:
            raise InjectError(f"seed is {self.seed}; it lies between 0 and 2**64 - 1")
        for name, value, least in (
            ("count", self.count, 1), ("flips", fault.flips, 1), ("frequency", self.frequency, 1),
            ("start", self.start, 0), ("end", self.end, self.start), ("index", self.index, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                raise InjectError(f"{name} is {value}; it is at least {least}")
        if fault.bits is not None and (not fault.bits or min(fault.bits) < 0):
            raise InjectError(f"bits is {fault.bits}; give positions, 0 for the least significant bit")
        if fault.kind not in OF_BITS and (fault.bits is not None or fault.field != "any"):
            raise InjectError(
                f"bits and field are for faults of bits ({', '.join(OF_BITS)}), not for {fault.kind}"
            )

    def selects(self, modules: Sequence[str], *names: str) -> bool:
        """Return whether an op that has these names, of a module with these paths, is selected."""
        return self.types(*names) and self.modules(*modules)

    def at(self, execution: int) -> bool:
        """Whether an execution of a selected op is."""
        after = execution - self.start
        return after >= 0 and (self.end is None or execution < self.end) and after % self.frequency == 0


def _check_known(option: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        raise InjectError(f"{option} is {given!r}; it is one of {', '.join(known)}")
