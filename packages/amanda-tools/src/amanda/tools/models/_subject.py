"""A model by its word: found by the word's kind, with inputs, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.options import Name, checked
from amanda.tools.models._inputs import Input, ModelError

KINDS = ("hf", "timm", "torch", "keras", "onnx")
"""Words before the colon of a model's name."""
_FILES = {".onnx": "onnx", ".keras": "keras"}


@dataclass(frozen=True)
class Subject:
    """A model that runs on inputs of its own.

    word: how it was named.  kind: its class.  parameters: their number; None where it is not known.
    model, inputs: what it is called with.  call: runs it once.
    """

    word: str
    kind: str
    model: Any
    inputs: Sequence[Input]
    call: Callable[[], object]
    parameters: int | None = None

    def __str__(self) -> str:
        counted = "" if self.parameters is None else f"{self.parameters:,} parameters, "
        return f"{self.word}: {self.kind}, {counted}{', '.join(map(str, self.inputs))}"

    def run(self) -> None:
        """Run the model once.  Raises ModelError if it does not run on its inputs."""
        try:
            self.call()
        except Exception as error:
            if isinstance(error, AmandaError) or getattr(error, "__notes__", None):  # of a tool
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            shapes = ", ".join(map(str, self.inputs))
            fix = "give shapes that fit by --input-shape [NAME=]N,N,..."
            raise ModelError(f"{self.word} does not run on {shapes}: {reason}; {fix}") from error


def is_model(word: str) -> bool:
    """Return True for a word that names a model: `hf:llama`, `model.onnx`."""
    return (word.partition(":")[0] in KINDS and ":" in word) or (
        Path(word).suffix in _FILES and Path(word).is_file()
    )


@checked(error=ModelError)
def made(word: Name, shapes: Sequence[Name] = (), backward: bool = False, device: Name = "cpu") -> Subject:
    """Return the model of a word.

    shapes: of inputs, as `--input-shape` has them.  backward: whether a run includes the backward pass.
    device: as PyTorch calls it; "meta" for shapes without values.
    Raises ModelError for a word without a model, a package that is not installed, and shapes that do not fit.
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
    name, options = _split(model_name)
    module = {"hf": "_hf", "timm": "_timm", "torch": "_torch"}.get(kind, f"_{kind}")
    maker: Callable[..., Subject] = import_module(f"amanda.tools.models.{module}").made
    return maker(word, name, options, shapes, backward=backward, device=device)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return a model's name, and the options that may follow behind a colon: "llama:hidden_size=64"."""
    import yaml

    from amanda.tools.command import ToolSpec

    name, _, last = text.rpartition(":")
    if not name or "=" not in last:
        return text, {}
    values = ToolSpec.parse(f"model:{last}").given
    try:
        return name, {key: yaml.safe_load(value[-1]) for key, value in values.items()}  # type: ignore[index]
    except yaml.YAMLError as error:
        raise ModelError(f"the options {last!r} cannot be read: {error}") from None


def library(name: str, word: str, package: str = "") -> Any:
    """Import a library that a model needs; raise ModelError where it is absent or broken."""
    package = package or name
    try:
        return import_module(name)
    except Exception as error:  # a binary that does not fit raises other errors than ImportError
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ModelError(
                f"{word} needs {package}, which is not installed: pip install {package}"
            ) from None
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{word} needs {package}, whose import fails: {first}") from error
