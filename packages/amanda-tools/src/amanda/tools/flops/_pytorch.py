"""Rules for PyTorch beyond the standard words: phases, parameters, and which gradients are products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import amanda
from amanda.tools.flops._cost import Components
from amanda.tools.flops._inside import costs_inside
from amanda.tools.flops._table import gradients_of_factors
from amanda.tools.kit import leaves
from amanda.tools.mapping import MATRIX_PRODUCTS, local, share, torch_shape, torch_word


def roles(context: amanda.OpContext) -> None:
    """Write `parameters`, `backward_macs` and the like in PyTorch's terms.

    is_function: an autograd.Function, or an operator of a library; either may call ops in Python.
    """
    if context.is_backward() or context["backward_macs"] is _backward_macs:
        return  # what takes a parameter's place later, as its mask has it, is none
    from torch._C import DisableTorchFunction
    from torch.nn import Parameter

    inputs = context.get_inputs()
    is_forward = context["phase"] == "forward"
    owned = [value for value in leaves(inputs) if is_forward and isinstance(value, Parameter)]
    context["parameters"] = sum(local(value).numel() for value in owned)
    context["backward_macs"] = _backward_macs
    context["batch_first"] = bool(context.get_attrs().get("batch_first"))
    context["extents"] = extents
    context["inside"] = costs_inside
    context["is_function"] = isinstance(context.get_op(), type) or "::" in context.get_op_type()
    with DisableTorchFunction():
        tensors = list(tensors_of(inputs))
        context["differentiated"] = [value.requires_grad for value in tensors]
        context["is_complex"] = any(value.dtype.is_complex for value in tensors)
    context["is_view"] = is_view


def extents(value: Any) -> Any:
    """Return a tensor's shape, of a nested tensor those of its components; None of what is no tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        return torch_shape(value)
    with torch._C.DisableTorchFunction(), amanda.disabled():
        try:
            return Components(_component_shapes(value)) if value.is_nested else torch_shape(value)
        except (NotImplementedError, RuntimeError):  # the lengths have no values, as on the device meta
            return torch_shape(value)


def _component_shapes(nested: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the components of a nested tensor."""
    import torch

    if nested.layout is not torch.jagged:
        yield from map(tuple, nested._nested_tensor_size().tolist())
        return
    lengths, ragged = nested.lengths(), nested._ragged_idx
    outer, inner = nested.shape[1:ragged], nested.shape[ragged + 1 :]
    for length in (nested.offsets().diff() if lengths is None else lengths).tolist():
        yield (*outer, length, *inner)


def is_view(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Return whether all outputs lie in the memory of an input."""
    import torch

    with torch._C.DisableTorchFunction():
        read = {_storage(local(tensor)) for tensor in tensors_of(inputs)}
        written = [_storage(local(tensor)) for tensor in tensors_of(outputs)]
    return bool(written) and None not in written and read.issuperset(written)


def tensors_of(values: Sequence[Any]) -> Iterator[Any]:
    """Return the tensors among values, those in lists too."""
    import torch

    return (value for value in leaves(values) if isinstance(value, torch.Tensor))


def _storage(tensor: Any) -> int | None:
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass, with its own methods, need not know
            return int(torch.Tensor.untyped_storage(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have several
        return None


_PRODUCT = re.compile(r"(addmm|baddbmm|addmv|matmul|mm|bmm|mv|dot)backward\d*", re.IGNORECASE)
_PRODUCTS_OF_COMPLEX_CONVOLUTION = 3
"""Convolutions of real numbers by which torch computes one of complex numbers."""


def _backward_macs(context: amanda.OpContext) -> int:
    """Count the products that make each gradient that a node gives."""
    grads, entering = context.get_grad_inputs() or [], context.get_grad_outputs() or []
    first = next((grad for grad in entering if grad is not None), None)
    if first is None:
        return 0  # where no gradient enters none leaves
    product = _PRODUCT.fullmatch(context.get_backward_op().__name__)
    if product is None:
        layer = _macs_of_recurrent_layer(context)
        return _macs_of_factors(context, _is_complex(first)) if layer is None else layer
    factors = MATRIX_PRODUCTS[torch_word(product[1].lower())].factors
    first_grad, second = (grads[i] if i < len(grads) else None for i in factors)
    size, macs = prod(first.shape), 0
    if first_grad is not None:
        macs += round(size * (first_grad.shape[-1] if first_grad.dim() else 1) * share([first_grad]))
    if second is not None:
        width = second.shape[-2] if second.dim() > 1 else second.shape[-1] if second.dim() else 1
        macs += round(size * width * share([second]))
    return macs * (context.get("complex_products", 1) if _is_complex(first) else 1)


def _macs_of_factors(context: amanda.OpContext, is_complex: bool) -> int:
    """Count for the gradient of each factor as many as the op itself takes.

    The double backward of a convolution is given gradients of data and kernel, each of which is convolved for
    the gradient of the output, and once more for that of the other.
    """
    grads, cost = context.get_grad_inputs() or [], context.get("cost")
    macs = cost.macs if cost else 0
    if context["is_complex"] and not is_complex:
        macs = round(macs / _PRODUCTS_OF_COMPLEX_CONVOLUTION)
    if context.get_backward_op().__name__.startswith("ConvolutionBackwardBackward"):
        entering = sum(grad is not None for grad in (context.get_grad_outputs() or [])[:2])
        is_made = [grad is not None for grad in grads[:3]]
        return int(entering * is_made[0] + sum(is_made[1:])) * macs
    return macs * gradients_of_factors(context["backward_type"].removesuffix("_backward"), grads)


def _is_complex(value: Any) -> bool:
    return "complex" in str(value.dtype)


def _macs_of_recurrent_layer(context: amanda.OpContext) -> int | None:
    """Count a node of oneDNN's LSTM, one layer in one direction; None for others.

    Its gradients are those of the input, the weights of the input and of the state, two biases, and states.
    The gradient of the state goes back through every step but the first, whose state is given.
    """
    if not context.get_backward_op().__name__.startswith("MkldnnRnnLayer"):
        return None
    grads, extents = context.get_grad_inputs() or [], context.get_inputs()[0].shape
    steps, rows = extents[1::-1] if context["batch_first"] else extents[:2]
    hidden = next(grad for grad in context.get_grad_outputs() or [] if grad is not None).shape[-1]
    size = sum(grad.numel() for grad in (grads[1], grads[2]) if grad is not None)  # of weights
    if grads[0] is not None:
        size += grads[0].shape[-1] * _GATES * hidden
    state = _GATES * hidden**2 * rows * (steps if grads[5] is not None else steps - 1)
    return int(steps * rows * size + state)


_GATES = 4
"""Of an LSTM."""


LIBRARIES = ("c10d::", "_c10d_functional", "fsdp::")
"""Of ops that move tensors between processes, which cost bytes alone."""

OF_NESTED = ("_transformer_encoder_layer_fwd",)
"""Types whose formulas read nested tensors, which have no shape, themselves."""
