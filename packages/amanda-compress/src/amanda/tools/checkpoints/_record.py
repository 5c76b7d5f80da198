"""Files of a folder: tensors, those of torchao taken apart, and the record of a model's compression."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import floordiv, mod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import ArtefactError
from amanda.files import write_file
from amanda.tools.kit import RequiredNames
from amanda.tools.results import check_schema, count_of, parsing, read_json, to_json

if TYPE_CHECKING:
    from torch import Tensor

NOUN = "compressed model"
_TENSORS, _RECORD = "model.safetensors", "compressed.json"
_SCHEMA, _VERSION = "compressed", 1


@dataclass(repr=False)
class Checkpoint:
    """Tensors of a compressed model, and the record of its compression, as a folder holds them.

    tensors: by name, those of torchao taken apart: "0.weight:qdata".  packed: attributes of these by name.
    ties: names of parameters that share a tensor with an earlier name.  shapes: of tensors before channels
    were removed, by name.  sizes: attributes of modules before and after that, by name.  results: of the
    tools, as `Result.to_dict` describes them.  versions: of the distributions that wrote the folder.
    """

    tensors: dict[str, Tensor]
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        elements = sum(tensor.numel() for tensor in self.tensors.values())
        tools = ", ".join(result["schema"].removeprefix("amanda.") for result in self.results)
        counts = f"{count_of(len(self.tensors), 'tensor')}, {count_of(elements, 'element')}"
        return f"Checkpoint: {counts}; {tools or 'no results'}"


def _read_extent(value: Any) -> Any:
    """Return an int, or a tuple for a list of these; raise TypeError for another value."""
    if type(value) is int:
        return value
    if type(value) is list and all(type(extent) is int for extent in value):
        return tuple(value)
    raise TypeError


def _read_shape(value: Any) -> tuple[int, ...]:
    """Return the extents of a tensor; raise TypeError for another value, ValueError for negative ones."""
    shape = tuple(_read_extent([*value]))
    if any(extent < 0 for extent in shape):
        raise ValueError
    return shape


def _read_size_change(value: Any) -> tuple[Any, Any]:
    """Return a size, or sizes by axis, before and after a removal; raise ValueError for one that grows.

    An extent may stay as it was; if it shrinks, it ends above 0.  Raises TypeError for what is no size.
    """
    before, after = map(_read_extent, value)
    old_extents, new_extents = ((size,) if type(size) is int else size for size in (before, after))
    pairs = zip(old_extents, new_extents, strict=True)
    if type(before) is not type(after) or not all(new == old or 0 < new < old for old, new in pairs):
        raise ValueError
    return before, after


def _instance_check(kind: type) -> Any:
    """Return a function that returns an instance of a type, and raises TypeError for another value."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


_FIELDS = {
    "versions": (_instance_check(str), "the version of a distribution"),
    "packed": (_instance_check(dict), "the attributes of a tensor"),
    "ties": (_instance_check(str), "the name of a tensor"),
    "shapes": (_read_shape, "the extents of a tensor"),
    "sizes": (_read_size_change, "a size before a removal of channels and a size after it that is no larger"),
}
"""Fields of a `Checkpoint` that the record has by name: a function that reads a value, and what it is."""


def _checked_fields(record: Any) -> dict[str, Any]:
    """Return fields and checksum of a record; raise ValueError for wrong, KeyError for missing ones."""
    check_schema(record, _SCHEMA, _VERSION)
    content: dict[str, Any] = {"checksum": record["checksum"]}
    for name, (read_value, noun) in _FIELDS.items():
        if not isinstance(record[name], dict):
            raise ValueError(f"its {name} is a {type(record[name]).__name__}")
        content[name] = {}
        for key, value in record[name].items():
            try:
                content[name][key] = read_value(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"its {name} has {value!r:.80} for {key!r}, which is not {noun}") from error
    results = content["results"] = record["results"]
    if not isinstance(results, list):
        raise ValueError(f"its results is a {type(results).__name__}")
    for result in results:
        if not isinstance(result, dict) or not isinstance(result.get("schema"), str):
            raise ValueError(f"its results have {result!r:.80}, which is no result of a tool")
    if _checksum_of_record(record) != record["record_checksum"]:
        raise ValueError("it is not as it was written: damaged or edited")
    return content


