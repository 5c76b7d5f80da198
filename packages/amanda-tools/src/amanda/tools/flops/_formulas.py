"""Formulas by the words of StandardMapping.

Convention: a multiply-accumulate is two floating-point operations; one operation for each element of the
largest tensor in elementwise ops and reductions, with more steps counted where `STEPS` says so; none for
what only moves data.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from amanda.tools.flops._cost import Cost, Formula, Shapes, tensors


def convolution(op: Shapes) -> Cost:
    """Every output element sums over its group's input channels and the kernel."""
    weight = op.inputs[op.weight if op.weight is not None else 1]
    axes = op.weight_layout or "OI"
    return Cost.of_macs(prod(op.out) * prod(weight) // weight[axes.index("O")], _bias(op, 2))


def depthwise_convolution(op: Shapes) -> Cost:
    """Every output element sums over the kernel in one channel; the weight is (..., channels, multiplier)."""
    weight = op.inputs[op.weight if op.weight is not None else 1]
    return Cost.of_macs(prod(op.out) * prod(weight[:-2]))


def transposed_convolution(op: Shapes) -> Cost:
    """Every input element is added to its group's output channels under the kernel."""
    weight = op.inputs[op.weight if op.weight is not None else 1]
    axes = op.weight_layout or "IO"
    # TensorFlow gives the extents of the result first.
    data = next(one for i, one in enumerate(op.inputs) if one is not None and i != op.weight and len(one) > 2)
    return Cost.of_macs(prod(data) * prod(weight) // weight[axes.index("I")], _bias(op, 2))


def linear(op: Shapes) -> Cost:
    """x (..., in) by weight (out, in)."""
    return Cost.of_macs(prod(op.out) * op.inputs[0][-1], _bias(op, 2))


def matrix_product(op: Shapes) -> Cost:
    """(..., n, k) by (..., k, m), either of them transposed or a vector."""
    return Cost.of_macs(prod(op.out) * _contracted(op.inputs[0], op.inputs[1], op.out))


def matrix_product_and_sum(op: Shapes) -> Cost:
    """input + (..., n, k) by (..., k, m)."""
    macs = prod(op.out) * _contracted(op.inputs[1], op.inputs[2], op.out)
    return Cost.of_macs(macs, prod(op.out))


def bilinear(op: Shapes) -> Cost:
    """x (..., i) by weight (out, i, j) by y (..., j)."""
    return Cost.of_macs(prod(op.out) * (op.inputs[0][-1] + 1) * op.inputs[1][-1], _bias(op, 3))


def attention(op: Shapes) -> Cost:
    """softmax(q k^T) v, for q (..., l, e), k (..., s, e), v (..., s, d)."""
    q, k, v = op.inputs[:3]
    scores = prod(q[:-1]) * k[-2]
    return Cost.of_macs(scores * (q[-1] + v[-1]), scores * (STEPS["softmax"] + 1))


def einsum(op: Shapes) -> Cost:
    """Pairs of operands, each summed over the letters that nothing later has: along the path, or from left.

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
    """Letters of each operand and of the result, and their extents; an ellipsis is digits, from the right."""
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
    """Positions of the operands that are multiplied next; the product is put behind the others."""
    if path and all(isinstance(one, int) for one in path):
        return list(zip(path[::2], path[1::2], strict=True))
    return [(0, 1)] + [(0, left - 1) for left in range(count - 1, 1, -1)] if count > 1 else []


def batch_norm(op: Shapes) -> Cost:
    """In training, the statistics of the batch and then the normalisation; else the normalisation alone."""
    names = ("training", "train", "is_training", "training_mode", "use_input_stats")
    trains = any(bool(op.attributes.get(name)) for name in names)
    return Cost(0, (STEPS["batch_norm"] + (3 if trains else 0)) * op.elements)


def recurrent(op: Shapes) -> Cost:
    """Every step multiplies the input and the state by the matrices among the parameters."""
    parameters = next(
        shapes for shapes in reversed(op.inputs) if isinstance(shapes, list) and len(shapes) > 1
    )
    steps = prod(op.inputs[0][:-1])
    return Cost.of_macs(steps * sum(prod(shape) for shape in parameters if len(shape) == 2))


def pooling(op: Shapes) -> Cost:
    """Every output element visits its window; one of a size that follows from the shapes."""
    size = next((value for value in op.values if value is not None), None)
    size = op.attributes.get("kernel_size", op.attributes.get("ksize", size))
    dimensions = 3 if "3d" in op.type else 1 if "1d" in op.type else 2
    window = prod(size) if isinstance(size, (list, tuple)) else int(size or 1) ** dimensions
    return Cost(0, max(prod(op.out) * window, 0))


def visits(steps: int) -> Formula:
    """So many operations for each element."""
    return lambda op: Cost(0, steps * op.elements)


def no_cost(op: Shapes) -> Cost:
    """Moves data, or looks at it."""
    return Cost()


def _contracted(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int:
    if len(left) < 2 or len(right) < 2:
        return left[-1] if len(right) < 2 or len(left) < 2 else 0
    return left[-1] * left[-2] // out[-2] if out[-2] else 0


def _bias(op: Shapes, position: int) -> int:
    has_bias = position < len(op.inputs) and op.inputs[position] is not None
    return prod(op.out) if has_bias else 0


STEPS = {
    "batch_norm": 4, "instance_norm": 7, "layer_norm": 7, "group_norm": 7, "rms_norm": 4, "softmax": 5,
    "log_softmax": 5, "cross_entropy": 6, "gelu": 8, "silu": 4, "mish": 6, "softplus": 3, "sigmoid": 3,
    "tanh": 1, "elu": 3, "selu": 3, "hardswish": 4, "hardsigmoid": 3, "addcmul": 2, "addcdiv": 2, "lerp": 3,
    "var": 3, "std": 4, "normalize": 4, "glu": 4, "dropout": 2, "logsumexp": 4, "mse_loss": 3, "l1_loss": 3,
}  # fmt: skip
"""Operations for each element, where it is not one."""

_ONE_STEP = """
    abs acos acosh add add_n all any argmax argmin asin asinh atan atan2 atanh bias_add bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil clamp cos cosh count_nonzero cummax cummin cumprod cumsum div
    eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod ge gt hardtanh isfinite isin isinf isnan le
    leaky_relu linalg_vector_norm log log10 log1p log2 logical_and logical_not logical_or logical_xor
    logsigmoid lt masked_fill max maximum mean min minimum mul nan_to_num ne neg nll_loss norm pow prelu
    prod reciprocal relu relu6 remainder round rrelu rsqrt rsub sign sin sinh sqrt square
    squared_difference sub sum tan threshold topk trunc where
""".split()

_FREE = """
    alias allclose alpha_dropout arange as_strided bernoulli broadcast_tensors broadcast_to cat chunk
    clone constant_pad_nd contiguous copy detach diagonal dropout2d embedding empty empty_like equal
    expand expand_as feature_dropout fill flip full full_like gather getitem hsplit identity index
    index_add index_copy index_fill index_put index_select item linspace masked_scatter masked_select
    meshgrid movedim narrow new_empty new_full new_ones new_zeros nonzero normal numpy one_hot ones
    ones_like pad permute pin_memory pixel_shuffle pixel_unshuffle rand rand_like randint randint_like
    randn randn_like randperm reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d
    reshape resize roll scatter scatter_add select setitem slice split split_with_sizes squeeze stack take
    take_along_dim tensor tensor_split tile to tolist transpose tril triu type type_as unbind unfold uniform
    unsqueeze variable view vsplit zero zeros zeros_like
""".split()

_POOLING = [f"{kind}_pool{n}d" for kind in ("max", "avg", "lp") for n in (1, 2, 3)]
_WHOLE_POOLING = [f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)]

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE, no_cost),
    **{word: visits(1) for word in [*_ONE_STEP, *_WHOLE_POOLING]},
    **{word: visits(steps) for word, steps in STEPS.items()},
    **dict.fromkeys(_POOLING, pooling),
    **{f"conv{n}d": convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": transposed_convolution for n in (1, 2, 3)},
    "depthwise_conv2d": depthwise_convolution, "batch_norm": batch_norm,
    "linear": linear, "matmul": matrix_product, "addmm": matrix_product_and_sum,
    "addmv": matrix_product_and_sum, "baddbmm": matrix_product_and_sum, "bilinear": bilinear,
    "scaled_dot_product_attention": attention, "einsum": einsum,
    "lstm": recurrent, "gru": recurrent, "rnn_tanh": recurrent, "rnn_relu": recurrent,
}  # fmt: skip
"""Formula by the op's word."""

MOVES = frozenset(_FREE)
"""Words of ops that compute nothing."""

STAYS = frozenset(
    "alias detach empty empty_like identity item movedim new_empty pin_memory reshape squeeze unsqueeze "
    "variable view".split()
)
"""Words of those that move nothing either."""

CONTRACTIONS = frozenset(
    """
    linear einsum matmul addmm addmv addbmm baddbmm bilinear trilinear grouped_mm conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d depthwise_conv2d conv_tbc lstm gru rnn_tanh rnn_relu
    """.split()
)
"""Words of ops each of whose gradients takes as many multiply-accumulates as the op itself."""

ELEMENTWISE = frozenset(FORMULAS) - CONTRACTIONS - {"scaled_dot_product_attention"}
"""Words of ops each of whose gradients takes one operation for each element, or none."""
