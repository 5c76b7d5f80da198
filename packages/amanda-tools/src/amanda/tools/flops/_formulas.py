"""Formulas by the shapes of an op, whatever a framework calls it.

Convention: a multiply-accumulate is two floating-point operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from amanda.tools.flops._cost import Cost, Formula, Shapes, tensors

SOFTMAX, BATCH_NORM, LAYER_NORM = 5, 4, 7
"""Operations for each element."""


def no_cost(op: Shapes) -> Cost:
    """Count nothing for an op that moves data, or looks at it."""
    return Cost()


def visits(steps: int) -> Formula:
    """Count so many operations for each element."""
    return lambda op: Cost(0, steps * op.elements)


def matrix_product(op: Shapes, first: int = 0) -> Cost:
    """Count (..., n, k) by (..., k, m), either of them transposed or a vector."""
    left, right = op.inputs[first : first + 2]
    depth = left[-1]
    if len(left) > 1 and len(right) > 1:
        depth = left[-1] * left[-2] // op.out[-2] if op.out[-2] else 0
    return Cost.of_macs(prod(op.out) * depth)


def matrix_product_and_sum(op: Shapes) -> Cost:
    """Count input + (..., n, k) by (..., k, m)."""
    return Cost.of_macs(matrix_product(op, 1).macs, prod(op.out))


def product_of(left: int, right: int) -> Formula:
    """Count (..., n, k) by (..., k, m) at these positions; a sparse factor counts as a dense one."""

    def formula(op: Shapes) -> Cost:
        last = op.inputs[right]
        return Cost.of_macs(prod(op.inputs[left]) * (last[-1] if len(last) > 1 else 1))

    return formula


def by_weight(op: Shapes) -> Cost:
    """Count x (..., in) by a weight, stored in any form, that gives (..., out)."""
    return Cost.of_macs(prod(op.out) * op.inputs[0][-1])


def linear(op: Shapes) -> Cost:
    """Count x (..., in) by weight (out, in), and a bias."""
    return Cost.of_macs(by_weight(op).macs, _bias(op, 2))


def bilinear(op: Shapes) -> Cost:
    """Count x (..., i) by weight (out, i, j) by y (..., j)."""
    return Cost.of_macs(prod(op.out) * (op.inputs[0][-1] + 1) * op.inputs[1][-1], _bias(op, 3))


def grouped_product(op: Shapes) -> Cost:
    """Count rows of (n, k), or columns of (k, m), each by the matrix of their group; or groups in depth."""
    left, right = op.inputs[:2]
    rows = prod(left) if len(left) <= len(right) or len(right) == 3 else prod(left[1:])
    return Cost.of_macs(rows * right[-1])


def attention(op: Shapes) -> Cost:
    """Count softmax(q k^T) v, for q (..., l, e), k (..., s, e), v (..., s, d)."""
    q, k, v = op.inputs[:3]
    scores = prod(q[:-1]) * k[-2]
    return Cost.of_macs(scores * (q[-1] + v[-1]), scores * (SOFTMAX + 1))


def attention_backward(op: Shapes, first: int = 1) -> Cost:
    """Count the scores once more, then the gradients of values, scores, queries and keys."""
    q, k, v = op.inputs[first : first + 3]
    scores = prod(q[:-1]) * k[-2]
    return Cost.of_macs(scores * (3 * q[-1] + 2 * v[-1]), 6 * scores)


def recurrent(op: Shapes) -> Cost:
    """Count every step: the input and the state by the matrices among the parameters, which are a list."""
    parameters = next(
        shapes for shapes in reversed(op.inputs) if isinstance(shapes, list) and len(shapes) > 1
    )
    return Cost.of_macs(prod(op.inputs[0][:-1]) * sum(prod(shape) for shape in parameters if len(shape) == 2))


def recurrent_layer(op: Shapes) -> Cost:
    """Count every step of one layer: the input and the state by the two weights that follow the input."""
    return Cost.of_macs(prod(op.inputs[0][:-1]) * (prod(op.inputs[1]) + prod(op.inputs[2])))


def einsum(op: Shapes) -> Cost:
    """Count pairs of operands, along the path or from left, each summed over letters that nothing later has.

    The axes of an ellipsis are letters too.
    """
    equation = next((one for one in op.values if isinstance(one, (str, bytes))), None)
    equation = equation or op.attributes.get("equation", "")
    equation = equation.decode() if isinstance(equation, bytes) else str(equation)
    names, result, extents = _letters(equation, tensors(op.inputs))
    path = next((one for one in op.values if isinstance(one, (list, tuple))), ())
    macs = 0
    for first, second in _pairs(path, len(names)):
        right, left = (names.pop(i) for i in sorted((first, second), reverse=True))
        together = {*left, *right}
        macs += prod(extents[letter] for letter in together)
        later = {*result, *"".join(names)}
        names.append("".join(letter for letter in together if letter in later))
    return Cost.of_macs(macs)


def _letters(equation: str, operands: list[tuple[int, ...]]) -> tuple[list[str], str, dict[str, int]]:
    """Return letters of each operand and of the result, and extents; an ellipsis is digits from the right."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    names: list[str] = []
    extents: dict[str, int] = {}
    widest = ""
    for term, shape in zip(terms.split(","), operands, strict=True):
        missing = len(shape) - len(term.replace("...", ""))
        digits = "".join(chr(ord("0") + i) for i in reversed(range(missing)))
        widest = max(widest, digits, key=len)
        names.append(term.replace("...", digits))
        for letter, n in zip(names[-1], shape, strict=True):
            extents[letter] = max(n, extents.get(letter, 0))  # one of extent 1 is broadcast
    if not arrow:
        once = sorted(letter for letter in extents if terms.count(letter) == 1)
        result = "..." + "".join(once)
    return names, result.replace("...", widest), extents


