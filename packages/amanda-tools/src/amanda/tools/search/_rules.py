"""Mapping rules of the tool: what differs from framework to framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from math import erf
from typing import TYPE_CHECKING, Any

import numpy as np

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import MappingTool
from amanda.tools.search._candidates import (
    Activation,
    Candidate,
    Convolution,
    Keep,
    Original,
    SearchError,
    Skip,
    WeightCandidate,
)

if TYPE_CHECKING:
    from amanda.tools.search._site import Site

_GELU = np.vectorize(erf, otypes=[np.float32])
_NUMPY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6), "tanh": np.tanh,
    "gelu": lambda x: x * (0.5 + 0.5 * _GELU(x / np.sqrt(2))), "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "softplus": lambda x: np.logaddexp(0, x),
}  # fmt: skip


class Library:
    """Functions of a framework that candidates call; this class computes on arrays of NumPy."""

    trains = ""
    """Why no gradient reaches the parameters of candidates; "" where gradients do."""

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


class TorchLibrary(Library):
    """PyTorch."""

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
        if isinstance(inputs[4], str):
            return "" if inputs[4] == "same" else "its padding is 'valid'"
        pads = _padding(inputs[4], inputs[5], change)
        return "" if min(pads) >= 0 else f"its padding is {inputs[4]}: a smaller window would give more"

    def convolve(
        self, original: Original, inputs: list[Any], site: Site, change: Sequence[int], groups: int
    ) -> Any:
        """Return the convolution, padded so that the output has its shape."""
        if not isinstance(inputs[4], str):
            inputs[4] = _padding(inputs[4], inputs[5], change)
        inputs[6] = groups
        return original(*inputs)

    def finalized(self, model: Any, sites: Iterable[Site]) -> Any:
        """Return a copy of a module with the chosen ones."""
        return _finalized_torch(model, sites)


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
        return _finalized_keras(model, sites)


def _padding(padding: Any, dilation: Any, change: Sequence[int]) -> list[int]:
    """Return the padding that leaves the output its shape with a window of another size."""
    pads, steps = (list(one) if isinstance(one, (list, tuple)) else [one] for one in (padding, dilation))
    rank = len(change)
    pads, steps = pads * (rank // len(pads)), steps * (rank // len(steps))
    return [pad + more * step // 2 for pad, step, more in zip(pads, steps, change, strict=True)]


def _finalized_torch(model: Any, sites: Iterable[Site]) -> Any:
    """Return a copy of a module whose submodules are those that were chosen.

    Raises SearchError where an op is not the one op of a module of torch.nn.
    """
    import torch

    made = deepcopy(model)
    with torch.no_grad():
        for site, chosen in _changed(sites):
            try:
                module = made.get_submodule(site.module)
            except AttributeError as error:
                raise _lost(site, chosen, f"the model has no module {site.module!r}") from error
            new = _module(site, chosen, module)
            if module is made:
                made = new
                continue
            paths = [path for path, one in made.named_modules(remove_duplicate=False) if one is module]
            for parent, _, name in (path.rpartition(".") for path in paths if new is not module):
                setattr(made.get_submodule(parent), name, new)
    return made


def _module(site: Site, chosen: Candidate, module: Any) -> Any:
    """Return the module that computes what a candidate does."""
    from torch import nn

    kinds: dict[str, Any] = {
        "relu": nn.ReLU, "relu6": nn.ReLU6, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh,
        "sigmoid": nn.Sigmoid, "elu": nn.ELU, "softplus": nn.Softplus,
    }  # fmt: skip
    is_layer = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(chosen, Skip) and (is_layer or type(module) in (*kinds.values(), nn.Dropout, nn.LayerNorm)):
        return nn.Identity()
    if isinstance(chosen, Activation) and type(module) in kinds.values():
        return kinds[chosen.label]()
    if not is_layer or not isinstance(chosen, WeightCandidate):
        raise _lost(site, chosen, f"{site.module or 'the model'} is a {type(module).__name__}")
    weight = chosen.weight(module.weight, site)
    if isinstance(chosen, Convolution):
        change = [chosen.kernel - size for size in module.kernel_size]
        own, padding = module, module.padding
        if not isinstance(padding, str):
            padding = tuple(_padding(padding, module.dilation, change))
        module = type(own)(
            own.in_channels, own.out_channels, chosen.kernel, own.stride, padding, own.dilation,
            chosen.groups, own.bias is not None, own.padding_mode, own.weight.device, own.weight.dtype,
        ).train(own.training)  # fmt: skip
        module.bias = own.bias
    module.weight = nn.Parameter(weight.clone(), module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(chosen.bias(module.bias, site).clone(), module.bias.requires_grad)
    return module


def _finalized_keras(model: Any, sites: Iterable[Site]) -> Any:
    """Return a clone of a Keras model, with the weights, whose layers are those that were chosen.

    Raises SearchError where an op is not that of a Conv, a Dense or an activation of a layer.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise SearchError(f"SearchTool.finalize: the model is a {type(model).__name__}; give one of Keras")
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False, recursive=True)}
    settings: dict[str, dict[str, Any]] = {}
    weights: dict[str, tuple[Site, WeightCandidate]] = {}
    for site, chosen in _changed(sites):
        parts = [part for path in site.scopes for part in path.replace(".", "/").split("/")]
        layer = next((layers[part] for part in reversed(parts) if part in layers), None)
        if layer is None:
            raise _lost(site, chosen, f"the model has no layer {site.module!r}")
        if isinstance(chosen, Activation) and "activation" in layer.get_config():
            settings.setdefault(layer.name, {})["activation"] = chosen.label
        elif isinstance(chosen, Activation) and type(layer) is keras.layers.ReLU:
            settings.setdefault(layer.name, {})["kind"] = chosen.label
        elif isinstance(chosen, WeightCandidate) and hasattr(layer, "kernel"):
            weights[layer.name] = site, chosen
            if isinstance(chosen, Convolution):
                window = (chosen.kernel,) * (len(site.weight_shape) - 2)
                settings.setdefault(layer.name, {}).update(kernel_size=window, groups=chosen.groups)
        else:
            raise _lost(site, chosen, f"{layer.name} is a {type(layer).__name__}")

    def clone(layer: Any) -> Any:
        changed = dict(settings.get(layer.name, {}))
        if "kind" in changed:
            return keras.layers.Activation(changed["kind"], name=layer.name)
        return layer.__class__.from_config({**layer.get_config(), **changed})

    made = keras.models.clone_model(model, clone_function=clone)
    made.build(model.input_shape)
    for layer in made._flatten_layers(include_self=False, recursive=True):
        own = layers[layer.name]
        if layer.name not in weights:
            if not getattr(own, "layers", None):
                layer.set_weights(own.get_weights())
            continue
        site, chosen = weights[layer.name]
        layer.kernel.assign(chosen.weight(own.kernel.value, site))
        if layer.use_bias:
            layer.bias.assign(own.bias)
    return made


