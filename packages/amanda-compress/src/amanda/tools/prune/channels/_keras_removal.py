"""Rebuilds a Keras model without channels, from the configs of its layers and shorter weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._plan import Plan

if TYPE_CHECKING:
    from amanda.tools.prune.channels._keras import KerasModel

_SIZES = {
    "Conv1D": ("filters", -1), "Conv2D": ("filters", -1), "Conv3D": ("filters", -1),
    "Conv1DTranspose": ("filters", -2), "Conv2DTranspose": ("filters", -2),
    "Conv3DTranspose": ("filters", -2),
    "SeparableConv1D": ("filters", -1), "SeparableConv2D": ("filters", -1), "Dense": ("units", -1),
    "Embedding": ("output_dim", -1),
}  # fmt: skip
"""Entry of a layer's config with the number of its channels, and the axis of its kernel, by class."""

_OF_INPUTS = (
    "BatchNormalization", "DepthwiseConv1D", "DepthwiseConv2D", "GroupNormalization", "LayerNormalization",
    "PReLU",
)  # fmt: skip
"""Layers whose weights are as long as what they are given."""

_KERNELS = ("pointwise_kernel", "_kernel", "kernel", "_embeddings", "embeddings")


def layers_of(model: Any) -> Iterator[Any]:
    """Yield the layers of a model, those of models in it one by one."""
    import keras

    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from layers_of(layer)
        else:
            yield layer


def size_is_unknown(layer: Any) -> str:
    """Return why no config can say how many channels a layer has; "" where one can."""
    import keras

    kinds = tuple(getattr(keras.layers, name) for name in (*_SIZES, *_OF_INPUTS))
    kind = type(layer)
    if isinstance(layer, kinds) and (size := _size(layer)) is not None and size[0] not in layer.get_config():
        return f"the config of {kind.__name__} has no {size[0]!r} to be made smaller"
    if not isinstance(layer, kinds):
        return f"the config of {kind.__name__} says no number of channels that can be made smaller"
    return ""


def smaller_model(model: KerasModel, plan: Plan) -> Any:
    """Return a new model without the channels that a plan does not keep.

    Raises PruneError where the rebuilt model has other weights than are expected.
    """
    import keras

    keep_masks: dict[str, dict[int, Any]] = {}
    for name, axis, keep_mask in plan.axes():
        keep_masks.setdefault(name, {})[axis] = keep_mask
    shapes = {
        step.module: plan.tracing.extents(step.outputs[0], plan.alive)
        for step in plan.tracing.steps if step.type == "reshape"
    }  # fmt: skip

    def rebuilt(layer: Any, within: str = "") -> Any:
        path = f"{within}{layer.name}"
        if isinstance(layer, keras.Model):
            inner = partial(rebuilt, within=f"{path}.")
            return keras.models.clone_model(layer, clone_function=inner)
        config = layer.get_config()
        size = _size(layer)
        if size is not None:
            key, name, axis = size
            keep_mask = keep_masks.get(name, {}).get(axis)
            if keep_mask is not None:
                before, config[key] = config[key], int(keep_mask.sum())
                if name in plan.tracing.notes.whole_groups:
                    config["groups"] = config["groups"] * config[key] // before
        elif isinstance(layer, keras.layers.GroupNormalization):
            for weight in layer.weights[:1]:
                keep_mask = keep_masks.get(weight.path, {}).get(0)
                if keep_mask is not None:
                    config["groups"] = config["groups"] * int(keep_mask.sum()) // len(keep_mask)
        elif isinstance(layer, keras.layers.Reshape) and path in shapes:
            config["target_shape"] = [
                new if old != -1 else old
                for old, new in zip(config["target_shape"], shapes[path][1:], strict=True)
            ]
        return type(layer).from_config(config)

    smaller = keras.models.clone_model(model.now, clone_function=rebuilt)
    if not smaller.built:
        smaller.build(model.now.input_shape)
    for old, new in zip(model.now.weights, smaller.weights, strict=True):
        value = old.numpy()
        for axis, keep_mask in keep_masks.get(old.path, {}).items():
            value = value.compress(keep_mask, axis)
        if tuple(new.shape) != value.shape:
            raise PruneError(
                f"the model that is rebuilt from the config of {model.now.name} has {tuple(new.shape)} in "
                f"{new.path}, where {value.shape} was expected: exclude the layer"
            )
        new.assign(value)
    for layer in layers_of(smaller):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # it computes with numbers made of its weights
    return smaller


def _size(layer: Any) -> tuple[str, str, int] | None:
    """Return the entry of a config, the path of the weight whose axis it is, and that axis."""
    import keras

    size = next(
        (size for name, size in _SIZES.items() if isinstance(layer, getattr(keras.layers, name))), None
    )
    if size is None or isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)):
        return None
    kernel = next(
        (candidate for name in _KERNELS if (candidate := getattr(layer, name, None)) is not None), None
    )
    if kernel is None:
        return None
    key, axis = size
    return key, kernel.path, axis % len(kernel.shape)
