"""Mapping rules of the tool: what differs from framework to framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import erf
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import RequiredNames, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MappingTool
from amanda.tools.search._candidates import Original
from amanda.tools.search._errors import SearchError
from amanda.tools.search._gradients import Gradients, GradientSum
from amanda.tools.search._padding import Edges, padded

if TYPE_CHECKING:
    from amanda.tools.search._site import Site

_REQUIRED = RequiredNames(
    "amanda.tools.search",
    "jax",
    "jax._src.core:set_current_trace",
    "jax._src.core:trace_ctx.trace",
    "jax._src.interpreters.batching:BatchTrace",
    "jax._src.lax.control_flow.conditionals:_cond_jvp",
    "jax._src.lax.control_flow.conditionals:_cond_linearize",
)

_NUMPY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6), "tanh": lambda x: np.tanh(x),
    "gelu": lambda x: x * (0.5 + 0.5 * _erf(x / np.sqrt(2))), "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "softplus": lambda x: np.logaddexp(0, x),
}  # fmt: skip


def _erf(x: Any) -> Any:
    return np.vectorize(erf, otypes=[np.float32])(x)


class Library:
    """Functions of a framework that candidates call; this class computes on arrays of NumPy."""

    trains = ""
    """Why no gradient reaches the parameters of candidates; "" where gradients do."""
    is_traced = False
    """True if what is chosen becomes a part of compiled programs, which another choice has to make anew."""

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the activation of a word."""
        return lambda x: _NUMPY[word](x).astype(x.dtype)

    def softmax(self, x: Any) -> Any:
        """Return softmax of a row."""
        exponents = np.exp(x - x.max())
        return exponents / exponents.sum()

    def cast(self, value: Any, like: Any) -> Any:
        """Return a tensor in the element type of another, within autodiff."""
        return tensors_of(like).cast(value, like)

    def fresh(self, x: Any) -> Any:
        """Return an input as the output of an op."""
        return x

    def at(self, context: amanda.OpContext) -> Library:
        """Return the functions for one op; most need nothing of it but its inputs."""
        return self

    def unread(self, context: amanda.OpContext, site: Site) -> str:
        """Return why the op's weight cannot be read when the op is met, or ""."""
        return ""

    def gradient_sum(self, parameter: Any, op: str) -> Gradients:
        """Return the sum of the gradients of a parameter."""
        return GradientSum()

    def collected(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return a parameter's value, whose gradient is added to a sum where no tape leads to the parameter.

        like: a tensor that the op computes with.
        """
        return value

    def refusal(self, context: amanda.OpContext, change: Sequence[int], groups: int) -> str:
        """Return why a convolution cannot have another window or groups; change: of its sizes."""
        return "the padding and groups of the graph are fixed"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, change: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution by another weight, which is among the inputs already."""
        raise NotImplementedError

    def finalized(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a model with the chosen modules; raise SearchError where it cannot be made of modules."""
        raise SearchError(f"SearchTool.finalize: no modules of {type(model).__name__} are known here")


class JaxLibrary(Library):
    """JAX, eager and under jit.

    attributes: of the convolution at hand.
    """

    is_traced = True
    trains = (
        "JAX takes no derivative by the parameters of candidates: hand tool.gradients(parameters) to an "
        "optimizer after each step"
    )

    def __init__(self, attributes: Mapping[str, Any] | None = None) -> None:
        self._attributes = attributes or {}

    def at(self, context: amanda.OpContext) -> Library:
        """Return the functions for one op: the padding of a convolution may depend on shapes."""
        if not context["type"].startswith("conv"):
            return self
        context.get_input_shapes()
        return JaxLibrary(context.get_attrs())

    def unread(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse symbols, which have no value."""
        import jax

        is_symbol = site.weight is not None and isinstance(context.get_value(site.weight), jax.core.Tracer)
        return "its weight has no value under jit; call prepare(model, x) outside of jit" if is_symbol else ""

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the function of jax.nn."""
        import jax

        found: Callable[..., Any] = getattr(jax.nn, word)
        return partial(found, approximate=False) if word == "gelu" else found

    def softmax(self, x: Any) -> Any:
        """Return softmax of jax.nn."""
        import jax

        return jax.nn.softmax(x)

    def gradient_sum(self, parameter: Any, op: str) -> Gradients:
        """Return a sum that programs add to."""
        _REQUIRED.check()
        from amanda.tools.search._gradients_jax import JaxGradientSum

        return JaxGradientSum(parameter, op)

    def collected(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return the value, with a gradient where `like` has one."""
        return gradients.followed(value, like)

    def refusal(self, context: amanda.OpContext, change: Sequence[int], groups: int) -> str:
        """Refuse padding that would be negative."""
        pads = context.get_attrs()["padding"]
        least = min(min(pair) for pair in _padded_pairs(context.get_attrs(), change))
        return "" if least >= 0 else f"its padding is {pads}: a smaller window would give more"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, change: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, padded so that the output has its shape."""
        import jax

        own = {**self._attributes, "padding": _padded_pairs(self._attributes, change)}
        return jax.lax.conv_general_dilated(*inputs, **{**own, "feature_group_count": groups})


class TorchLibrary(Library):
    """PyTorch.

    edges: how the module of the convolution at hand pads its input; None where the convolution itself pads.
    """

    def __init__(self, edges: Edges | None = None) -> None:
        self._edges = edges

    def at(self, context: amanda.OpContext) -> Library:
        """Return the functions for one op: modules pad the input of a convolution unless with zeros."""
        edges = Edges.of(context)
        return self if edges is None else TorchLibrary(edges)

    def fresh(self, x: Any) -> Any:
        """Return a copy, since a later op may write to the output in place."""
        return x.clone()

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the function of torch."""
        from torch.nn import functional

        found: Callable[[Any], Any] = getattr(functional, word)
        return found

    def softmax(self, x: Any) -> Any:
        """Return torch's."""
        import torch

        return torch.softmax(x, -1)

    def refusal(self, context: amanda.OpContext, change: Sequence[int], groups: int) -> str:
        """Refuse calls that leave padding or groups out, and padding that would be negative."""
        inputs = context.get_inputs()
        if len(inputs) < 7:
            return "it is called without groups; call the convolution as a module"
        edges = Edges.of(context)
        if edges is not None:
            return edges.refusal(context["shape"](inputs[0]), inputs[5], change)
        if isinstance(inputs[4], str):
            return "" if inputs[4] == "same" else "its padding is 'valid'"
        pads = padded(inputs[4], inputs[5], change)
        return "" if min(pads) >= 0 else f"its padding is {inputs[4]}: a smaller window would give more"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, change: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, padded so that the output has its shape."""
        if self._edges is not None:
            inputs[0] = self._edges.changed(inputs[0], inputs[5], change)
        elif not isinstance(inputs[4], str):
            inputs[4] = padded(inputs[4], inputs[5], change)
        inputs[6] = groups
        return original(*inputs)

    def finalized(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a copy of a module with the chosen ones."""
        from amanda.tools.search._finalize_torch import finalized

        return finalized(model, sites)


class TensorFlowLibrary(Library):
    """TensorFlow, eager and in functions."""

    def __init__(self, trains: str = "") -> None:
        self.trains = trains

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the function of tf.nn."""
        import tensorflow

        found: Callable[[Any], Any] = getattr(tensorflow.nn, word)
        return found

    def softmax(self, x: Any) -> Any:
        """Return TensorFlow's."""
        import tensorflow

        return tensorflow.nn.softmax(x)

    def fresh(self, x: Any) -> Any:
        """Return an equal tensor, since a tape takes no op whose output is its input."""
        import tensorflow

        return tensorflow.identity(x)

    def collected(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return an equal tensor; in functions its gradient is handed over as the routine's is computed."""
        import tensorflow

        if not self.trains:
            return value

        def passed(x: Any) -> Any:
            def backward(gradient: Any) -> Any:
                gradients.add(gradient)
                return gradient

            return tensorflow.identity(x), backward

        return tensorflow.custom_gradient(passed)(value)

    def refusal(self, context: amanda.OpContext, change: Sequence[int], groups: int) -> str:
        """Refuse other padding than "same", and groups in the model's own convolution."""
        attributes = context.get_attrs()
        if attributes.get("padding") not in ("SAME", b"SAME") and any(change):
            return f"its padding is {attributes.get('padding')}, not 'same'"
        return "" if groups == 1 else "it has groups"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, change: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, group by group, since the kernels of groups have no gradient on a CPU."""
        import tensorflow as tf

        if groups == 1:
            return original(*inputs)
        axis = site.channels
        parts = zip(tf.split(inputs[0], groups, axis), tf.split(inputs[1], groups, -1), strict=True)
        return tf.concat([original(*part) for part in parts], axis)

    def finalized(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a clone of a Keras model with the chosen layers."""
        from amanda.tools.search._finalize_keras import finalized

        return finalized(model, sites)


def _padded_pairs(attributes: Mapping[str, Any], change: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding before and after, by axis, that leaves the output its shape."""
    triples = zip(attributes["padding"], attributes["rhs_dilation"], change, strict=True)
    return [(low + more * step // 2, high + more * step // 2) for (low, high), step, more in triples]


def frameworks() -> MappingTool:
    """Return the rules, which put the library of an op's framework under "search"."""
    graph = (
        "no tape leads to the parameters of candidates in functions of TensorFlow, nor in sessions: hand "
        "tool.gradients(parameters) to an optimizer after each step of a function, or train eagerly"
    )
    rules: list[list[Any]] = [
        ["*", partial(_put, Library())], ["pytorch", partial(_put, TorchLibrary())],
        ["tensorflow", partial(_put, TensorFlowLibrary(graph))],
        ["tensorflow/*/eager", partial(_put, TensorFlowLibrary())],
        ["jax", partial(_put, JaxLibrary())],
    ]  # fmt: skip
    return MappingTool(rules)


def _put(library: Library, context: amanda.OpContext) -> None:
    context["search"] = library
