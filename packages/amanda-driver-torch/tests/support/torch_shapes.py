"""Every native callable of torch with arguments of many shapes, most of them wrong: as without a tool.

`python -m torch_shapes [EVERY] [FIRST]` calls each EVERY-th from FIRST on. A callable that takes its process
down without a scope is passed over and named; one that does so in a scope alone, or ends otherwise there, is
an error.
"""

from __future__ import annotations

import faulthandler
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import amanda
from amanda.drivers.torch._targets import Target, targets


class Untouched(amanda.Tool):
    """Routines before and after every op, which hand back what they were given."""

    def __init__(self) -> None:
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._same)
        context.insert_after_op(self._same)

    def _same(self, *values: Any) -> Any:
        return values


class Sub(torch.Tensor):
    """A tensor of the user's own."""


def matrix(**options: Any) -> torch.Tensor:
    """Three by three, the same every time."""
    return torch.linspace(0.1, 0.9, 9, **options).reshape(3, 3)


def grown() -> torch.Tensor:
    """A matrix that needs a gradient."""
    return matrix().requires_grad_()


SHAPES: list[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    lambda: ((), {}),
    lambda: ((matrix(),), {}),
    lambda: ((grown() * 1,), {}),
    lambda: ((matrix(), matrix()), {}),
    lambda: ((matrix(), torch.nn.Parameter(matrix()), matrix()), {}),
    lambda: ((matrix(), 1), {}),
    lambda: ((matrix(), 0, 1), {}),
    lambda: (([matrix(), matrix()],), {}),
    lambda: ((matrix().as_subclass(Sub),), {}),
    lambda: ((matrix(), None), {}),
    lambda: ((matrix(), "no", object()), {}),
    lambda: ((matrix(),), {"dim": 0}),
    lambda: ((matrix(),), {"out": torch.empty(0)}),
    lambda: ((matrix(),), {"no such name": 1, "\udc80": 2}),
    lambda: ((torch.tensor([1, 2]), torch.tensor([0, 1])), {}),
    lambda: (tuple(matrix() for _ in range(40)), {}),
    lambda: ((3, [1, 2], {}), {}),
]
ADDRESS = re.compile(r"0x[0-9a-f]+|\bid=\d+")


def perform(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the call as its kind is called."""
    name = getattr(target.callable, "__name__", target.name)
    if target.kind == "getset":
        return getattr(args[0], name)
    if target.kind == "classmethod":
        return getattr(torch.autograd.Function, name)(*args, **kwargs)
    return target.callable(*args, **kwargs)


def described(value: Any) -> str:
    """Type and contents, bit by bit."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor)
        numbers = "" if plain.layout is not torch.strided or plain.is_meta else str(plain.tolist())
        grad = type(value.grad_fn).__name__
        kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.requires_grad}"
        return f"{kind} {grad} {numbers}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    return ADDRESS.sub("", f"{type(value).__name__} {value!r}")


def outcome(target: Target, shape: int) -> str:
    """What a call gives or raises, and what its arguments are then."""
    torch.manual_seed(0)
    args, kwargs = SHAPES[shape]()
    try:
        ended = described(perform(target, args, kwargs))
    except Exception as error:
        ended = ADDRESS.sub("", f"raises {type(error).__name__}: {error}")
    return f"{ended} {described(args)}"


def child(marker: Path, first: int, every: int) -> None:
    """Call from the first on; the marker says which call is being made, and whether in a scope."""
    faulthandler.enable()
    everything = list(targets())
    differences = []
    for index in range(first, len(everything), every):
        target = everything[index]
        for shape in range(len(SHAPES)):
            marker.write_text(f"{index} {shape} bare")
            bare = [outcome(target, shape) for _ in range(2)]
            marker.write_text(f"{index} {shape} scope")
            with amanda.apply(Untouched()):
                outcomes = [outcome(target, shape) for _ in range(2)]
            if bare[0] == bare[1] and outcomes != bare:
                differences.append(f"{target.name} {shape}: bare {bare[0]}; in a scope {outcomes}")
    marker.write_text("done")
    sys.stdout.write("\n".join(differences))


def main(every: int = 1, first: int = 0) -> int:
    """Run children until all is called; the number of errors."""
    everything, errors, passed_over = list(targets()), [], []
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        while True:
            command = [sys.executable, "-m", "torch_shapes", "child", str(marker), str(first), str(every)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            errors += done.stdout.splitlines()
            words = marker.read_text().split()
            if words == ["done"]:
                break
            index, shape, where = int(words[0]), words[1], words[2]
            name = f"{everything[index].name} {shape}: {done.stderr[-1500:]}"
            (passed_over if where == "bare" else errors).append(name)
            first = index + every
    sys.stdout.write("".join(f"passed over: {name.splitlines()[0]}\n" for name in passed_over))
    sys.stdout.write("".join(f"{error}\n" for error in errors))
    return len(errors)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(bool(main(*map(int, sys.argv[1:]))))