def _pairs(path: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return positions of the operands to be multiplied next; the product is put behind the others."""
    if path and all(isinstance(one, int) for one in path):
        return list(zip(path[::2], path[1::2], strict=True))
    return [(0, 1)] + [(0, left - 1) for left in range(count - 1, 1, -1)] if count > 1 else []


def convolution(op: Shapes) -> Cost:
    """Count for every output element the input channels of its group and the kernel."""
    weight, axes = _kernel(op), op.weight_layout or "OI"
    return Cost.of_macs(prod(op.out) * prod(weight) // weight[axes.index("O")], _bias(op, 2))


def depthwise_convolution(op: Shapes) -> Cost:
    """Count for every output element the kernel in one channel; the weight is (..., channels, multiplier)."""
    return Cost.of_macs(prod(op.out) * prod(_kernel(op)[:-2]))


def transposed_convolution(op: Shapes) -> Cost:
    """Count for every input element the output channels of its group under the kernel."""
    weight, axes = _kernel(op), op.weight_layout or "IO"
    # TensorFlow gives the extents of the result first.
    data = next(one for i, one in enumerate(op.inputs) if one is not None and i != op.weight and len(one) > 2)
    return Cost.of_macs(prod(data) * prod(weight) // weight[axes.index("I")], _bias(op, 2))


def pooling(op: Shapes) -> Cost:
    """Count for every output element its window; one of a size that follows from the shapes."""
    size = next((value for value in op.values if value is not None), None)
    for name in ("ksize", "kernel_size", "kernel_shape"):
        size = op.attributes.get(name, size)
    dimensions = 3 if "3d" in op.type else 1 if "1d" in op.type else 2
    window = prod(size) if isinstance(size, (list, tuple)) else int(size or 1) ** dimensions
    return Cost(0, max(prod(op.out) * window, 0))


def batch_norm(op: Shapes) -> Cost:
    """Count the normalisation, and in training the statistics of the batch before it."""
    names = ("training", "train", "is_training", "training_mode", "use_input_stats")
    trains = any(bool(op.attributes.get(name)) for name in names)
    return Cost(0, (BATCH_NORM + (3 if trains else 0)) * op.elements)


def _kernel(op: Shapes) -> tuple[int, ...]:
    kernel: tuple[int, ...] = op.inputs[1 if op.weight is None else op.weight]
    return kernel


def _bias(op: Shapes, position: int) -> int:
    """Return the additions of a bias, if there is one at a position."""
    has_bias = position < len(op.inputs) and op.inputs[position] is not None
    return prod(op.out) if has_bias else 0
