"""Models of keras.applications, and of files, whose inputs Keras knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.libraries import numpy as np
from amanda.tools.models._inputs import Input, ModelError, reshaped
from amanda.tools.models._subject import Subject, library


def made(
    word: str, name: str, options: Mapping[str, Any], shapes: Sequence[str], backward: bool, device: str
) -> Subject:
    """Return a model with random weights, or one of a file with its own."""
    keras = library("keras", word)
    model = _model(keras, word, name, options)
    inputs = reshaped([_input(entry) for entry in model.inputs], shapes)
    random = np.random.default_rng(0)
    values = [entry.value(random) for entry in inputs]
    batch = values[0] if len(values) == 1 else values
    call = _training(keras, model, batch, word) if backward else lambda: model(batch, training=False)
    return Subject(word, f"{type(model).__name__} {model.name}", model, inputs, call, model.count_params())


def _model(keras: Any, word: str, name: str, options: Mapping[str, Any]) -> Any:
    try:
        if Path(name).suffix == ".keras":
            if not Path(name).is_file():
                raise ModelError(f"there is no file {name}")
            return keras.saving.load_model(name, compile=False)
        kinds = {key for key, value in vars(keras.applications).items() if isinstance(value, Callable)}  # type: ignore[arg-type]
        if name not in kinds:
            raise ModelError(f"keras.applications has no model {name!r}; {did_you_mean(name, kinds)}")
        return getattr(keras.applications, name)(**{"weights": None, **options})
    except (TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{word} cannot be made: {str(error).splitlines()[0]}") from error


def _input(tensor: Any) -> Input:
    """Return an input; the batch, and other sizes that the model leaves open, are 1, of images 224."""
    open_size = 224 if len(tensor.shape) == 4 else 1
    shape = tuple(size or (open_size if axis else 1) for axis, size in enumerate(tensor.shape))
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name
    return Input(tensor.name, shape, 0 if "float" in dtype else 2, dtype)


def _training(keras: Any, model: Any, batch: Any, word: str) -> Callable[[], object]:
    """Return a function that runs the model and the gradients of the sum of its outputs."""
    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"{word}: --backward of Keras is for its backend tensorflow: set KERAS_BACKEND=tensorflow"
        )
    import tensorflow as tf

    def step() -> object:
        with tf.GradientTape() as tape:
            outputs = model(batch, training=True)
        return tape.gradient(outputs, model.trainable_variables)

    return step
