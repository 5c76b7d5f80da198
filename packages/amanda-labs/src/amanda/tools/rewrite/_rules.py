"""Patterns of ops, rules that replace their matches, and the built-in rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

import amanda
from amanda.errors import ToolError
from amanda.options import Name, NotEmpty, checked
from amanda.tools.mapping import CONVOLUTIONS
from amanda.tools.select import Patterns

if TYPE_CHECKING:
    from amanda.tools.rewrite._program import Match, OpCall

Pattern: TypeAlias = Union["Op", "Maybe", "Capture", None]
"""A pattern of an input; None fits any input, or its absence."""

_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"})


class PatternError(ToolError, module="amanda.tools.rewrite"):
    """A pattern or a rule that is not valid."""


class Capture:
    """A pattern that fits any input of an op, and names its value in the match.

    Two captures with one name fit the same value.

    Args:
        name: Name of the value in the match.
    """

    @checked(error=PatternError)
    def __init__(self, name: Name) -> None:
        self.name = name


class Op:
    """A pattern of an op, with patterns for its first inputs.

    An Op that is an input of several patterns fits one op, whose output all of them read.

    Args:
        type: Words of StandardMapping ("conv2d"), or names of the framework; `*` and `?` are wildcards, so
            "*" is any op.
        inputs: An Op or a Maybe that makes the input, a Capture, or None for any input; the op may have more
            inputs.
        name: Of the op in the match.
        where: Called once with the context, as the op is analysed.
        commutative: True if the inputs may be in any order; by default for add, mul and similar ops.
    """

    @checked(error=PatternError)
    def __init__(
        self,
        type: Name | Annotated[Sequence[Name], NotEmpty],
        *inputs: Pattern,
        name: Name | None = None,
        where: Callable[[amanda.OpContext], bool] | None = None,
        commutative: bool | None = None,
    ) -> None:
        self.types = (type,) if isinstance(type, str) else tuple(type)
        self._types = Patterns("type", self.types)
        self.inputs = inputs
        self.name = name
        self.where = where
        self.commutative = commutative

    def fits(self, context: amanda.OpContext) -> bool:
        """Return True if an op is of the type, and `where` accepts it."""
        if not self._types(context["type"], context.get_op_type()):
            return False
        return self.where is None or bool(self.where(context))

    def orders(self, type: str) -> Iterator[Sequence[Pattern]]:
        """Return the orders that the inputs of an op of this type may have."""
        # By the type that the op has in the program: a pattern with a wildcard has none.
        commutes = type in _COMMUTATIVE if self.commutative is None else self.commutative
        return permutations(self.inputs) if commutes else iter((self.inputs,))

    @property
    def first_input(self) -> Pattern:
        """Return the first pattern among the inputs, which takes the place of an absent op."""
        return next((pattern for pattern in self.inputs if pattern is not None), None)

    def __repr__(self) -> str:
        return f"Op({'|'.join(self.types)}{'' if self.name is None else f', name={self.name}'})"


class Maybe:
    """An op that may be absent; the first pattern among its inputs then takes its place.

    Args:
        op: The op, which has a pattern among its inputs.

    Raises:
        PatternError: For an op without patterns of its inputs.
    """

    @checked(error=PatternError)
    def __init__(self, op: Op) -> None:
        if op.first_input is None:
            raise PatternError(f"Maybe wants an op that tells what it is given, not {op!r}")
        self.op = op


@checked(error=PatternError)
@dataclass(frozen=True)
class Rule:
    """A pattern, which is its last op, and a function that computes the output of this op instead.

    Args:
        pattern: The last op, with the patterns of its inputs.
        replacement: Called with the `Match` at every execution; its ops take part in autodiff.
        when: Called with the match before each execution; if it returns False, the original computes.  In a
            graph `when` is called once, as the graph is rewritten, with symbols as values.
        name: Name of the rule in results; "" for that of the replacement.

    Raises:
        PatternError: For two ops of one name.
    """

    pattern: Op
    replacement: Callable[[Match], Any]
    when: Callable[[Match], bool] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Check the names of ops, and name the rule after its replacement if it has no name."""
        # A match gives its ops by name, so a name has to mean one op.
        names = [op.name for op in self.ops if op.name is not None]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise PatternError(f"two ops of a pattern have the name {repeated[0]!r}; a match has ops by name")
        if not self.name:
            name = getattr(self.replacement, "__name__", type(self.replacement).__name__)
            # The dataclass is frozen.
            object.__setattr__(self, "name", name)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return each Op of the pattern once, the last one first."""
        ops: dict[Op, None] = {}
        pending: list[Pattern] = [self.pattern]
        # The list grows while it is walked through.
        for pattern in pending:
            op = pattern.op if isinstance(pattern, Maybe) else pattern
            if isinstance(op, Op) and op not in ops:
                ops[op] = None
                pending += op.inputs
        return tuple(ops)


@checked(error=PatternError)
def remove(*types: Name, name: str = "") -> Rule:
    """Return a rule that replaces ops of these types by their first input.

    Args:
        *types: Types of StandardMapping, such as "dropout".
        name: Name of the rule in results; "" for "remove" and the types.
    """
    rule_name = name or f"remove {', '.join(types)}"
    return Rule(Op(types, Capture("input")), lambda match: match["input"], name=rule_name)


@checked(error=PatternError)
def insert_after(pattern: Op, function: Callable[[Any], Any], name: str = "") -> Rule:
    """Return a rule that passes the output of a pattern through a function, which takes part in autodiff.

    Args:
        pattern: Ops whose output is changed, that of the last.
        function: Function of the output, which returns the new value.
        name: Name of the rule in results; "" for "insert" and the name of the function.
    """
    rule_name = name or f"insert {getattr(function, '__name__', function)}"
    return Rule(pattern, lambda match: function(match.original()), name=rule_name)


def fold_batch_norm() -> Sequence[Rule]:
    """Return rules that fold the scale of each channel into a convolution's weight, the shift into its bias.

    With W, b of the convolution and the statistics m, v: W' = W g / sqrt(v + eps) and
    b' = (b - m) g / sqrt(v + eps) + beta.  Source: Jacob et al. 2018, eq. 14.  Both are computed at every
    execution, so that they follow the parameters and pass gradients to them.  A normalisation by the
    statistics of the batch stays.
    """
    name = "fold_batch_norm"
    convolution = Op(tuple(CONVOLUTIONS), name="convolution")
    # Only where the framework has a folding: others keep their ops.
    norm = Op("batch_norm", convolution, name="norm", where=lambda context: name in context["rewrites"])
    # Keras normalises by a multiplication and an addition.
    biased = Maybe(Op(("add", "BiasAdd"), convolution, Capture("bias"), where=_is_per_channel))
    scaled = Op("mul", biased, Capture("scale"), where=_is_per_channel)
    affine = Op("add", scaled, Capture("shift"), where=_is_per_channel)
    return Rule(norm, _fold_norm, when=_uses_running_statistics, name=name), Rule(
        affine, _fold_affine, name=name
    )


def _uses_running_statistics(match: Match) -> bool:
    """Return True if the normalisation uses running statistics."""
    norm = match.ops["norm"]
    mean, variance = norm.inputs[3:5]
    # PyTorch has the flag among the inputs, TensorFlow among the attributes.
    training = norm.inputs[5] if len(norm.inputs) > 5 else norm.attributes["is_training"]
    # In training the statistics are those of the batch, which no weight can hold.
    return not training and mean is not None and variance is not None


def _fold_norm(match: Match) -> Any:
    """Return the output of the match, from the folding of the op's framework."""
    return match.ops["norm"].rewrites["fold_batch_norm"](match)


