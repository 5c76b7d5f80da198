"""Models with the chosen candidates as modules of PyTorch, or layers of Keras."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from amanda.tools.search._candidates import (
    Activation,
    Candidate,
    Convolution,
    Keep,
    SearchError,
    Skip,
    WeightCandidate,
)
from amanda.tools.search._site import Site


def finalized_torch(model: Any, sites: Iterable[Site]) -> Any:
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
            if new is not module:
                parent, _, name = site.module.rpartition(".")
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
        padding = module.padding
        if not isinstance(padding, str):
            steps = zip(padding, module.dilation, change, strict=True)
            padding = tuple(pad + more * step // 2 for pad, step, more in steps)
        own = module
        module = type(own)(
            own.in_channels, own.out_channels, chosen.kernel, own.stride, padding, own.dilation,
            chosen.groups, own.bias is not None, own.padding_mode, own.weight.device, own.weight.dtype,
        ).train(own.training)  # fmt: skip
        module.bias = own.bias
    module.weight.copy_(weight)
    if module.bias is not None:
        module.bias.copy_(chosen.bias(module.bias, site))
    return module


def finalized_keras(model: Any, sites: Iterable[Site]) -> Any:
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
            raise _lost(site, chosen, f"{other.name} of the same module has {other.chosen}")
    return [(site, chosen) for site, chosen in found if not isinstance(chosen, Keep)]


def _lost(site: Site, chosen: Candidate, reason: str) -> SearchError:
    return SearchError(
        f"SearchTool.finalize: {chosen.label!r} of {site.name} at {site.source} is no module: {reason}; "
        "run the model in a scope of the tool instead"
    )
