"""Finalized models of Keras."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from amanda.tools.search._candidates import Activation
from amanda.tools.search._checks import SearchError
from amanda.tools.search._finalize import changed, lost
from amanda.tools.search._weight_candidates import Convolution, WeightCandidate

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


def finalized(model: Any, sites: Iterable[Site]) -> Any:
    """Return a clone of a Keras model, with the weights, whose layers are those that were chosen.

    Raises SearchError where an op is not that of a Conv, a Dense or an activation of a layer.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise SearchError(f"SearchTool.finalize: the model is a {type(model).__name__}; give one of Keras")
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False, recursive=True)}
    settings: dict[str, dict[str, Any]] = {}
    weights: dict[str, tuple[Site, WeightCandidate]] = {}
    for site, chosen in changed(sites):
        parts = [part for path in site.scopes for part in path.replace(".", "/").split("/")]
        layer = next((layers[part] for part in reversed(parts) if part in layers), None)
        if layer is None:
            raise lost(site, chosen, f"the model has no layer {site.module!r}")
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
            raise lost(site, chosen, f"{layer.name} is a {type(layer).__name__}")

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