def fold_in_pytorch(match: Match) -> Any:
    """Compute the convolution with the folded weight and bias."""
    import torch

    convolution, norm = match.ops["convolution"], match.ops["norm"]
    x, weight, *options = convolution.inputs  # bias, stride, padding, ...
    bias, settings = (options[0], options[1:]) if options else (None, [])
    _, gamma, beta, mean, variance, _training, _momentum, epsilon, _cudnn = norm.inputs
    scale = torch.rsqrt(variance + epsilon)
    if gamma is not None:
        scale = scale * gamma
    # A convolution without bias counts as one with bias 0.
    shift = -mean * scale if bias is None else (bias - mean) * scale
    if beta is not None:
        shift = shift + beta
    per_channel = scale.reshape(-1, *[1] * (weight.dim() - 1))
    # In the weight's element type: statistics may be float32 where weights are half.
    return convolution(x, (weight * per_channel).to(weight.dtype), shift.to(weight.dtype), *settings)


def fold_in_tensorflow(match: Match) -> Any:
    """Return the outputs of a FusedBatchNorm: a convolution with the folded weight, and unread statistics."""
    import tensorflow as tf

    norm = match.ops["norm"]
    _, gamma, beta, mean, variance = norm.inputs
    scale = gamma * tf.math.rsqrt(variance + norm.attributes["epsilon"])
    y = _convolve_folded(match.ops["convolution"], scale, beta - mean * scale)
    # FusedBatchNorm has outputs for its gradient, which nobody reads here.
    reserved_outputs = (tf.zeros([0], mean.dtype),) if norm.name == "FusedBatchNormV3" else ()
    return y, mean, variance, mean, variance, *reserved_outputs


def _fold_affine(match: Match) -> Any:
    """Return a convolution with the folded weight, for the multiplication and addition of Keras."""
    scale, shift = match["scale"], match["shift"]
    if "bias" in match:
        shift = shift + match["bias"] * scale
    return _convolve_folded(match.ops["convolution"], scale, shift)


def _convolve_folded(convolution: OpCall, scale: Any, shift: Any) -> Any:
    """Return a convolution of TensorFlow with a scaled weight, and a shift for each channel."""
    import tensorflow as tf

    x, weight = convolution.inputs
    # Output channel c * M + m has the weight [..., c, m].
    if convolution.type == "depthwise_conv2d":  # its weight has (height, width, in, out for each in)
        scale = tf.reshape(scale, weight.shape[2:])
    y = convolution(x, weight * tf.cast(scale, weight.dtype))
    channels_first = convolution.attributes.get("data_format") in (b"NCHW", "NCHW")
    return tf.nn.bias_add(y, tf.cast(shift, y.dtype), "NCHW" if channels_first else "NHWC")


