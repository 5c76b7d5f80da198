"""FLOPs of ops that are made of others, and of products by every name: counted by what they call inside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.tools.flops import FlopsTool

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
]


def counted(program: Callable[[], Any]) -> Any:
    tool = FlopsTool()
    with amanda.apply(tool):
        program()
    return tool.result


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, dtype=dtype, requires_grad=True)


def cell(kind: type[nn.Module], states: int) -> Callable[[], Tensor]:
    """One step of a cell of width 5 on two rows of width 3, whose state wants a gradient."""
    layer = kind(3, 5)
    state = [rand(2, 5) for _ in range(states)]
    return lambda: layer(rand(2, 3), tuple(state) if states > 1 else state[0])[
        slice(None) if states == 1 else 0
    ]


def grouped(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    return torch._grouped_mm(rand(16, 16, dtype=dtype), rand(2, 16, 8, dtype=dtype), offs=offsets)


def thrice(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(x @ weight)
    return x


PRODUCTS: dict[str, tuple[Callable[[], Tensor], int, int]] = {
    "LSTMCell": (cell(nn.LSTMCell, 2), 2 * 20 * (3 + 5), 2 * 2 * 20 * (3 + 5)),
    "GRUCell": (cell(nn.GRUCell, 1), 2 * 15 * (3 + 5), 2 * 2 * 15 * (3 + 5)),
    "RNNCell": (cell(nn.RNNCell, 1), 2 * 5 * (3 + 5), 2 * 2 * 5 * (3 + 5)),
    "tensordot": (lambda: torch.tensordot(rand(3, 4, 5), rand(4, 5, 6), 2), 3 * 20 * 6, 2 * 3 * 20 * 6),
    "inner": (lambda: torch.inner(rand(3, 4), rand(5, 4)), 60, 120),
    "multi_dot": (lambda: torch.linalg.multi_dot([rand(3, 4), rand(4, 5), rand(5, 6)]), 150, 300),
    "matrix_power": (lambda: torch.matrix_power(rand(4, 4), 4), 2 * 64, 4 * 64),
    "addbmm": (lambda: torch.addbmm(rand(3, 5), rand(2, 3, 4), rand(2, 4, 5)), 120, 240),
    "conv_tbc": (lambda: torch.conv_tbc(rand(7, 2, 3), rand(3, 3, 5), rand(5)), 5 * 2 * 5 * 9, 900),
    "grouped": (grouped, 16 * 16 * 8, 2 * 16 * 16 * 8),
    "sparse": (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), rand(4, 5)), 80, 80),
    "batches of einsum": (lambda: torch.einsum("...ij,...jk->...ik", rand(2, 3, 4), rand(2, 4, 5)), 120, 240),
    "einsum, one broadcast": (lambda: torch.einsum("...ij,jk", rand(2, 3, 4), rand(4, 5)), 120, 240),
    "einsum of three": (lambda: torch.einsum("ij,jk,kl->il", rand(2, 3), rand(3, 4), rand(4, 5)), 64, 128),
    "bilinear": (lambda: F.bilinear(rand(4, 2), rand(4, 3), rand(5, 2, 3)), 4 * 5 * 9, 3 * 4 * 5 * 9),
    "cov": (lambda: torch.cov(rand(3, 5)), 45, 90),
    "TorchScript": (lambda: torch.jit.script(thrice)(rand(3, 4), rand(4, 4)), 3 * 48, 2 * 3 * 48),
}
"""A program, and its multiply-accumulates forward and backward."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_any_name_is_counted_forward_and_backward(name: str) -> None:
    program, forward, backward = PRODUCTS[name]
    result = counted(lambda: program().float().sum().backward())
    assert (result.total("macs", "forward"), result.total("macs", "backward")) == (forward, backward)
    assert not result.missing


def test_integer_and_scaled_products_are_counted() -> None:
    ones = torch.ones(32, 16, dtype=torch.int8)
    assert counted(lambda: torch._int_mm(ones, ones.t().contiguous())).total("macs") == 32 * 16 * 32
    small, scale = torch.ones(32, 16).to(torch.float8_e4m3fn), torch.ones(())
    result = counted(lambda: torch._scaled_mm(small, small.t(), scale, scale, out_dtype=torch.float32))
    assert result.total("macs") == 32 * 16 * 32


