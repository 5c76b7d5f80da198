"""Finalized models of PyTorch and Keras: the chosen candidates as modules and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.options import shown
from amanda.tools.search._candidates import (
    ACTIVATIONS,
    ActivationCandidate,
    ConvolutionCandidate,
    KeepCandidate,
    OpCandidate,
    SearchError,
    SkipCandidate,
    WeightCandidate,
)
from amanda.tools.search._libraries import padding_for_window

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


def changed_sites(sites: Iterable[Site]) -> list[tuple[Site, OpCandidate]]:
    """Return the sites whose op is replaced, with the candidates.

    Raises SearchError if ops of one module have different candidates.
    """
    site_candidates = [(site, site.candidates[site.chosen]) for site in sites]
    sites_by_module: dict[tuple[str, str], Site] = {}
    for site, candidate in site_candidates:
        # A module that is called twice has one weight and so one replacement.
        earlier_site = sites_by_module.setdefault((site.module, site.type), site)
        if earlier_site.chosen != site.chosen:
            raise not_a_module_error(
                site,
                candidate,
                f"{earlier_site.name} at the same path has {earlier_site.chosen}, of this or of another "
                "model",
            )
    return [
        (site, candidate) for site, candidate in site_candidates if not isinstance(candidate, KeepCandidate)
    ]


def not_a_module_error(site: Site, candidate: OpCandidate, reason: str) -> SearchError:
    """Return the error for a candidate that cannot become a module."""
    return SearchError(
        f"SearchTool.finalize: {candidate.label!r} of {site.name} at {site.source} is no module: {reason}; "
        "run the model in a scope of the tool instead"
    )


def finalize_torch(model: Any, sites: Iterable[Site]) -> Any:
    """Return a copy of a module of PyTorch with the chosen candidates as submodules.

    Raises SearchError for an op that is not the only op of a module of torch.nn.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise SearchError(f"SearchTool.finalize: model is {shown(model)}; give the module that was run")
    # The program's model stays as it is.
    finalized_model = deepcopy(model)
    with torch.no_grad():
        for site, candidate in changed_sites(sites):
            try:
                module = finalized_model.get_submodule(site.module)
            except AttributeError as error:
                raise not_a_module_error(
                    site, candidate, f"the model has no module {site.module!r}"
                ) from error
            replacement = _replacement_module(site, candidate, module)
            # Without the op its input reaches ops that used to write into a tensor of their own.
            if isinstance(candidate, SkipCandidate) and not site.in_place:
                _disable_in_place_writers(site, candidate, finalized_model)
            if module is finalized_model:
                finalized_model = replacement
            elif replacement is not module:
                _replace_submodule(finalized_model, module, replacement)
    return finalized_model


def _replace_submodule(model: Any, module: Any, replacement: Any) -> None:
    """Replace a submodule at each path at which it is registered."""
    paths = [path for path, submodule in model.named_modules(remove_duplicate=False) if submodule is module]
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)


def _disable_in_place_writers(site: Site, candidate: SkipCandidate, model: Any) -> None:
    """Set `inplace` to False in modules that write to a skipped op's output, which is now its input.

    Raises SearchError for a function that writes to it.
    """
    for writer in site.writers.values():
        try:
            module = model.get_submodule(writer.module)
        except AttributeError:
            module = None
        if not hasattr(module, "inplace"):
            raise not_a_module_error(
                site, candidate, f"{writer.type} at {writer.source} writes to its input in place"
            )
        module.inplace = False


