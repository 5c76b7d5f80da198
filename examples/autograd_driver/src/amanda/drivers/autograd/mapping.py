"""Autograd's operators in the words of StandardMapping, docs/vocabulary.md of Amanda; it imports no tool."""

from __future__ import annotations

from typing import Any

from amanda import OpContext

# Operators by their word; one without is known to tools by its own name.
WORDS: dict[str, str] = {}  # {"FullyConnected": "linear", "Activation": "relu"}
# Position of the weight among the inputs, by word.
WEIGHTS: dict[str, int] = {"linear": 1, "conv2d": 1, "embedding": 1}


def standard(context: OpContext) -> None:
    """Write the keys of StandardMapping for an op."""
    operator = context.get_forward_op_type()
    word = WORDS.get(operator, operator)
    weight = WEIGHTS.get(word)
    if weight is not None and context.get_variable(weight) is None:
        weight = None  # the program computes it
    is_backward = context.is_backward()
    context.update(
        type=word,
        in_place=operator.endswith("_"),
        phase="backward" if is_backward else "forward",
        backward_type=f"{word}_backward" if is_backward else None,
        weight_index=weight,
        # Position of the weight's gradient among those that leave the backward op.
        weight_grad_index=weight if is_backward else None,
        weight_layout=None if weight is None else "OI",  # axes of the weight: outputs, inputs
        layout=None,
        shape=shape,
        dtype=dtype,
    )


def shape(value: Any) -> tuple[int, ...] | None:
    """Return the extents of a tensor; None for other values."""
    raise NotImplementedError("tuple(value.shape) of a tensor; None of what is none")


def dtype(value: Any) -> str | None:
    """Return the name of a tensor's dtype, as NumPy has it; None for other values."""
    raise NotImplementedError('"float32" of a tensor; None of what is none')