@contextmanager
def without_one_dnn() -> Iterator[None]:
    """The kernels of ATen instead; `torch.backends.mkldnn.flags` warns of what it sets besides."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def lstm(layers: int, both: bool, batch_first: bool = False) -> nn.LSTM:
    return nn.LSTM(3, 5, layers, bidirectional=both, batch_first=batch_first)


@pytest.mark.parametrize(("layers", "both"), [(1, False), (4, True)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_backward_of_an_lstm_costs_the_same_in_one_kernel_and_in_many(
    layers: int, both: bool, batch_first: bool
) -> None:
    model, x = lstm(layers, both, batch_first), torch.rand(7, 2, 3)
    fused = counted(lambda: model(x)[0].sum().backward())
    with without_one_dnn():
        apart = counted(lambda: model(x)[0].sum().backward())
    assert fused.total("macs", "forward") == apart.total("macs", "forward")
    assert fused.total("macs", "backward") == apart.total("macs", "backward")


def test_experts_of_a_mixture_cost_what_they_do_one_by_one(transformers: Any) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    totals = []
    for experts, backend in (("grouped_mm", None), ("grouped_mm", "aot_eager"), ("eager", None)):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM._from_config(config, experts_implementation=experts)
        run, tool = model if backend is None else torch.compile(model, backend=backend), FlopsTool()
        with amanda.apply(tool, compiled="instrument"):
            run(torch.arange(32)[None]).logits.sum().backward()
        totals.append((tool.result.total("macs", "forward"), tool.result.total("macs", "backward")))
        assert not tool.result.missing
    assert totals[0] == totals[1] == totals[2]


OTHERS: dict[str, tuple[Callable[[], Any], int]] = {
    "inv": (lambda: torch.linalg.inv(rand(4, 4)), 2 * 64),
    "det": (lambda: torch.linalg.det(rand(3, 3)), 18),
    "cholesky": (lambda: torch.linalg.cholesky(torch.eye(3)), 9),
    "solve": (lambda: torch.linalg.solve(torch.eye(3), torch.ones(3, 2)), 18 + 36),
    "fft": (lambda: torch.fft.fft(torch.ones(4, 8, dtype=torch.complex64)), 5 * 32 * 3),
    "bilinear interpolation": (
        lambda: F.interpolate(rand(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
        8 * 128,
    ),
    "grid_sample": (lambda: F.grid_sample(rand(1, 2, 4, 4), rand(1, 3, 3, 2), align_corners=False), 8 * 32),
    "cdist": (lambda: torch.cdist(rand(5, 3), rand(4, 3)), 3 * 20 * 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_has_flops_alone(name: str) -> None:
    program, flops = OTHERS[name]
    with torch.no_grad():
        places = [place for place in counted(program).ops if place.flops]
    assert sum(place.flops or 0 for place in places) >= flops
    assert {flops} & {place.flops for place in places}
    assert not any(place.macs for place in places)


def test_gradients_of_a_decomposition_are_counted_by_what_they_call() -> None:
    result = counted(lambda: torch.linalg.inv(rand(4, 4) + 4 * torch.eye(4)).sum().backward())
    assert result.total("macs", "backward") == 2 * 64


def test_batch_norm_costs_its_statistics_in_training_alone() -> None:
    layer, x = nn.BatchNorm2d(3), torch.rand(2, 3, 4, 4)
    training = counted(lambda: layer(x)).by("type").rows()
    layer.eval()
    evaluated = counted(lambda: layer(x)).by("type").rows()
    flops = [next(row[3] for row in rows if row[0] == "batch_norm") for rows in (training, evaluated)]
    assert flops == [7 * x.numel(), 4 * x.numel()]


def moved(program: Callable[[], Any], kind: str) -> int:
    return sum(place.bytes for place in counted(program).ops if place.type == kind)


def test_bytes_are_those_that_move() -> None:
    table, rows = torch.rand(1000, 8), torch.tensor([1, 2, 3])
    assert moved(lambda: F.embedding(rows, table), "embedding") == 2 * 3 * 32 + 3 * 8
    x = torch.rand(6, 4)
    assert moved(lambda: x.contiguous(), "contiguous") == 0
    assert moved(lambda: x.t().contiguous(), "contiguous") == 2 * 96
    assert moved(lambda: x.view(4, 6), "reshape") == moved(lambda: x[0], "getitem") == 0
    assert moved(lambda: x.clone(), "clone") == moved(lambda: x.copy_(x + 1), "copy") == 2 * 96
    assert moved(lambda: torch.zeros(6, 4), "zeros") == moved(lambda: x.zero_(), "zero") == 96


def test_a_script_that_is_counted_computes_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.norm(x))

    program, x = torch.jit.script(Counting()), torch.rand(3, 4)
    torch.manual_seed(0)
    counted(lambda: program(x))
    after = torch.rand(1)
    assert program.norm.num_batches_tracked == 1
    torch.manual_seed(0)
    torch.jit.script(Counting())(x)
    assert torch.equal(after, torch.rand(1))


class Remembering(nn.Module):
    """A script that changes a list and a dict of its module, and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.jit.Attribute([], list[Tensor])
        self.named = torch.jit.Attribute({}, dict[str, Tensor])

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x * 2)
        self.named["square"] = x @ x
        torch.manual_seed(5)
        return x + torch.tensor([1.0, 2.0])