def _replacement_module(site: Site, candidate: OpCandidate, module: Any) -> Any:
    """Return the module that computes a candidate: a new one, or this one, whose parameters are replaced.

    Raises SearchError for a module that is not a layer or activation of torch.nn.
    """
    from torch import nn

    activation_classes: dict[str, Any] = {
        "relu": nn.ReLU, "relu6": nn.ReLU6, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh,
        "sigmoid": nn.Sigmoid, "elu": nn.ELU, "softplus": nn.Softplus,
    }  # fmt: skip
    # The exact type: a subclass may compute more than its base.
    is_layer = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(candidate, SkipCandidate) and (
        is_layer or type(module) in (*activation_classes.values(), nn.Dropout, nn.LayerNorm)
    ):
        return nn.Identity()
    if isinstance(candidate, ActivationCandidate) and type(module) in activation_classes.values():
        return activation_classes[candidate.label]()
    if not is_layer or not isinstance(candidate, WeightCandidate):
        raise not_a_module_error(
            site, candidate, f"{site.module or 'the model'} is a {type(module).__name__}"
        )
    weight = candidate.weight(module.weight, site)
    if isinstance(candidate, ConvolutionCandidate):
        module = _convolution_like(module, candidate)  # its weight is overwritten below
    # A clone: the candidate's own weight goes on being trained by the tool.
    module.weight = nn.Parameter(weight.clone(), module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(candidate.bias(module.bias, site).clone(), module.bias.requires_grad)
    return module


def _convolution_like(original: Any, candidate: ConvolutionCandidate) -> Any:
    """Return a convolution with a candidate's kernel and groups, a new weight, and the original's bias."""
    padding = original.padding
    if not isinstance(padding, str):
        kernel_growth = [candidate.kernel - size for size in original.kernel_size]
        padding = tuple(padding_for_window(padding, original.dilation, kernel_growth))
    convolution = type(original)(
        in_channels=original.in_channels, out_channels=original.out_channels, kernel_size=candidate.kernel,
        stride=original.stride, padding=padding, dilation=original.dilation, groups=candidate.groups,
        bias=original.bias is not None, padding_mode=original.padding_mode,
        device=original.weight.device, dtype=original.weight.dtype,
    ).train(original.training)  # fmt: skip
    convolution.bias = original.bias
    return convolution


def finalize_keras(model: Any, sites: Iterable[Site]) -> Any:
    """Return a clone of a Keras model, with its weights, whose layers are the chosen candidates.

    The activation of a skipped layer stays.  Raises SearchError for an op that is not of a Conv, a Dense or
    an activation of a layer.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise SearchError(f"SearchTool.finalize: the model is a {type(model).__name__}; give one of Keras")
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False, recursive=True)}
    changes = _find_layer_changes(layers, sites)

    def clone_layer(layer: Any) -> Any:
        """Return a layer with the settings of its candidate; an activation in place of a replaced one."""
        config = {**layer.get_config(), **changes.settings[layer.name]}
        if layer.name in changes.replaced:
            return keras.layers.Activation(config["activation"], name=layer.name)
        return layer.__class__.from_config(config)

    clone = keras.models.clone_model(model, clone_function=clone_layer)
    clone.build(model.input_shape)
    # The clone's layers have the same names, by which they find their weights.
    for layer in clone._flatten_layers(include_self=False, recursive=True):
        original_layer = layers[layer.name]
        if layer.name in changes.replaced:
            continue
        if layer.name in changes.weights:
            site, candidate = changes.weights[layer.name]
            layer.kernel.assign(candidate.weight(original_layer.kernel.value, site))
            if layer.use_bias:
                layer.bias.assign(original_layer.bias)
        # Of a nested model, the layers in it are visited themselves.
        elif not getattr(original_layer, "layers", None):
            layer.set_weights(original_layer.get_weights())
    return clone


@dataclass
class _LayerChanges:
    """Changes of layers of Keras, by their names.

    settings: entries of the config.  weights: sites and candidates that compute other weights.
    replaced: layers in whose place an activation comes.
    """

    settings: dict[str, dict[str, Any]]
    weights: dict[str, tuple[Site, WeightCandidate]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)


def _find_layer_changes(layers: Mapping[str, Any], sites: Iterable[Site]) -> _LayerChanges:
    """Return the changes of layers for the candidates; raise SearchError for one that is not a layer."""
    changes = _LayerChanges({name: {} for name in layers})
    for site, candidate in changed_sites(sites):
        # Scopes of Keras and of TensorFlow's graphs separate names by slashes.
        parts = [part for path in site.scopes for part in path.replace(".", "/").split("/")]
        # The innermost layer: a nested model is a layer too.
        layer = next((layers[part] for part in reversed(parts) if part in layers), None)
        if layer is None:
            raise not_a_module_error(site, candidate, f"the model has no layer {site.module!r}")
        is_skipped, has_kernel = isinstance(candidate, SkipCandidate), hasattr(layer, "kernel")
        chooses_activation = is_skipped or isinstance(candidate, ActivationCandidate)
        if chooses_activation and site.type in ACTIVATIONS and _is_activation(layer):
            changes.settings[layer.name]["activation"] = "linear" if is_skipped else candidate.label
            if "activation" not in layer.get_config():  # a layer such as ReLU, which is the activation
                changes.replaced.add(layer.name)
        elif is_skipped and has_kernel:
            # An op with a bias is two ops in Keras: the skipped product would leave the addition.
            if getattr(layer, "use_bias", True):
                raise not_a_module_error(site, candidate, f"{layer.name} adds a bias to what it skips")
            changes.replaced.add(layer.name)
        elif isinstance(candidate, WeightCandidate) and has_kernel:
            changes.weights[layer.name] = site, candidate
            if isinstance(candidate, ConvolutionCandidate):
                window = (candidate.kernel,) * (len(site.weight_shape) - 2)
                changes.settings[layer.name].update(kernel_size=window, groups=candidate.groups)
        else:
            raise not_a_module_error(site, candidate, f"{layer.name} is a {type(layer).__name__}")
    return changes


def _is_activation(layer: Any) -> bool:
    """Return True if a layer has an option `activation`, or is an activation without settings."""
    import keras

    return "activation" in layer.get_config() or type(layer) is keras.layers.ReLU
