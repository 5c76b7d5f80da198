"""A model by its word on the command line, as hf:llama: its inputs, and the model ready to run on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import amanda
from amanda.errors import AmandaError, did_you_mean
from amanda.options import Name, checked
from amanda.tools.libraries import numpy as np

_SHAPE = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<sizes>\d+([,x]\d+)*)?")


class ModelError(AmandaError, ValueError, module="amanda.tools.models"):
    """A model that was named cannot be made, or does not run on its inputs."""


@dataclass(frozen=True)
class Input:
    """One input of a model.

    below: bound of random whole numbers, which is not reached; 0 for numbers of [0, 1).  dtype: as in numpy.
    """

    name: str
    shape: tuple[int, ...]
    below: int = 0
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))})"

    def value(self, random: Any) -> Any:
        """Return an array of random numbers, of its shape and dtype.  random: a generator of numpy."""
        if self.below:
            return random.integers(0, self.below, self.shape).astype(self.dtype)
        return np.asarray(random.random(self.shape)).astype(self.dtype)


def set_input_shapes(inputs: Sequence[Input], shapes: Iterable[str]) -> list[Input]:
    """Return the inputs with the shapes of the command line: "2,3,224,224", or "NAME=2,64".

    A shape without a name is for the first input.  Raises ModelError for other text and unknown names.
    """
    input_by_name = {entry.name: entry for entry in inputs}
    for text in shapes:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise ModelError(f"--input-shape {text} is no shape; give sizes, as in 2,3,224,224 or NAME=2,64")
        name = match["name"] or inputs[0].name
        if name not in input_by_name:
            raise ModelError(
                f"--input-shape {text}: the model has no input {name!r}; {did_you_mean(name, input_by_name)}"
            )
        sizes = re.split("[,x]", match["sizes"]) if match["sizes"] else []
        input_by_name[name] = replace(input_by_name[name], shape=tuple(map(int, sizes)))
    return list(input_by_name.values())


KINDS = {
    "hf": "_transformers:transformers_model", "timm": "_loaders:timm_model", "torch": "_loaders:torch_model",
    "keras": "_loaders:keras_model", "onnx": "_loaders:onnx_model",
}  # fmt: skip
"""Words before the colon of a model's name, with the module and the function that load the model."""
_FILES = {".onnx": "onnx", ".keras": "keras"}


class Request(NamedTuple):
    """A model as the command line asks for it.

    word: all of it.  name: what is behind the kind.  options, shapes, backward, device: as `made` takes them.
    """

    word: str
    name: str
    options: Mapping[str, Any]
    shapes: Sequence[str]
    backward: bool
    device: str


@dataclass(frozen=True)
class Subject:
    """A model that runs on inputs of its own.

    word: how it was named.  kind: its class.  parameters: their number; None where it is not known.
    model, inputs: what it is called with.  call: runs it once.
    weights: where they come from; "" where that is not known.
    """

    word: str
    kind: str
    model: Any
    inputs: Sequence[Input]
    call: Callable[[], object]
    parameters: int | None = None
    weights: str = ""

    def __str__(self) -> str:
        counted = [] if self.parameters is None else [f"{self.parameters:,} parameters"]
        weights = [self.weights] if self.weights else []
        return f"{self.word}: {', '.join([self.kind, *counted, *weights, *map(str, self.inputs)])}"

    def run(self) -> None:
        """Call the model once on its inputs.  Raises ModelError if it fails; errors of a tool as they are."""
        try:
            self.call()
        except Exception as error:
            # Amanda adds notes to what a tool raises: then the model is not to blame.
            if isinstance(error, AmandaError) or getattr(error, "__notes__", None):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            shapes = ", ".join(map(str, self.inputs))
            fix = "give shapes that fit by --input-shape [NAME=]N,N,..."
            raise ModelError(f"{self.word} does not run on {shapes}: {reason}; {fix}") from error


def is_model(word: str) -> bool:
    """Return True for a word that names a model: `hf:llama`, or `model.onnx` where there is that file."""
    return (word.partition(":")[0] in KINDS and ":" in word) or (
        Path(word).suffix in _FILES and Path(word).is_file()
    )


@checked(error=ModelError)
def made(word: Name, shapes: Sequence[Name] = (), backward: bool = False, device: Name = "cpu") -> Subject:
    """Return the model of a word.

    Args:
        word: A word, path or name, as `amanda run` takes it.
        shapes: Of inputs, as `--input-shape` has them.
        backward: Whether a run includes the backward pass.
        device: As PyTorch calls it; "meta" for shapes without values.

    Raises:
        ModelError: For a word without a model, a package that is not installed, and shapes that do not fit.
    """
    kind, _, model_name = word.partition(":")
    if not (kind in KINDS and model_name):
        kind, model_name = _FILES.get(Path(word).suffix, ""), word
    if not kind:
        raise ModelError(
            f"word {word!r} names no model; give {', '.join(f'{key}:NAME' for key in KINDS)}, or FILE.onnx"
        )
    if device != "cpu" and kind in ("keras", "onnx"):
        raise ModelError(f"--device {device} is for models of PyTorch, {word} runs where {kind} puts it")
    if device not in ("cpu", "meta"):
        _check_device(import_library("torch", word), device)
    # The loaders, and what they import, are only for processes that make a model.
    module, _, loader = KINDS[kind].partition(":")
    load: Callable[[Request], Subject] = getattr(import_module(f"amanda.tools.models.{module}"), loader)
    return load(Request(word, *_split_options(model_name), shapes, backward, device))


def _check_device(torch: Any, device: str) -> None:
    """Raise ModelError for a device that PyTorch does not have here."""
    try:
        with amanda.disabled():
            torch.empty(1, device=device)
    except Exception as error:  # each kind of device has errors of its own
        devices = f"cpu,{' cuda,' * torch.cuda.is_available()} meta"
        raise ModelError(f"--device {device}: {str(error).splitlines()[0]}; there are {devices}") from error


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of "llama:hidden_size=64", values read as YAML; raise ModelError for others."""
    import yaml

    from amanda.tools.command import ToolSpec

    name, _, options_text = text.rpartition(":")
    if not name or "=" not in options_text:
        return text, {}
    texts_by_option = ToolSpec.parse(f"model:{options_text}").options
    try:
        return name, {key: yaml.safe_load(value[-1]) for key, value in texts_by_option.items()}  # type: ignore[index]
    except yaml.YAMLError as error:
        raise ModelError(f"the options {options_text!r} cannot be read: {error}") from None


def import_library(name: str, word: str) -> Any:
    """Import a library that a model needs, without tools; raise ModelError where it is absent or broken."""
    try:
        with amanda.disabled():  # a library may compute something as it is imported
            return import_module(name)
    except Exception as error:  # a binary that does not fit raises other errors than ImportError
        # Of another name, the package that is absent is one that the library itself needs.
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ModelError(f"{word} needs {name}, which is not installed: pip install {name}") from None
        raise ModelError(f"{word} needs {name}, whose import fails: {import_failure(error)}") from error


def import_failure(error: BaseException) -> str:
    """Return the first line of the error at the root of a failed import, and a fix for torchvision's."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "torchvision::" in reason:  # it finds no operators where it was built for another torch
        fix = "install both from one index, or uninstall torchvision"
        return f"{reason}; torchvision does not fit this torch: {fix}"
    return reason
