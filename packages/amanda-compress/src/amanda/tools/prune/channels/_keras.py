"""Keras models on TensorFlow, whose channels are removed in a new model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import amanda
from amanda.backend import TensorMap
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._keras_removal import smaller_model
from amanda.tools.prune.channels._keras_tracing import KerasTracing
from amanda.tools.prune.channels._plan import Plan
from amanda.tools.prune.channels._prunable_model import (
    Axes,
    Masks,
    PrunableModel,
    array_over_kept,
    selected_of_array,
)
from amanda.tools.prune.channels._tracing import Tracing, tensors_in


class KerasModel(PrunableModel):
    """A functional or sequential model of Keras.

    now: the model that is called, which is a smaller one while a removal is tried.
    Raises PruneError for a model that no config rebuilds, and for Keras on another backend.
    """

    has_gradients = False
    # ops over channels keep these whole, so that neither is called
    selected, over_kept = staticmethod(selected_of_array), staticmethod(array_over_kept)

    def __init__(self, model: Any) -> None:
        import keras

        super().__init__(model)
        self.now = model
        self._original_handles: TensorMap[str] = TensorMap()
        if keras.backend.backend() != "tensorflow":
            raise PruneError(
                f"ChannelPruneTool.prepare was given a Keras model on {keras.backend.backend()}; it removes "
                "channels on TensorFlow: set KERAS_BACKEND=tensorflow"
            )
        if type(model).call not in (keras.Sequential.call, type(_functional(keras)).call):
            raise PruneError(
                f"ChannelPruneTool.prepare was given {model.name}, a {type(model).__name__} with code of its "
                "own: no config says its sizes; give a functional or a sequential model, or mask filters by "
                'PruneTool(pattern="structured")'
            )

    def __call__(self, *example: Any, **named: Any) -> Any:
        """Call the model op by op, in inference."""
        return self.now(example[0] if len(example) == 1 else list(example), **{"training": False, **named})

    def time(self, *example: Any, **named: Any) -> None:
        """Predict a batch by a compiled function."""
        self.now.predict_on_batch(example[0] if len(example) == 1 else list(example))

    def tracing(self) -> Tracing:
        """Return a tool that follows a call."""
        return KerasTracing(self)

    def handles(self) -> TensorMap[str]:
        """Return the paths of the floating-point weights of the model as it is now, by their handles."""
        paths: TensorMap[str] = TensorMap()
        for path, weight in self._weights().items():
            paths[weight.value.handle] = path
        return paths

    def _weights(self) -> dict[str, Any]:
        return {weight.path: weight for weight in self.now.weights if "float" in str(weight.dtype)}

    def tensors(self) -> Mapping[str, Any]:
        """Return the floating-point weights as arrays, by path."""
        return {path: weight.numpy() for path, weight in self._weights().items()}

    def parameters(self) -> Mapping[str, Any]:
        """Return the floating-point weights, also those that do not train, as Keras counts them."""
        return self._weights()

    def masks(self, axes: Axes) -> Masks:
        """Return masks of weights, found by path and shape, in the type of what is read."""
        # Within a call of a layer of mixed precision a weight is a cast one, which has no handle.
        self._original_handles = self.handles()
        masks: dict[tuple[str, tuple[int | None, ...]], Any] = {}
        weights = self._weights()
        for path, axis, keep_mask in axes:
            shape = tuple(weights[path].shape)
            axis_mask = keep_mask.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            masks[path, shape] = masks.get((path, shape), np.True_) & axis_mask

        def mask(value: Any) -> Any:
            weight_mask = masks.get((value.path, value.shape)) if isinstance(value, _WeightRead) else None
            return None if weight_mask is None else weight_mask.astype(value.dtype)

        return mask

    def reads(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return the weights that an op reads; the form that a reshape gives of one was masked before."""
        handles = self._original_handles
        weights: list[_WeightRead | None] = []
        for i, value in enumerate(context.get_inputs()):
            variable = None if isinstance(value, (list, tuple)) else context.get_variable(i)
            path = None if variable is None else handles.get(variable)
            if path is None or not value.dtype.is_floating or value.shape.rank is None:
                weights.append(None)
            else:
                weights.append(_WeightRead(path, tuple(value.shape), value.dtype.as_numpy_dtype))
        return weights

    def removal(self, plan: Plan) -> KerasRemoval:
        """Return what puts a smaller model in the place of this one."""
        return KerasRemoval(self, plan)

    def smaller(self, plan: Plan, optimizer: Any) -> Any:
        """Return a smaller model."""
        return smaller_model(self, plan)

    def with_zeros(self, masks: Masks) -> Any:
        """Write masks into the weights; return the model."""
        for path, weight in self._weights().items():
            mask = masks(_WeightRead(path, tuple(weight.shape), np.float32))
            if mask is not None:
                weight.assign(weight.numpy() * mask)
        return self.model

    def floats(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point tensors."""
        for tensor in tensors_in(result):
            if tensor.dtype.is_floating:
                yield tensor.numpy().astype(np.float64), float(np.finfo(tensor.dtype.as_numpy_dtype).eps)


class KerasRemoval:
    """Puts a smaller model in the place of a KerasModel's, and puts that back."""

    def __init__(self, model: KerasModel, plan: Plan) -> None:
        self._model, self._plan = model, plan

    def apply(self) -> None:
        """Make the model smaller."""
        self._model.now = smaller_model(self._model, self._plan)

    def undo(self) -> None:
        """Put the whole model back."""
        self._model.now = self._model.model


@dataclass(frozen=True)
class _WeightRead:
    path: str
    shape: tuple[int | None, ...]
    dtype: Any


def _functional(keras: Any) -> Any:
    """Return a functional model, whose class Keras does not name."""
    tensor = keras.Input((1,))
    return keras.Model(tensor, tensor)
