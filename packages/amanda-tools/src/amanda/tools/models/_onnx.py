"""ONNX models, whose graphs have the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.models._inputs import Input, ModelError, reshaped
from amanda.tools.models._subject import Subject, library

_TYPES = {"float": "float32", "double": "float64"}


def made(
    word: str, name: str, options: Mapping[str, Any], shapes: Sequence[str], backward: bool, device: str
) -> Subject:
    """Return the model of a file in ONNX Runtime, on the CPU."""
    if backward:
        raise ModelError(f"{word} has no backward pass: leave --backward")
    if options:
        raise ModelError(f"{word}: an ONNX model has no options, was given {', '.join(options)}")
    if not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    runtime = library("onnxruntime", word)
    try:
        session = runtime.InferenceSession(name, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load {name}: {str(error).splitlines()[0]}") from error
    random = np.random.default_rng(0)
    inputs = reshaped([_input(entry) for entry in session.get_inputs()], shapes)
    values = {entry.name: entry.value(random) for entry in inputs}
    kind = session.get_modelmeta().graph_name or "graph"
    return Subject(word, kind, session, inputs, lambda: session.run(None, values))


def _input(node: Any) -> Input:
    """Return an input of a graph; sizes that the graph leaves open are 1."""
    shape = tuple(size if isinstance(size, int) and size > 0 else 1 for size in node.shape)
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    below = 0 if kind in ("float", "double", "float16") else 2
    return Input(node.name, shape, below, _TYPES.get(kind, kind))