def test_a_script_with_effects_is_not_run_to_be_counted() -> None:
    program = torch.jit.script(Remembering())
    place = next(place for place in counted(lambda: program(torch.ones(2, 2))).ops if place.type == "forward")
    after = torch.rand(1)
    assert [type(value) for value in [*program.seen, *program.named.values()]] == [Tensor, Tensor]
    assert place.macs is None
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("twice", ["data", "both"])
def test_the_double_backward_of_a_convolution_is_counted(twice: str) -> None:
    image, kernel = rand(1, 2, 4, 4), rand(3, 2, 3, 3)
    differentiated = [image, kernel] if twice == "both" else [image]

    def program() -> None:
        grads = torch.autograd.grad(F.conv2d(image, kernel).square().sum(), differentiated, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()

    places = counted(program).ops
    macs = [place.macs for place in places if place.type == "conv2d_backward_backward"]
    assert macs == [{"data": 2, "both": 4}[twice] * prod((3, 2, 2, 2, 3, 3))]


class Recorder(TorchDispatchMode):
    """Names of the kernels that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_what_runs_to_be_counted_is_seen_by_nobody() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.linalg.inv(torch.tensordot(x, x.t(), 1) + torch.eye(3)).sum()

    names = []
    for tools in ((), (FlopsTool(),)):
        with Recorder() as recorder, amanda.apply(*tools):
            program(rand(3, 4)).backward()
        names.append(recorder.names)
    assert names[0] == names[1]
    x = rand(3, 4)
    result = counted(lambda: checkpoint(program, x, use_reentrant=False).backward())
    assert result.total("macs", "backward") > 0
    bare = rand(3, 4)
    bare.data = x.data
    checkpoint(program, bare, use_reentrant=False).backward()
    assert torch.equal(bare.grad, x.grad)


class Doubled(torch.autograd.Function):
    """A product in Python, whose ops are counted themselves."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        return 2 * x @ weight

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


@torch.library.custom_op("flops_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """A product that nobody sees into."""
    return torch.from_numpy(x.numpy() @ weight.numpy())


def test_a_product_without_a_formula_is_told_by_its_share_of_the_work(caplog: Any) -> None:
    x, weight = torch.rand(6, 4), torch.rand(4, 5)
    result = counted(lambda: (product(x, weight), Doubled.apply(x, weight)))
    assert result.missing == {"flops_tests::product": 6 * 4 * 5}
    assert "Perhaps products, which would be so much of all MACs: flops_tests::product (50.0 %)." in str(
        result
    )
    with caplog.at_level(logging.WARNING, "amanda"):
        assert result.total("macs") == 6 * 4 * 5
        result.total("flops")
    messages = [record.message.split(",")[0] for record in caplog.records]
    assert messages == ["FLOPs: No formula", "FLOPs: Perhaps products"]
