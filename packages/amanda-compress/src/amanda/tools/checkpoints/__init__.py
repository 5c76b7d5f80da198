"""Save and load pruned and quantised PyTorch models: safetensors, and a file of what was done to the model.

result = convert(model, gptq)
save_compressed(model, "folder", result)

model = Model()  # as it was before
load_compressed(model, "folder")
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import ArtefactError
from amanda.files import replacing_all, write_file
from amanda.options import checked
from amanda.tools.kit import RequiredNames
from amanda.tools.prune import ChannelPruneResult
from amanda.tools.prune.channels import is_size_name
from amanda.tools.results import Result, check_schema, parsing, read_json, to_json

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Checkpoint", "load_compressed", "save_compressed"]

_TENSORS, _RECORD = "model.safetensors", "compressed.json"
_SCHEMA, _VERSION = "compressed", 1
_NOUN = "compressed model"


@dataclass(repr=False)
class Checkpoint:
    """What a folder holds.

    tensors: by name, those of torchao taken apart: "0.weight:qdata".  packed: attributes of these by name.
    ties: names of parameters that share a tensor with an earlier name.  sizes: attributes of modules with the
    extents of their weights, by path; empty unless channels were removed.  results: of the tools, as
    `Result.to_dict` describes them.  versions: of the distributions that wrote the folder.
    """

    tensors: dict[str, Tensor]
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        elements = sum(tensor.numel() for tensor in self.tensors.values())
        tools = ", ".join(result["schema"].removeprefix("amanda.") for result in self.results)
        return f"Checkpoint: {len(self.tensors):,} tensors, {elements:,} elements; {tools or 'no results'}"


@checked(error=ArtefactError)
def save_compressed(
    model: nn.Module, path: str | os.PathLike[str], *results: Result, force: bool = False
) -> Path:
    """Write a pruned or quantised model as tensors and a record of its compression; return the folder.

    The folder has model.safetensors and compressed.json; neither holds code.  `load_compressed` reads it.

    Args:
        model: A PyTorch module after `finalize` or `convert`.
        path: Of the new folder.
        *results: What `finalize` and `convert` returned.  Needed if channels were removed, as loading then
            makes the layers smaller; for other tools they are a record.
        force: Replace a folder that is there.

    Returns:
        The path of the folder.

    Raises:
        ArtefactError: For another kind of model, a tensor that is neither plain nor one that `convert` makes,
            and a folder that is there without `force`.
        FileError: If the folder cannot be written; an existing one is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path, checkpoint = Path(path), _checkpoint_of(model, results)
    with replacing_all(path, force) as folder:
        folder.mkdir()
        try:
            save_file(checkpoint.tensors, folder / _TENSORS, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        record = {
            "schema": f"amanda.{_SCHEMA}", "version": _VERSION,
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "checksum": _checksum(folder / _TENSORS),
            **{name: getattr(checkpoint, name) for name in _RECORDED},
        }  # fmt: skip
        write_file(folder / _RECORD, to_json(record, indent=1) + "\n")
    return path


_RECORDED = {"versions": dict, "packed": dict, "ties": dict, "sizes": dict, "results": list}
"""Fields of a `Checkpoint` that the record has, and their types."""


@checked(error=ArtefactError)
def load_compressed(model: nn.Module, path: str | os.PathLike[str]) -> Checkpoint:
    """Load a model that `save_compressed` wrote, into a module of the same structure, in place.

    Tensors have the type of the file: a weight that is an integer there is one in the module.  Parameters are
    new objects, so that an optimizer is made afterwards.  They lie on the device of those before, and on the
    host if these are on "meta".

    Args:
        model: A module made as the saved one was before its compression.
        path: Of the folder.

    Returns:
        What the folder holds; `results` says what was done.

    Raises:
        ArtefactError: For a damaged folder, and for another model; the module is as it was.
        FileError: If the folder cannot be read.
    """
    _check_kind(model)
    path = Path(path)
    checkpoint = _read(path)
    if checkpoint.packed and find_spec("torchao") is None:
        raise ArtefactError(
            f"{path} has integers, which become tensors of torchao: pip install 'amanda-compress[torchao]'"
        )
    with parsing(path, _NOUN, ArtefactError):
        tensors = dict(_unpacked(checkpoint))
        tensors |= {name: tensors[first_name] for name, first_name in checkpoint.ties.items()}
    _check_model(model, path, checkpoint, tensors)
    _assign(model, checkpoint, tensors)
    return checkpoint


def _checkpoint_of(model: nn.Module, results: tuple[Result, ...]) -> Checkpoint:
    """Return what a folder holds of a model.  Raises ArtefactError as `save_compressed` does."""
    _check_kind(model)
    names = ("amanda-compress", "torch")
    checkpoint = Checkpoint({}, results=[result.to_dict() for result in results])
    checkpoint.versions = {name: version(name) for name in names}
    names_by_identity: dict[int, str] = {}
    storages: set[int] = set()
    for name, (_, _, tensor) in _state_of(model).items():
        if (first_name := names_by_identity.setdefault(id(tensor), name)) != name:
            checkpoint.ties[name] = first_name
            continue
        parts, attributes = _plain(name, tensor)
        if attributes:
            checkpoint.packed[name] = attributes
        for part_name, part in parts.items():
            part = part.contiguous()
            storage = part.untyped_storage().data_ptr()
            # safetensors refuses memory that tensors share; empty tensors all have the address 0.
            if storage in storages and part.numel():
                part = part.clone()
            storages.add(storage)
            checkpoint.tensors[part_name] = part
    if any(isinstance(result, ChannelPruneResult) for result in results):
        checkpoint.sizes = {
            path: sizes for path, module in model.named_modules() if (sizes := _sizes(module))
        }
    return checkpoint


def _check_kind(model: Any) -> None:
    """Raise ArtefactError for anything but a module of PyTorch."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArtefactError(
            f"a {type(model).__module__}.{type(model).__name__} was given; give a torch.nn.Module: a model "
            "of Keras is saved by model.save(path), and `convert` writes ONNX files itself"
        )


def _state_of(model: nn.Module) -> dict[str, tuple[dict[str, Any], str, Tensor]]:
    """Return the parameters and buffers that are saved: by name the dict and the key that hold each.

    Raises ArtefactError where `state_dict` has something else too, such as `get_extra_state` of a module.
    """
    saved_names = set(model.state_dict(keep_vars=True))
    state = {
        f"{path}.{key}" if path else key: (tensors, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items() if tensor is not None
    }  # fmt: skip
    if others := sorted(saved_names - set(state)):
        raise ArtefactError(
            f"the state_dict of this {type(model).__name__} has {', '.join(others[:3])}, which is no "
            "parameter and no buffer of a module, and these alone are saved: register it as a buffer"
        )
    return {name: entry for name, entry in state.items() if name in saved_names}


def _plain(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a tensor, or its parts, by their names in the file, and its attributes, {} for a plain tensor.

    Raises ArtefactError for tensors of other types.
    """
    import torch

    plain = tensor.detach()
    if type(plain) is torch.Tensor and plain.layout is torch.strided and plain.device.type != "meta":
        return {name: plain}, {}
    packed = _parts_of(plain)
    if packed is None:
        raise ArtefactError(
            f"{name} of the model is a {type(plain).__name__} ({plain.layout}, {plain.device}); saved are "
            "plain tensors and the integers of `convert`: save the model before it is compressed further"
        )
    parts, attributes = packed
    return {f"{name}:{part}": value for part, value in parts.items()}, attributes


def _sizes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are extents, or tuples of extents."""
    return {
        name: value
        for name, value in vars(module).items()
        if is_size_name(name)
        and (type(value) is int or (type(value) is tuple and all(type(extent) is int for extent in value)))
    }


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _read(folder: Path) -> Checkpoint:
    """Return what a folder holds.

    Raises ArtefactError for a damaged folder and for another kind of checkpoint; FileError.
    """
    if not (folder / _RECORD).exists() and (folder / "config.json").exists():
        raise ArtefactError(
            f"{folder} has no {_RECORD}: it is a checkpoint for vLLM or transformers, which load it "
            f"themselves; save_compressed(model, path) writes a folder for load_compressed"
        )

    def content_of(record: Any) -> Mapping[str, Any]:
        check_schema(record, _SCHEMA, _VERSION)
        for name, kind in _RECORDED.items():
            if not isinstance(record[name], kind):
                raise ValueError(f"its {name} is a {type(record[name]).__name__}")
        return {name: record[name] for name in (*_RECORDED, "checksum")}

    record = dict(read_json(folder / _RECORD, f"record of a {_NOUN}", content_of, ArtefactError))
    checksum = record.pop("checksum")
    path = folder / _TENSORS
    with parsing(path, f"file of the tensors of a {_NOUN}", ArtefactError):
        from safetensors.torch import load_file

        # Damaged numbers would load without an error.
        if _checksum(path) != checksum:
            raise ValueError(f"it is not the file that {_RECORD} was written with: damaged or replaced")
        return Checkpoint(load_file(path), **record)


def _unpacked(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as the model has them, by name; of tied ones the first."""
    parts: dict[str, dict[str, Tensor]] = {}
    for part_name, tensor in checkpoint.tensors.items():
        name, is_part, part = part_name.rpartition(":")
        if is_part and name in checkpoint.packed:
            parts.setdefault(name, {})[part] = tensor
        else:
            yield part_name, tensor
    for name, attributes in checkpoint.packed.items():
        yield name, _from_parts(parts[name], attributes)


def _check_model(model: nn.Module, path: Path, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Raise ArtefactError for a model that has other parameters and buffers than a folder."""
    state = _state_of(model)
    buffers, modules = dict(model.named_buffers()), dict(model.named_modules())
    differences = [
        *(f"the model has {name}, the folder has not" for name in state if name not in tensors),
        *(f"the folder has {name}, the model has not" for name in sorted(set(tensors) - set(state))),
        *(f"the model has no module {path}" for path in checkpoint.sizes if path not in modules),
        *(
            f"{name} is {_form(tensors[name])} in the folder and {_form(tensor)} in the model"
            for name, (_, _, tensor) in state.items()
            if name in tensors and not _fits(tensors[name], tensor, is_smaller=bool(checkpoint.sizes))
        ),
        # No file has its values, which the constructor computes.
        *(
            f"{name} of the model is on the device meta and in no state_dict: make the model elsewhere"
            for name, tensor in buffers.items() if tensor.device.type == "meta" and name not in state
        ),
    ]  # fmt: skip
    if differences:
        count = len(differences) - 3
        further = f"; and {count} more difference{'s' * (count > 1)}" if count > 0 else ""
        raise ArtefactError(
            f"{path} is not of this {type(model).__name__}: {'; '.join(differences[:3])}{further}"
        )


def _fits(tensor: Tensor, expected: Tensor, is_smaller: bool) -> bool:
    """Return True if a tensor has the expected shape, or a smaller one of as many axes where that may be.

    A floating-point tensor may have another floating-point type than the model's, as after `bfloat16()`.
    """
    if tensor.is_floating_point() != expected.is_floating_point():
        return False
    if tensor.shape == expected.shape:
        return True
    extents = zip(tensor.shape, expected.shape, strict=False)
    return is_smaller and tensor.ndim == expected.ndim and all(new <= old for new, old in extents)


def _form(tensor: Tensor) -> str:
    """Return the type and the extents of a tensor, as in float32 8x4."""
    return " ".join([str(tensor.dtype).removeprefix("torch."), "x".join(map(str, tensor.shape))]).strip()


def _assign(model: nn.Module, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors and sizes into a model."""
    import torch

    state, loaded = _state_of(model), dict[str, Any]()
    # Before anything is assigned: a device may lack the memory.
    for name, (_, _, before) in state.items():
        first_name = checkpoint.ties.get(name, name)
        if first_name in loaded:
            continue
        tensor: Any = tensors[name].to("cpu" if before.device.type == "meta" else before.device)
        if isinstance(before, torch.nn.Parameter):
            trains = before.requires_grad and first_name not in checkpoint.packed
            tensor = torch.nn.Parameter(tensor, requires_grad=trains)
        loaded[first_name] = tensor
    for name, (holder, key, _) in state.items():
        holder[key] = loaded[checkpoint.ties.get(name, name)]
    for path, sizes in checkpoint.sizes.items():
        module = model.get_submodule(path)
        present_sizes = _sizes(module)
        for attribute, size in sizes.items():
            value = tuple(size) if isinstance(size, list) else size
            # Of a crafted file nothing but a size is set.
            if attribute in present_sizes and type(value) is type(present_sizes[attribute]):
                setattr(module, attribute, value)


_REQUIRED = RequiredNames(
    "amanda.tools.checkpoints", "torch",
    "torch:ops.aten._convert_weight_to_int4pack_for_cpu", "torch:ops.aten._weight_int4pack_mm_for_cpu",
)  # fmt: skip

_ROWS = 256
"""Rows of the identity by which packed integers are read at once."""


def _parts_of(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the plain tensors that a tensor of torchao consists of, and its attributes.

    None for a type that `convert` does not make, or with attributes that it leaves at their defaults.
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
    if kind == "Int4OpaqueTensor":
        parts["codes"] = _two_in_a_byte(_codes_of(tensor))
        del parts["qdata"]
    return parts, {"type": kind, "block_size": list(tensor.block_size)}


def _from_parts(parts: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """Return the tensor of torchao that `_parts_of` took apart.

    Raises ValueError for another type, KeyError for a missing part, ImportError without torchao.
    """
    kind = attributes["type"]
    # No class is looked up by a name of the file: a file chooses among these two.
    if kind not in _BUILDERS:
        raise ValueError(f"its tensors are of type {kind!r}, and {' and '.join(_BUILDERS)} are read")
    return _BUILDERS[kind](parts, [int(extent) for extent in attributes["block_size"]])


def _int8(parts: Mapping[str, Tensor], block_size: list[int]) -> Tensor:
    from torchao.quantization import Int8Tensor

    scale = parts["scale"]
    tensor: Tensor = Int8Tensor(
        parts["qdata"], scale, block_size, scale.dtype, act_pre_scale=parts.get("act_pre_scale")
    )
    return tensor


def _int4(parts: Mapping[str, Tensor], block_size: list[int]) -> Tensor:
    import torch
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    _REQUIRED.check()
    codes = torch.stack([parts["codes"] & 15, parts["codes"] >> 4], dim=-1).flatten(-2)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    tensor: Tensor = Int4OpaqueTensor(
        packed, parts["scale_and_zero"], block_size, codes.shape, act_pre_scale=parts.get("act_pre_scale")
    )
    return tensor


_BUILDERS = {"Int8Tensor": _int8, "Int4OpaqueTensor": _int4}


def _codes_of(tensor: Any) -> Tensor:
    """Return the integers (outputs, inputs), from 0 to 15, of an Int4OpaqueTensor.

    How the host's kernel packs them depends on the processor's vectors, so that a file cannot hold the packed
    form.  No op unpacks it; a product with the identity does, exactly, as bfloat16 holds these integers.
    """
    import torch

    _REQUIRED.check()
    outputs, inputs = tensor.shape
    group_size = tensor.block_size[1]
    units = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(inputs // group_size, outputs, 2)
    units = units.contiguous()
    columns = []
    for start in range(0, inputs, _ROWS):
        rows = torch.zeros(min(_ROWS, inputs - start), inputs, dtype=torch.bfloat16)
        rows[range(len(rows)), range(start, start + len(rows))] = 1
        columns.append(torch.ops.aten._weight_int4pack_mm_for_cpu(rows, tensor.qdata, group_size, units))
    # The kernel centres codes at 8.
    return (torch.cat(columns).T + 8).to(torch.uint8)


def _two_in_a_byte(codes: Tensor) -> Tensor:
    """Return rows of 4-bit integers with two in each byte, the lower bits first."""
    return codes[:, ::2] | codes[:, 1::2] << 4
