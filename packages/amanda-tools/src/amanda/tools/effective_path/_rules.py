"""By the words of StandardMapping: what the outputs of an op are made of."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._terms import Indices, Rule, Step, Terms, Where, aligned, strides_of
from amanda.tools.effective_path._windows import average_pooling, convolution, max_pooling


def contraction(
    step: Step, rows: Indices, output: int, factors: Sequence[Where], labels: Sequence[Any]
) -> Terms:
    """Two factors, summed over the labels that the output lacks; labels of both and of the output.

    A label of extent 1 is broadcast.
    """
    one, other = (step.tensor(where) for where in factors)
    shape = step.outputs[output].shape
    extents: dict[Any, int] = {}
    for tensor, names in ((one, labels[0]), (other, labels[1])):
        for name, extent in zip(names, tensor.shape, strict=True):
            extents[name] = max(extents.get(name, 1), extent)
    summed = [name for name in extents if name not in labels[2]]
    extent = [extents[name] for name in summed] or [1]
    terms = np.unravel_index(np.arange(prod(extent)), extent)
    at = {name: index[:, None] for name, index in zip(labels[2], np.unravel_index(rows, shape), strict=True)}
    at.update({name: index[None] for name, index in zip(summed, terms, strict=False)})
    read = []
    for tensor, names in ((one, labels[0]), (other, labels[1])):
        index = np.zeros((len(rows), len(terms[0])), np.int64)
        for name, stride, size in zip(names, strides_of(tensor.shape), tensor.shape, strict=True):
            index = index + at[name] * (stride if size > 1 else 0)
        read.append(index)
    values = one.reshape(-1)[read[0]].astype(np.float64) * other.reshape(-1)[read[1]]
    return Terms(dict(zip(factors, read, strict=True)), values, prod(shape) * len(terms[0]), weighted=True)


def linear(step: Step, rows: Indices, output: int) -> Terms:
    """x (..., in) by weight (out, in)."""
    lead = list(range(step.tensor((0, 0)).ndim - 1))
    turned = step.weight_layout == "IO"
    labels = ([*lead, "in"], ["in", "out"] if turned else ["out", "in"], [*lead, "out"])
    return contraction(step, rows, output, ((0, 0), (1, 0)), labels)


def matmul(step: Step, rows: Indices, output: int) -> Terms:
    """(..., n, k) by (..., k, m), either of them turned or a vector; behind them what is added."""
    factors: Sequence[Where] = step.arguments.get("factors", ((0, 0), (1, 0)))
    one, other = (step.tensor(where) for where in factors)
    rank = step.outputs[output].ndim
    vectors = (one.ndim == 1, other.ndim == 1)
    batch = list(range(rank - 2 + sum(vectors)))
    turned = step.arguments.get("turned", (False, False))
    left: list[Any] = [*_last(batch, one.ndim - 2), *(("k", "n") if turned[0] else ("n", "k"))]
    right: list[Any] = [*_last(batch, other.ndim - 2), *(("m", "k") if turned[1] else ("k", "m"))]
    left, right = (["k"] if alone else names for alone, names in zip(vectors, (left, right), strict=True))
    out = [*batch, *([] if vectors[0] else ["n"]), *([] if vectors[1] else ["m"])]
    return contraction(step, rows, output, factors, (left, right, out))


def einsum(step: Step, rows: Indices, output: int) -> Terms:
    """Two factors by an equation without an ellipsis.

    Raises NotImplementedError for others.
    """
    equation = step.arguments["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    names = terms.split(",")
    tensors = [
        (i, j) for i, value in enumerate(step.inputs)
        for j, one in enumerate(value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, np.ndarray)
    ]  # fmt: skip
    if len(names) != 2 or len(tensors) != 2 or "." in equation or not arrow:
        raise NotImplementedError(f"einsum {equation!r}")
    return contraction(step, rows, output, tensors, (*names, out))


def attention(step: Step, rows: Indices, output: int) -> Terms:
    """softmax(q k^T) v, of which the values are the neurons and the shares of the softmax their weights."""
    query, key, value = (np.asarray(one, np.float64) for one in step.inputs[:3])
    if query.shape[:-2] != value.shape[:-2]:
        raise NotImplementedError("whose heads are shared")
    scale, mask, causal = (step.arguments.get(name) for name in ("scale", "mask", "causal"))
    scores = query @ key.swapaxes(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if causal:
        mask = np.tril(np.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    *lead, at, channel = np.unravel_index(rows, step.outputs[output].shape)
    batch = np.ravel_multi_index(lead, value.shape[:-2]) if lead else np.zeros_like(rows)
    count, width = value.shape[-2:]
    read = (batch[:, None] * count + np.arange(count)) * width + channel[:, None]
    terms = shares.reshape(-1, *shares.shape[-2:])[batch, at] * value.reshape(-1)[read]
    return Terms({(2, 0): read}, terms, step.outputs[output].size * count, weighted=True)


def _last(values: list[int], count: int) -> list[int]:
    return values[len(values) - count :] if count else []


def summation(step: Step, rows: Indices, output: int) -> Terms:
    """a + b: of what varies, the summands that make most of it; a constant is no part of the path."""
    if len(step.varying) < 2:
        return elementwise(step, rows, output)
    signs = step.arguments.get("signs", (1, 1))
    shape, count = step.outputs[output].shape, len(step.varying)
    sources, contributions = {}, np.zeros((len(rows), count))
    for i, where in enumerate(step.varying):
        array = step.tensor(where)
        index = aligned(rows, shape, array.shape)
        sources[where] = np.where(np.arange(count) == i, index[:, None], -1)
        contributions[:, i] = array.reshape(-1)[index].astype(np.float64) * signs[min(i, len(signs) - 1)]
    return Terms(sources, contributions, prod(shape) * count)


def reduction(step: Step, rows: Indices, output: int) -> Terms:
    """The mean or the sum over axes."""
    read = _reduced(step, rows, output)
    values = step.tensor(step.data).reshape(-1)[read].astype(np.float64)
    return Terms({step.data: read}, values, step.tensor(step.data).size)


def maximum(step: Step, rows: Indices, output: int) -> Terms:
    """The largest over axes, and of equal ones the first."""
    read = _reduced(step, rows, output)
    values = step.tensor(step.data).reshape(-1)[read]
    largest = np.zeros(read.shape)
    np.put_along_axis(largest, values.argmax(1)[:, None], 1, 1)
    return Terms({step.data: read}, largest, step.tensor(step.data).size)


def _reduced(step: Step, rows: Indices, output: int) -> Indices:
    """(outputs, terms) flat indices of what each output is made of."""
    data = step.tensor(step.data)
    axes = step.arguments.get("axes")
    gone = sorted({axis % data.ndim for axis in (range(data.ndim) if axes is None else axes)})
    kept = [axis for axis in range(data.ndim) if axis not in gone]
    indices = np.arange(data.size).reshape(data.shape).transpose([*kept, *gone])
    found: Indices = indices.reshape(prod(data.shape[axis] for axis in kept), -1)[rows]
    return found


def elementwise(step: Step, rows: Indices, output: int) -> Terms:
    """Every element of the output has one of each input that varies, which may be broadcast."""
    shape = step.outputs[output].shape
    sources = {where: aligned(rows, shape, step.tensor(where).shape)[:, None] for where in step.varying}
    return Terms(sources)


def first_elementwise(step: Step, rows: Indices, output: int) -> Terms:
    """The same of the first input alone."""
    return Terms(
        {step.data: aligned(rows, step.outputs[output].shape, step.tensor(step.data).shape)[:, None]}
    )


def reshaped(step: Step, rows: Indices, output: int) -> Terms:
    """The same elements in the same order, in another shape."""
    if step.tensor(step.data).size != step.outputs[output].size:
        raise NotImplementedError("it gives another number of elements than it reads")
    return Terms({step.data: rows[:, None]})


def moved(step: Step, rows: Indices, output: int) -> Terms:
    """Elements in another place: `arguments["move"]` does to flat indices what the op does to its input."""
    data = step.tensor(step.data)
    made = step.arguments["move"](np.arange(data.size).reshape(data.shape))
    found: NDArray[Any] = made[output] if isinstance(made, list) else made
    return Terms({step.data: found.reshape(-1)[rows][:, None]})


def joined(step: Step, rows: Indices, output: int) -> Terms:
    """Several tensors side by side along an axis, or along a new one."""
    join = np.stack if step.type == "stack" else np.concatenate
    position = next(i for i, value in enumerate(step.inputs) if isinstance(value, (list, tuple)))
    tensors = step.inputs[position]
    axis = step.arguments.get("axis", 0)
    which = join([np.full(one.shape, j) for j, one in enumerate(tensors)], axis=axis).reshape(-1)[rows]
    index = join([np.arange(one.size).reshape(one.shape) for one in tensors], axis=axis).reshape(-1)[rows]
    return Terms({
        (position, j): np.where(which == j, index, -1)[:, None] for j in range(len(tensors))
    })  # fmt: skip


_ELEMENTWISE = """
    BiasAdd abs alias alpha_dropout bias_add celu clamp clone contiguous detach div dropout dropout2d elu
    erf exp feature_dropout gelu hardsigmoid hardswish hardtanh identity Identity leaky_relu log logsigmoid
    masked_fill mish mul neg pow reciprocal relu relu6 rrelu rsqrt selu sigmoid silu softplus softsign sqrt
    square tanh to type type_as where LeakyRelu StopGradient
