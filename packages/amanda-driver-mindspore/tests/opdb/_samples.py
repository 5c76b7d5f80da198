"""Arguments of calls of MindSpore's functions, by short names, and the functions themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

RANDOM = np.random.RandomState(0)
FLOATS = {
    "x": RANDOM.uniform(0.1, 0.9, (3, 4)),
    "y": RANDOM.uniform(0.1, 0.9, (3, 4)),
    "z": RANDOM.uniform(0.1, 0.9, (3, 4)),
    "t": RANDOM.uniform(0.1, 0.9, (4, 5)),
    "m": RANDOM.uniform(0.1, 0.9, (3, 3)) + 2 * np.eye(3),
    "v": RANDOM.uniform(0.1, 0.9, (4,)),
    "s": RANDOM.uniform(0.1, 0.9, ()),
    "p": RANDOM.uniform(0.1, 0.9, (2, 3, 4)),
    "q": RANDOM.uniform(0.1, 0.9, (2, 4, 5)),
    "image": RANDOM.uniform(-1, 1, (2, 4, 8, 8)),
    "kernel": RANDOM.uniform(-1, 1, (3, 4, 3, 3)),
    "turned": RANDOM.uniform(-1, 1, (4, 3, 3, 3)),
    "volume": RANDOM.uniform(-1, 1, (1, 2, 6, 6, 6)),
    "kernel3": RANDOM.uniform(-1, 1, (3, 2, 3, 3, 3)),
    "signal": RANDOM.uniform(-1, 1, (2, 4, 8)),
    "kernel1": RANDOM.uniform(-1, 1, (3, 4, 3)),
    "c4": RANDOM.uniform(0.5, 1, (4,)),
    "c3": RANDOM.uniform(0.5, 1, (3,)),
}
OTHERS = {
    "i": RANDOM.randint(0, 3, (3, 4)).astype(np.int64),
    "j": RANDOM.randint(1, 4, (3, 4)).astype(np.int64),
    "n": np.array([0, 2, 1], np.int64),
    "n32": np.array([0, 2, 1], np.int32),
    "b": RANDOM.rand(3, 4) > 0.5,
    "a": RANDOM.rand(3, 4) > 0.5,
}
VALUES: Mapping[str, Any] = {
    "0": 0, "1": 1, "2": 2, "-1": -1, "0.5": 0.5, "none": None, "true": True, "false": False,
    "axes": (0, 1), "turn": (1, 0), "shape": (4, 3), "pads": (1, 1), "size": (2, 2), "size3": (2, 2, 2),
    "wide": (16, 16), "mean": "mean", "float16": ms.float16, "float32": ms.float32, "ij,jk->ik": "ij,jk->ik",
}  # fmt: skip


def arguments(names: str) -> list[Any]:
    """Return new arguments: tensors by their names, numbers, "[x,y]" as a list of tensors."""
    return [_argument(name) for name in names.split()]


def _argument(name: str) -> Any:
    if name.startswith("["):
        return [_argument(element) for element in name[1:-1].split("|")]
    if name in FLOATS:
        return Tensor(FLOATS[name].astype(np.float32))
    return Tensor(OTHERS[name]) if name in OTHERS else VALUES[name]


def function(name: str) -> Callable[..., Any]:
    """Return a function by its name, "mint.add", or a method of tensors, "Tensor.add"."""
    path, _, last = name.rpartition(".")
    result: Callable[..., Any] = (
        getattr(Tensor, last) if path == "Tensor" else getattr(import_module(f"mindspore.{path}"), last)
    )
    return result
