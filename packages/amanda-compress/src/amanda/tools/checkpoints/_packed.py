"""Tensors of torchao as plain tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from operator import floordiv, mod
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import RequiredNames

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = RequiredNames(
    "amanda.tools.checkpoints", "torch",
    "torch:ops.aten._convert_weight_to_int4pack_for_cpu", "torch:ops.aten._weight_int4pack_mm_for_cpu",
)  # fmt: skip

_ROWS = 256
"""Rows of the identity by which packed integers are read at once."""


def parts_of(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
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


def from_parts(parts: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """Return the tensor of torchao that `parts_of` took apart.

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
