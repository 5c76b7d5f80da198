"""autograd's primitives in the words of StandardMapping; it imports no tool."""

from __future__ import annotations

from amanda import OpContext

_WORDS = {"dot": "matmul", "concatenate_args": "cat", "__getitem__": "getitem", "subtract": "sub"}
_WORDS |= {"multiply": "mul", "divide": "div", "true_divide": "div", "power": "pow", "negative": "neg"}
_WORDS |= {"absolute": "abs"}


def standard(context: OpContext) -> None:
    """Write the keys of StandardMapping for an op."""
    name = context.get_forward_op_type()
    word, is_backward = _WORDS.get(name, name), context.is_backward()
    weights = [i for i in (0, 1) if word == "matmul" and context.get_variable(i) is not None]
    weight = weights[0] if len(weights) == 1 else None
    context.update(
        type=word,
        in_place=False,
        phase="backward" if is_backward else "forward",
        backward_type=f"{word}_backward" if is_backward else None,
        weight_index=weight,
        weight_grad_index=weight if is_backward else None,
        weight_layout=None if weight is None else ("OI", "IO")[weight],
        layout=None,
        shape=lambda value: value.shape if hasattr(value, "shape") else None,
        dtype=lambda value: value.dtype.name if hasattr(value, "dtype") else None,
    )
