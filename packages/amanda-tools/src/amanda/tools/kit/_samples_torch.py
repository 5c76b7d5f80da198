"""Values of function transforms of PyTorch: the tensors within the wrappers, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amanda.tools.kit._tensors import RequiredNames, Samples

if TYPE_CHECKING:
    from torch import Tensor

_FUNCTIONS = (
    "_add_batch_dim", "get_unwrapped", "is_batchedtensor", "is_functorch_wrapped_tensor",
    "maybe_get_bdim", "maybe_get_level", "peek_interpreter_stack", "pop_dynamic_layer_stack",
    "push_dynamic_layer_stack",
)  # fmt: skip
_REQUIRED = RequiredNames(
    "amanda.tools.kit", "torch", *(f"torch:_C._functorch.{name}" for name in _FUNCTIONS)
)


class TorchSamples(Samples):
    """The samples of a tensor that transforms of torch.func have wrapped."""

    def __init__(self, x: Tensor) -> None:
        import torch

        _REQUIRED.check()
        functions: Any = torch._C._functorch
        self._functions = functions
        axes: dict[int, int] = {}
        while functions.is_functorch_wrapped_tensor(x):
            if functions.is_batchedtensor(x):
                axis = functions.maybe_get_bdim(x)
                # An inner layer has the axes of outer batches too, which shift from its axis on.
                axes = {level: place + (place >= axis) for level, place in axes.items()}
                axes[functions.maybe_get_level(x)] = axis
            x = functions.get_unwrapped(x)
        # Levels count from the outermost transform.
        self.levels = tuple(sorted(axes))
        with torch.no_grad(), self.outside():
            data = x.detach().movedim([axes[level] for level in self.levels], [*range(len(axes))])
        self.data, self.sizes = data, tuple(data.shape[: len(axes)])

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave all transforms within the context."""
        stack: list[Any] = []
        try:
            while self._functions.peek_interpreter_stack() is not None:
                stack.append(self._functions.pop_dynamic_layer_stack())
            yield
        finally:
            while stack:  # the outermost, which was left last, comes first
                self._functions.push_dynamic_layer_stack(stack.pop())

    def wrapped(self, data: Tensor) -> Tensor:
        """Return data with axes of samples in front as one value under the transforms."""
        # Each call takes the axis in front, so that the batches come in the order of the levels.
        for level in self.levels:
            data = self._functions._add_batch_dim(data, 0, level)
        return data
