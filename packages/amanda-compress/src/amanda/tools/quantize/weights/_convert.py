"""Convert simulated integers to real ones: torchao tensors, compressed-tensors checkpoints, ONNX files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.files import naming, replacing, write_file
from amanda.options import checked, deprecated, renamed
from amanda.tools.kit import RequiredNames
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight
from amanda.tools.quantize.weights._integers import IntegerTool, has_factors
from amanda.tools.results import Column, Result, count_of, to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn


@renamed(since="amanda-compress 0.2", gone="0.4", out="path")
@checked(error=QuantizeError)
def convert(
    model: Any, tool: Any, path: str | os.PathLike[str] | None = None, force: bool = False
) -> ConvertResult:
    """Convert simulated integers to real ones; outputs equal the simulation within kernels' rounding.

    A module that is converted in place is for inference.

    Args:
        model: A torch.nn.Module that a NearestTool, GPTQTool or AWQTool has quantised.  Without `path` its
            linear layers get tensors of torchao in place; with `path` the module stays unchanged, and a
            checkpoint of compressed-tensors for vLLM and transformers is written into that folder. Or the
            path of an ONNX file, with a QuantizeTool that was calibrated in a session of the file: a copy
            with integer weights, QuantizeLinear and DequantizeLinear nodes is written to `path`.
        tool: The tool that quantised the model, see `model`.
        path: Of the new file or folder; the former name `out` is deprecated.
        force: Replace an existing file.

    Returns:
        A row for each converted tensor.

    Raises:
        QuantizeError: For another model or tool, a missing package, scales of another model, and a `path`
            that cannot be written; an error leaves existing files unchanged.
    """
    # Files need onnx, which is imported for them alone.
    if isinstance(model, (str, os.PathLike)):
        from amanda.tools.quantize._onnx_file import convert_file

        return convert_file(Path(model), tool, path, force)
    if path is None:
        return convert_module(model, tool)
    if Path(path).suffix == ".onnx":
        raise QuantizeError(
            f"path is {str(path)!r}, which is for ONNX files; a {type(model).__name__} was given: give the "
            "path of a folder, or none to convert it in place"
        )

    return convert_checkpoint(model, tool, Path(path), force)


Layers = Mapping[str, "tuple[nn.Linear, CalibratedWeight]"]

ELSEWHERE = "it is not the whole weight of torch.nn.Linear layers alone"
COMPUTED = "it is computed at each call, so that no parameter holds it"


def linear_layers(model: nn.Module, tool: IntegerTool) -> tuple[Layers, dict[str, str]]:
    """Return quantised linear layers by path, each with its weight, and reasons for skipped weights.

    Layers that share a parameter have the same weight.
    Raises QuantizeError for another kind of model or tool, if the tool has quantised no weight of this model,
    and where `check_model` does.
    """
    import torch

    _check_kinds(model, tool)
    tool.check_model(model)
    owners_by_parameter = _owners_by_parameter(model, tool)
    layers, skipped, quantised_count = {}, dict(tool.left), 0
    for weight in tool.weights:
        owners = owners_by_parameter.get(weight.holder, [])  # paths and modules that hold it
        is_computed = weight.holder is None
        is_of_other_model = not (owners or is_computed)
        if not weight.is_ready or is_of_other_model:
            continue
        quantised_count += 1
        is_linear = bool(owners) and all(isinstance(module, torch.nn.Linear) for _, module in owners)
        is_whole_matrix = weight.part is None and weight.layout == "OI"
        if not (is_linear and is_whole_matrix):
            place = f"{weight.type} of {weight.module or weight.source}"
            skipped[place] = COMPUTED if is_computed else ELSEWHERE
        elif weight.holder in tool.other_readers:
            first_path, _ = owners[0]
            skipped[f"{weight.type} of {first_path}"] = tool.other_readers[weight.holder]
        else:
            layers.update({name: (module, weight) for name, module in owners})
    if not quantised_count:
        raise QuantizeError(
            f"{type(tool).__name__} has quantised no weight of this {type(model).__name__}: call the model "
            "in a scope of the tool first"
        )
    return layers, skipped


def _owners_by_parameter(model: nn.Module, tool: IntegerTool) -> dict[Any, list[tuple[str, Any]]]:
    """Return paths and modules that hold each parameter, by its identity.

    None in place of a module that holds the parameter under another name than "weight".
    """
    owners_by_parameter: dict[Any, list[tuple[str, Any]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            owners = owners_by_parameter.setdefault(tool.identity_of(parameter, module), [])
            owners.append((path, module if name == "weight" else None))
    return owners_by_parameter


def _check_kinds(model: Any, tool: Any) -> None:
    """Raise QuantizeError for what is not a module of PyTorch, and for a tool without integers."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise QuantizeError(
            f"a {type(model).__name__} was given; give a torch.nn.Module, or the path of an ONNX file (.onnx)"
        )
    if not isinstance(tool, IntegerTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for a {type(model).__name__}: a module of PyTorch gets "
            "integers in its weights alone; give a NearestTool, GPTQTool or AWQTool of "
            "amanda.tools.quantize.weights, or an ONNX file of the model with a QuantizeTool"
        )


