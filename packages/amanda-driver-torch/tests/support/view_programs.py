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


def write_rows_that_overlap() -> Tensor:
    b = torch.arange(12.0)
    rows = b.as_strided((3, 3), (2, 1))
    rows[0] = 7
    rows.t()[2] = 5
    b.unfold(0, 4, 2)[1:3] = 3
    return torch.cat([b, rows.flatten()])


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


def write_behind_expand() -> Tensor:
    b = torch.arange(6.0).reshape(2, 3)
    wide = b.expand(4, 2, 3)
    copy = wide.contiguous()
    copy.div_(2)
    row = wide[0]
    row.add_(1)
    return torch.cat([b.flatten(), wide.reshape(-1), copy.flatten()])


def write_into_an_expanded_tensor() -> Tensor:
    wide = torch.zeros(2).expand(3, 2)
    try:
        wide.add_(1)
    except RuntimeError:  # several elements are one in memory
        return wide * 1
    raise AssertionError


def write_copies_of_parts() -> Tensor:
    b = torch.arange(24.0).reshape(3, 8).requires_grad_() * 2
    b[:, :2].unsqueeze(0).reshape(-1).neg_()
    b[:, :2].view_as(b[:, 2:4]).flatten().neg_()
    b.t().transpose(0, 1).contiguous().mul_(3)
    return b.detach() * 1


def write_real_part() -> Tensor:
    def part() -> Tensor:
        return torch.fft.ifft(torch.fft.fft(torch.arange(20.0).reshape(2, 2, 5).requires_grad_())).real.mT

    r = part()[..., :3, :]
    r += part()[..., :3, :]
    r[..., 0] -= 1
    return r.detach() * 1


def write_imaginary_part() -> Tensor:
    c = torch.fft.fft(torch.arange(6.0))
    r, i = c.real, c.imag[1:4]
    c.mul_(2)
    i.add_(1)
    return torch.cat([torch.view_as_real(c).flatten(), r, i])


def _gradient_of_written(*writes: Callable[[Tensor], Any]) -> Tensor:
    """Return complex numbers that were written, what the writes returned, and the gradient of all."""
    p = torch.arange(8.0).mul(1 - 2j).reshape(2, 4).requires_grad_()
    z = p * 2
    written = [write(z) for write in writes]
    sum((tensor.abs() ** 2).sum() for tensor in (z, *written)).backward()
    return torch.cat([torch.view_as_real(tensor.detach().resolve_conj()).flatten() for tensor in (z, p.grad)])


def write_conjugates() -> Tensor:
    return _gradient_of_written(lambda z: z.conj().neg_(), lambda z: z.conj()[0].mul_(1j))


def write_parts_of_conjugates() -> Tensor:
    return _gradient_of_written(lambda z: z.conj().imag.mul_(3), lambda z: z[1:].conj().real.t()[0].add_(1))


def write_pairs_of_slices() -> Tensor:
    return _gradient_of_written(lambda z: torch.view_as_real(z[..., ::2]).mul_(3), lambda z: z[1:].neg_())


def write_numbers_whose_parts_were_written() -> Tensor:
    return _gradient_of_written(lambda z: z.real[..., ::2].mul_(3), lambda z: z[0].unsqueeze(0).fill_(5))


def _written_values(layout: torch.layout) -> Tensor:
    s = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(layout=layout)
    v = s.values()
    v[1:].add_(1)
    s.mul_(2)
    return torch.cat([s.to_dense().flatten(), v])


def write_values_of_csr() -> Tensor:
    return _written_values(torch.sparse_csr)


def write_values_of_csc() -> Tensor:
    return _written_values(torch.sparse_csc)


def write_values_of_coo() -> Tensor:
    return _written_values(torch.sparse_coo)


def write_indices() -> Tensor:
    s = torch.eye(2).to_sparse()
    s.indices()[1].copy_(torch.tensor([1, 0]))
    return s.to_dense()


def write_what_a_sparse_tensor_is_made_of() -> Tensor:
    v = torch.tensor([1.0, 2.0])
    s = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), v, (2, 2))
    v.fill_(7)
    return s.to_dense()


def write_values_of_jagged() -> Tensor:
    v = torch.zeros(3, 1)
    n = torch.nested.nested_tensor_from_jagged(v, torch.tensor([0, 2, 3]))
    v.add_(1)
    n.values().mul_(3)
    n.unbind()[0].add_(1)
    return torch.cat([n.values(), v])


def write_nested() -> Tensor:
    n = torch.nested.nested_tensor([torch.arange(6.0).view(2, 3), torch.ones(1, 3)])
    first, last = n.unbind()
    first.add_(1)
    n.values().mul_(2)
    n.mul_(3)
    return torch.cat([n.to_padded_tensor(0.0).flatten(), first.flatten(), last.flatten()])


def gradient_of_nested() -> Any:
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    n = torch.nested.as_nested_tensor([a, b])
    torch.softmax((n * 3).transpose(1, 2).contiguous(), -1).to_padded_tensor(0.0)[:, 0].sum().backward()
    return torch.cat([a.grad, b.grad])


def write_parameters_in_one_memory() -> Tensor:
    flat = torch.ones(5)
    parts = [torch.nn.Parameter(flat[:2]), torch.nn.Parameter(flat[2:])]
    for part in parts:
        part.grad = torch.ones_like(part)
    torch.optim.SGD(parts, lr=0.5, fused=True).step()
    return flat


def write_detached() -> Tensor:
    b = torch.zeros(3)
    b.detach()[1:].add_(1)
    b.data[0] = 5
    return b


class _Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


def write_within_a_function() -> Tensor:
    b = torch.zeros(3)
    v = b[:2]
    _Writing.apply(torch.ones(2, requires_grad=True), b)  # type: ignore[no-untyped-call]
    return v * 1


def hand_back_parameters() -> Tensor:
    p = torch.nn.Parameter(torch.ones(3))
    same = [
        p.contiguous(), p.to("cpu"), p.float(), p.type_as(p), torch.real(p), p.resolve_conj(),
        torch.dropout(p, 0.5, False), torch.atleast_1d((p, p))[0], torch.ops.aten.contiguous(p), +p,
    ]  # fmt: skip
    optimizer = torch.optim.SGD([same[0]], lr=0.5)
    (same[1] * 2).sum().backward()
    optimizer.step()
    return torch.cat([p.detach(), torch.tensor([float(tensor is p) for tensor in same])])


PROGRAMS: list[Program] = [
    copy_into_slice, add_to_view, out_into_slice, fill_diagonal, add_to_chunk, write_base, write_other_view,
    write_through_views_of_views, write_row_of_expanded, write_rows_that_overlap, foreach_on_parts,
    complex_as_real, other_type,
    numpy_array, weight_under_no_grad, in_inference_mode, while_disabled, gradient_of_what_is_copied,
    gradient_through_written_views, gradient_through_a_written_base, gradient_of_what_no_grad_hands_through,
    write_behind_expand, write_into_an_expanded_tensor, write_real_part, write_imaginary_part,
    write_copies_of_parts, write_conjugates, write_parts_of_conjugates, write_pairs_of_slices,
    write_numbers_whose_parts_were_written,
    write_values_of_csr, write_values_of_csc, write_values_of_coo, write_indices,
    write_what_a_sparse_tensor_is_made_of, write_values_of_jagged, write_nested,
    write_parameters_in_one_memory, write_detached, write_within_a_function, hand_back_parameters,
]  # fmt: skip
