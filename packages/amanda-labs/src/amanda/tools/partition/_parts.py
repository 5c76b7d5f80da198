"""The result of a file that was cut: stages, and the files that were written for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amanda.tools.partition._cut import Request, Stages
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._work import Work
from amanda.tools.results import amount


@dataclass(frozen=True)
class Part:
    """One file.  kind: "stage", "public" or "protected".  inputs, outputs: names of values of the model.

    bytes: of its initializers.
    """

    file: str
    kind: str
    ops: int
    inputs: list[str]
    outputs: list[str]
    bytes: int


class PartsResult(PartitionResult):
    """Stages of a file that was cut; `parts` are the files in the order in which they run.

    inputs, outputs: of the whole model.
    """

    about_shared = "In the files of several parts"

    def __init__(
        self, work: Work, request: Request, inputs: list[str], outputs: list[str],
        stage_of: Stages | None = None,
    ) -> None:  # fmt: skip
        super().__init__(work, request)
        self.inputs, self.outputs = inputs, outputs
        self.parts: list[Part] = []
        if stage_of is not None:
            self.stage_of = stage_of

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the answer; of protected parts, how much is protected."""
        if all(one.kind == "stage" for one in self.parts):
            return super().title
        own = [one for one in self.parts if one.kind == "protected"]
        crossing = amount(sum(one.tensor.bytes or 0 for one in self.crossings), unit="B")
        return (
            f"{sum(one.ops for one in own)} of {len(self.work.ops)} ops and "
            f"{amount(sum(one.bytes for one in own), unit='B')} of initializers are in "
            f"{', '.join(one.file for one in own)} alone; {crossing} cross"
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the files in the order in which they run, and the inputs and outputs of the whole model."""
        files = [asdict(one) for one in self.parts]
        return {**super().facts(), "files": files, "inputs": self.inputs, "outputs": self.outputs}

    def notes(self) -> Sequence[str]:
        """Return the files, and what is said of the stages."""
        files = ", ".join(one.file for one in self.parts)
        return [
            f"Run in this order: {files}. Each is given the model's inputs that it reads.",
            *super().notes(),
        ]
