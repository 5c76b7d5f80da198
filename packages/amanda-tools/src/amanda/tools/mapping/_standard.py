"""StandardMapping: the keys that portable tools read. `docs/vocabulary.md` lists their words."""

from __future__ import annotations

from collections.abc import Hashable

from amanda.options import checked
from amanda.tools.mapping import _onnxruntime, _pytorch, _tensorflow
from amanda.tools.mapping._gradient import drop_unmade
from amanda.tools.mapping._installed import installed_rules
from amanda.tools.mapping._rules import MappingTool, Rules
from amanda.tools.mapping._weight_axes import write_weight_axes

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize",
     "Empty", "ParallelConcatStart"}
)  # fmt: skip
"""Types of ops whose outputs are what was in memory before."""


class StandardMapping(MappingTool):
    """Puts these keys into a context, with the same words for every framework.

    type: what the op computes: "add" for `a + b`, "conv2d", "linear", "matmul"; a name of the
        framework's own where the vocabulary has no word.
    in_place: whether the op writes its result into its first input.
    phase: "forward", "backward", "optimizer" for what an optimizer of PyTorch computes in its step, or
        "construction" for what constructors and initializers of modules and layers compute.
    backward_type: what the backward op computes, e.g. "conv2d_backward"; None in the forward pass.
    weight_index: position of the weight among the inputs; None without one.
    weight_grad_index: position, among the gradients that leave the backward op, of the gradient in
        the weight's own shape; None in the forward pass and where this backward op makes none.
    layout: axes of the data input, e.g. "NCHW", "NHWC", "NCW"; None where they have no fixed meaning.
    weight_layout: axes of the weight, e.g. "OIHW", "HWIO", "OI"; None likewise.
    weight_groups: number of groups of a convolution; 1 of other ops.
    shape: function from a tensor to a tuple of int, None for an unknown extent; None for no tensor.
    dtype: function from a tensor to the name of its element type, e.g. "float32"; None likewise.

    rules: further mapping rules, which run after the standard ones.
    """

    @checked
    def __init__(self, rules: Rules = ()) -> None:
        # A framework's half is a module of its own: a function `standard(context)` that writes
        # every key above; of `weight_grad_index` the position alone.  It may leave out `weight_groups`, and
        # `weight_layout` where the table of `_weight_axes` has that.
        own = [
            ["pytorch", _pytorch.standard],
            ["tensorflow", _tensorflow.standard],
            ["onnxruntime", _onnxruntime.standard],
        ]
        super().__init__([*own, *installed_rules(), ["*", write_weight_axes], ["*", drop_unmade], *rules])
        self._is_plain = not rules

    def stands_for(self) -> Hashable:
        """One StandardMapping without rules of its own does for all the tools of a scope."""
        return StandardMapping if type(self) is StandardMapping and self._is_plain else None
