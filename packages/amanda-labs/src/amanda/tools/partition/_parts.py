"""The parts of an ONNX model: the result that lists their files, and the chain of sessions that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amanda.errors import ArtefactError
from amanda.options import Folder, checked
from amanda.tools.partition._cut import Request, Stages
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._step_work import StepWork
from amanda.tools.results import amount, read_json


@dataclass(frozen=True)
class Part:
    """A file with a part of the model.  kind: "stage", "public" or "protected".

    inputs, outputs: names of values of the whole model.  bytes: of initializers.
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
        self, work: StepWork, request: Request, inputs: list[str], outputs: list[str],
        stage_of: Stages | None = None,
    ) -> None:  # fmt: skip
        super().__init__(work, request)
        self.inputs, self.outputs = inputs, outputs
        self.parts: list[Part] = []
        if stage_of is not None:
            self.stage_of = stage_of

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the title of the stages, or the numbers of protected ops and bytes."""
        if all(part.kind == "stage" for part in self.parts):
            return super().title
        protected_parts = [part for part in self.parts if part.kind == "protected"]
        crossing = amount(sum(crossing.tensor.bytes or 0 for crossing in self.crossings), unit="B")
        return (
            f"{sum(part.ops for part in protected_parts)} of {len(self.work.ops)} ops and "
            f"{amount(sum(part.bytes for part in protected_parts), unit='B')} of initializers are in "
            f"{', '.join(part.file for part in protected_parts)} alone; {crossing} cross"
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the files in the order in which they run, and the inputs and outputs of the whole model."""
        files = [asdict(part) for part in self.parts]
        return {**super().facts(), "files": files, "inputs": self.inputs, "outputs": self.outputs}

    def notes(self) -> Sequence[str]:
        """Return the order of the files, and the notes on the stages."""
        files = ", ".join(part.file for part in self.parts)
        return [
            f"Run in this order: {files}. Each is given the model's inputs that it reads.",
            *super().notes(),
        ]


class StageChain:
    """Sessions of the files that `PartitionTool` wrote into a folder, run in the order of `partition.json`.

    options, providers: of each session, as onnxruntime.InferenceSession has them.
    Raises FileError for a folder without such a file, ArtefactError for another file of this name.
    """

    @checked(error=ArtefactError)
    def __init__(
        self,
        folder: Folder,
        options: Any = None,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        from onnxruntime import InferenceSession

        plan = Path(folder, "partition.json")
        self.outputs: list[str]
        files, self.outputs = read_json(
            plan, "plan of files that amanda instrument wrote", _read_plan, ArtefactError
        )
        self.sessions = [InferenceSession(Path(folder, file), options, list(providers)) for file in files]

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the parts in order, and return outputs of the whole model.  output_names: None for all.

        feeds: inputs of the whole model.  A value is dropped once no later part reads it.
        """
        requested = self.outputs if output_names is None else list(output_names)
        unknown_names = [name for name in requested if name not in self.outputs]
        if unknown_names:
            raise ArtefactError(
                f"there is no output {unknown_names[0]!r}; there are {', '.join(self.outputs)}"
            )
        values = dict(feeds)
        reads = [{value.name for value in session.get_inputs()} for session in self.sessions]
        reads_default = [
            {value.name for value in session.get_overridable_initializers()} for session in self.sessions
        ]
        for number, session in enumerate(self.sessions):
            names_read = reads[number] | reads_default[number]
            names = [value.name for value in session.get_outputs()]
            outputs = session.run(names, {name: values[name] for name in names_read & values.keys()})
            values |= zip(names, outputs, strict=True)
            later = set(requested).union(*reads[number + 1 :], *reads_default[number + 1 :])
            values = {name: value for name, value in values.items() if name in later}
        return [values[name] for name in requested]


def _read_plan(plan: Any) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the outputs; raise ValueError for a file in another folder."""
    files, outputs = [str(entry["file"]) for entry in plan["files"]], [str(name) for name in plan["outputs"]]
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is no file of its folder")
    return files, outputs
