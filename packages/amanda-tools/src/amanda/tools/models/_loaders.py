"""Models of the user's functions, timm, Keras and ONNX files, with inputs that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import did_you_mean
from amanda.tools.command import function_of
from amanda.tools.kit import torch_tensors
from amanda.tools.libraries import numpy as np
from amanda.tools.models._subject import Input, ModelError, Request, Subject, import_library, set_input_shapes

_MEMINFO = Path("/proc/meminfo")


def torch_model(request: Request) -> Subject:
    """Return the module that a function of FILE:FUNCTION or MODULE:FUNCTION returns, maybe with its inputs.

    Without these inputs are random, of the shapes that `--input-shape` gives, which takes precedence.
    Raises ModelError for a function of other arguments or another result, and without shapes of inputs.
    """
    torch = import_library("torch", request.word)
    with amanda.disabled():  # as in `import_model_library`
        make_module = function_of(request.name)
    _check_arguments(make_module, request)
    with torch.device(request.device):
        returned = make_module(**request.options)
    module, *arguments = returned if isinstance(returned, (tuple, list)) else (returned,)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{request.name} returns {type(module).__name__}; it is to return a module, or (module, inputs)"
        )
    if arguments and not request.shapes:
        shapes = [tuple(getattr(value, "shape", ())) for value in arguments]
        inputs = [Input(f"input {i}", shape) for i, shape in enumerate(shapes)]
        return make_torch_subject(request, module, inputs, lambda: module(*arguments))
    if not request.shapes:
        raise ModelError(
            f"{request.word} does not say what its inputs are: give --input-shape "
            f"{_guess_input_shape(torch, module)}, or have {request.name} return (module, inputs)"
        )
    return subject_on_random_inputs(request, module, [Input("input", ())], by_name=False)


def _check_arguments(function: Callable[..., Any], request: Request) -> None:
    """Raise ModelError, with a word that has its arguments, where a function does not take the options."""
    try:
        inspect.signature(function).bind(**request.options)
    except TypeError as error:
        parameters = inspect.signature(function).parameters
        required_names = [
            name for name, entry in parameters.items()
            if entry.default is entry.empty and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
        ]  # fmt: skip
        words = ",".join(f"{name}=..." for name in required_names or parameters)
        hint = f"arguments follow behind a colon: {':'.join(filter(None, ('torch', request.name, words)))}"
        raise ModelError(f"{request.word} cannot be made: {error}; {hint}") from None
    except ValueError:  # a builtin without a signature
        return


def import_model_library(name: str, word: str) -> Any:
    """Import a library of models of PyTorch; raise ModelError where it, or PyTorch, is absent or broken."""
    import_library("torch", word)  # first, since `amanda run` opens its scope there
    with amanda.disabled():  # what a module computes when it is imported is no op of the model
        return import_library(name, word)


def subject_on_random_inputs(
    request: Request, module: Any, inputs: Sequence[Input], by_name: bool = True, weights: str = ""
) -> Subject:
    """Return a module that runs on random values of its inputs, in its element type, with a fixed seed.

    by_name: pass inputs by name, not in order.  weights: where those of the module come from, in words.
    """
    import torch

    inputs, generator = set_input_shapes(inputs, request.shapes), np.random.default_rng(0)
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
    with amanda.disabled():
        tensors = [torch.from_numpy(entry.value(generator)).to(request.device) for entry in inputs]
        # Checkpoints are often of half precision, and take images and sound in the same.
        tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
    tensor_by_name = {entry.name: tensor for entry, tensor in zip(inputs, tensors, strict=True)}
    call_module = (lambda: module(**tensor_by_name)) if by_name else (lambda: module(*tensors))
    return make_torch_subject(request, module, inputs, call_module, weights)


def make_torch_subject(
    request: Request, module: Any, inputs: Sequence[Input], call: Callable[[], Any], weights: str = ""
) -> Subject:
    """Set a module to train or evaluate; return it with a run forward and, if asked, backward from ones."""
    import torch

    module.train(request.backward)

    def run() -> None:
        """Run forward, and backward if that is asked for."""
        with torch.set_grad_enabled(request.backward):
            outputs = torch_tensors([call()], structures=True)
            differentiable = [output for output in outputs if output.requires_grad]
            with amanda.disabled():
                # The first gradient is ours, so tools count no op for it.
                gradients = [torch.ones_like(output) for output in differentiable]
            if request.backward:
                torch.autograd.backward(differentiable, gradients)

    parameter_count = sum(parameter.numel() for parameter in module.parameters())
    return Subject(request.word, type(module).__name__, module, inputs, run, parameter_count, weights)


RANDOM = "random weights"


def build_on_device(request: Request, build: Callable[[], Any]) -> Any:
    """Build a module on the device; raise ModelError before, where its parameters exceed the free memory."""
    import torch

    check_parameters_fit(request, build)
    with torch.device(request.device):
        return build()


def check_parameters_fit(request: Request, build: Callable[[], Any]) -> None:
    """Raise ModelError where a model's parameters exceed the CPU's free memory; builds it without data."""
    import torch

    # Built once without memory: a model that does not fit would end the process, not raise.
    with torch.device("meta"), amanda.disabled():
        size = sum(parameter.numel() * parameter.element_size() for parameter in build().parameters())
    if request.device == "cpu" and size > (free_size := _free_memory()):
        raise ModelError(
            f"the parameters of {request.word} take {size / 1e9:.1f} GB, but {free_size / 1e9:.1f} GB are "
            "free; give --device meta, for shapes alone, or options that make it smaller"
        )


def _free_memory() -> float:
    """Return the bytes of memory that Linux has available; infinite on other systems."""
    # Only Linux has the file; elsewhere the operating system decides.
    if not _MEMINFO.is_file():
        return float("inf")
    text_by_field = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    return 1024 * int(text_by_field["MemAvailable"].split()[0])


def _guess_input_shape(torch: Any, module: Any) -> str:
    """Return a shape that the first linear layer or convolution may take, as text; a pattern without one."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            return f"1,{layer.in_features}"
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
            return ",".join(map(str, (1, layer.in_channels, *[224] * len(layer.kernel_size))))
    return "SIZE,SIZE,..."


