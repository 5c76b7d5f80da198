"""Save and load pruned and quantised PyTorch models: safetensors, and a file of what was done to the model.

result = convert(model, gptq)
save_compressed(model, "folder", result)

model = Model()  # as it was before
load_compressed(model, "folder")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.errors import ArtefactError
from amanda.files import naming, replacing_all
from amanda.options import checked
from amanda.tools.checkpoints._record import (
    NOUN,
    Checkpoint,
    build_packed_tensor,
    check_target,
    packed_parts,
    read_folder,
    write_folder,
)
from amanda.tools.prune import ChannelPruneResult
from amanda.tools.prune.channels import extents_of, size_attributes
from amanda.tools.results import Result, parsing

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Checkpoint", "load_compressed", "save_compressed"]


@checked(error=ArtefactError)
def save_compressed(
    model: nn.Module, path: str | os.PathLike[str], *results: Result, force: bool = False
) -> Path:
    """Write a pruned or quantised model as tensors and a record of its compression; return the folder.

    The folder has model.safetensors and compressed.json; neither holds code.  `load_compressed` reads it.

    Args:
        model: A PyTorch module after `finalize` or `convert`.
        path: Of the new folder.
        *results: What `finalize` and `convert` returned.  Needed if channels were removed, each removal's, as
            loading then makes the layers smaller; for other tools they are a record.
        force: Replace a folder that `save_compressed` has written.

    Returns:
        The path of the folder.

    Raises:
        ArtefactError: For another kind of model, a tensor that is neither plain nor one that `convert` makes,
            results of another model, a folder that is there without `force`, and one with other files.
        FileError: If the folder cannot be written; an existing one is as it was.
    """
    path = Path(path)
    # A link stays a link: the folder that it leads to is replaced.
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    with naming(path):
        check_target(target, force)
    checkpoint = _checkpoint_of(model, results)
    with replacing_all(target, force) as folder:
        write_folder(checkpoint, f"{type(model).__module__}.{type(model).__qualname__}", folder)
    return path


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
    checkpoint = read_folder(path)
    if checkpoint.packed and find_spec("torchao") is None:
        raise ArtefactError(
            f"{path} has integers, which become tensors of torchao: pip install 'amanda-compress[torchao]'"
        )
    with parsing(path, NOUN, ArtefactError):
        tensors = dict(_unpack_tensors(checkpoint))
        tensors |= {name: tensors[first_name] for name, first_name in checkpoint.ties.items()}
    _check_model(model, path, checkpoint, tensors)
    _assign(model, checkpoint, tensors)
    return checkpoint


def _checkpoint_of(model: nn.Module, results: tuple[Result, ...]) -> Checkpoint:
    """Return what a folder holds of a model, no two tensors in one memory; errors as of `save_compressed`."""
    _check_kind(model)
    names = ("amanda-compress", "torch")
    checkpoint = Checkpoint({}, results=[result.to_dict() for result in results])
    checkpoint.versions = {name: version(name) for name in names}
    names_by_identity: dict[int, str] = {}
    storages: set[int] = set()
    for name, entry in _saved_state(model).items():
        first_name = names_by_identity.setdefault(id(entry.tensor), name)
        if first_name != name:  # one parameter under two names is saved once
            checkpoint.ties[name] = first_name
            continue
        parts, attributes = _file_parts(name, entry.tensor)
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
    channel_results = [result for result in results if isinstance(result, ChannelPruneResult)]
    checkpoint.shapes, checkpoint.sizes = _extents_before(model, channel_results)
    return checkpoint


def _extents_before(
    model: nn.Module, results: list[ChannelPruneResult]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[Any, Any]]]:
    """Return shapes of tensors before removals, and sizes before and after them.

    Raises ArtefactError for results of another model, and a smaller tensor that is not saved.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    for result in results:
        for name, (before, after) in result.extents.items():
            # Of several removals, in any order: extents only become smaller.
            whole, smallest = changes.get(name, (before, after))
            changes[name] = max(whole, before), min(smallest, after)
    state, extents, buffers = _saved_state(model), extents_of(model), dict(model.named_buffers())
    shapes, sizes = {}, {}
    for name, (before, after) in changes.items():
        if name in buffers and name not in state:
            raise ArtefactError(
                f"{name} of the model became smaller and is in no state_dict, so that a folder lacks it: "
                "register it as a persistent buffer"
            )
        if name not in extents or (name in state and extents[name] != after):
            raise ArtefactError(
                f"{name} is {after} after the removal of channels by the results, and "
                f"{extents.get(name, 'missing')} in the model: give the results of all of its removals"
            )
        if name in state:
            shapes[name] = before
        else:
            sizes[name] = before, after
    return shapes, sizes


