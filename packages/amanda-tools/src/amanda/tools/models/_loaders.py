"""Models of timm, Keras and ONNX files, with inputs that they take; the loader of each kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.libraries import numpy as np
from amanda.tools.models._pytorch import (
    RANDOM,
    library_of_models,
    on_device,
    torch_model,
    with_random_values,
)
from amanda.tools.models._subject import Input, ModelError, Request, Subject, library, reshaped
from amanda.tools.models._transformers import transformers_model


def timm_model(request: Request) -> Subject:
    """Return a model of timm with random weights.

    Raises ModelError for an unknown name, and if the model cannot be made.
    """
    timm = library_of_models("timm", request.word)
    name = request.name
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has their names"
        raise ModelError(f"timm has no model {name!r}; {hint}")
    try:
        model = on_device(request, lambda: timm.create_model(name, pretrained=False, **request.options))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{request.word} cannot be made: {error}") from error
    # timm knows the size with which the model was trained.
    size = tuple(model.pretrained_cfg.get("input_size") or (3, 224, 224))
    return with_random_values(request, model, [Input("images", (1, *size))], False, RANDOM)


def keras_model(request: Request) -> Subject:
    """Return a model with random weights, or one of a file with its own."""
    keras = library("keras", request.word)
    model = _load_keras(keras, request)
    inputs = reshaped([_keras_input(entry) for entry in model.inputs], request.shapes)
    random = np.random.default_rng(0)
    values = [entry.value(random) for entry in inputs]
    batch = values[0] if len(values) == 1 else values
    call = (
        _keras_training(keras, model, batch, request.word)
        if request.backward
        else lambda: model(batch, training=False)
    )
    kind = f"{type(model).__name__} {model.name}"
    # Weights of keras.applications may be chosen by an option.
    weights = "" if Path(request.name).suffix == ".keras" or request.options.get("weights") else RANDOM
    return Subject(request.word, kind, model, inputs, call, model.count_params(), weights)


def _load_keras(keras: Any, request: Request) -> Any:
    """Return a model of a file, or of keras.applications with random weights.

    Raises ModelError for an unknown name, a missing file, and a model that cannot be made.
    """
    name = request.name
    try:
        if Path(name).suffix == ".keras":
            if not Path(name).is_file():
                raise ModelError(f"there is no file {name}")
            return keras.saving.load_model(name, compile=False)
        kinds = {key for key, value in vars(keras.applications).items() if isinstance(value, Callable)}  # type: ignore[arg-type]
        if name not in kinds:
            raise ModelError(f"keras.applications has no model {name!r}; {did_you_mean(name, kinds)}")
        return getattr(keras.applications, name)(**{"weights": None, **request.options})
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise ModelError(f"{request.word} cannot be made: {str(error).splitlines()[0]}") from error


def _keras_input(tensor: Any) -> Input:
    """Return an input; the batch, and other sizes that the model leaves open, are 1, of images 224."""
    open_size = 224 if len(tensor.shape) == 4 else 1
    shape = tuple(size or (open_size if axis else 1) for axis, size in enumerate(tensor.shape))
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name
    return Input(tensor.name, shape, 0 if "float" in dtype else 2, dtype)


def _keras_training(keras: Any, model: Any, batch: Any, word: str) -> Callable[[], object]:
    """Return a function that runs the model and the gradients of the sum of its outputs.

    Raises ModelError for another backend of Keras than TensorFlow.
    """
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


_ONNX_TYPES = {"float": "float32", "double": "float64"}


def onnx_model(request: Request) -> Subject:
    """Return the model of a file in ONNX Runtime, on the CPU.

    Raises ModelError for a backward pass, for options, and for a file that cannot be loaded.
    """
    word, name = request.word, request.name
    if request.backward:
        raise ModelError(f"{word} has no backward pass: leave --backward")
    if request.options:
        raise ModelError(f"{word}: an ONNX model has no options, was given {', '.join(request.options)}")
    if not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    runtime = library("onnxruntime", word)
    try:
        session = runtime.InferenceSession(name, providers=["CPUExecutionProvider"])
    # ONNX Runtime has errors of its own for each kind of damage.
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load {name}: {str(error).splitlines()[0]}") from error
    random = np.random.default_rng(0)
    inputs = reshaped([_onnx_input(entry) for entry in session.get_inputs()], request.shapes)
    values = {entry.name: entry.value(random) for entry in inputs}
    kind = session.get_modelmeta().graph_name or "graph"
    return Subject(word, kind, model=session, inputs=inputs, call=lambda: session.run(None, values))


def _onnx_input(node: Any) -> Input:
    """Return an input of a graph; sizes that the graph leaves open are 1."""
    shape = tuple(size if isinstance(size, int) and size > 0 else 1 for size in node.shape)
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    below = 0 if kind in ("float", "double", "float16") else 2
    return Input(node.name, shape, below, _ONNX_TYPES.get(kind, kind))


LOADERS: Mapping[str, Callable[[Request], Subject]] = {
    "hf": transformers_model, "timm": timm_model, "torch": torch_model, "keras": keras_model,
    "onnx": onnx_model,
}  # fmt: skip
"""Functions that load models, by the word before the colon."""
