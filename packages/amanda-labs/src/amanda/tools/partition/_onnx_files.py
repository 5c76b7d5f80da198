"""Files of the parts of an ONNX model: stages, or protected ops and the public ones around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

import amanda
from amanda.tools.onnx_graph import add_note, save_onnx
from amanda.tools.partition._cut import CutRequest, PartitionError, Stages
from amanda.tools.partition._enclave import ProtectError
from amanda.tools.partition._onnx_graph import FileFactsTool, FileGraph
from amanda.tools.partition._result import Part, PartsResult
from amanda.tools.partition._step_work import StepWork
from amanda.tools.select import Selection

PLAN_FILE = "partition.json"
"""Name of the file beside the parts that lists them in the order in which they run."""

Analyse = Callable[[amanda.Tool], None]


def write_stages(
    request: CutRequest, measured: StepWork | None, source: Path, folder: Path, analyse: Analyse,
    about: Mapping[str, Any],
) -> PartsResult:  # fmt: skip
    """Write a file for each stage, and return the result, which is saved beside them.

    measured: costs of sessions that ran the model; None for FLOPs by shapes.  about: notes for each file.
    Raises PartitionError if no cut meets the request, ArtefactError if another model was measured.
    """
    graph = FileGraph(source)
    if request.stages > len(graph.ops):
        raise PartitionError(
            f"stages={request.stages}, but {source} has {len(graph.ops)} ops that compute with its inputs; "
            "give fewer stages"
        )
    tool = FileFactsTool(graph)
    analyse(tool)
    result = PartsResult(tool.work(measured), request, list(graph.inputs), list(graph.outputs))
    _write_parts(tool, result, ["stage"] * request.stages, source, folder, about)
    return result


def write_protected(
    selection: Selection, text: str, source: Path, folder: Path, analyse: Analyse, about: Mapping[str, Any]
) -> PartsResult:
    """Write files of protected and public ops by turns; return the result, which is saved beside them.

    text: of the user's selection.  Raises PartitionError and ProtectError as `assign_parts` does.
    """
    tool = FileFactsTool(FileGraph(source), selection)
    analyse(tool)
    part_of_op, kinds, remarks = assign_parts(tool, selection, text, source.parent)
    # The parts are decided by the selection: these options are those of a plan without a pipeline.
    request = CutRequest(
        stages=len(kinds), method="order", microbatches=1, schedule="1f1b", memory=None, copies=None,
        byte_cost=0.0, tolerance=0.0,
    )  # fmt: skip
    graph = tool.graph
    result = PartsResult(tool.work(None), request, list(graph.inputs), list(graph.outputs), part_of_op)
    result.remarks = remarks
    _write_parts(tool, result, kinds, source, folder, about)
    return result


def _write_parts(
    tool: FileFactsTool, result: PartsResult, kinds: Sequence[str], source: Path, folder: Path,
    about: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a file for each part, add them to `parts` of the result, and save the result beside them.

    kinds: of each part, "stage", "protected" or "public".
    """
    graph, part_of_op = tool.graph, result.stage_of
    assert part_of_op is not None
    for number, kind in enumerate(kinds):
        part = f"stage{number}" if kind == "stage" else f"{number}.{kind}"
        file_name = f"{source.stem}.{part}.onnx"
        positions = [i for i in range(len(graph.ops)) if part_of_op[i] == number]
        model = extract_part(tool, positions, is_last=number == len(kinds) - 1)
        add_note(model, {**about, "part": part})
        inputs = [value.name for value in model.graph.input if value.name not in graph.declared]
        outputs = [value.name for value in model.graph.output]
        size = save_onnx(model, folder / file_name, source.parent, graph.is_external)
        result.parts.append(Part(file_name, kind, len(positions), inputs, outputs, size))
    # Last: a folder with a plan has all of its files.
    result.save(folder / PLAN_FILE)


