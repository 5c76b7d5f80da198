"""Small programs in which tensors share memory, and are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

import amanda

Program = Callable[[], Tensor]


def copy_into_slice() -> Tensor:
    b = torch.zeros(4)
    b[:2].copy_(torch.ones(2))
    return b


def add_to_view() -> Tensor:
    b = torch.zeros(4)
    b.view(-1).add_(1)
    return b


def out_into_slice() -> Tensor:
    b = torch.zeros(4, 2)
    torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=b[:2])
    return b


def fill_diagonal() -> Tensor:
    b = torch.zeros(3, 3)
    b.diagonal().fill_(2)
    return b


def add_to_chunk() -> Tensor:
    b = torch.zeros(4)
    x, _ = b.chunk(2)
    x += 1
    return b


def write_base() -> Tensor:
    b = torch.zeros(4)
    v = b[:2]
    b.fill_(3)
    return v


def write_other_view() -> Tensor:
    b = torch.zeros(2, 3)
    v = b.view(-1)
    b.t()[1] = 4.0
    return v * 1


def write_through_views_of_views() -> Tensor:
    b = torch.zeros(3, 3)
    b.fill_diagonal_(1)
    b[torch.tensor([0, 1])] += 1
    b[:, 0][1:].sub_(4)
    b.T[2] = 9
    return b


def write_row_of_expanded() -> Tensor:
    b = torch.zeros(3)
    b.expand(2, 3)[1].add_(2)
    return b


def foreach_on_parts() -> Tensor:
    b = torch.zeros(6)
    torch._foreach_add_(list(b.split(2)), 1.0)
    return b


def complex_as_real() -> Tensor:
    b = torch.zeros(4, dtype=torch.complex64)
    torch.view_as_real(b)[:, 1].add_(2)
    return b


def other_type() -> Tensor:
    b = torch.zeros(4)
    b.view(torch.int32).fill_(1065353216)
    return b


def numpy_array() -> Tensor:
    array = numpy.zeros(3, numpy.float32)
    t = torch.from_numpy(array)
    t.add_(1)
    t[0] = 5
    return torch.tensor(array)


def weight_under_no_grad() -> Tensor:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.t().copy_(torch.ones(2, 2))
        layer.weight.view(-1)[0] = 7
        layer.weight.data[1].zero_()
    return layer.weight.detach()


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        b = torch.zeros(4)
        b.view(2, 2)[0].fill_(1)
        return b.clone()


def while_disabled() -> Tensor:
    b = torch.arange(4.0)
    v = b[:3]
    with amanda.disabled():
        v.add_(1)
    return b * 1


def gradient_of_what_is_copied() -> Any:
    w = torch.arange(4.0, requires_grad=True)
    b = torch.zeros(4)
    b[:2].copy_(w[1:3])
    b.sum().backward()
    return w.grad


def gradient_through_written_views() -> Any:
    w = torch.arange(1.0, 5, requires_grad=True)
    b = w * 2
    v = b.view(2, 2)
    v[0].mul_(w[2].detach())
    v.t()[1].add_(b[0].clone() * w[1])
    (b * b).sum().backward()
    return w.grad


def gradient_through_a_written_base() -> Any:
    w = torch.arange(1.0, 5, requires_grad=True)
    b = w * 2
    v = b[1:3]
    b.mul_(w)
    (v * v).sum().backward()
    return w.grad


def gradient_of_what_no_grad_hands_through() -> Any:
    x = torch.ones(3, requires_grad=True) * 2
    x.retain_grad()
    with torch.no_grad():
        y = torch.nn.functional.dropout(x.contiguous(), 0.5, False)
    (y * 3).sum().backward()
    return x.grad


PROGRAMS: list[Program] = [
    copy_into_slice, add_to_view, out_into_slice, fill_diagonal, add_to_chunk, write_base, write_other_view,
    write_through_views_of_views, write_row_of_expanded, foreach_on_parts, complex_as_real, other_type,
    numpy_array, weight_under_no_grad, in_inference_mode, while_disabled, gradient_of_what_is_copied,
    gradient_through_written_views, gradient_through_a_written_base, gradient_of_what_no_grad_hands_through,
]  # fmt: skip
