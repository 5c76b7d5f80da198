"""Formulas for the MACs and FLOPs of an op by its shapes, whatever a framework calls it.

Convention: a multiply-accumulate is two floating-point operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod
from typing import Any

from amanda.tools.flops._cost import Cost, Formula, Shapes, tensor_shapes

SOFTMAX, BATCH_NORM, LAYER_NORM = 5, 4, 7
"""Operations for each element."""


def no_cost(op: Shapes) -> Cost:
    """Count nothing for an op that moves data, or looks at it."""
    return Cost()


def visits(steps: int) -> Formula:
    """Count so many operations for each element."""
    return lambda op: Cost(0, steps * op.elements)


def products(macs: Callable[[Shapes], int], other_flops: Callable[[Shapes], int] = lambda op: 0) -> Formula:
    """Count multiply-accumulates, and operations besides."""
    return lambda op: Cost.of_macs(macs(op), other_flops(op))


def operations(flops: Callable[[Shapes], float]) -> Formula:
    """Count operations that are not multiply-accumulates, as textbooks tell."""
    return lambda op: Cost(0, round(flops(op)))


def matrix_product(op: Shapes, first: int = 0) -> Cost:
    """Count (..., n, k) by (..., k, m), either transposed or a vector: the two inputs from `first` on."""
    factor, other_factor = op.inputs[first : first + 2]
    depth = factor[-1]
    if len(factor) > 1 and len(other_factor) > 1:
        # n comes from the result, so k is found also where the left factor is transposed.
        depth = factor[-1] * factor[-2] // op.out[-2] if op.out[-2] else 0
    return Cost.of_macs(prod(op.out) * depth)


def product_at(left: int, right: int) -> Formula:
    """Return a formula for (..., n, k) by (..., k, m) at these positions; a sparse factor counts as dense."""

    def macs(op: Shapes) -> Any:
        right_shape = op.inputs[right]
        return prod(op.inputs[left]) * (right_shape[-1] if len(right_shape) > 1 else 1)

    return products(macs)


def linear(op: Shapes) -> Cost:
    """Count x (..., in), in ONNX maybe transposed, by a weight that gives (..., out), and a bias."""
    # Gemm of ONNX may transpose x, whose depth is then its first axis.
    depth = op.inputs[0][0 if op.attributes.get("transA") else -1]
    return Cost.of_macs(prod(op.out) * depth, _bias(op, 2))


def bilinear(op: Shapes) -> Cost:
    """Count x (..., i) by weight (out, i, j) by y (..., j)."""
    # For each output and each j: i products with x, and one with y.
    return Cost.of_macs(prod(op.out) * (op.inputs[0][-1] + 1) * op.inputs[1][-1], _bias(op, 3))


def contraction(op: Shapes) -> Cost:
    """Count each element of the result times the extents that it is summed over, by numbers of axes."""
    (summed, _), _ = op.attributes["dimension_numbers"]
    return Cost.of_macs(prod(op.out) * prod(op.inputs[0][axis] for axis in summed))


def ragged_contraction(op: Shapes) -> Cost:
    """Count a contraction by groups: a row with the matrix of its group, or each part of the depth once."""
    # JAX's axes: those of each factor that are summed over, and those of the first one that groups divide.
    dimensions = op.attributes["ragged_dot_dimension_numbers"]
    (summed_axes, _), _ = dimensions.dot_dimension_numbers
    are_groups_summed = set(summed_axes) & set(dimensions.lhs_ragged_dimensions)
    # Then there is a result for each group, along the first axis.
    result_shape = op.out[1:] if are_groups_summed else op.out
    return Cost.of_macs(prod(result_shape) * prod(op.inputs[0][axis] for axis in summed_axes))


def grouped_product(op: Shapes) -> Cost:
    """Count rows of (n, k), or columns of (k, m), each by the matrix of their group; or groups in depth."""
    left, right = op.inputs[:2]
    rows = prod(left) if len(left) <= len(right) or len(right) == 3 else prod(left[1:])
    return Cost.of_macs(rows * right[-1])


def attention(op: Shapes) -> Cost:
    """Count softmax(q k^T) v, for q (..., l, e), k (..., s, e), v (..., s, d), of which any is broadcast."""
    q, k, v = op.inputs[:3]
    scores = prod(op.out[:-1]) * k[-2]
    # One operation more than softmax takes: the scores are scaled.
    return Cost.of_macs(scores * (q[-1] + v[-1]), scores * (SOFTMAX + 1))


def attention_backward(op: Shapes) -> Cost:
    """Count the scores once more, then the gradients of values, scores, queries and keys.

    The inputs are the gradient of the result, then queries, keys and values.
    """
    gradient, q, k, v = op.inputs[:4]
    scores = prod(gradient[:-1]) * k[-2]
    # With flash attention the scores were not kept: q k^T again, then two products with e for q and k, and
    # two with d for v and the scores.
    return Cost.of_macs(scores * (3 * q[-1] + 2 * v[-1]), 6 * scores)


def recurrent(op: Shapes) -> Cost:
    """Count the products of input and state with the matrices among the parameters, at every step.

    The parameters are a list; where they are one row of numbers, attributes tell the matrices in it.
    """
    steps = prod(op.inputs[0][:-1])
    lists = [shapes for shapes in op.inputs if isinstance(shapes, list) and len(shapes) > 1]
    if not lists and "hidden_size" in op.attributes:
        return Cost.of_macs(steps * _recurrent_weight_count(op))
    parameters = lists[-1]  # the two states of an LSTM are a list too, before the parameters
    # Biases are vectors, and their additions are left out as in other counters.
    return Cost.of_macs(steps * sum(prod(shape) for shape in parameters if len(shape) == 2))


_GATES = {"lstm": 4, "gru": 3}


def _recurrent_weight_count(op: Shapes) -> int:
    """Return the number of weights of a recurrent network by its sizes, without biases."""
    hidden, width = op.attributes["hidden_size"], op.attributes["input_size"]
    projected = op.attributes.get("proj_size") or 0
    directions, gates = 1 + bool(op.attributes.get("bidirectional")), _GATES.get(op.type, 1)
    state, count = projected or hidden, 0
    for _ in range(op.attributes.get("num_layers", 1)):
        # Every gate has a matrix for the input and one for the state; a projection makes the state smaller.
        count += directions * hidden * (gates * (width + state) + projected)
        width = directions * state
    return count


def recurrent_layer(op: Shapes) -> Cost:
    """Count every step of one layer: the input and the state by the two weights that follow the input."""
    return Cost.of_macs(prod(op.inputs[0][:-1]) * (prod(op.inputs[1]) + prod(op.inputs[2])))


def einsum(op: Shapes) -> Cost:
    """Count pairs of operands, along the path or from left, each summed over letters that nothing later has.

    The axes of an ellipsis are letters too.
    """
    equation = next((value for value in op.values if isinstance(value, (str, bytes))), None)
    # TensorFlow has the equation among the attributes, as bytes; PyTorch among the values.
    equation = equation or op.attributes.get("equation", "")
    equation = equation.decode() if isinstance(equation, bytes) else str(equation)
    names, result, extents = _letters(equation, tensor_shapes(op.inputs))
    path = next((value for value in op.values if isinstance(value, (list, tuple))), ())
    macs = 0
    for first, second in _pairs(path, len(names)):
        right, left = (names.pop(i) for i in sorted((first, second), reverse=True))
        letters = {*left, *right}
        macs += prod(extents[letter] for letter in letters)
        # An axis that neither the result nor a later operand has is summed over now.
        later = {*result, *"".join(names)}
        names.append("".join(letter for letter in letters if letter in later))
    return Cost.of_macs(macs)


def _letters(equation: str, operands: list[tuple[int, ...]]) -> tuple[list[str], str, dict[str, int]]:
    """Return the letters of each operand and of the result, and extents by letter; an ellipsis is digits."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    names: list[str] = []
    extents: dict[str, int] = {}
    widest = ""
    for term, shape in zip(terms.split(","), operands, strict=True):
        ellipsis_rank = len(shape) - len(term.replace("...", ""))
        # Letters are taken by the program, so the axes of an ellipsis are digits: counted from the right,
        # broadcasting axes meet.
        digits = "".join(chr(ord("0") + i) for i in reversed(range(ellipsis_rank)))
        widest = max(widest, digits, key=len)
        names.append(term.replace("...", digits))
        for letter, extent in zip(names[-1], shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 0))  # one of extent 1 is broadcast
    if not arrow:
        single_letters = sorted(letter for letter in extents if terms.count(letter) == 1)
        result = "..." + "".join(single_letters)
    return names, result.replace("...", widest), extents