def timm_model(request: Request) -> Subject:
    """Return a model of timm with random weights; raise ModelError where that cannot be."""
    timm = import_model_library("timm", request.word)
    name = request.name
    if not timm.is_model(name):
        names = get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(names)}?" if names else "timm.list_models() has their names"
        raise ModelError(f"timm has no model {name!r}; {hint}")
    try:
        model = build_on_device(request, lambda: timm.create_model(name, pretrained=False, **request.options))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{request.word} cannot be made: {error}") from error
    # timm knows the size with which the model was trained.
    images = Input("images", (1, *(model.pretrained_cfg.get("input_size") or (3, 224, 224))))
    return subject_on_random_inputs(request, model, [images], by_name=False, weights=RANDOM)


def keras_model(request: Request) -> Subject:
    """Return a model with random weights, or of a file with its own; raise ModelError where it cannot be."""
    keras = import_library("keras", request.word)
    model = _load_keras_model(keras, request)
    inputs = set_input_shapes([_keras_input(entry) for entry in model.inputs], request.shapes)
    generator = np.random.default_rng(0)
    values = [entry.value(generator) for entry in inputs]
    batch = values[0] if len(values) == 1 else values
    call: Callable[[], Any] = partial(model, batch, training=False)
    if request.backward:
        call = _make_keras_training(keras, model, batch, request.word)
    kind = f"{type(model).__name__} {model.name}"
    # Weights of keras.applications may be chosen by an option.
    weights = "" if Path(request.name).suffix == ".keras" or request.options.get("weights") else RANDOM
    return Subject(request.word, kind, model, inputs, call, model.count_params(), weights)


def _load_keras_model(keras: Any, request: Request) -> Any:
    """Return the model of a file, or of keras.applications with random weights; else raise ModelError."""
    name, is_file = request.name, Path(request.name).suffix == ".keras"
    model_names = {key for key, value in vars(keras.applications).items() if callable(value)}
    if is_file and not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    if not is_file and name not in model_names:
        raise ModelError(f"keras.applications has no model {name!r}; {did_you_mean(name, model_names)}")
    try:
        if is_file:
            return keras.saving.load_model(name, compile=False)
        return getattr(keras.applications, name)(**{"weights": None, **request.options})
    except (TypeError, ValueError) as error:
        raise ModelError(f"{request.word} cannot be made: {str(error).splitlines()[0]}") from error


def _keras_input(tensor: Any) -> Input:
    """Return an input of Keras with sizes for open axes: 1 for the batch, 224 for images, else 1."""
    size_of_open_axis = 224 if len(tensor.shape) == 4 else 1
    shape = tuple(size or (size_of_open_axis if axis else 1) for axis, size in enumerate(tensor.shape))
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name
    return Input(tensor.name, shape, below=0 if "float" in dtype else 2, dtype=dtype)


def _make_keras_training(keras: Any, model: Any, batch: Any, word: str) -> Callable[[], object]:
    """Return a function that computes outputs and gradients; raise ModelError unless by TensorFlow."""
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
    """Return the model of a file in ONNX Runtime, on the CPU; raise ModelError where that cannot be."""
    word, name = request.word, request.name
    if request.backward:
        raise ModelError(f"{word} has no backward pass: leave --backward")
    if request.options:
        raise ModelError(f"{word}: an ONNX model has no options, was given {', '.join(request.options)}")
    if not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    runtime = import_library("onnxruntime", word)
    try:
        session = runtime.InferenceSession(name, providers=["CPUExecutionProvider"])
    # ONNX Runtime has errors of its own for each kind of damage.
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load {name}: {str(error).splitlines()[0]}") from error
    generator = np.random.default_rng(0)
    inputs = set_input_shapes([_onnx_input(entry) for entry in session.get_inputs()], request.shapes)
    value_by_name = {entry.name: entry.value(generator) for entry in inputs}
    kind = session.get_modelmeta().graph_name or "graph"
    return Subject(word, kind, model=session, inputs=inputs, call=lambda: session.run(None, value_by_name))


def _onnx_input(node: Any) -> Input:
    """Return an input of a graph; sizes that the graph leaves open are 1."""
    shape = tuple(size if isinstance(size, int) and size > 0 else 1 for size in node.shape)
    element_type = node.type.removeprefix("tensor(").removesuffix(")")
    below = 0 if element_type in ("float", "double", "float16") else 2
    return Input(node.name, shape, below, dtype=_ONNX_TYPES.get(element_type, element_type))
