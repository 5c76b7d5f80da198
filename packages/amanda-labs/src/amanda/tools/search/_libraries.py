"""Libraries: functions of each framework by which candidates compute; mapping rules that write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import erf
from typing import TYPE_CHECKING, Any

import amanda
from amanda import interceptor
from amanda.tools.kit import RequiredNames, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MappingTool
from amanda.tools.search._candidates import Original, SearchError
from amanda.tools.search._site import Gradients, GradientSum

if TYPE_CHECKING:
    from amanda.tools.search._site import Site

_JAX_REQUIRED = RequiredNames(
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
    """Return the error function of each element, which NumPy lacks, in float32."""
    return np.vectorize(erf, otypes=[np.float32])(x)


class SearchLibrary:
    """Functions of a framework that candidates call; this class computes on arrays of NumPy."""

    no_gradient_reason = ""
    """Reason why autodiff does not reach the parameters of candidates; "" if it does."""
    is_traced = False
    """True if candidates become a part of compiled programs, so that another choice needs a new trace."""

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

    def as_output(self, x: Any) -> Any:
        """Return an op's input in a form that can be the op's output."""
        return x

    def for_op(self, context: amanda.OpContext) -> SearchLibrary:
        """Return the functions for an op; this library itself if they do not depend on the op."""
        return self

    def weight_obstacle(self, context: amanda.OpContext, site: Site) -> str:
        """Return why the op's weight has no value at its analysis, or ""."""
        return ""

    def gradient_sum(self, parameter: Any, op: str) -> Gradients:
        """Return a new sum of the gradients of a parameter."""
        return GradientSum()

    def with_gradient_sum(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return a parameter's value, whose gradient is added to a sum if no tape leads to the parameter.

        like: a tensor that the op reads.
        """
        return value

    def convolution_obstacle(
        self, context: amanda.OpContext, kernel_growth: Sequence[int], groups: int
    ) -> str:
        """Return why a convolution cannot have another window or groups, or "".

        kernel_growth: by how much the size of the window grows along each axis.
        """
        return "the padding and groups of the graph are fixed"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, kernel_growth: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution with another weight, which is among the inputs already."""
        raise NotImplementedError

    def finalize(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a model with the chosen candidates as modules; raise SearchError for other models."""
        raise SearchError(f"SearchTool.finalize: no modules of {type(model).__name__} are known here")


class JaxLibrary(SearchLibrary):
    """Functions of JAX for candidates, eager and under jit.

    attributes: of the convolution, for the library of an op.
    """

    is_traced = True
    no_gradient_reason = (
        "JAX takes no derivative by the parameters of candidates: hand tool.gradients(parameters) to an "
        "optimizer after each step"
    )

    def __init__(self, attributes: Mapping[str, Any] | None = None) -> None:
        self._attributes = attributes or {}

    def for_op(self, context: amanda.OpContext) -> SearchLibrary:
        """Return the functions for an op; of a convolution, with its attributes."""
        # No other op depends on shapes.
        if not context["type"].startswith("conv"):
            return self
        # Asking for shapes binds the plan to these, for which the padding is computed.
        context.get_input_shapes()
        return JaxLibrary(context.get_attrs())

    def weight_obstacle(self, context: amanda.OpContext, site: Site) -> str:
        """Return a reason for a symbol of jit, which has no value; "" for an array."""
        import jax

        is_symbol = site.weight is not None and isinstance(context.get_value(site.weight), jax.core.Tracer)
        return "its weight has no value under jit; call prepare(model, x) outside of jit" if is_symbol else ""

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the activation of this word, a function of jax.nn."""
        import jax

        function: Callable[..., Any] = getattr(jax.nn, word)
        # Other frameworks compute the exact one by default.
        return partial(function, approximate=False) if word == "gelu" else function

    def softmax(self, x: Any) -> Any:
        """Return softmax of jax.nn."""
        import jax

        return jax.nn.softmax(x)

    def gradient_sum(self, parameter: Any, op: str) -> Gradients:
        """Return a sum in references of JAX, to which programs add."""
        _JAX_REQUIRED.check()
        from amanda.tools.search._site import JaxGradientSum

        return JaxGradientSum(parameter, op)

    def with_gradient_sum(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return the value, with a gradient where `like` has one."""
        return gradients.collect(value, like)

    def convolution_obstacle(
        self, context: amanda.OpContext, kernel_growth: Sequence[int], groups: int
    ) -> str:
        """Refuse padding that would be negative."""
        pads = context.get_attrs()["padding"]
        # A negative padding would crop the input, which lax allows and no layer has.
        smallest = min(min(pair) for pair in _jax_padding(context.get_attrs(), kernel_growth))
        return "" if smallest >= 0 else f"its padding is {pads}: a smaller window would give more"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, kernel_growth: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, padded so that the output has the shape of the original's."""
        import jax

        arguments = {**self._attributes, "padding": _jax_padding(self._attributes, kernel_growth)}
        return jax.lax.conv_general_dilated(*inputs, **{**arguments, "feature_group_count": groups})


class TorchLibrary(SearchLibrary):
    """Functions of PyTorch for candidates; a convolution has the inputs of torch.nn.functional.conv2d.

    module_padding: of the convolution's module, for the library of an op; None if the op itself pads.
    """

    def __init__(self, module_padding: ModulePadding | None = None) -> None:
        self._module_padding = module_padding

    def for_op(self, context: amanda.OpContext) -> SearchLibrary:
        """Return the functions for an op: a module pads the input of its convolution, unless with zeros."""
        module_padding = ModulePadding.of_called_module()
        return self if module_padding is None else TorchLibrary(module_padding)

    def as_output(self, x: Any) -> Any:
        """Return a copy, since a later op may write to the output in place."""
        return x.clone()

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the activation of this word, a function of torch.nn.functional."""
        from torch.nn import functional

        function: Callable[[Any], Any] = getattr(functional, word)
        return function

    def softmax(self, x: Any) -> Any:
        """Return torch.softmax of a row."""
        import torch

        return torch.softmax(x, -1)

    def convolution_obstacle(
        self, context: amanda.OpContext, kernel_growth: Sequence[int], groups: int
    ) -> str:
        """Refuse calls in another form than `conv2d` with groups, and padding "valid" or below 0."""
        inputs = context.get_inputs()
        # With groups, the last input, positions are those of the whole schema; `torch.convolution` has more.
        if len(inputs) < 7:
            return "it is called without groups; call the convolution as a module"
        if len(inputs) > 7:
            return "it is called as torch.convolution; call the convolution as a module"
        data, _weight, _bias, _stride, padding, dilation, *_ = inputs
        module_padding = ModulePadding.of_called_module()
        if module_padding is not None:
            return module_padding.convolution_obstacle(context["shape"](data), dilation, kernel_growth)
        # "same" follows the window by itself; "valid" gives a smaller output for a larger window.
        if isinstance(padding, str):
            return "" if padding == "same" else "its padding is 'valid'"
        pads = padding_for_window(padding, dilation, kernel_growth)
        return "" if min(pads) >= 0 else f"its padding is {padding}: a smaller window would give more"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, kernel_growth: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, padded so that the output has the shape of the original's."""
        data, weight, bias, stride, padding, dilation, _groups = inputs
        if self._module_padding is not None:
            data = self._module_padding.pad_for_window(data, dilation, kernel_growth)
        elif not isinstance(padding, str):
            padding = padding_for_window(padding, dilation, kernel_growth)
        return original(data, weight, bias, stride, padding, dilation, groups)

    def finalize(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a copy of a module with the chosen submodules."""
        from amanda.tools.search._finalize import finalize_torch

        return finalize_torch(model, sites)


class TensorFlowLibrary(SearchLibrary):
    """Functions of TensorFlow for candidates, eager and in functions."""

    def __init__(self, no_gradient_reason: str = "") -> None:
        self.no_gradient_reason = no_gradient_reason

    def activation(self, word: str) -> Callable[[Any], Any]:
        """Return the activation of this word, a function of tf.nn."""
        import tensorflow

        function: Callable[[Any], Any] = getattr(tensorflow.nn, word)
        return function

    def softmax(self, x: Any) -> Any:
        """Return tf.nn.softmax of a row."""
        import tensorflow

        return tensorflow.nn.softmax(x)

    def as_output(self, x: Any) -> Any:
        """Return an equal tensor, since a tape records no op whose output is its input."""
        import tensorflow

        return tensorflow.identity(x)

    def with_gradient_sum(self, value: Any, gradients: Any, like: Any) -> Any:
        """Return an equal tensor; in a function its backward pass adds the gradient to a sum."""
        import tensorflow

        # In eager mode a tape reaches the parameter itself.
        if not self.no_gradient_reason:
            return value

        def collect(x: Any) -> Any:
            """Return an equal tensor, and a backward function that adds its gradient to the sum."""

            def backward(gradient: Any) -> Any:
                gradients.add(gradient)
                return gradient

            return tensorflow.identity(x), backward

        return tensorflow.custom_gradient(collect)(value)

    def convolution_obstacle(
        self, context: amanda.OpContext, kernel_growth: Sequence[int], groups: int
    ) -> str:
        """Refuse another window if the padding is not "same", and groups in the model's own convolution."""
        attributes = context.get_attrs()
        if attributes.get("padding") not in ("SAME", b"SAME") and any(kernel_growth):
            return f"its padding is {attributes.get('padding')}, not 'same'"
        return "" if groups == 1 else "it has groups"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, kernel_growth: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, computed group by group: kernels of groups have no gradient on a CPU."""
        import tensorflow as tf

        if groups == 1:
            return original(*inputs)
        # Inputs are split along their channels, and the weight along the outputs, its last axis.
        axis = site.channels
        group_inputs = zip(tf.split(inputs[0], groups, axis), tf.split(inputs[1], groups, -1), strict=True)
        return tf.concat([original(*part) for part in group_inputs], axis)

    def finalize(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a clone of a Keras model with the chosen layers."""
        from amanda.tools.search._finalize import finalize_keras

        return finalize_keras(model, sites)


def _jax_padding(attributes: Mapping[str, Any], kernel_growth: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding before and after, by axis, that leaves the output its shape."""
    triples = zip(attributes["padding"], attributes["rhs_dilation"], kernel_growth, strict=True)
    # A window with `growth` more elements reads growth * dilation more of the input, half at each side.
    return [(low + growth * step // 2, high + growth * step // 2) for (low, high), step, growth in triples]


def library_rules() -> MappingTool:
    """Return mapping rules that put the library of an op's framework under "search" into contexts."""
    no_gradient_reason = (
        "no tape leads to the parameters of candidates in functions of TensorFlow, nor in sessions: hand "
        "tool.gradients(parameters) to an optimizer after each step of a function, or train eagerly"
    )
    rules: list[list[Any]] = [
        ["*", partial(_put_library, SearchLibrary())], ["pytorch", partial(_put_library, TorchLibrary())],
        ["tensorflow", partial(_put_library, TensorFlowLibrary(no_gradient_reason))],
        ["tensorflow/*/eager", partial(_put_library, TensorFlowLibrary())],
        ["jax", partial(_put_library, JaxLibrary())],
    ]  # fmt: skip
    return MappingTool(rules)


def _put_library(library: SearchLibrary, context: amanda.OpContext) -> None:
    """Put the library of an op's framework into a context."""
    context["search"] = library


_TORCH_REQUIRED = RequiredNames(
    "amanda.tools.search", "torch", *(f"torch:nn.Conv{axes}d._conv_forward" for axes in (1, 2, 3))
)


def padding_for_window(padding: Any, dilation: Any, kernel_growth: Sequence[int]) -> list[int]:
    """Return the padding of each axis for a window that is larger, or smaller, along each axis."""
    pads = list(padding) if isinstance(padding, (list, tuple)) else [padding]
    # One number stands for all axes.
    pads *= len(kernel_growth) // len(pads)
    return [pad + growth for pad, growth in zip(pads, _padding_growth(dilation, kernel_growth), strict=True)]


def _padding_growth(dilation: Any, kernel_growth: Sequence[int]) -> list[int]:
    """Return the growth of the padding of each axis, at each side; negative for a smaller window."""
    dilations = list(dilation) if isinstance(dilation, (list, tuple)) else [dilation]
    dilations *= len(kernel_growth) // len(dilations)
    return [step * size // 2 for step, size in zip(dilations, kernel_growth, strict=True)]


@dataclass(frozen=True)
class ModulePadding:
    """Padding by a module of torch.nn, ahead of its convolution, with values of the input.

    mode: "reflect", "replicate" or "circular".  pads: before and after each axis, the last axis first.
    """

    mode: str
    pads: tuple[int, ...]

    @classmethod
    def of_called_module(cls) -> ModulePadding | None:
        """Return the padding by the module that is being called; None if no module of torch.nn pads."""
        _TORCH_REQUIRED.check()
        from torch import nn

        # The innermost module that is being called, whose `forward` has padded the input before the op.
        modules = [module for module in interceptor.subjects() if isinstance(module, nn.Module)]
        module: Any = modules[-1] if modules else None
        forwards = [conv_class._conv_forward for conv_class in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
        if getattr(type(module), "_conv_forward", None) not in forwards or module.padding_mode == "zeros":
            return None
        return cls(module.padding_mode, tuple(module._reversed_padding_repeated_twice))

    def _pads_for_window(self, dilation: Any, kernel_growth: Sequence[int]) -> list[int]:
        """Return the padding before and after each axis for another window, the last axis first."""
        # torch.nn.functional.pad begins with the last axis, and takes both sides of each.
        growth = [size for size in reversed(_padding_growth(dilation, kernel_growth)) for _ in range(2)]
        return [pad + size for pad, size in zip(self.pads, growth, strict=True)]

    def convolution_obstacle(self, shape: Sequence[int], dilation: Any, kernel_growth: Sequence[int]) -> str:
        """Return why an input of a shape, padding included, cannot be padded for another window, or ""."""
        pads = self._pads_for_window(dilation, kernel_growth)
        if min(pads) < 0:
            return f"its padding is {list(self.pads)}: a smaller window would give more"
        most_pads: list[int] = []  # as in `pads`, before and behind each axis, the last axis first
        for size, before, after in zip(reversed(shape), self.pads[::2], self.pads[1::2], strict=False):
            # Reflection does not repeat the element at the edge, so it has one less to give.
            most_pads += 2 * [size - before - after - (self.mode == "reflect")]
        is_too_wide = self.mode != "replicate" and any(
            pad > most for pad, most in zip(pads, most_pads, strict=True)
        )
        return f"the input is smaller than its {self.mode} padding would be" if is_too_wide else ""

    def pad_for_window(self, x: Any, dilation: Any, kernel_growth: Sequence[int]) -> Any:
        """Return a padded input with the padding for another window."""
        from torch.nn.functional import pad

        # The module's own padding is right already.
        if not any(kernel_growth):
            return x
        # Negative padding removes what the module has added; a larger padding then reflects the input itself.
        unpadded = pad(x, [-size for size in self.pads])
        return pad(unpadded, self._pads_for_window(dilation, kernel_growth), mode=self.mode)
