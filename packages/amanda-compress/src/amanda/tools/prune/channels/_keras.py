"""Keras models on TensorFlow, whose channels are removed in a new model, from the configs of its layers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import amanda
from amanda.backend import TensorMap
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._keras_tracing import KerasTracing
from amanda.tools.prune.channels._plan import RemovalPlan
from amanda.tools.prune.channels._prunable_model import (
    Axes,
    Masks,
    PrunableModel,
    Tracing,
    compute_array_over_kept,
    selected_of_array,
    tensors_in,
)


class KerasModel(PrunableModel):
    """A functional or sequential model of Keras, called in eager TensorFlow.

    now: the model that is called, which is a smaller one while a removal is tried.
    Raises PruneError for a model that no config rebuilds, and for Keras on another backend.
    """

    has_gradients = False
    # Ops over channels keep these whole, so that neither is called.
    selected, compute_over_kept = staticmethod(selected_of_array), staticmethod(compute_array_over_kept)

    def __init__(self, model: Any) -> None:
        import keras

        super().__init__(model)
        self.now = model
        self._compiled: tuple[Any, Any] | None = None  # the model as it was, and a compiled function of it
        self._path_by_handle: TensorMap[str] = TensorMap()  # of the model that `masks` is for
        if keras.backend.backend() != "tensorflow":
            raise PruneError(
                f"ChannelPruneTool.prepare was given a Keras model on {keras.backend.backend()}; it removes "
                "channels on TensorFlow: set KERAS_BACKEND=tensorflow"
            )
        # A subclass with a `call` of its own has sizes in its code, which no config changes.
        if type(model).call not in (keras.Sequential.call, type(_functional(keras)).call):
            raise PruneError(
                f"ChannelPruneTool.prepare was given {model.name}, a {type(model).__name__} with code of its "
                "own: no config says its sizes; give a functional or a sequential model, or mask filters by "
                'PruneTool(pattern="structured")'
            )

    def __call__(self, *example: Any, **kwargs: Any) -> Any:
        """Call the model op by op, in inference."""
        return self._call(self.now, example, kwargs)

    def run_to_completion(self, *example: Any, **kwargs: Any) -> None:
        """Call the model by a compiled function, as `predict` does, and wait for the results."""
        import tensorflow as tf

        # Not by `predict_on_batch`, to which no inputs by name go.
        if self._compiled is None or self._compiled[0] is not self.now:
            self._compiled = self.now, tf.function(self.now, jit_compile=self.now.jit_compile)
        for tensor in tensors_in(self._call(self._compiled[1], example, kwargs)):
            tensor.numpy()

    @staticmethod
    def _call(function: Any, example: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of a model, or of its compiled function, in inference."""
        inputs = example[:1] if len(example) < 2 else [list(example)]
        return function(*inputs, **{"training": False, **kwargs})

    def tracing(self) -> Tracing:
        """Return a tool that follows a call."""
        return KerasTracing(self)

    def path_by_handle(self) -> TensorMap[str]:
        """Return the paths of floating-point weights of the model as it is now, by handle of the variable."""
        paths: TensorMap[str] = TensorMap()
        for path, weight in self._weights().items():
            paths[weight.value.handle] = path
        return paths

    def weights_of_unknown_size(self) -> Iterator[tuple[str, str]]:
        """Yield paths of weights of layers whose config says no number of channels, and the reasons."""
        for layer in layers_of(self.now):
            why = why_size_is_unknown(layer)
            if why:
                for weight in layer.weights:
                    yield weight.path, why

    def _weights(self) -> dict[str, Any]:
        """Return the floating-point weights of the model as it is now, by path."""
        return {weight.path: weight for weight in self.now.weights if "float" in str(weight.dtype)}

    def tensors(self) -> Mapping[str, Any]:
        """Return the floating-point weights as arrays, by path."""
        return {path: weight.numpy() for path, weight in self._weights().items()}

    def parameters(self) -> Mapping[str, Any]:
        """Return the floating-point weights, also those that do not train, as Keras counts them."""
        return self._weights()

    def masks(self, axes: Axes) -> Masks:
        """Return masks of weights, found by path and shape, in the type of what is read.

        Also stores the handles by which `inputs_for_masks` finds the weights of the model as it is now.
        """
        # Within a call of a layer of mixed precision a weight is a cast one, which has no handle.
        self._path_by_handle = self.path_by_handle()
        mask_by_weight: dict[tuple[str, tuple[int | None, ...]], Any] = {}
        weights = self._weights()
        for path, axis, keep_mask in axes:
            shape = tuple(weights[path].shape)
            axis_mask = keep_mask.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            mask_by_weight[path, shape] = mask_by_weight.get((path, shape), np.True_) & axis_mask

        def mask(value: Any) -> Any:
            """Return the mask of a weight; None for another value, and for a whole weight."""
            if not isinstance(value, _KerasWeight):
                return None
            weight_mask = mask_by_weight.get((value.path, value.shape))
            # TensorFlow multiplies tensors of one type alone.
            return None if weight_mask is None else weight_mask.astype(value.dtype)

        return mask

    def inputs_for_masks(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return the weights that an op reads; None for other inputs, and for values of unknown rank.

        A reshaped weight is another input: the reshape has read the weight, and was masked.
        """
        weights: list[_KerasWeight | None] = []
        for i, value in enumerate(context.get_inputs()):
            variable = None if isinstance(value, (list, tuple)) else context.get_variable(i)
            path = None if variable is None else self._path_by_handle.get(variable)
            if path is None or not value.dtype.is_floating or value.shape.rank is None:
                weights.append(None)
            else:
                weights.append(_KerasWeight(path, tuple(value.shape), value.dtype.as_numpy_dtype))
        return weights

    def removal(self, plan: RemovalPlan) -> KerasRemoval:
        """Return a removal that puts a smaller model in the place of this one."""
        return KerasRemoval(self, plan)

    def make_smaller(self, plan: RemovalPlan, optimizer: Any) -> Any:
        """Return a smaller model."""
        return smaller_model(self, plan)

    def write_masks(self, masks: Masks) -> Any:
        """Write masks into the weights; return the model."""
        for path, weight in self._weights().items():
            mask = masks(_KerasWeight(path, tuple(weight.shape), np.float32))
            if mask is not None:
                weight.assign(weight.numpy() * mask)
        return self.model

    def float_arrays(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point tensors."""
        for tensor in tensors_in(result):
            if tensor.dtype.is_floating:
                yield tensor.numpy().astype(np.float64), float(np.finfo(tensor.dtype.as_numpy_dtype).eps)


class KerasRemoval:
    """Puts a smaller model in the place of a KerasModel's, and puts that back."""

    def __init__(self, model: KerasModel, plan: RemovalPlan) -> None:
        self._model, self._plan = model, plan

    def apply(self) -> None:
        """Make the model smaller."""
        self._model.now = smaller_model(self._model, self._plan)

    def undo(self) -> None:
        """Put the whole model back."""
        self._model.now = self._model.model


@dataclass(frozen=True)
class _KerasWeight:
    """A weight as an op reads it, by which its mask is found."""

    path: str
    shape: tuple[int | None, ...]
    dtype: Any


def _functional(keras: Any) -> Any:
    """Return a functional model, whose class Keras does not name."""
    tensor = keras.Input((1,))
    # Keras has no public name for the class of functional models.
    return keras.Model(tensor, tensor)


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
    """Yield the layers of a model; of a nested model its layers instead."""
    import keras

    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from layers_of(layer)
        else:
            yield layer


def why_size_is_unknown(layer: Any) -> str:
    """Return why no config can say how many channels a layer has; "" where one can."""
    import keras

    # By name, so that this module can be imported without Keras.
    sized_classes = tuple(getattr(keras.layers, name) for name in (*_SIZES, *_OF_INPUTS))
    class_name = type(layer).__name__
    if not isinstance(layer, sized_classes):
        return f"the config of {class_name} says no number of channels that can be made smaller"
    entry = _channel_count_entry(layer)
    if entry is not None and entry.key not in layer.get_config():
        return f"the config of {class_name} has no {entry.key!r} to be made smaller"
    return ""


def smaller_model(model: KerasModel, plan: RemovalPlan) -> Any:
    """Return a new model without the channels that a plan does not keep.

    Raises PruneError where the rebuilt model has other weights than are expected.
    """
    import keras

    keep_masks: dict[str, dict[int, Any]] = {}  # of weights, by path and axis
    for name, axis, keep_mask in plan.axes():
        keep_masks.setdefault(name, {})[axis] = keep_mask
    reshaped_extents = {  # of the outputs of Reshape layers, by their paths
        op.module: plan.tracing.kept_extents(op.outputs[0], plan.kept_label_mask)
        for op in plan.tracing.traced_ops if op.type == "reshape"
    }  # fmt: skip

    def rebuild_layer(layer: Any, prefix: str = "") -> Any:
        """Return a new layer with the sizes that the plan keeps; prefix: of the path, for a nested model."""
        path = f"{prefix}{layer.name}"
        if isinstance(layer, keras.Model):
            rebuild_inner = partial(rebuild_layer, prefix=f"{path}.")
            return keras.models.clone_model(layer, clone_function=rebuild_inner)
        config = layer.get_config()
        _update_sizes(config, layer, keep_masks, plan.tracing.notes.whole_groups)
        if isinstance(layer, keras.layers.Reshape) and path in reshaped_extents:
            _, *new_sizes = reshaped_extents[path]  # without the batch
            config["target_shape"] = [
                # -1 follows the elements by itself.
                new_size if old_size != -1 else old_size
                for old_size, new_size in zip(config["target_shape"], new_sizes, strict=True)
            ]
        return type(layer).from_config(config)

    smaller = keras.models.clone_model(model.now, clone_function=rebuild_layer)
    # A clone of a sequential model without an Input layer has no weights yet.
    if not smaller.built:
        smaller.build(model.now.input_shape)
    _copy_kept_weights(model.now, smaller, keep_masks)
    for layer in layers_of(smaller):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # computes the mean and variance that it uses from its weights
    return smaller


def _update_sizes(
    config: dict[str, Any],
    layer: Any,
    keep_masks: Mapping[str, Mapping[int, Any]],
    whole_groups: Container[str],
) -> None:
    """Write the kept numbers of channels and groups into the config of a layer; nothing for a whole layer."""
    import keras

    entry = _channel_count_entry(layer)
    if entry is not None:
        keep_mask = keep_masks.get(entry.weight_path, {}).get(entry.axis)
        if keep_mask is not None:
            old_size, new_size = config[entry.key], int(keep_mask.sum())
            config[entry.key] = new_size
            # Whole groups went, so that their number shrinks in the same share.
            if entry.weight_path in whole_groups:
                config["groups"] = config["groups"] * new_size // old_size
    elif isinstance(layer, keras.layers.GroupNormalization) and layer.weights:
        keep_mask = keep_masks.get(layer.weights[0].path, {}).get(0)
        if keep_mask is not None:
            config["groups"] = config["groups"] * int(keep_mask.sum()) // len(keep_mask)


def _copy_kept_weights(whole: Any, smaller: Any, keep_masks: Mapping[str, Mapping[int, Any]]) -> None:
    """Write the kept places of a model's weights into a smaller model; raise PruneError for other shapes."""
    for old_weight, new_weight in zip(whole.weights, smaller.weights, strict=True):
        value = old_weight.numpy()
        for axis, keep_mask in keep_masks.get(old_weight.path, {}).items():
            value = value.compress(keep_mask, axis)
        if tuple(new_weight.shape) != value.shape:
            raise PruneError(
                f"the model that is rebuilt from the config of {whole.name} has "
                f"{tuple(new_weight.shape)} in {new_weight.path}, where {value.shape} was expected: exclude "
                "the layer"
            )
        new_weight.assign(value)


class _ChannelCountEntry(NamedTuple):
    """The key of a layer's config with its number of channels, and the weight and axis that have these."""

    key: str
    weight_path: str
    axis: int


def _channel_count_entry(layer: Any) -> _ChannelCountEntry | None:
    """Return the entry of a layer's config; None without a kernel, and where the input gives the channels."""
    import keras

    keys_and_axes = [pair for name, pair in _SIZES.items() if isinstance(layer, getattr(keras.layers, name))]
    if not keys_and_axes or isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)):
        return None
    kernels = [getattr(layer, name) for name in _KERNELS if getattr(layer, name, None) is not None]
    if not kernels:
        return None
    (key, axis), kernel = keys_and_axes[0], kernels[0]
    return _ChannelCountEntry(key, kernel.path, axis % len(kernel.shape))
