"""Inputs of a model: names, shapes and types, and values for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amanda.errors import AmandaError, did_you_mean
from amanda.tools.libraries import numpy as np

_SHAPE = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<sizes>\d+([,x]\d+)*)?")


class ModelError(AmandaError, ValueError):
    """A model that was named cannot be made, or does not run on its inputs."""


@dataclass(frozen=True)
class Input:
    """One input of a model.

    below: of whole numbers, the least that is too large; 0 for numbers of [0, 1).  dtype: as numpy calls it.
    """

    name: str
    shape: tuple[int, ...]
    below: int = 0
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))})"

    def value(self, random: Any) -> Any:
        """Return an array of random numbers.  random: a generator of numpy."""
        if self.below:
            return random.integers(0, self.below, self.shape).astype(self.dtype)
        return np.asarray(random.random(self.shape)).astype(self.dtype)


def reshaped(inputs: Sequence[Input], shapes: Iterable[str]) -> list[Input]:
    """Return the inputs with the shapes of the command line: "2,3,224,224", or "NAME=2,64".

    A shape without a name is for the first input.  Raises ModelError for other text and unknown names.
    """
    inputs_by_name = {entry.name: entry for entry in inputs}
    for text in shapes:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise ModelError(f"--input-shape {text} is no shape; give sizes, as in 2,3,224,224 or NAME=2,64")
        name = match["name"] or inputs[0].name
        if name not in inputs_by_name:
            raise ModelError(
                f"--input-shape {text}: the model has no input {name!r}; {did_you_mean(name, inputs_by_name)}"
            )
        sizes = re.split("[,x]", match["sizes"]) if match["sizes"] else []
        inputs_by_name[name] = replace(inputs_by_name[name], shape=tuple(map(int, sizes)))
    return list(inputs_by_name.values())