def _is_per_channel(context: amanda.OpContext) -> bool:
    """Return True if channels are the last axis, and one of two inputs is a vector along it."""
    if not context["channels_last"]:
        return False
    shapes = [context["shape"](value) for value in context.get_inputs()[:2]]
    return any(shape is not None and len(shape) == 1 for shape in shapes)


def fuse_attention() -> Sequence[Rule]:
    """Return the rule that replaces softmax(q k^T scale + mask) v, with dropout, by one fused call.

    Active dropout draws other random elements than the original, with the same probability.
    """
    name = "fuse_attention"
    scores = Op("matmul", Capture("query"), Capture("key"), where=lambda context: name in context["rewrites"])
    scaled = Maybe(Op(("mul", "div"), scores, Capture("scale"), name="scaling"))
    masked = Maybe(Op("add", scaled, Capture("mask"), name="masking"))
    weights = Op("softmax", masked, Capture("dim"), name="softmax")
    cast = Maybe(Op(("to", "type"), weights, name="cast"))
    dropped = Maybe(Op("dropout", cast, name="dropout"))
    fused = Op("matmul", dropped, Capture("value"))
    return (Rule(fused, fused_attention, when=is_fusible, name=name),)


def is_fusible(match: Match) -> bool:
    """Return True if scaled_dot_product_attention computes what a match does.

    The values need a batch axis and one floating-point type, softmax the last axis, the mask no broadcast of
    the scores and no `alpha`, and the scale no gradient.
    """
    query, key, value, mask = (match.get(name) for name in ("query", "key", "value", "mask"))
    # softmax along another axis than the last is not attention, and fused kernels want a batch.
    if min(query.dim(), key.dim(), value.dim()) < 3 or match["dim"] not in (-1, query.dim() - 1):
        return False
    # A cast between softmax and the product gives the values another type.
    if query.dtype != value.dtype or not query.is_floating_point():
        return False
    if "masking" in match.ops and len(match.ops["masking"].inputs) > 2:  # alpha
        return False
    if "mask" in match and not _is_additive_mask(mask, (*query.shape[:-1], key.shape[-1])):
        return False
    scale = match.get("scale", 1.0)
    # A scale that is trained would get no gradient as a plain number.
    return isinstance(scale, (int, float)) or (scale.numel() == 1 and not scale.requires_grad)


def _is_additive_mask(mask: Any, shape: Sequence[int]) -> bool:
    """Return True if a tensor can be added to scores without broadcasting the scores."""
    sizes = getattr(mask, "shape", None)
    if sizes is None or len(sizes) > len(shape):
        return False
    # From the right, as broadcasting does.
    return all(size in (1, extent) for size, extent in zip(reversed(sizes), reversed(shape), strict=False))


def fused_attention(match: Match) -> Any:
    """Return the output of scaled_dot_product_attention.

    The captured key is an input of the first matmul, so it is transposed: (..., head, length).
    """
    from torch.nn.functional import scaled_dot_product_attention

    query, mask = match["query"], match.get("mask")
    if mask is not None:
        # An additive mask has the element type of the query in fused kernels.
        mask = mask.to(query.dtype)
        mask = mask if mask.dim() > 1 else mask.reshape(1, -1)  # the kernels want two axes
    scale = float(match.get("scale", 1.0))
    if "scaling" in match.ops and match.ops["scaling"].type == "div":
        scale = 1 / scale
    dropout = 0.0
    if "dropout" in match.ops:
        _, p, training = match.ops["dropout"].inputs
        dropout = p if training else 0.0
    return scaled_dot_product_attention(
        query, match["key"].transpose(-2, -1), match["value"], dropout_p=dropout, scale=scale,
        attn_mask=mask,
    )  # fmt: skip


_BUILTIN_RULES: dict[str, Callable[[], Sequence[Rule]]] = {
    "fold_batch_norm": fold_batch_norm,
    "fuse_attention": fuse_attention,
    "remove_dropout": lambda: (remove("dropout", "alpha_dropout", "feature_dropout", name="remove_dropout"),),
}


def expand_rules(rules: Sequence[str | Rule] | str | Rule) -> Iterator[Rule]:
    """Yield rules, with the built-in rules for names; raise PatternError for an unknown name."""
    rule_list = [rules] if isinstance(rules, (str, Rule)) else rules
    for rule in rule_list:
        yield from [rule] if isinstance(rule, Rule) else _builtin_rules(rule)


def _builtin_rules(name: str) -> Sequence[Rule]:
    """Return the built-in rules of a name; raise PatternError for an unknown name."""
    if name not in _BUILTIN_RULES:
        near = get_close_matches(name, _BUILTIN_RULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PatternError(
            f"RewriteTool: rules has {name!r}; there are {', '.join(sorted(_BUILTIN_RULES))}{hint}"
        )
    return _BUILTIN_RULES[name]()
