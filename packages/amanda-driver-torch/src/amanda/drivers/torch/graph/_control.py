"""`control`: whether compiled code computes the same numbers with tools as without."""

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

    largest: distance between two of its elements; nan where shapes differ, an element is nan, or a run lacks
    the tensor.
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
        # A difference of nan, which is not a number, counts as the largest.
        widest = max(
            self.differences,
            key=lambda difference: (difference.largest != difference.largest, difference.largest),
        )
        noise_text = f"differ in {len(self.noise)}" if self.noise else "are equal to the bit"
        return (
            f"{len(self.differences)} of {self.compared} tensors differ from those of the unobserved run, "
            f"most of all {widest.name} by {widest.largest:.1e}; two unobserved runs {noise_text}"
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
    state = _ModelState(model)
    try:
        plain_values, repeated_values = state.run(step), state.run(step)
        with apply(*tools, compiled="instrument"):
            observed_values = state.run(step)
    finally:
        state.restore()
    return Control(
        len(plain_values),
        list(_differences(plain_values, observed_values)),
        list(_differences(plain_values, repeated_values)),
    )


class _ModelState:
    """State of a model, and of the generators of random numbers, from which every run begins."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Copy the model's parameters, buffers and gradients, and the states of the generators."""
        self._model = model
        self._tensors = {name: tensor.detach().clone() for name, tensor in _named_tensors(model)}
        self._gradients = {name: _copy_of(tensor.grad) for name, tensor in model.named_parameters()}
        self._cpu_generator_state = torch.get_rng_state()
        self._device_generator_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Set the model and the generators back to the state."""
        with torch.no_grad():
            for name, tensor in _named_tensors(self._model):
                tensor.copy_(self._tensors[name])
        for name, parameter in self._model.named_parameters():
            parameter.grad = _copy_of(self._gradients[name])
        torch.set_rng_state(self._cpu_generator_state)
        if self._device_generator_states:
            torch.cuda.set_rng_state_all(self._device_generator_states)

    def run(self, step: Callable[[], Any]) -> dict[str, torch.Tensor]:
        """Run a step from the state; return its outputs, the gradients and the model's tensors by name."""
        self.restore()
        path_outputs, _ = tree_flatten_with_path(step())
        values = {f"output{keystr(path)}": output for path, output in path_outputs}
        values |= {f"gradient of {name}": tensor.grad for name, tensor in self._model.named_parameters()}
        values |= dict(_named_tensors(self._model))
        return {
            name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)
        }


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _differences(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Iterator[Difference]:
    """Yield the tensors that differ in a bit, with the largest distance; NaN for another shape or none."""
    for name in {**first, **second}:
        if name not in first or name not in second or first[name].shape != second[name].shape:
            yield Difference(name, float("nan"))
        elif first[name].dtype != second[name].dtype or not torch.equal(
            _as_bytes(first[name]), _as_bytes(second[name])
        ):
            # Differences of small integers and halves would overflow, or lose their last bits.
            wide_dtype = torch.complex128 if first[name].is_complex() else torch.float64
            yield Difference(
                name, float((first[name].to(wide_dtype) - second[name].to(wide_dtype)).abs().max())
            )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes: NaN must equal NaN, and 0.0 differ from -0.0.
    return tensor.reshape(-1).contiguous().view(torch.uint8)