_REQUIRED = RequiredNames(
    "amanda.tools.quantize.weights", "torch", "torch:ops.aten._convert_weight_to_int4pack_for_cpu"
)

_TINYGEMM_GROUPS = (32, 64, 128)
"""Sizes of groups that the kernel for 4 bits has."""


class ConvertResult(Result):
    """The converted layers: the type of each tensor, and bytes of the weight before and after.

    model: the module, or the path of the file or folder.  before, after: bytes of the parameters and buffers
    of the module, or of the file.
    left: reasons why weights stay in floating point; a module has the dequantised weights there.
    """

    name: ClassVar[str] = "converted"
    title = "Converted layers"
    columns: ClassVar[Sequence[Column]] = (
        Column("layer"), Column("tensor"), Column("bits", number=True), Column("group_size", number=True),
        Column("before", show="{:,}".format, total=True, unit="B"),
        Column("after", show="{:,}".format, total=True, unit="B"),
    )  # fmt: skip

    def __init__(
        self, model: nn.Module | Path, rows: Sequence[Sequence[Any]], before: int, after: int,
        left: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.model, self._rows, self.left = model, rows, dict(left)
        self.before, self.after = before, after

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each tensor."""
        return self._rows

    def _facts(self) -> Mapping[str, Any]:
        """Return the bytes of the model, and reasons for skipped weights."""
        return {"before": self.before, "after": self.after, "left": self.left}

    def notes(self) -> Sequence[str]:
        """Return the bytes of the model, and reasons for skipped weights."""
        count = len({row[0] for row in self._rows})
        summary = f"{count_of(count, 'layer')}: the model has {self.after:,} bytes, and had {self.before:,}."
        return [summary, *(f"{place} stays in floating point: {why}." for place, why in self.left.items())]


def convert_module(model: nn.Module, tool: IntegerTool) -> ConvertResult:
    """Replace the quantised weights of linear layers by integers, in place.

    The layers keep their class; their weights are tensors of torchao, whose kernels multiply by them.
    `Int4OpaqueTensor` has two weights in a byte: 4 bits in groups of 32, 64 or 128 inputs, in a layer of
    bfloat16 or float16 on the host, where it has kernels, with a multiple of 16 outputs.  `Int8Tensor` has
    one weight in a byte, of any other symmetric integers.  AWQ's scales that are not folded become the
    tensors' `act_pre_scale`.  A weight that an op reads in another way too, such as transposed, stays in
    floating point; skipped weights become the dequantised weights, as by `finalize`.

    tool: a NearestTool, GPTQTool or AWQTool that has met the model.  Outputs are those in its scope, within
    the rounding of the kernels.  The model is for inference.
    Raises QuantizeError if torchao is not installed, if the tool has met another model or its calibration was
    not completed, and if a weight was written since: then the model is as it was.
    """
    try:
        import torch
        from torchao.quantization import Int8Tensor
    except ImportError as error:
        hint = "pip install 'amanda-compress[torchao]'"
        raise QuantizeError(f"convert makes tensors of torchao: {hint}") from error
    layers, skipped = linear_layers(model, tool)
    packed_by_weight, reason_by_weight = _packed_parameters(layers, tool, Int8Tensor)
    before, rows = model_bytes(model), []
    converted_layers: dict[int, tuple[nn.Linear, nn.Parameter]] = {}
    for name, (layer, weight) in layers.items():
        # A layer under two names is converted once.
        if id(layer) in converted_layers:
            continue
        if id(weight) in reason_by_weight:
            skipped[f"{weight.type} of {name}"] = reason_by_weight[id(weight)]
            continue
        parameter = packed_by_weight[id(weight)]
        converted_layers[id(layer)] = layer, parameter
        kind, group_size = type(parameter.data).__name__, tool.group_size_of(weight)
        bytes_before, bytes_after = weight_bytes(layer.weight), weight_bytes(parameter)
        rows.append((name, kind, tool.grid.bits, group_size, bytes_before, bytes_after))
    # Last step that may raise; layers are replaced when nothing can fail any more.
    tool.write_rounded(model, [weight for weight in tool.weights if id(weight) not in packed_by_weight])
    for layer, parameter in converted_layers.values():
        layer.weight = parameter
    for name, module in model.named_modules():
        is_left = isinstance(module, torch.nn.Linear) and id(module) not in converted_layers
        if is_left and not tool.weights.has_met(tool.identity_of(module.weight, module)):
            skipped.setdefault(f"linear of {name}", "no op has read it in a scope of the tool")
    return ConvertResult(model, rows, before, model_bytes(model), skipped)


def _packed_parameters(
    layers: Layers, tool: IntegerTool, int8_class: Any
) -> tuple[dict[int, nn.Parameter], dict[int, str]]:
    """Return a packed parameter for each weight, by its id, and reasons for weights without one.

    Layers that share a weight share the packed tensor, as tied embeddings do.
    """
    import torch

    parameters: dict[int, nn.Parameter] = {}
    reasons: dict[int, str] = {}
    for layer, weight in layers.values():
        if id(weight) in parameters or id(weight) in reasons:
            continue
        tensor = _torchao_tensor(layer.weight, weight, tool, int8_class)
        if isinstance(tensor, str):
            reasons[id(weight)] = tensor
        else:
            parameters[id(weight)] = torch.nn.Parameter(tensor, requires_grad=False)
    return parameters, reasons


def _torchao_tensor(
    parameter: Tensor, weight: CalibratedWeight, tool: IntegerTool, int8_class: Any
) -> Tensor | str:
    """Return the tensor of torchao for a weight, or a reason why none can be built.

    int8_class: torchao's `Int8Tensor`, for all but 4 bits that the host has kernels for.
    """
    import torch

    state = weight.tensors_like(torch.empty(0, device=parameter.device), tool.state_names)
    codes, scale, zero_point = state["codes"], state["scale"], state["zero_point"]
    size, dtype = tool.group_size_of(weight), parameter.dtype
    pre_scale = 1 / state["smoothing"] if has_factors(weight) else None
    # torchao's packed tensors of 4 bits run on the host alone in this layout.
    has_kernel = parameter.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    # Codes of the packed tensor begin at 0.
    if has_kernel and tool.grid.bits == 4 and size in _TINYGEMM_GROUPS and len(codes) % 16 == 0:
        return _int4_tensor(codes - tool.grid.low, scale, zero_point - tool.grid.low, size, dtype, pre_scale)
    if not tool.grid.symmetric:
        return "torchao's tensors of 8 bits are symmetric"
    tensor: Tensor = int8_class(
        codes.to(torch.int8), scale.to(dtype), [1, size], dtype,
        act_pre_scale=None if pre_scale is None else pre_scale.to(dtype),
    )  # fmt: skip
    return tensor


def _int4_tensor(
    codes: Tensor, scale: Tensor, zero_point: Tensor, size: int, dtype: Any, pre_scale: Tensor | None
) -> Tensor:
    """Return a tensor for the host's kernel, which reads (code - 8) * scale + zero of codes from 0 to 15."""
    import torch
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    _REQUIRED.check()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    # The kernel centres codes at 8.
    zero = (8 - zero_point) * scale
    scales_and_zeros = pack_tinygemm_scales_and_zeros(scale.to(dtype), zero.to(dtype), dtype)
    tensor: Tensor = Int4OpaqueTensor(
        packed, scales_and_zeros, [1, size], codes.shape,
        act_pre_scale=None if pre_scale is None else pre_scale.to(dtype),
    )  # fmt: skip
    return tensor


def weight_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor; of a tensor of torchao those of the tensors that it consists of."""
    tensor = getattr(tensor, "data", tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.numel() * tensor.element_size())
    # PyTorch's protocol for tensors that consist of others.
    names, _ = tensor.__tensor_flatten__()
    return sum(weight_bytes(getattr(tensor, name)) for name in names)


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a model; what is shared counts once."""
    return sum(map(weight_bytes, [*model.parameters(), *model.buffers()]))


_TENSORS, _CONFIG, _FORMAT = "model.safetensors", "config.json", "pack-quantized"


@deprecated(use="convert(model, tool, path)", since="amanda-compress 0.2", gone="0.4")
def save_compressed(path: str | Path, model: nn.Module, tool: IntegerTool) -> Path:
    """Write a checkpoint of integers; return the folder.  Deprecated: use `convert(model, tool, path)`."""
    convert_checkpoint(model, tool, Path(path), force=True)
    return Path(path)


def convert_checkpoint(
    model: nn.Module, tool: IntegerTool, folder: Path, force: bool = False
) -> ConvertResult:
    """Write a folder with the parameters of a model and its quantised weights, packed into integers.

    model.safetensors has `weight_packed`, `weight_scale`, `weight_shape` and for unsymmetric integers
    `weight_zero_point` in the place of each quantised weight; config.json has the `quantization_config`,
    beside what `model.config` says if the model is of transformers.  The format is "pack-quantized".
    Raises QuantizeError for a tool that has met another model, for quantised weights of others than linear
    layers, for AWQ's scales of inputs that are not folded, for a checkpoint that is there already, and as
    `convert` does; and FileError.
    """
    layers, skipped = linear_layers(model, tool)
    _check_fits_format(layers, [place for place in skipped if place not in tool.left], tool)
    if not force and any((folder / name).exists() for name in (_TENSORS, _CONFIG)):
        raise QuantizeError(f"{folder} is there already, with a checkpoint; force=True replaces it")
    # safetensors writes contiguous tensors alone.
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    rows = []
    for name, (layer, weight) in layers.items():
        prefix = f"{name}." if name else ""
        del state[f"{prefix}weight"]
        tensors = _packed_weight(layer, weight, tool)
        state.update({prefix + part: value for part, value in tensors.items()})
        bytes_before, bytes_after = weight_bytes(layer.weight), sum(map(weight_bytes, tensors.values()))
        group_size = tool.group_size_of(weight)
        rows.append((name, _FORMAT, tool.grid.bits, group_size, bytes_before, bytes_after))
    model_config: Any = getattr(getattr(model, "config", None), "to_dict", dict)
    config = {**model_config(), "quantization_config": _quantization_config(model, tool, set(layers))}
    state, text = _without_shared_memory(state), to_json(config, indent=2) + "\n"
    _write_checkpoint(folder, state, text)
    after = sum(map(weight_bytes, state.values()))
    return ConvertResult(folder, rows, model_bytes(model), after, skipped)


def _check_fits_format(layers: Layers, unsupported: Sequence[str], tool: IntegerTool) -> None:
    """Raise QuantizeError for what the format of checkpoints has no place for.

    That is quantised weights of others than linear layers, `unsupported`, and scales of inputs.
    """
    if unsupported:
        raise QuantizeError(
            f"the layout holds integers of linear layers alone; exclude {', '.join(unsupported)} of the tool"
        )
    scaled_layers = [name for name, (_, weight) in layers.items() if has_factors(weight)]
    if scaled_layers:
        raise QuantizeError(
            f"the layout has no place for the scales of the inputs of {', '.join(scaled_layers)}: fold them "
            f"by prepare(model, example) of the {type(tool).__name__} before its calibration and by "
            "finalize(model) after it, or exclude these layers"
        )


def _packed_weight(layer: nn.Linear, weight: CalibratedWeight, tool: IntegerTool) -> dict[str, Tensor]:
    """Return the tensors of the layout for a weight, by the ends of their names."""
    import torch

    arrays = weight.numbers(("codes", "scale", "zero_point"))
    codes = arrays["codes"].astype(np.int64) - tool.grid.low
    tensors = {
        "weight_packed": torch.from_numpy(packed_in_int32(codes, tool.grid.bits)),
        "weight_scale": torch.from_numpy(arrays["scale"]).to(layer.weight.dtype),
        "weight_shape": torch.tensor(layer.weight.shape),
    }
    if not tool.grid.symmetric:
        # The layout packs zero points along the outputs.
        zeros = arrays["zero_point"].astype(np.int64).T - tool.grid.low
        tensors["weight_zero_point"] = torch.from_numpy(packed_in_int32(zeros, tool.grid.bits).T.copy())
    return tensors


def _write_checkpoint(folder: Path, state: dict[str, Tensor], config: str) -> None:
    """Write tensors and configuration into a new or existing folder; an error leaves the old model file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / _TENSORS, is_moved_over=True) as part_path:
        try:
            save_file(state, part_path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
    write_file(folder / _CONFIG, config)


def packed_in_int32(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Return rows of integers of so many bits, from 0, as rows of int32, the lowest bits first.

    An integer may begin in one int32 and end in the next; zeros fill the last.
    """
    # By single bits, so that 3, 5, 6 and 7 bits need no case of their own.
    bit_rows = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    missing_bits = -bit_rows.shape[1] % 32
    bit_rows = np.pad(bit_rows, ((0, 0), (0, missing_bits)))
    return np.packbits(bit_rows, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _without_shared_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return tensors without duplicates of earlier ones, and copies of tensors that share a part of memory.

    safetensors refuses tensors that share memory.
    """
    written_views: set[Any] = set()
    written_storages: set[int] = set()
    unshared = {}
    for name, tensor in state.items():
        view, storage = (tensor.data_ptr(), tensor.shape, tensor.dtype), tensor.untyped_storage().data_ptr()
        # Empty tensors all have the address 0, and are not duplicates.
        if tensor.numel() and view in written_views:
            continue
        unshared[name] = tensor.clone() if storage in written_storages else tensor
        written_views.add(view)
        written_storages.add(storage)
    return unshared


def _quantization_config(model: nn.Module, tool: IntegerTool, layers: set[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint; layers: names of the quantised ones."""
    import torch

    linear_names = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear)
    ]
    weights = {
        "num_bits": tool.grid.bits, "type": "int", "symmetric": tool.grid.symmetric,
        "strategy": "channel" if tool.group_size is None else "group", "group_size": tool.group_size,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": _FORMAT, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [name for name in linear_names if name not in layers],
    }  # fmt: skip
