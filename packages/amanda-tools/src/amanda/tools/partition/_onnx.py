"""Files of the parts of an ONNX model: stages, or protected ops and the public ones before and after them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

import amanda
from amanda.tools.partition._cut import PartitionError, Request, Stages
from amanda.tools.partition._onnx_facts import FileTool
from amanda.tools.partition._onnx_graph import FileGraph
from amanda.tools.partition._onnx_parts import part_of, save
from amanda.tools.partition._onnx_protect import levels
from amanda.tools.partition._protect import _selection
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._work import Work
from amanda.tools.results import amount

PLAN = "partition.json"
"""The file beside the parts that says how they are run."""

Analyse = Callable[[amanda.Tool], None]


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

    def __init__(self, tool: FileTool, work: Work, request: Request, stage_of: Stages | None = None) -> None:
        super().__init__(work, request)
        self.inputs, self.outputs = list(tool.graph.inputs), list(tool.graph.outputs)
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


def write_stages(
    request: Request, measured: Work | None, source: Path, folder: Path, analyse: Analyse,
    about: Mapping[str, Any],
) -> PartsResult:  # fmt: skip
    """Write a file for each stage.  measured: costs of sessions that ran the model."""
    graph = FileGraph(source)
    if request.stages > len(graph.ops):
        raise PartitionError(
            f"stages={request.stages}, but {source} has {len(graph.ops)} ops that compute with its inputs; "
            "give fewer stages"
        )
    tool = FileTool(graph)
    analyse(tool)
    result = PartsResult(tool, tool.work(measured), request)
    _write(tool, result, ["stage"] * request.stages, source, folder, about)
    return result


def write_protected(
    text: str, source: Path, folder: Path, analyse: Analyse, about: Mapping[str, Any]
) -> PartsResult:
    """Write files of protected and of public ops; `text` says which are protected."""
    selection = _selection(text)
    tool = FileTool(FileGraph(source), selection)
    analyse(tool)
    stage_of, kinds, remarks = levels(tool, selection, text, source.parent)
    request = Request(len(kinds), "order", 1, "1f1b", None, None, 0.0, 0.0)
    result = PartsResult(tool, tool.work(None), request, stage_of)
    result.remarks = remarks
    _write(tool, result, kinds, source, folder, about)
    return result


def _write(
    tool: FileTool, result: PartsResult, kinds: Sequence[str], source: Path, folder: Path,
    about: Mapping[str, Any],
) -> None:  # fmt: skip
    graph, stage_of = tool.graph, result.stage_of
    assert stage_of is not None
    for number, kind in enumerate(kinds):
        part = f"stage{number}" if kind == "stage" else f"{number}.{kind}"
        name = f"{source.stem}.{part}.onnx"
        chosen = [i for i in range(len(graph.ops)) if stage_of[i] == number]
        made = part_of(tool, chosen, is_last=number == len(kinds) - 1)
        _note(made, {**about, "part": part})
        inputs = [one.name for one in made.graph.input if one.name not in graph.declared]
        outputs = [one.name for one in made.graph.output]
        size = save(made, source.parent, folder / name, graph.is_external)
        result.parts.append(Part(name, kind, len(chosen), inputs, outputs, size))
    result.save(folder / PLAN)


def _note(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Say in the metadata what was done, after what is said there already."""
    told = {one.key: one.value for one in model.metadata_props}
    notes = [*json.loads(told.get("amanda", "[]")), about]
    onnx.helper.set_model_props(model, {**told, "amanda": json.dumps(notes)})