def assign_parts(
    tool: FileFactsTool, selection: Selection, text: str, folder: Path
) -> tuple[Stages, list[str], list[str]]:
    """Return the part of each op, the kind of each part, and remarks for the user.

    Parts are public and protected by turns, as few as can be; a public op that does not depend on protected
    ones is in the first part.  folder: of external data.  Raises PartitionError if no op is selected, and
    ProtectError if a public part would hold a protected initializer.
    """
    graph = tool.graph
    is_selected = [tool.facts(i).selected for i in range(len(graph.ops))]
    if not any(is_selected):
        reason = "; ".join(selection.unmatched()) or "the ops that it fits compute with constants alone"
        raise PartitionError(f"protect={text!r} selects no op of the file: {reason}")
    alternating_parts = _alternating_parts(graph, is_selected)
    # Part 0 has no op if the first op is protected, so parts are numbered anew.
    used_parts = sorted(set(alternating_parts))
    kinds = ["protected" if part % 2 else "public" for part in used_parts]
    part_of_op = np.array([used_parts.index(part) for part in alternating_parts])
    protected_names = _protected_constants(tool, is_selected)
    shared_names = list(_check_shared_constants(tool, is_selected, protected_names, folder))
    remarks = []
    if shared_names:
        remarks.append(f"In public and protected parts, as extents or one number: {', '.join(shared_names)}.")
    return part_of_op, kinds, remarks


def _alternating_parts(graph: FileGraph, is_selected: list[bool]) -> list[int]:
    """Return the part of each op: even numbers for public parts, odd ones for protected parts."""
    part_of_op: list[int] = []
    for op, is_protected in zip(graph.ops, is_selected, strict=True):
        producers = [graph.producer_of[name] for name in op.reads if name in graph.producer_of]
        last_part = max((part_of_op[i] for i in producers), default=0)
        # The part of the last producer if it is of the op's kind, otherwise the next one.
        is_part_protected = last_part % 2 == 1
        part_of_op.append(last_part if is_part_protected == is_protected else last_part + 1)
    return part_of_op


def _protected_constants(tool: FileFactsTool, is_selected: list[bool]) -> set[str]:
    """Return the initializers, and the values computed from them alone, that protected ops read or make."""
    graph = tool.graph
    names_read = [
        name
        for op, is_protected in zip(graph.ops, is_selected, strict=True)
        if is_protected
        for name in op.reads
    ]
    for op in graph.constants.values():
        # A constant may be selected itself, as a fake-quantised weight is.
        op_facts = tool.ops.get(op.outputs[0])  # by the op's first output
        if op_facts is not None and op_facts.selected:
            names_read += op.outputs
    # Values that ops compute from inputs of the model are no constants.
    return {
        name for name in graph.with_constants(names_read)
        if name in graph.initializers or name in graph.sparse or name in graph.constants
    }  # fmt: skip


def _check_shared_constants(
    tool: FileFactsTool, is_selected: list[bool], protected_names: set[str], folder: Path
) -> Iterator[str]:
    """Yield the protected constants that public ops read and may read, such as shapes.

    Raises ProtectError for other protected constants that a public op or an output reads, and for a public
    constant with the same values as a protected one.
    """
    graph = tool.graph
    # Exporters store the same values under several names; a public twin would give a protected one away.
    secret_names = (name for name in protected_names if not _may_be_public(graph, name, folder))
    secret_name_by_bytes = {_constant_bytes(graph, name, folder): name for name in secret_names}
    # b"" stands for a computed value, which has no bytes in the file, and for one number repeated, no secret.
    secret_name_by_bytes.pop(b"", None)
    for name, reader in _public_readers(graph, is_selected).items():
        if name in protected_names:
            if not _may_be_public(graph, name, folder):
                raise ProtectError(
                    f"{reader} reads {name}, which protected ops read: select this op too, or leave out the "
                    "ops that read it"
                )
            yield name
            continue
        protected_twin = secret_name_by_bytes.get(_constant_bytes(graph, name, folder))
        if protected_twin is not None:
            raise ProtectError(
                f"{reader} reads {name}, which has the same values as {protected_twin}, which is protected: "
                "select this op too, or leave out the ops that read it"
            )


def _public_readers(graph: FileGraph, is_selected: list[bool]) -> dict[str, str]:
    """Return by value that is read in public, directly or by constant nodes, a text on one of its readers."""
    reader_text: dict[str, str] = {}
    for op, is_protected in zip(graph.ops, is_selected, strict=True):
        if not is_protected:
            reader_text |= dict.fromkeys(graph.with_constants(op.reads), f"{op}, which is not selected,")
    # Outputs that no op makes: constants, or inputs handed on.
    passed_through = [name for name in graph.outputs if name not in graph.producer_of]
    return reader_text | dict.fromkeys(graph.with_constants(passed_through), "an output of the model")


def _may_be_public(graph: FileGraph, name: str, folder: Path) -> bool:
    """Return True for extents, single numbers and arrays of one number, which exporters share between ops.

    A constant that is computed from public ones alone is public too; a sparse one never is.
    """
    tensor = graph.constant_tensor(name)
    if tensor is None:
        op = graph.constants.get(name)
        reads = () if op is None else op.reads
        return bool(reads) and all(_may_be_public(graph, input_name, folder) for input_name in reads)
    # Shapes, axes and flags say nothing about trained values.
    is_extents = tensor.data_type in (TensorProto.INT64, TensorProto.BOOL) and len(tensor.dims) <= 1
    return is_extents or not _constant_bytes(graph, name, folder)


