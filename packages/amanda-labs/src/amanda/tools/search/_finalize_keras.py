"""Finalized models of Keras."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from amanda.tools.search._candidates import ACTIVATIONS, Activation, Skip
from amanda.tools.search._errors import SearchError
from amanda.tools.search._finalize import changed, lost
from amanda.tools.search._weight_candidates import Convolution, WeightCandidate

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


def finalized(model: Any, sites: Iterable[Site]) -> Any:
    """Return a clone of a Keras model, with the weights, whose layers are those that were chosen.

    A skipped layer leaves its activation.  Raises SearchError where an op is not that of a Conv, a Dense or
    an activation of a layer.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise SearchError(f"SearchTool.finalize: the model is a {type(model).__name__}; give one of Keras")
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False, recursive=True)}
    settings: dict[str, dict[str, Any]] = {layer: {} for layer in layers}
    weights: dict[str, tuple[Site, WeightCandidate]] = {}
    replaced: set[str] = set()
    for site, chosen in changed(sites):
        parts = [part for path in site.scopes for part in path.replace(".", "/").split("/")]
        layer = next((layers[part] for part in reversed(parts) if part in layers), None)
        if layer is None:
            raise lost(site, chosen, f"the model has no layer {site.module!r}")
        if isinstance(chosen, (Activation, Skip)) and site.type in ACTIVATIONS and _is_activation(layer):
            settings[layer.name]["activation"] = "linear" if isinstance(chosen, Skip) else chosen.label
            if "activation" not in layer.get_config():
                replaced.add(layer.name)
        elif isinstance(chosen, Skip) and hasattr(layer, "kernel"):
            if getattr(layer, "use_bias", True):
                raise lost(site, chosen, f"{layer.name} adds a bias to what it skips")
            replaced.add(layer.name)
        elif isinstance(chosen, WeightCandidate) and hasattr(layer, "kernel"):
            weights[layer.name] = site, chosen
            if isinstance(chosen, Convolution):
                window = (chosen.kernel,) * (len(site.weight_shape) - 2)
                settings[layer.name].update(kernel_size=window, groups=chosen.groups)
        else:
            raise lost(site, chosen, f"{layer.name} is a {type(layer).__name__}")

    def clone(layer: Any) -> Any:
        config = {**layer.get_config(), **settings[layer.name]}
        if layer.name in replaced:
            return keras.layers.Activation(config["activation"], name=layer.name)
        return layer.__class__.from_config(config)

    made = keras.models.clone_model(model, clone_function=clone)
    made.build(model.input_shape)
    for layer in made._flatten_layers(include_self=False, recursive=True):
        own = layers[layer.name]
        if layer.name in replaced:
            continue
        if layer.name not in weights:
            if not getattr(own, "layers", None):
                layer.set_weights(own.get_weights())
            continue
        site, chosen = weights[layer.name]
        layer.kernel.assign(chosen.weight(own.kernel.value, site))
        if layer.use_bias:
            layer.bias.assign(own.bias)
    return made


def _is_activation(layer: Any) -> bool:
    """Return True if a layer has a choice of activations, or is one without settings of its own."""
    import keras

    return "activation" in layer.get_config() or type(layer) is keras.layers.ReLU
