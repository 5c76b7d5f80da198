"""Random programs of views, writes, gradients and modes, to be run with and without tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SIZE = 6
"""Elements of each tensor that a program begins with."""


class Step(NamedTuple):
    """One statement of a program: what it does, to which of the tensors, in which mode."""

    kind: str
    first: int
    second: int
    mode: str


def half(x: Tensor) -> Tensor:
    """Return a view of the first half."""
    return x[: max(len(x) // 2, 1)]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "half": half,
    "every other": lambda x: x[::2],
    "view": lambda x: x.view(-1) if x.is_contiguous() else x.reshape(-1),
    "matrix": lambda x: x.reshape(2, -1).t()[0] if len(x) % 2 == 0 else x,
    "narrow": lambda x: x.narrow(0, len(x) // 2, len(x) - len(x) // 2),
    "chunk": lambda x: x.chunk(2)[-1],
    "unbind": lambda x: torch.stack(x.unbind()),
    "diagonal": lambda x: torch.outer(x, x).diagonal(),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1)[1],
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "as_strided": lambda x: x.as_strided(x.shape, x.stride(), x.storage_offset()),
    "flip": lambda x: x.flip(0),
    "mask": lambda x: x[x < 0.5] if (x < 0.5).any() else x,
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(_like(y, x)),
    "mul_": lambda x, y: x.mul_(2),
    "copy_": lambda x, y: x.copy_(_like(y, x)),
    "item": lambda x, y: x.__setitem__(0, y.sum()),
    "slice": lambda x, y: x.__setitem__(slice(0, 2), 0.25),
    "index": lambda x, y: x.__setitem__(torch.tensor([len(x) - 1]), 0.75),
    "relu_": lambda x, y: x.relu_(),
    "out": lambda x, y: torch.mul(x.detach(), 3, out=x),
    "foreach": lambda x, y: torch._foreach_add_(list(x.chunk(2)), 1.0),
}
PURE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + _like(y, x),
    "mul": lambda x, y: x * _like(y, x),
    "exp": lambda x, y: x.clamp(-2, 2).exp(),
    "cat": lambda x, y: torch.cat([x, y]).index_select(0, torch.arange(min(SIZE, len(x) + len(y)))),
    "where": lambda x, y: torch.where(x > 0, x, _like(y, x)),
    "checkpoint": lambda x, y: checkpoint(lambda z: z.sin() * 2, x, use_reentrant=False),
    "linear": lambda x, y: torch.nn.functional.linear(x, torch.outer(_like(y, x), x)),
    "cumsum": lambda x, y: x.cumsum(0),
}
MODES = ("grad", "grad", "no_grad", "hooks")


def programs(most: int = 10) -> st.SearchStrategy[list[Step]]:
    """Return a strategy for programs of so many statements at most."""
    kinds = st.sampled_from([*VIEWS, *WRITES, *PURE])
    step = st.builds(Step, kinds, st.integers(0, 5), st.integers(0, 5), st.sampled_from(MODES))
    return st.lists(step, min_size=2, max_size=most)


def run(program: Sequence[Step]) -> list[Any]:
    """Run a program; return its tensors, the gradients of its leaves, and what its hooks were given.

    Raises what torch raises, as for a write into a leaf.
    """
    torch.manual_seed(0)
    leaves = [torch.linspace(-1, 1, SIZE).requires_grad_(), torch.linspace(0.5, 2, SIZE).requires_grad_()]
    tensors: list[Tensor] = [leaves[0] * 1.5, leaves[1] + 0.5, torch.linspace(-2, 1, SIZE)]
    hooked: list[Tensor] = []
    for step in program:
        x, y = (tensors[i % len(tensors)] for i in (step.first, step.second))
        with torch.set_grad_enabled(step.mode != "no_grad"):
            if step.kind in WRITES:
                WRITES[step.kind](x, y)
            else:
                result = VIEWS[step.kind](x) if step.kind in VIEWS else PURE[step.kind](x, y)
                is_new = (
                    step.kind in PURE
                )  # a view may be the very tensor, whose hooks see all of its gradient
                if result.requires_grad and is_new and step.mode == "hooks":
                    result.register_hook(lambda grad: hooked.append(grad.clone()))
                tensors.append(result)
    values = [tensor.detach().clone() for tensor in tensors]
    loss = sum((tensor * tensor).sum() for tensor in tensors if tensor.requires_grad)
    gradients: list[Any] = []
    if isinstance(loss, Tensor):
        first = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)
        gradients += first
        hook_count = len(hooked)  # later gradients of a result that its own op has saved go by another way
        again = sum(tensor.sum() for tensor in first if tensor is not None and tensor.requires_grad)
        if isinstance(again, Tensor):
            gradients += torch.autograd.grad(again, leaves, allow_unused=True)
        del hooked[hook_count:]
    return [values, [None if tensor is None else tensor.detach() for tensor in gradients], hooked]


def _like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return as many elements as another has."""
    return tensor.repeat(SIZE)[: len(like)]
