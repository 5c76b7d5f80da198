"""Control of observed compiled code: whether its numbers are those of the same code without tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from amanda import apply
from torch.utils._pytree import keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from amanda import Tool


class Difference(NamedTuple):
    """One tensor that two runs compute differently.

    largest: distance between two of its elements; nan where shapes or types differ, or an element is none.
    """

    name: str
    largest: float


@dataclass(frozen=True)
class Control:
    """Comparison of a compiled step that tools observe with the same step without tools; true if equal.

    compared: number of tensors.  differences: between the step without tools and the observed one, to the
    bit.  noise: the same between two runs without tools.
    """

    compared: int
    differences: Sequence[Difference]
    noise: Sequence[Difference]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        """Return the comparison in one sentence."""
        if not self.differences:
            return f"{self.compared} tensors are those of the unobserved run, to the bit"
        most = max(self.differences, key=lambda one: (one.largest != one.largest, one.largest))
        noise = f"differ in {len(self.noise)}" if self.noise else "are equal to the bit"
        return (
            f"{len(self.differences)} of {self.compared} tensors differ from those of the unobserved run, "
            f"most of all {most.name} by {most.largest:.1e}; two unobserved runs {noise}"
        )


def control(step: Callable[[], Any], model: torch.nn.Module, *tools: Tool) -> Control:
    """Run a compiled step twice without tools and once with them, and compare its numbers to the bit.

    step: takes no argument, calls compiled code, and may go on to the backward pass.  model: parameters,
    buffers, gradients and the generators of random numbers are set back before each run, and in the end.
    Compared are the tensors that `step` returns, the gradients, and the model's parameters and buffers.
    The tools run in a scope with `compiled="instrument"`, and see one step.

    >>> import amanda, torch
    >>> from amanda.drivers.torch.graph import control
    >>> model = torch.nn.Linear(2, 1)
    >>> compiled = torch.compile(model, backend="aot_eager")
    >>> print(control(lambda: compiled(torch.ones(3, 2)), model, amanda.Tool()))
    3 tensors are those of the unobserved run, to the bit
    """
    kept = _State(model)
    try:
        bare, again = kept.run(step), kept.run(step)
        with apply(*tools, compiled="instrument"):
            observed = kept.run(step)
    finally:
        kept.restore()
    return Control(len(bare), list(_differences(bare, observed)), list(_differences(bare, again)))


class _State:
    """State of a model, and of the generators of random numbers, from which every run begins."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held = {name: one.detach().clone() for name, one in _held(model)}
        self._gradients = {name: _copied(one.grad) for name, one in model.named_parameters()}
        self._random = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        with torch.no_grad():
            for name, one in _held(self._model):
                one.copy_(self._held[name])
        for name, parameter in self._model.named_parameters():
            parameter.grad = _copied(self._gradients[name])
        torch.set_rng_state(self._random)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    def run(self, step: Callable[[], Any]) -> dict[str, torch.Tensor]:
        """Return the numbers of a run by their names."""
        self.restore()
        made = {f"output{keystr(path)}": one for path, one in tree_flatten_with_path(step())[0]}
        made |= {f"gradient of {name}": one.grad for name, one in self._model.named_parameters()}
        made |= dict(_held(self._model))
        return {name: one.detach().clone() for name, one in made.items() if isinstance(one, torch.Tensor)}


def _held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Iterator[Difference]:
    for name in {**one, **other}:
        if name not in one or name not in other or one[name].shape != other[name].shape:
            yield Difference(name, float("nan"))
        elif one[name].dtype != other[name].dtype or not torch.equal(_bits(one[name]), _bits(other[name])):
            wide = torch.complex128 if one[name].is_complex() else torch.float64
            yield Difference(name, float((one[name].to(wide) - other[name].to(wide)).abs().max()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
