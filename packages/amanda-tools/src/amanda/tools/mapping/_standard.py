"""StandardMapping: the keys that portable tools read. `docs/vocabulary.md` lists their words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from amanda import OpContext
from amanda.errors import AmandaError
from amanda.options import checked
from amanda.tools.mapping import _onnxruntime, _pytorch, _tensorflow
from amanda.tools.mapping._products import write_weight_axes
from amanda.tools.mapping._rules import MappingTool, Rules, installed_rules


def weight_gradient(context: OpContext) -> Callable[[int, Any], bool]:
    """Return a function that is True for the position and value of the weight's gradient in a pass.

    For the routines of a backward op, which the analysis of one pass inserts for all: another may make no
    gradient of the weight, or, where the weight is broadcast, one of another shape.  A weight that is
    computed anew for each call is told by its rank.  Call it in a callback without `require_outputs`: in one
    with it `weight_grad_index` is that of the present pass alone.
    """
    index, shape = context["weight_grad_index"], context["shape"]
    if index is None:
        return _never
    extents, is_variable = _weight_extents(context)

    def is_weights(position: int, gradient: Any) -> bool:
        gradient_extents = None if position != index or gradient is None else shape(gradient)
        return gradient_extents is not None and (
            extents is None or _extents_agree(gradient_extents, extents, is_variable)
        )

    return is_weights


def drop_absent_weight_gradient(context: OpContext) -> None:
    """Set `weight_grad_index` to None if this pass made no gradient in the weight's shape."""
    index, grads = context.get("weight_grad_index"), context.get_grad_inputs()
    if index is None or grads is None:
        return
    gradient = grads[index] if index < len(grads) else None
    gradient_extents, (extents, _) = context["shape"](gradient), _weight_extents(context)
    if gradient is None or not (
        gradient_extents is None or extents is None or _extents_agree(gradient_extents, extents, True)
    ):
        context["weight_grad_index"] = None


def _weight_extents(context: OpContext) -> tuple[Sequence[int | None] | None, bool]:
    """Return the weight's extents, None where unknown, and True for a variable, which keeps its extents."""
    weight = context["weight_index"]
    if weight is None:
        return None, False
    try:
        extents = context["shape"](context.get_inputs()[weight])
        return extents, context.get_variable(weight) is not None
    except AmandaError:
        return None, False


def _never(position: int, gradient: Any) -> bool:
    return False


def _extents_agree(first: Sequence[int | None], second: Sequence[int | None], whole: bool) -> bool:
    if len(first) != len(second):
        return False
    return not whole or all(None in pair or pair[0] == pair[1] for pair in zip(first, second, strict=True))


UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize",
     "Empty", "ParallelConcatStart"}
)  # fmt: skip
"""Types of ops whose outputs are what was in memory before."""


_SHARED = """
    add sub rsub mul div floor_divide remainder pow neg abs matmul addmm linear eq ne lt le gt ge bitwise_not
    bitwise_and bitwise_or reshape transpose permute getitem setitem cat clamp conv1d conv2d conv3d
    conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm layer_norm group_norm embedding relu
    sigmoid softmax log_softmax cross_entropy nll_loss dropout scaled_dot_product_attention rnn_tanh lstm gru
    to item
""".split()

_TABLES = (_pytorch.WORDS, _tensorflow.WORDS, _onnxruntime.WORDS)

VOCABULARY = frozenset((*_SHARED, *(word for table in _TABLES for word in table.values())))
"""Words that mean the same in every framework; what is in no list keeps the framework's own name."""


class StandardMapping(MappingTool):
    """Write op type, shapes, weight and layout into contexts, alike for all frameworks (for tool authors).

    Keys of the context, and their values:
    type: what the op computes: "add" for `a + b`, "conv2d", "linear", "matmul"; the framework's own name
        if docs/vocabulary.md has none.
    in_place: whether the op writes its result into its first input.
    phase: "forward", "backward", "optimizer" in the step of a PyTorch optimizer, or "construction" in
        constructors and initializers of modules and layers.
    backward_type: what the backward op computes, e.g. "conv2d_backward"; None in the forward pass.
    weight_index: position of the weight among the inputs; None without one.
    weight_grad_index: position of the weight's gradient among `get_grad_inputs()`; None in the forward pass
        and if no gradient has the shape of the weight.
    layout: axes of the data input, e.g. "NCHW", "NHWC", "NCW"; None where they have no fixed meaning.
    weight_layout: axes of the weight, e.g. "OIHW", "HWIO", "OI"; None where they have no fixed meaning.
    weight_groups: number of groups of a convolution; 1 of other ops.
    shape: function that returns the shape of a tensor, with None for an unknown extent; None for non-tensors.
    dtype: function that returns a tensor's element type, e.g. "float32"; None for non-tensors.

    rules: option: mapping rules, as of MappingTool, that run after the standard rules.
    """

    @checked
    def __init__(self, rules: Rules = ()) -> None:
        # A framework's half is a module of its own: a function `standard(context)` that writes
        # every key above; of `weight_grad_index` the position alone.  It may leave out `weight_groups`, and
        # `weight_layout` where the table of `_weight_axes` has that.
        framework_rules = [
            ["pytorch", _pytorch.standard],
            ["tensorflow", _tensorflow.standard],
            ["onnxruntime", _onnxruntime.standard],
        ]
        super().__init__(
            [
                *framework_rules,
                *installed_rules(),
                ["*", write_weight_axes],
                ["*", drop_absent_weight_gradient],
                *rules,
            ]
        )
        self._is_plain = not rules

    def stands_for(self) -> Hashable:
        """Return a key that lets one StandardMapping without further rules serve all tools of a scope."""
        return StandardMapping if type(self) is StandardMapping and self._is_plain else None
