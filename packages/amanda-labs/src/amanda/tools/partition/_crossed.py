"""Records of what crosses between a program and its protected process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amanda.tools.partition._channel import Form


@dataclass(eq=False)
class Crossed:
    """Tensors that cross at an op, or for an optimizer, in both directions together.

    forms: the tensors that were declared, as texts.
    """

    phase: str
    type: str
    module: str
    source: str
    calls: int = 0
    bytes: int = 0
    forms: dict[str, None] = field(default_factory=dict)

    def add(self, sent: Sequence[Form], made: Sequence[Form], size: int) -> None:
        """Count a call."""
        self.calls += 1
        self.bytes += size
        self.forms[f"{' '.join(map(str, sent)) or '-'} > {' '.join(map(str, made)) or '-'}"] = None
