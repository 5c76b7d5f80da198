"""Linear layers whose weights are integers in memory: torchao's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.kit import RequiredNames
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight
from amanda.tools.quantize.weights._integers import IntegerTool, has_factors
from amanda.tools.quantize.weights._layers import linear_layers
from amanda.tools.results import Column, Result

if TYPE_CHECKING:
    from torch import Tensor, nn

_REQUIRED = RequiredNames(
    "amanda.tools.quantize.weights", "torch", "torch:ops.aten._convert_weight_to_int4pack_for_cpu"
)

_TINYGEMM_GROUPS = (32, 64, 128)


class ConvertResult(Result):
    """The layers that were converted: the type of each tensor, and bytes of its weight before and after.

    model: the module, or the path of the file or folder.  before, after: bytes of the parameters and buffers
    of the module, or of the file.
    left: weights that stay in floating point, and why: a module holds there what the integers stand for.
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

    def facts(self) -> Mapping[str, Any]:
        """Return the bytes of the model, and what was left."""
        return {"before": self.before, "after": self.after, "left": self.left}

    def notes(self) -> Sequence[str]:
        """Return the bytes of the model, and what was left."""
        count = len({row[0] for row in self._rows})
        summary = (
            f"{count} layer{'s' * (count != 1)}: the model has {self.after:,} bytes, and had {self.before:,}."
        )
        return [summary, *(f"{place} stays in floating point: {why}." for place, why in self.left.items())]


def convert_module(model: nn.Module, tool: IntegerTool) -> ConvertResult:
    """Put integers in the place of the weights of linear layers that a tool has quantised, in place.

    The layers keep their class; their weights are tensors of torchao, whose kernels multiply by them.
    `Int4OpaqueTensor` has two weights in a byte: 4 bits in groups of 32, 64 or 128 inputs, in a layer of
    bfloat16 or float16 on the host, where it has kernels, with a multiple of 16 outputs.  `Int8Tensor` has
    one weight in a byte, of any other symmetric integers.  AWQ's scales that are not folded become the
    tensors' `act_pre_scale`.  A weight that an op reads in another way too, such as transposed, stays in
    floating point; it and others that are left become what their integers stand for, as by `finalize`.

    tool: a NearestTool, GPTQTool or AWQTool that has met the model.  Outputs are those in its scope, within
    the rounding of the kernels.  The model is for inference.
    Raises QuantizeError if torchao is not installed, if the tool has met another model or its calibration was
    not completed, and if a weight was written since: then the model is as it was.
    """
    try:
        import torch
        from torchao.quantization import Int8Tensor
    except ImportError as error:
        raise QuantizeError("convert makes tensors of torchao: pip install torchao") from error
    layers, skipped = linear_layers(model, tool)
    before, rows = model_bytes(model), []
    converted: dict[int, tuple[nn.Linear, nn.Parameter]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, (layer, weight) in layers.items():
        if id(layer) in converted:
            continue
        size = weight_bytes(layer.weight)
        if id(weight) not in parameters:
            tensor = _torchao_tensor(layer.weight, weight, tool, Int8Tensor)
            if isinstance(tensor, str):
                skipped[f"{weight.type} of {name}"] = tensor
                continue
            parameters[id(weight)] = torch.nn.Parameter(tensor, requires_grad=False)
        parameter = parameters[id(weight)]
        converted[id(layer)] = layer, parameter
        kind = type(parameter.data).__name__
        rows.append((name, kind, tool.grid.bits, tool.size(weight), size, weight_bytes(parameter)))
    tool.write_rounded(model, [weight for weight in tool.weights if id(weight) not in parameters])
    for layer, parameter in converted.values():
        layer.weight = parameter
    for name, module in model.named_modules():
        if id(module) in converted or not isinstance(module, torch.nn.Linear):
            continue
        if not tool.weights.has_met(tool.identity_of(module.weight, module)):
            skipped.setdefault(f"linear of {name}", "no op has read it in a scope of the tool")
    return ConvertResult(model, rows, before, model_bytes(model), skipped)


def _torchao_tensor(
    parameter: Tensor, weight: CalibratedWeight, tool: IntegerTool, int8: Any
) -> Tensor | str:
    """Return the tensor of torchao for a weight, or why there is none."""
    import torch

    state = weight.tensors_like(torch.empty(0, device=parameter.device), tool.state_names)
    codes, scale, zero_point = state["codes"], state["scale"], state["zero_point"]
    size, dtype = tool.size(weight), parameter.dtype
    pre_scale = 1 / state["smoothing"] if has_factors(weight) else None
    has_kernel = parameter.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    if has_kernel and tool.grid.bits == 4 and size in _TINYGEMM_GROUPS and len(codes) % 16 == 0:
        return _int4_tensor(codes - tool.grid.low, scale, zero_point - tool.grid.low, size, dtype, pre_scale)
    if not tool.grid.symmetric:
        return "torchao's tensors of 8 bits are symmetric"
    tensor: Tensor = int8(
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
    zero = (8 - zero_point) * scale
    both = pack_tinygemm_scales_and_zeros(scale.to(dtype), zero.to(dtype), dtype)
    tensor: Tensor = Int4OpaqueTensor(
        packed, both, [1, size], codes.shape,
        act_pre_scale=None if pre_scale is None else pre_scale.to(dtype),
    )  # fmt: skip
    return tensor


def weight_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors that one of torchao has within."""
    tensor = getattr(tensor, "data", tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.numel() * tensor.element_size())
    names, _ = tensor.__tensor_flatten__()
    return sum(weight_bytes(getattr(tensor, name)) for name in names)


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a model; what is shared counts once."""
    return sum(map(weight_bytes, [*model.parameters(), *model.buffers()]))