def _checksum_of_record(record: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a record without its own checksum."""
    content = {name: value for name, value in record.items() if name != "record_checksum"}
    return zlib.crc32(to_json(content).encode())


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def write_folder(checkpoint: Checkpoint, model_name: str, folder: Path) -> None:
    """Create a folder and write its files. Raises OSError, also for what safetensors refuses; FileError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir()
    try:
        save_file(checkpoint.tensors, folder / _TENSORS, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    record = {
        "schema": f"amanda.{_SCHEMA}", "version": _VERSION, "model": model_name,
        "checksum": _checksum(folder / _TENSORS),
        **{name: getattr(checkpoint, name) for name in (*_FIELDS, "results")},
    }  # fmt: skip
    record["record_checksum"] = _checksum_of_record(record)
    write_file(folder / _RECORD, to_json(record, indent=1) + "\n")


def read_folder(folder: Path) -> Checkpoint:
    """Return what a folder holds.

    Raises ArtefactError for a damaged folder and for another kind of checkpoint; FileError.
    """
    if not (folder / _RECORD).exists() and (folder / "config.json").exists():
        raise ArtefactError(
            f"{folder} has no {_RECORD}: it is a checkpoint for vLLM or transformers, which load it "
            f"themselves; save_compressed(model, path) writes a folder for load_compressed"
        )
    record = read_json(folder / _RECORD, f"record of a {NOUN}", _checked_fields, ArtefactError)
    checksum = record.pop("checksum")
    path = folder / _TENSORS
    with parsing(path, f"file of the tensors of a {NOUN}", ArtefactError):
        from safetensors.torch import load_file

        # Damaged numbers would load without an error.
        if _checksum(path) != checksum:
            raise ValueError(f"it is not the file that {_RECORD} was written with: damaged or replaced")
        return Checkpoint(load_file(path), **record)


def check_target(path: Path, force: bool) -> None:
    """Raise ArtefactError where a new folder cannot take the place of what is at a path."""
    if not path.exists():
        return
    if not force:
        raise ArtefactError(f"{path} is there already; force=True replaces it")
    if not path.is_dir():
        raise ArtefactError(f"{path} is no folder, and only a folder of save_compressed is replaced")
    names = {entry.name for entry in path.iterdir()}
    if names and _RECORD not in names:
        raise ArtefactError(
            f"{path} has no {_RECORD}: save_compressed has not written it, and does not replace what is in "
            "it; give the path of a new folder"
        )
    if foreign_names := sorted(names - {_RECORD, _TENSORS}):
        raise ArtefactError(
            f"{path} has {', '.join(foreign_names[:3])}, which save_compressed has not written and does "
            "not replace; give the path of a new folder"
        )


_REQUIRED = RequiredNames(
    "amanda.tools.checkpoints", "torch",
    "torch:ops.aten._convert_weight_to_int4pack_for_cpu", "torch:ops.aten._weight_int4pack_mm_for_cpu",
)  # fmt: skip

_ROWS = 256
"""Rows of the identity by which packed integers are read at once."""


def packed_parts(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the plain tensors, by name, that a tensor of torchao consists of, and its attributes.

    None for a type that `convert` does not make, or with attributes that it leaves at their defaults.
    Integers that are packed for a processor are unpacked, as `codes`.
    """
    kind = type(tensor).__name__
    if kind not in _BUILDERS or not hasattr(tensor, "tensor_data_names"):
        return None
    names = {"Int8Tensor": ("qdata", "scale"), "Int4OpaqueTensor": ("qdata", "scale_and_zero")}[kind]
    optional = (*tensor.optional_tensor_data_names, *tensor.optional_tensor_attribute_names)
    if any(getattr(tensor, name) for name in optional if name != "act_pre_scale"):
        return None
    parts = {name: getattr(tensor, name) for name in names}
    if tensor.act_pre_scale is not None:
        parts["act_pre_scale"] = tensor.act_pre_scale
    if kind == "Int4OpaqueTensor":  # packed for one kind of processor, see `_codes_of`
        parts["codes"] = _two_in_a_byte(_codes_of(tensor))
        del parts["qdata"]
    return parts, {"type": kind, "block_size": list(tensor.block_size)}


def build_packed_tensor(parts: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """Return the tensor of torchao that `packed_parts` took apart.

    Raises ValueError for another type or size of blocks, KeyError for a missing part, ImportError without
    torchao.
    """
    kind = attributes["type"]
    # No class is looked up by a name of the file: a file chooses among these two.
    if kind not in _BUILDERS:
        raise ValueError(f"its tensors are of type {kind!r}, and {' and '.join(_BUILDERS)} are read")
    block_size = attributes["block_size"]
    is_list = type(block_size) is list and all(type(extent) is int and extent > 0 for extent in block_size)
    tensor = _BUILDERS[kind](parts, block_size) if is_list else None
    if tensor is None or not _has_blocks(tensor, parts):
        raise ValueError(
            f"a tensor of type {kind} has the block_size {block_size!r:.80}, which does not fit it"
        )
    return tensor


def _has_blocks(tensor: Any, parts: Mapping[str, Tensor]) -> bool:
    """Return True if the scales of a tensor of torchao are as many as its blocks."""
    block_size = tensor.block_size
    if len(block_size) != tensor.ndim or any(map(mod, tensor.shape, block_size)):
        return False
    counts = tuple(map(floordiv, tensor.shape, block_size))
    if "scale" in parts:
        return tuple(parts["scale"].shape) == counts
    return tuple(parts["scale_and_zero"].shape) == (*reversed(counts), 2)


def _build_int8(parts: Mapping[str, Tensor], block_size: list[int]) -> Tensor:
    """Return the `Int8Tensor` of parts that `packed_parts` gives."""
    from torchao.quantization import Int8Tensor

    scale = parts["scale"]
    tensor: Tensor = Int8Tensor(
        parts["qdata"], scale, block_size, scale.dtype, act_pre_scale=parts.get("act_pre_scale")
    )
    return tensor


def _build_int4(parts: Mapping[str, Tensor], block_size: list[int]) -> Tensor:
    """Return the `Int4OpaqueTensor` of `packed_parts`, its codes packed for this processor."""
    import torch
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    _REQUIRED.check()
    first_codes, second_codes = parts["codes"] & 15, parts["codes"] >> 4  # two in a byte
    codes = torch.stack([first_codes, second_codes], dim=-1).flatten(-2)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    tensor: Tensor = Int4OpaqueTensor(
        packed, parts["scale_and_zero"], block_size, codes.shape, act_pre_scale=parts.get("act_pre_scale")
    )
    return tensor


_BUILDERS = {"Int8Tensor": _build_int8, "Int4OpaqueTensor": _build_int4}


def _codes_of(tensor: Any) -> Tensor:
    """Return the integers (outputs, inputs), from 0 to 15, of an Int4OpaqueTensor.

    How the host's kernel packs them depends on the processor's vectors, so that a file cannot hold the packed
    form.  No op unpacks it; a product with the identity does, exactly, as bfloat16 holds these integers.
    """
    import torch

    _REQUIRED.check()
    outputs, inputs = tensor.shape
    group_size = tensor.block_size[1]
    # Scale 1 and zero 0 for each group, so that the product is that with the integers themselves.
    unit_scales = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(inputs // group_size, outputs, 2)
    unit_scales = unit_scales.contiguous()
    columns = []
    for start in range(0, inputs, _ROWS):
        identity_rows = torch.zeros(min(_ROWS, inputs - start), inputs, dtype=torch.bfloat16)
        identity_rows[range(len(identity_rows)), range(start, start + len(identity_rows))] = 1
        columns.append(
            torch.ops.aten._weight_int4pack_mm_for_cpu(identity_rows, tensor.qdata, group_size, unit_scales)
        )
    # The kernel centres codes at 8.
    return (torch.cat(columns).T + 8).to(torch.uint8)


def _two_in_a_byte(codes: Tensor) -> Tensor:
    """Return rows of 4-bit integers with two in each byte, the lower bits first."""
    return codes[:, ::2] | codes[:, 1::2] << 4