def _constant_bytes(graph: FileGraph, name: str, folder: Path) -> bytes:
    """Return the values of a constant as bytes; no bytes for computed, sparse or equal values."""
    tensor = graph.constant_tensor(name)
    if tensor is None:
        return b""
    if tensor.data_type == TensorProto.STRING:
        return b"\0".join(tensor.string_data)
    # Also external data, which the file itself does not hold.
    array: NDArray[np.generic] = numpy_helper.to_array(tensor, str(folder))
    content = array.tobytes()
    # One number repeated, such as a mask of zeros, is not a secret.
    return b"" if content == content[: array.itemsize] * array.size else content


def extract_part(tool: FileFactsTool, positions: Sequence[int], is_last: bool) -> ModelProto:
    """Return a model of some ops, with the constants and initializers that they read.

    Its outputs are the values that ops of other parts read, and outputs of the whole model; the last part
    also has outputs that are constants or inputs of the whole model.  Raises ArtefactError for a value of
    unknown type that crosses.
    """
    graph, part_positions = tool.graph, set(positions)
    reads = [name for i in positions for name in graph.ops[i].reads]
    produced = [name for i in positions for name in graph.ops[i].outputs]
    outputs = []
    for name in produced:
        readers = graph.readers_of.get(name, ())
        if name in graph.outputs or not part_positions.issuperset(readers):
            outputs.append(name)
    if is_last:
        passed_through = [name for name in graph.outputs if name not in graph.producer_of]
        reads, outputs = reads + passed_through, outputs + passed_through
    return _build_part(tool, positions, dict.fromkeys(graph.with_constants(reads)), produced, outputs)


def _build_part(
    tool: FileFactsTool, positions: Sequence[int], reads: Collection[str], produced: Sequence[str],
    outputs: Sequence[str],
) -> ModelProto:  # fmt: skip
    """Return a model of the ops at these positions.

    reads: values that the ops read, and those from which constants among them are computed.
    produced: values that the ops make.  outputs: of the model.
    """
    graph, model = tool.graph, ModelProto()
    # Opsets, functions and metadata of the whole model hold for each part.
    for field, value in graph.proto.ListFields():  # those that are set
        if field.name not in ("graph", "training_info"):
            _copy_field(model, field.name, value)
    part, whole = model.graph, graph.proto.graph
    part.name, part.doc_string = whole.name, whole.doc_string
    part.metadata_props.extend(whole.metadata_props)
    # Each part has copies of the constant nodes that it reads.
    constants = [graph.constants[name] for name in reads if name in graph.constants]
    node_numbers = {op.number for op in (*(graph.ops[i] for i in positions), *constants)}
    # In the order of the file, which ONNX wants to be topological.
    part.node.extend(whole.node[number] for number in sorted(node_numbers))
    part.initializer.extend(tensor for tensor in whole.initializer if tensor.name in reads)
    part.sparse_initializer.extend(
        tensor for tensor in whole.sparse_initializer if tensor.values.name in reads
    )
    part.input.extend(value for value in whole.input if value.name in reads)
    # Values that ops of other parts make become inputs.
    crossing_names = [
        name for name in reads if name in graph.producer_of and graph.producer_of[name] not in set(positions)
    ]
    part.input.extend(_value_info(tool, name) for name in crossing_names)
    part.output.extend(graph.outputs.get(name) or _value_info(tool, name) for name in outputs)
    all_names = {*produced, *reads}
    # Inputs and outputs have their types already, and ONNX forbids a second entry.
    inner_names = all_names - {*outputs, *crossing_names}
    part.value_info.extend(info for info in whole.value_info if info.name in inner_names)
    part.quantization_annotation.extend(
        annotation for annotation in whole.quantization_annotation if annotation.tensor_name in all_names
    )
    return model


def _value_info(tool: FileFactsTool, name: str) -> ValueInfoProto:
    """Return the declaration of a value that crosses between parts."""
    return ValueInfoProto(name=name, type=tool.type_of(name))


def _copy_field(model: ModelProto, name: str, value: Any) -> None:
    """Set a field of a model to a value, or extend it if it is repeated."""
    if hasattr(value, "extend"):
        getattr(model, name).extend(value)
    else:
        setattr(model, name, value)