def _pairs(path: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the positions of operands that are multiplied, two at a time, by the path, else from left.

    Both are taken away, and their product is put behind the others.
    """
    if path and all(isinstance(index, int) for index in path):
        return list(zip(path[::2], path[1::2], strict=True))
    # After the first pair the product is the last operand, and the next from left the first.
    return [(0, 1)] + [(0, remaining - 1) for remaining in range(count - 1, 1, -1)] if count > 1 else []


def convolution(op: Shapes) -> Cost:
    """Count for every output element the input channels of its group and the kernel."""
    weight, axes = _kernel(op), op.weight_layout or "OI"
    # The weight has the input channels of one group already, so groups need no case of their own.
    return Cost.of_macs(prod(op.out) * prod(weight) // weight[axes.index("O")], _bias(op, 2))


def depthwise_convolution(op: Shapes) -> Cost:
    """Count for every output element the kernel in one channel; the weight is (..., channels, multiplier)."""
    return Cost.of_macs(prod(op.out) * prod(_kernel(op)[:-2]))


def transposed_convolution(op: Shapes) -> Cost:
    """Count for every input element the output channels of its group under the kernel."""
    weight, axes = _kernel(op), op.weight_layout or "IO"
    # TensorFlow gives the extents of the result first.
    data = next(
        shape for i, shape in enumerate(op.inputs) if shape is not None and i != op.weight and len(shape) > 2
    )
    return Cost.of_macs(prod(data) * prod(weight) // weight[axes.index("I")], _bias(op, 2))


def pooling(op: Shapes) -> Cost:
    """Count for every output element its window; 1 for a window whose size follows from the shapes."""
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


def any_convolution(op: Shapes) -> Cost:
    """Count a convolution, whose argument says whether it is transposed."""
    return (transposed_convolution if op.attributes.get("transposed") else convolution)(op)


def convolution_backward(op: Shapes) -> Cost:
    """Count the gradients of data and kernel that are asked for, each as much as the convolution."""
    grad, data, weight = op.inputs[:3]
    macs = prod(data if op.attributes.get("transposed") else grad) * prod(weight) // weight[0]
    return Cost.of_macs(macs * sum(map(bool, op.attributes["output_mask"][:2])))


def covariance(op: Shapes) -> Cost:
    """Count variables (v, n), less their means, by their transpose; one variable is a vector."""
    shape = op.inputs[0]
    variables, observations = shape if len(shape) == 2 else (1, prod(shape))
    return Cost.of_macs(variables**2 * observations, 3 * prod(shape))


def trilinear(op: Shapes) -> Cost:
    """Count every element of the product of three tensors, each with new axes of extent 1."""
    operands = [list(shape) for shape in op.inputs[:3]]
    for shape, axes in zip(operands, [op.attributes[f"expand{i}"] for i in (1, 2, 3)], strict=True):
        for axis in sorted(axes):
            shape.insert(axis, 1)
    return Cost.of_macs(prod(map(max, *operands)))


def blocked_cell(op: Shapes) -> Cost:
    """Count input and state together by the weight, at each step."""
    matrices = [shape for shape in op.inputs if shape and len(shape) > 1]
    weight = max((shape for shape in matrices if len(shape) == 2), key=prod)
    return Cost.of_macs(prod(matrices[0][:-1]) * prod(weight))


def grouped_attention(op: Shapes) -> Cost:
    """Count each query (batch, length, width) by all keys that are held."""
    query, present = op.inputs[0], op.outputs[1] if len(op.outputs) > 1 else None
    return Cost.of_macs(2 * prod(op.out) * (present[-2] if present else query[-2]))


def cached_attention(past: int) -> Formula:
    """Return a formula of queries by all keys, cached ones too, as ONNX and ONNX Runtime write attention.

    past: position of the cached keys.  Queries are (batch, heads, l, e), or (batch, l, heads * e) with the
    number of heads in an attribute; packed ones (batch, l, heads, 3, e).  Several heads may share a key.
    """

    def cost(op: Shapes) -> Cost:
        """Count scores of queries by new and cached keys, their softmax, and its product with values."""
        query, key = op.inputs[0], op.inputs[1]
        if len(query) == 5:
            _, length, heads, _, width = query
            queries, keys, depth = heads * length, length, width
        else:
            heads = op.attributes.get("q_num_heads") or op.attributes.get("num_heads", 1)
            queries = query[1] * query[2] if len(query) == 4 else query[1] * heads
            keys = key[-2] if len(key) in (3, 4) else key[1]
            depth = query[-1] if len(query) == 4 else query[-1] // heads
        cached = op.inputs[past] if len(op.inputs) > past else None
        scores = query[0] * queries * (keys + (cached[-2] if cached else 0))
        value_width = op.out[-1] if len(op.out) == 4 else op.out[-1] // heads
        return Cost.of_macs(scores * (depth + value_width), scores * (SOFTMAX + 1))

    return cost


def onnx_attention(op: Shapes) -> Cost:
    """Count ONNX' Attention, before which ONNX Runtime's takes x (batch, length, in) by (in, 3 width)."""
    if op.type == "scaled_dot_product_attention":
        return cached_attention(4)(op)
    (batch, length, _), (depth, projected) = op.inputs[:2]
    return Cost.of_macs(batch * length * (depth * projected + 2 * length * op.out[-1]))


def attention_layer(op: Shapes) -> Cost:
    """Count projections and attention of `torch._native_multi_head_attention`."""
    query, key, width = op.inputs[0], op.inputs[1], op.inputs[0][-1]
    tokens = prod(query[:-1])
    weights = [shape for shape in op.inputs[3:] if shape is not None and len(shape) == 2 and width in shape]
    projected = sum(prod(shape) for shape in weights[:2])
    return Cost.of_macs(tokens * projected + 2 * tokens * key[-2] * width)


def encoder_layer(op: Shapes) -> Cost:
    """Count `torch._transformer_encoder_layer_fwd`: projections, attention, two linear layers, two norms.

    A batch may be a nested tensor, which tells the length and width of each sequence itself.
    """
    # A batch of texts may be nested: its lengths are values, and no shape.
    if None in op.inputs[0]:
        sequences = [(length, width) for length, width in op.values[0]._nested_tensor_size().tolist()]
    else:
        sequences = [op.inputs[0][-2:]] * prod(op.inputs[0][:-2])
    lengths = {length for length, _ in sequences}
    # A mask is a matrix too: one of these extents is taken for a mask, and not for a weight.
    masks = {(rows, length) for length in lengths for rows in (len(sequences), length)}
    matrices = [shape for shape in op.inputs[1:] if shape is not None and len(shape) == 2]
    weights = sum(prod(shape) for shape in matrices if shape not in masks)
    macs = sum(length * (weights + 2 * length * width) for length, width in sequences)
    return Cost.of_macs(macs, sum(map(prod, sequences)) * (2 * LAYER_NORM + 2))


def elements_of_list(op: Shapes) -> int:
    """Return the elements of all tensors of the first list."""
    return sum(map(prod, next((shapes for shapes in op.inputs if isinstance(shapes, list)), [])))


def of_matrix(count: Callable[[int, int, int], float]) -> Formula:
    """Return a formula of `count(m, n, min(m, n))` operations for each matrix (..., m, n) of the first input.

    Source of what matrices take: Golub and Van Loan, "Matrix Computations"; what iterates takes its average.
    """

    def flops(op: Shapes) -> Any:
        *batch, m, n = op.inputs[0]
        return prod(batch) * count(m, n, min(m, n))

    return operations(flops)


def of_square(factor: float) -> Formula:
    """Count so many times n^3 operations for each matrix (..., n, n)."""
    return of_matrix(lambda m, n, k: factor * n**3)


def of_system(each: float, matrix: int = 0, once: float = 0) -> Formula:
    """Return a formula: `once` n^3 operations per matrix (..., n, n), `each` n^2 per right-hand side."""

    def flops(op: Shapes) -> Any:
        n = op.inputs[matrix][-1]
        sides = prod(op.out) // n if n else 0  # of all systems
        systems = max(prod(op.inputs[matrix][:-2]), 1)
        return systems * (once * n**3) + sides * (each * n**2)

    return operations(flops)


def lu(m: int, n: int, k: int) -> float:
    """Return the operations of a decomposition into triangular factors."""
    # Golub and Van Loan, sec. 3.2, for matrices that need not be square.
    return 2 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def svd(m: int, n: int, k: int) -> float:
    """Return the operations of a singular value decomposition."""
    # Golub and Van Loan, sec. 8.6: singular values with both sets of vectors.
    return 6 * max(m, n) * k**2 + 20 * k**3


def fourier(steps: float, last: int = 0) -> Formula:
    """Return a formula of `steps` operations for each element and each halving of the transformed axes.

    last: number of last axes that are transformed; 0 for those that the attribute `dim` names, or all.
    """

    def flops(op: Shapes) -> Any:
        # A real transform has half of the numbers at one side: the larger side is transformed.
        shape = max(op.inputs[0], op.out, key=prod)
        axes = range(-last, 0) if last else op.attributes.get("dim") or range(len(shape))
        extent = prod(shape[axis] for axis in axes)
        return steps * prod(shape) * log2(max(extent, 1))

    return operations(flops)


def grid_sampling(dimensions: int) -> Formula:
    """Return a formula for sampling a grid: two operations for each neighbour that a point is made of."""

    def flops(op: Shapes) -> Any:
        # PyTorch's numbers: 0 linear, of two neighbours an axis, 1 nearest, 2 cubic.
        mode = op.attributes.get("interpolation_mode", 0)
        taps = 1 if mode == 1 else (4 if mode == 2 else 2) ** dimensions
        return 2 * taps * max(map(prod, (op.inputs[0], op.out)))

    return operations(flops)


def interpolation(taps: int, position: int | None = None) -> Formula:
    """Count so many neighbours, each weighted and added, for each element of the result or of an input."""
    return lambda op: Cost(0, 2 * taps * prod(op.out if position is None else op.inputs[position]))


def _kernel(op: Shapes) -> tuple[int, ...]:
    """Return the shape of the weight; by default the second input."""
    kernel: tuple[int, ...] = op.inputs[1 if op.weight is None else op.weight]
    return kernel


def _bias(op: Shapes, position: int) -> int:
    """Return the number of additions of the bias at a position; 0 without one."""
    has_bias = position < len(op.inputs) and op.inputs[position] is not None
    return prod(op.out) if has_bias else 0
