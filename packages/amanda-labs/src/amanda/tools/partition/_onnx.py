"""Files of the parts of an ONNX model: stages, or protected ops and the public ones before and after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda.tools.onnx_graph import add_note, save_onnx
from amanda.tools.partition._cut import PartitionError, Request
from amanda.tools.partition._onnx_facts import FileTool
from amanda.tools.partition._onnx_graph import FileGraph
from amanda.tools.partition._onnx_parts import part_of
from amanda.tools.partition._onnx_protect import levels
from amanda.tools.partition._parts import Part, PartsResult
from amanda.tools.partition._work import Work
from amanda.tools.select import Selection

PLAN = "partition.json"
"""The file beside the parts that says how they are run."""

Analyse = Callable[[amanda.Tool], None]


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
    result = PartsResult(tool.work(measured), request, list(graph.inputs), list(graph.outputs))
    _write(tool, result, ["stage"] * request.stages, source, folder, about)
    return result


def write_protected(
    selection: Selection, text: str, source: Path, folder: Path, analyse: Analyse, about: Mapping[str, Any]
) -> PartsResult:
    """Write files of protected and of public ops; `text` is how the user gave the selection."""
    tool = FileTool(FileGraph(source), selection)
    analyse(tool)
    stage_of, kinds, remarks = levels(tool, selection, text, source.parent)
    request = Request(len(kinds), "order", 1, "1f1b", None, None, 0.0, 0.0)
    graph = tool.graph
    ends = list(graph.inputs), list(graph.outputs)
    result = PartsResult(tool.work(None), request, *ends, stage_of)
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
        add_note(made, {**about, "part": part})
        inputs = [one.name for one in made.graph.input if one.name not in graph.declared]
        outputs = [one.name for one in made.graph.output]
        size = save_onnx(made, folder / name, source.parent, graph.is_external)
        result.parts.append(Part(name, kind, len(chosen), inputs, outputs, size))
    result.save(folder / PLAN)