def _check_kind(model: Any) -> None:
    """Raise ArtefactError for anything but a module of PyTorch."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArtefactError(
            f"a {type(model).__module__}.{type(model).__name__} was given; give a torch.nn.Module: a model "
            "of Keras is saved by model.save(path), and `convert` writes ONNX files itself"
        )


class _SavedTensor(NamedTuple):
    """A parameter or buffer of a model: `holder`, a dict of its module, has the tensor under a key."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor


def _saved_state(model: nn.Module) -> dict[str, _SavedTensor]:
    """Return the parameters and buffers that are saved, by name.

    Raises ArtefactError where `state_dict` has something else too, such as `get_extra_state` of a module, and
    for a parameter without a shape.
    """
    from torch.nn.parameter import is_lazy

    saved_names = set(model.state_dict(keep_vars=True))
    state = {
        f"{path}.{key}" if path else key: _SavedTensor(tensors, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items() if tensor is not None
    }  # fmt: skip
    extra_names = sorted(saved_names - set(state))
    if extra_names:
        raise ArtefactError(
            f"the state_dict of this {type(model).__name__} has {', '.join(extra_names[:3])}, which is "
            "no parameter and no buffer of a module, and these alone are saved: register it as a buffer"
        )
    for name, entry in state.items():
        if is_lazy(entry.tensor):
            kind = type(entry.tensor).__name__
            raise ArtefactError(f"{name} of the model has no shape ({kind}): call the model once before")
    return {name: entry for name, entry in state.items() if name in saved_names}


_DTYPES = frozenset(
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex64 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)
"""Types of tensors that safetensors writes and reads."""


def _file_parts(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a tensor, or its parts, by their names in the file, and its attributes, {} for a plain tensor.

    Raises ArtefactError for tensors of other types.
    """
    import torch

    # Bits of a view that the bytes lack.
    plain = tensor.detach().resolve_conj().resolve_neg()
    if type(plain) is torch.Tensor and plain.layout is torch.strided and plain.device.type != "meta":
        if str(plain.dtype).removeprefix("torch.") not in _DTYPES:
            raise ArtefactError(
                f"{name} of the model is {_dtype_and_shape(plain)}, a type that safetensors does not have"
            )
        return {name: plain}, {}
    packed = packed_parts(plain)
    if packed is None:
        raise ArtefactError(
            f"{name} of the model is a {type(plain).__name__} ({plain.layout}, {plain.device}); saved are "
            "plain tensors and the integers of `convert`: save the model before it is compressed further"
        )
    parts, attributes = packed
    return {f"{name}:{part}": value for part, value in parts.items()}, attributes


def _unpack_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as the model has them, by name; of tied ones the first."""
    parts: dict[str, dict[str, Tensor]] = {}  # of each packed tensor, by name
    for part_name, tensor in checkpoint.tensors.items():
        # "layer.weight:scale" is a part of a packed tensor; a plain one has the name of its parameter.
        name, colon, part = part_name.rpartition(":")
        if colon and name in checkpoint.packed:
            parts.setdefault(name, {})[part] = tensor
        else:
            yield part_name, tensor
    for name, attributes in checkpoint.packed.items():
        yield name, build_packed_tensor(parts[name], attributes)


def _check_model(model: nn.Module, path: Path, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Raise ArtefactError for a model that has other parameters, buffers or sizes of layers than a folder."""
    differences = list(filter(None, _differences(model, checkpoint, tensors)))
    if differences:
        count = len(differences) - 3
        further = f"; and {count} more difference{'s' * (count > 1)}" if count > 0 else ""
        raise ArtefactError(
            f"{path} is not of this {type(model).__name__}: {'; '.join(differences[:3])}{further}"
        )


def _differences(model: nn.Module, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield sentences on what differs between a model and a folder, "" for what fits."""
    state = _saved_state(model)
    for name in state:
        if name not in tensors:
            yield f"the model has {name}, the folder has not"
    for name in sorted(set(tensors) - set(state)):
        yield f"the folder has {name}, the model has not"
    for name, entry in state.items():
        if name in tensors:
            yield _difference_of_tensors(name, tensors[name], entry.tensor, checkpoint.shapes.get(name))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, change in checkpoint.sizes.items():
        yield _difference_of_sizes(name, change, modules.get(name.rpartition(".")[0]))
    for name, tensor in model.named_buffers():
        # No file has its values, which the constructor computes.
        if tensor.device.type == "meta" and name not in state:
            yield f"{name} of the model is on the device meta and in no state_dict: make the model elsewhere"


def _difference_of_tensors(
    name: str, saved: Tensor, present: Tensor, whole_shape: tuple[int, ...] | None
) -> str:
    """Return why a tensor of a folder does not fit the model's, "" if it does.

    A floating-point tensor may have another floating-point type than the model's, as after `bfloat16()`.
    whole_shape: of the tensor before channels were removed, None if they were not.
    """
    if _element_kind(saved) == _element_kind(present) and present.shape in (saved.shape, whole_shape):
        return ""
    whole = "" if whole_shape is None else f", {_shape_text(whole_shape)} before channels were removed,"
    saved_text, present_text = _dtype_and_shape(saved), _dtype_and_shape(present)
    return f"{name} is {saved_text} in the folder{whole} and {present_text} in the model"


def _difference_of_sizes(name: str, change: tuple[Any, Any], module: nn.Module | None) -> str:
    """Return why an attribute of a module has no size that the folder has, "" if it has one."""
    path, _, attribute = name.rpartition(".")
    if module is None:
        return f"the model has no module {path}"
    before, after = change
    present = size_attributes(module).get(attribute)
    # An attribute that `forward` sets is not there before a call.
    if present is None or present in change:
        return ""
    return (
        f"{name} is {after} in the folder, {before} before channels were removed, and {present} in the model"
    )


def _element_kind(tensor: Tensor) -> str:
    """Return floating-point, complex, quantised, bool or integer: what the elements of a tensor are."""
    if tensor.is_floating_point():
        return "floating-point"
    if tensor.is_complex():
        return "complex"
    if tensor.is_quantized:
        return "quantised"
    return "bool" if str(tensor.dtype) == "torch.bool" else "integer"


def _dtype_and_shape(tensor: Tensor) -> str:
    """Return the type and the extents of a tensor, as in float32 8x4."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {_shape_text(tensor.shape)}".strip()


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _assign(model: nn.Module, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors, as new parameters on the devices of the old ones, and sizes of layers into a model.

    Packed parameters do not train.  Attributes that are no sizes of the module are left out.
    """
    import torch

    state, loaded = _saved_state(model), dict[str, Any]()
    # Before anything is assigned: a device may lack the memory.
    for name, entry in state.items():
        present, first_name = entry.tensor, checkpoint.ties.get(name, name)
        if first_name in loaded:
            continue
        tensor: Any = tensors[name].to("cpu" if present.device.type == "meta" else present.device)
        if isinstance(present, torch.nn.Parameter):
            trains = present.requires_grad and first_name not in checkpoint.packed
            tensor = torch.nn.Parameter(tensor, requires_grad=trains)
        loaded[first_name] = tensor
    for name, entry in state.items():
        entry.holder[entry.key] = loaded[checkpoint.ties.get(name, name)]
    for name, (_, size) in checkpoint.sizes.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        # Of a crafted file nothing but a size is set.
        if attribute in size_attributes(module):
            setattr(module, attribute, size)
