"""The parts of an ONNX model, run one after the other by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import ArtefactError
from amanda.options import Folder, checked
from amanda.tools.results import read_json


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
            plan, "plan of files that amanda instrument wrote", _files, ArtefactError
        )
        self.sessions = [InferenceSession(Path(folder, one), options, list(providers)) for one in files]

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Return outputs of the whole model; None for all.

        A part is given those of the model's inputs that it reads, and what parts before it made; what no
        part after it reads is forgotten.
        """
        wanted = self.outputs if output_names is None else list(output_names)
        unknown = [name for name in wanted if name not in self.outputs]
        if unknown:
            raise ArtefactError(f"there is no output {unknown[0]!r}; there are {', '.join(self.outputs)}")
        values = dict(feeds)
        reads = [{one.name for one in session.get_inputs()} for session in self.sessions]
        reads_default = [
            {one.name for one in session.get_overridable_initializers()} for session in self.sessions
        ]
        for number, session in enumerate(self.sessions):
            needed = reads[number] | reads_default[number]
            names = [one.name for one in session.get_outputs()]
            made = session.run(names, {name: values[name] for name in needed & values.keys()})
            values |= zip(names, made, strict=True)
            later = set(wanted).union(*reads[number + 1 :], *reads_default[number + 1 :])
            values = {name: value for name, value in values.items() if name in later}
        return [values[name] for name in wanted]


def _files(told: Any) -> tuple[list[str], list[str]]:
    """Return the names of files, all in the folder of the plan, and of outputs."""
    files, outputs = [str(one["file"]) for one in told["files"]], [str(name) for name in told["outputs"]]
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is no file of its folder")
    return files, outputs
