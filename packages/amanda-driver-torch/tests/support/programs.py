"""Small programs of many kinds: each makes a model and gives the step that is repeated.

A step gives outputs, gradients and buffers; made anew, a program's first steps are those of before.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import amanda

Step = Callable[[], list[Tensor]]
Program = Callable[[], Step]


def bits(value: Any) -> Any:
    """What a value holds, every tensor in lists among it by its bits, to be compared with `==`."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), value.requires_grad, data
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def same_under(tool: amanda.Tool, run: Callable[[], Any]) -> amanda.Scope:
    """Check that a program gives under a tool what it gives without, twice, and after it."""
    bare = bits(run())
    with amanda.apply(tool) as scope:
        assert bits(run()) == bare
        assert bits(run()) == bare
    assert bits(run()) == bare
    return scope


def _results(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *model.buffers()]


def convolution() -> Step:
    """Convolution, batch norm, dropout, linear; a step of an optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Dropout(0.5), torch.nn.Linear(8, 2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    x, labels = torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 0])

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return _results(model, loss)

    return step


def transformer() -> Step:
    """One layer of a transformer over an embedding."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(7, 8)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    words = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def step() -> list[Tensor]:
        loss = layer(table(words)).square().mean()
        loss.backward()
        return _results(torch.nn.ModuleList([table, layer]), loss)

    return step


def functional() -> Step:
    """In-place ops, out=, views, subscripts, tuples of outputs, lists of inputs, no_grad inside."""
    torch.manual_seed(0)
    weight, out = torch.nn.Parameter(torch.randn(4, 4)), torch.empty(4, 4)
    x = torch.randn(4, 4)

    def step() -> list[Tensor]:
        torch.mul(x, 2, out=out)
        y = (2 - weight) ** 2 + out.T
        y[0] = x[1]
        y.view(-1)[3:5].mul_(3)
        first, second = y.split(2, dim=1)
        z = torch.cat([first, second.relu()], 1).add_(1)
        with torch.no_grad():
            count = int((z > 0).sum())
        loss = z.max(1).values.sum() + F.dropout(z).std() * count
        loss.backward()
        assert weight.grad is not None
        return [loss.detach(), weight.grad, out, y.detach()]

    return step


class Cube(torch.autograd.Function):
    """A function of the user's, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def second_order() -> Step:
    """The gradient of a gradient through the user's function."""
    torch.manual_seed(0)
    x = torch.randn(3, requires_grad=True)

    def step() -> list[Tensor]:
        y = Cube.apply(torch.sin(x)).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        return [y.detach(), grad.detach(), again]

    return step


def checkpointed() -> Step:
    """Checkpoints of both kinds, one within the other."""
    torch.manual_seed(0)
    inner, outer = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)

    def middle(value: Tensor) -> Tensor:
        inside: Tensor = checkpoint(lambda tensor: torch.tanh(inner(tensor)), value, use_reentrant=False)
        return F.dropout(outer(inside), 0.5)

    def step() -> list[Tensor]:
        loss = checkpoint(middle, x, use_reentrant=False).sum()
        loss = loss + checkpoint(inner, x, use_reentrant=True).sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad, *_results(torch.nn.ModuleList([inner, outer]), loss)]

    return step


PROGRAMS: tuple[Program, ...] = (convolution, transformer, functional, second_order, checkpointed)
