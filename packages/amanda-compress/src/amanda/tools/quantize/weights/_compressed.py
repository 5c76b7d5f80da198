"""Checkpoints in the layout of compressed-tensors, which vLLM and transformers read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.files import naming, replacing, write_file
from amanda.options import deprecated
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight
from amanda.tools.quantize.weights._convert import ConvertResult, model_bytes, weight_bytes
from amanda.tools.quantize.weights._integers import IntegerTool, has_factors
from amanda.tools.quantize.weights._layers import linear_layers
from amanda.tools.results import to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

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
    unsupported = [place for place in skipped if place not in tool.left]
    if unsupported:
        raise QuantizeError(
            f"the layout holds integers of linear layers alone; exclude {', '.join(unsupported)} of the tool"
        )
    scaled = [name for name, (_, weight) in layers.items() if has_factors(weight)]
    if scaled:
        raise QuantizeError(
            f"the layout has no place for the scales of the inputs of {', '.join(scaled)}: fold them by "
            f"prepare(model, example) of the {type(tool).__name__} before its calibration and by "
            "finalize(model) after it, or exclude these layers"
        )
    if not force and any((folder / name).exists() for name in (_TENSORS, _CONFIG)):
        raise QuantizeError(f"{folder} is there already, with a checkpoint; force=True replaces it")
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    rows = []
    for name, (layer, weight) in layers.items():
        prefix = f"{name}." if name else ""
        del state[f"{prefix}weight"]
        tensors = _packed_weight(layer, weight, tool)
        state.update({prefix + part: value for part, value in tensors.items()})
        bytes_after = sum(map(weight_bytes, tensors.values()))
        rows.append(
            (name, _FORMAT, tool.grid.bits, tool.size(weight), weight_bytes(layer.weight), bytes_after)
        )
    model_config: Any = getattr(getattr(model, "config", None), "to_dict", dict)
    config = {**model_config(), "quantization_config": _quantization_config(model, tool, set(layers))}
    state, text = _unshared(state), to_json(config, indent=2) + "\n"
    _write_checkpoint(folder, state, text)
    after = sum(map(weight_bytes, state.values()))
    return ConvertResult(folder, rows, model_bytes(model), after, skipped)


def _packed_weight(layer: nn.Linear, weight: CalibratedWeight, tool: IntegerTool) -> dict[str, Tensor]:
    """Return the tensors of the layout for a weight, by the ends of their names."""
    import torch

    numbers = weight.numbers(("codes", "scale", "zero_point"))
    codes = numbers["codes"].astype(np.int64) - tool.grid.low
    tensors = {
        "weight_packed": torch.from_numpy(packed(codes, tool.grid.bits)),
        "weight_scale": torch.from_numpy(numbers["scale"]).to(layer.weight.dtype),
        "weight_shape": torch.tensor(layer.weight.shape),
    }
    if not tool.grid.symmetric:
        zeros = numbers["zero_point"].astype(np.int64).T - tool.grid.low
        tensors["weight_zero_point"] = torch.from_numpy(packed(zeros, tool.grid.bits).T.copy())
    return tensors


def _write_checkpoint(folder: Path, state: dict[str, Tensor], config: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / _TENSORS) as part:
        try:
            save_file(state, part, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
    write_file(folder / _CONFIG, config)


def packed(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Return rows of integers of so many bits, from 0, as rows of int32, the lowest bits first.

    An integer may begin in one int32 and end in the next; zeros fill the last.
    """
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _unshared(state: dict[str, Any]) -> dict[str, Any]:
    """Return tensors without those that a former one is; copies where only a part of memory is shared.

    safetensors refuses what shares memory.
    """
    written: set[Any] = set()
    unshared = {}
    for name, tensor in state.items():
        place, memory = (tensor.data_ptr(), tensor.shape, tensor.dtype), tensor.untyped_storage().data_ptr()
        if tensor.numel() and place in written:
            continue
        unshared[name] = tensor.clone() if memory in written else tensor
        written |= {place, memory}
    return unshared


def _quantization_config(model: nn.Module, tool: IntegerTool, layers: set[str]) -> dict[str, Any]:
    import torch

    linear = [
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
        "ignore": [name for name in linear if name not in layers],
    }  # fmt: skip
