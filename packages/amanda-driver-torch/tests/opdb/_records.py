"""What a program can see of tensors after a call, as plain values that are equal bit for bit or not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

Facts = dict[str, Any]


def tensor_facts(tensor: Tensor) -> Facts:
    """All but the identity of a tensor: its bits, form, class, and place in autograd's graph."""
    with torch.no_grad():
        return {
            "type": type(tensor),
            "dtype": tensor.dtype,
            "layout": tensor.layout,
            "shape": None if tensor.is_nested else tuple(tensor.shape),
            "strides": _strides(tensor),
            "requires_grad": tensor.requires_grad,
            "grad_fn": type(tensor.grad_fn).__name__,
            "output_nr": tensor.output_nr,
            "is_leaf": tensor.is_leaf,
            "is_view": tensor._is_view(),
            "is_conj": tensor.is_conj(),
            "is_neg": tensor.is_neg(),
            "is_inference": tensor.is_inference(),
            "version": None if tensor.is_inference() else tensor._version,
            "attributes": sorted(vars(tensor)),
            "bits": bits(tensor),
        }


ULPS, ULPS_NESTED = 64, 256
"""Bounds of rounding, in units in the last place of the largest element; the second for nested gradients.

These cancel: in a second gradient of `householder_product` 210 were seen.
"""


def computed(facts: Any, ulps: int = ULPS) -> Any:
    """Return what a program computes, of a record: without what memory it lies in and which node made it.

    ulps: by which its numbers may differ from those that they are compared with.
    """
    if isinstance(facts, list):
        return [computed(item, ulps) for item in facts]
    if not isinstance(facts, dict) or isinstance(facts.get("bits"), Numbers):
        return facts
    if "error" in facts or "backward error" in facts:
        return {name: value[0] for name, value in facts.items() if name in ("error", "backward error")}
    numbers = {name: computed(value, ulps) for name, value in facts.items() if name not in _OF_MEMORY}
    return (
        {**numbers, "bits": Numbers(numbers["bits"], numbers["dtype"], ulps)}
        if "bits" in numbers
        else numbers
    )


class Numbers:
    """The values of a tensor: equal if bit-identical, or apart by rounding.

    Kernels round otherwise where a new tensor cannot have the strides of the one that it is equal to, as
    after `expand`. rounded: how often that was so.
    """

    rounded = 0

    def __init__(self, bits: Any, dtype: torch.dtype, ulps: int = ULPS) -> None:
        self._bits, self._dtype, self._ulps = bits, dtype, ulps

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers) or self._bits == other._bits:
            return isinstance(other, Numbers)
        close = _close(self._bits, other._bits, self._dtype, self._ulps)
        Numbers.rounded += close
        return close

    def __repr__(self) -> str:
        return f"{_decoded(self._bits, self._dtype)}" if isinstance(self._bits, bytes) else repr(self._bits)


def _close(found_bits: Any, expected_bits: Any, dtype: torch.dtype, ulps: int) -> bool:
    if (
        isinstance(found_bits, list)
        and isinstance(expected_bits, list)
        and len(found_bits) == len(expected_bits)
    ):
        return all(_close(*pair, dtype, ulps) for pair in zip(found_bits, expected_bits, strict=True))
    if not (
        isinstance(found_bits, bytes)
        and isinstance(expected_bits, bytes)
        and len(found_bits) == len(expected_bits)
    ):
        return bool(found_bits == expected_bits)
    if found_bits == expected_bits or not (dtype.is_floating_point or dtype.is_complex) or not found_bits:
        return found_bits == expected_bits
    values, expected = _decoded(found_bits, dtype), _decoded(expected_bits, dtype)
    finite = expected.abs()[expected.isfinite()]
    rounding = ulps * torch.finfo(dtype).eps
    most = max(1.0, float(finite.max())) if len(finite) else 1.0
    return torch.allclose(values, expected, rtol=rounding, atol=rounding * most, equal_nan=True)


def _decoded(bits: bytes, dtype: torch.dtype) -> Tensor:
    wider = torch.complex128 if dtype.is_complex else torch.float64
    return torch.frombuffer(bytearray(bits), dtype=dtype).to(wider) if bits else torch.empty(0, dtype=wider)


_OF_MEMORY = frozenset(
    {
        *("strides", "is_view", "is_conj", "is_neg", "version", "is", "base", "storage"),
        *("grad_fn", "is_leaf", "output_nr"),
    }
)


def bits(tensor: Tensor) -> Any:
    """The values of a tensor of any layout, as bytes."""
    if tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.is_nested:
        return [bits(part) for part in tensor.unbind()]
    if tensor.layout == torch.sparse_coo:
        return [tensor.is_coalesced(), bits(tensor._indices()), bits(tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [bits(part) for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [bits(part) for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values())]
    if tensor.layout != torch.strided:
        return bits(tensor.to_dense())
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def value_facts(value: Any) -> Any:
    """Facts of a tensor; of anything else, its type and how it prints."""
    return tensor_facts(value) if isinstance(value, Tensor) else (type(value), repr(value))


def results_facts(result: Any, inputs: Sequence[Tensor]) -> list[Any]:
    """Facts of everything in a result: its form, and what it shares with the inputs and with itself."""
    outputs, form = tree_flatten(result)
    tensors = [*inputs, *(output for output in outputs if isinstance(output, Tensor))]
    return [str(form), *({**_shared(output, tensors), **_as_facts(output)} for output in outputs)]


def _as_facts(value: Any) -> Facts:
    return tensor_facts(value) if isinstance(value, Tensor) else {"value": value_facts(value)}


def _shared(value: Any, tensors: Sequence[Tensor]) -> Facts:
    if not isinstance(value, Tensor):
        return {}
    base = value._base if value._is_view() else None
    return {
        "is": next(i for i, tensor in enumerate(tensors) if tensor is value),
        "base": next((i for i, tensor in enumerate(tensors) if tensor is base), None),
        "storage": next((i for i, tensor in enumerate(tensors) if _storage(tensor) == _storage(value)), None),
    }


def _storage(tensor: Tensor) -> int | None:
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _strides(tensor: Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    return tensor.stride(), tensor.storage_offset()


def difference(observed: Any, expected: Any, at: str = "") -> str | None:
    """Where two records differ first, and how; None where they are equal."""
    if observed == expected:
        return None
    if type(observed) is type(expected) and isinstance(observed, dict) and observed.keys() == expected.keys():
        each = ((f"{at}.{key}", observed[key], expected[key]) for key in expected)
    elif type(observed) is type(expected) and isinstance(observed, list) and len(observed) == len(expected):
        each = ((f"{at}[{i}]", *pair) for i, pair in enumerate(zip(observed, expected, strict=True)))
    else:
        return f"{at}: {_short(observed)} instead of {_short(expected)}"
    return next((text for text in (difference(*pair[1:], at=pair[0]) for pair in each) if text), None)


def _short(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) < 200 else text[:200] + "..."