def _changed(sites: Iterable[Site]) -> list[tuple[Site, Candidate]]:
    """Return the sites whose op is replaced, with the candidates; raise where two are of one module."""
    found = [(site, site.candidates[site.chosen]) for site in sites]
    seen: dict[tuple[str, str], Site] = {}
    for site, chosen in found:
        other = seen.setdefault((site.module, site.type), site)
        if other.chosen != site.chosen:
            raise _lost(
                site, chosen, f"{other.name} at the same path has {other.chosen}, of this or of another model"
            )
    return [(site, chosen) for site, chosen in found if not isinstance(chosen, Keep)]


def _lost(site: Site, chosen: Candidate, reason: str) -> SearchError:
    return SearchError(
        f"SearchTool.finalize: {chosen.label!r} of {site.name} at {site.source} is no module: {reason}; "
        "run the model in a scope of the tool instead"
    )


def frameworks() -> MappingTool:
    """Return the rules, which put the library of an op's framework under "search"."""
    graph = (
        "no tape leads to the parameters of candidates in functions and sessions of TensorFlow: train eagerly"
    )
    rules: list[list[Any]] = [
        ["*", _put(Library())], ["pytorch", _put(TorchLibrary())],
        ["tensorflow", _put(TensorFlowLibrary(graph))], ["tensorflow/*/eager", _put(TensorFlowLibrary())],
    ]  # fmt: skip
    return MappingTool(rules)


def _put(library: Library) -> Callable[[amanda.OpContext], None]:
    def rule(context: amanda.OpContext) -> None:
        context["search"] = library

    return rule