""".split()
_RESHAPED = "reshape squeeze unsqueeze view unflatten ravel".split()
_MOVED = """
    permute transpose getitem pad Pad PadV2 split split_with_sizes tensor_split chunk unbind expand expand_as
    repeat narrow select index_select flip roll
""".split()

FIRST = frozenset(
    {"batch_norm", "instance_norm", "group_norm", "layer_norm", "softmax", "log_softmax", "prelu"}
)
"""Words of ops that compute element by element of their first input, with weights and statistics."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise), **dict.fromkeys(FIRST, first_elementwise),
    **dict.fromkeys(_RESHAPED, reshaped), **dict.fromkeys(_MOVED, moved),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "depthwise_conv2d"), convolution),
    **{f"max_pool{n}d": max_pooling for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": max_pooling for n in (1, 2, 3)},
    **{f"avg_pool{n}d": average_pooling for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": average_pooling for n in (1, 2, 3)},
    "linear": linear, "matmul": matmul, "addmm": matmul, "baddbmm": matmul, "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "add": summation, "sub": summation, "rsub": summation, "mean": reduction, "sum": reduction,
    "amax": maximum, "cat": joined, "stack": joined,
}  # fmt: skip
"""Rule by the op's word, or the framework's own name where there is no word."""

PASSING = FIRST | frozenset(_ELEMENTWISE + _RESHAPED + _MOVED + ["cat", "stack"])
"""Words of ops whose rule reads shapes alone, unless they scale by a constant."""
