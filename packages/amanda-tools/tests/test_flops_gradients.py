"""FLOPs of gradients that a pass makes, of factors alone, of complex and nested tensors, of Functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.errors import AmandaError
from amanda.tools.flops import FlopsTool

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def macs(program: Callable[[], Any], tool: FlopsTool | None = None, **options: Any) -> tuple[int, int]:
    """Multiply-accumulates forward and backward."""
    tool = tool or FlopsTool()
    with amanda.apply(tool, **options):
        program()
    assert not tool.result.unsupported
    return tool.result.total("macs", "forward"), tool.result.total("macs", "backward")


def rand(*extents: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(extents, dtype=dtype, requires_grad=True)


def test_a_gradient_that_the_first_pass_did_not_make_is_counted() -> None:
    a, b = rand(3, 4), rand(4, 5)

    def program() -> None:
        y = (a @ b).sum()
        torch.autograd.grad(y, a, retain_graph=True)
        torch.autograd.grad(y, (a, b))

    assert macs(program) == (60, 60 + 120)


def test_a_gradient_penalty_counts_both_differentiations() -> None:
    a, b = rand(3, 4), rand(4, 5)

    def program() -> None:
        (gradient,) = torch.autograd.grad(((a @ b) ** 2).sum(), a, create_graph=True)
        gradient.square().sum().backward()

    assert macs(program) == (60, 300)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(4, 5), (3, 4), 60),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), 2 * 6 * 7 * 12),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5), 2 * 6 * 9 * 18),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 9), 2 * 4 * 9 * 18),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_that_are_frozen_and_unfrozen_count_as_they_are(name: str) -> None:
    make, extents, cost = LAYERS[name]
    layer = make()

    def program() -> None:
        for trains in (False, True, False, True):
            layer.requires_grad_(trains)
            layer(rand(*extents)).sum().backward()

    assert macs(program) == (4 * cost, 2 * (1 + 2) * cost)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_a_bias_is_no_product_in_a_compiled_graph(name: str, dynamic: bool) -> None:
    make, extents, cost = LAYERS[name]
    torch.compiler.reset()
    compiled = torch.compile(make(), backend="aot_eager", dynamic=dynamic)
    x = rand(*extents)
    assert macs(lambda: compiled(x).sum().backward(), compiled="instrument") == (cost, 2 * cost)


@pytest.mark.slow
def test_attention_in_a_compiled_graph_of_unknown_shapes() -> None:
    def attention(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", dynamic=True)
    q, k = rand(2, 4, 7, 16), rand(2, 4, 9, 16)
    eager = macs(lambda: attention(q, k).sum().backward())
    assert macs(lambda: compiled(q, k).sum().backward(), compiled="instrument") == eager


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize("product", [torch.mm, torch.bmm, torch.matmul, F.linear])
def test_where_no_gradient_enters_a_product_costs_nothing(product: Any) -> None:
    extents = (2, 3, 3) if product is torch.bmm else (3, 3)
    a, b = rand(*extents), rand(*extents)
    assert macs(lambda: (a.sum() + Stop.apply(product(a, b)).sum()).backward())[1] == 0  # type: ignore[no-untyped-call]


SHAPES = {
    "of one batch": ((2, 4, 7, 16), (2, 4, 9, 16), {}),
    "broadcast query": ((1, 1, 7, 16), (2, 8, 9, 16), {}),
    "broadcast keys": ((2, 8, 7, 16), (2, 1, 9, 16), {}),
    "grouped": ((2, 8, 7, 16), (2, 2, 9, 16), {"enable_gqa": True}),
    "without a batch": ((7, 16), (9, 16), {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_costs_its_products_for_each_head_of_the_result(name: str) -> None:
    of_query, of_keys, options = SHAPES[name]
    q, k, v = rand(*of_query), rand(*of_keys), rand(*of_keys)
    made: Tensor = F.scaled_dot_product_attention(q, k, v, **options)
    scores = made[..., 0].numel() * k.shape[-2]

    def program() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v, **options).sum().backward()

    assert macs(program) == (32 * scores, 64 * scores)


def test_a_fused_kernel_computes_the_scores_again() -> None:
    q, k = rand(2, 4, 7, 16), rand(2, 4, 9, 16)

    def program() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, k).sum().backward()

    assert macs(program) == (2 * 4 * 7 * 9 * 32, 2 * 4 * 7 * 9 * 80)


COMPLEX: dict[str, tuple[Callable[[torch.dtype], Tensor], int]] = {
    "mm": (lambda kind: rand(3, 4, dtype=kind) @ rand(4, 5, dtype=kind), 60),
    "linear": (lambda kind: F.linear(rand(3, 4, dtype=kind), rand(5, 4, dtype=kind)), 60),
    "conv2d": (lambda kind: F.conv2d(rand(2, 4, 5, 5, dtype=kind), rand(6, 4, 3, 3, dtype=kind)), 3888),
    "einsum": (
        lambda kind: torch.einsum(
            "bixy,ioxy->boxy", rand(2, 4, 5, 5, dtype=kind), rand(4, 6, 5, 5, dtype=kind)
        ),
        1200,
    ),
    "tensordot": (lambda kind: torch.tensordot(rand(3, 4, 5, dtype=kind), rand(4, 5, 6, dtype=kind), 2), 360),
}


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("products", [1, 3, 4])
def test_a_complex_product_is_so_many_real_ones(name: str, products: int) -> None:
    program, cost = COMPLEX[name]
    tool = FlopsTool(complex_macs=products)
    assert macs(lambda: program(torch.cfloat).abs().sum().backward(), tool) == (
        products * cost,
        2 * products * cost,
    )
    assert macs(lambda: program(torch.float32).abs().sum().backward(), FlopsTool()) == (cost, 2 * cost)


@pytest.mark.parametrize("products", [2, True, 0, "4"])
def test_a_number_of_products_that_no_method_takes_is_refused(products: Any) -> None:
    with pytest.raises(AmandaError, match=r"complex_macs is .*; give 1, 3 or 4"):
        FlopsTool(complex_macs=products)


def nested(*lengths: int, width: int = 8) -> Tensor:
    rows = [torch.rand(length, width) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def attended(x: Tensor) -> Tensor:
    q = x.unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)


WEIGHT = torch.rand(4, 8)
NESTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], int]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT), lambda length: 32 * length),
    "bmm": (lambda x: torch.bmm(x, torch.rand(2, 8, 4)), lambda length: 32 * length),
    "matmul": (lambda x: x @ WEIGHT.t(), lambda length: 32 * length),
}


@pytest.mark.parametrize("name", NESTED)
def test_an_op_on_nested_tensors_costs_what_it_does_on_their_components(name: str) -> None:
    program, cost = NESTED[name]

    def several() -> None:
        for lengths in ((3, 5), (1, 6), (4, 4)):
            program(nested(*lengths)).values().sum().backward()

    total = sum(map(cost, (3, 5, 1, 6, 4, 4)))
    assert macs(several) == (total, total)


def test_attention_of_nested_tensors_is_that_of_each_sequence() -> None:
    scores = 2 * (9 + 25)
    assert macs(lambda: attended(nested(3, 5)).values().sum().backward()) == (8 * scores, 16 * scores)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def test_ops_of_the_backward_of_a_function_are_backward() -> None:
    def program() -> None:
        for rows in (2, 3, 4, 2):
            Product.apply(rand(rows, 4), rand(4, 5)).sum().backward()  # type: ignore[no-untyped-call]

    assert macs(program) == (11 * 20, 22 * 20)


def test_ops_of_a_hook_are_backward() -> None:
    def program() -> None:
        y = rand(3, 4) @ rand(4, 5)
        y.register_hook(lambda gradient: gradient @ torch.ones(5, 5))
        y.sum().backward()

    assert macs(program) == (60, 120 + 75)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_forward(reentrant: bool) -> None:
    layer, x = nn.Linear(4, 5), rand(3, 4)
    forward, backward = macs(lambda: checkpoint(layer, x, use_reentrant=reentrant).sum().backward())
    assert (forward, backward) in ((60, 120), (120, 120))  # a recomputation may stop before its last op


def test_an_operator_of_a_library_costs_what_its_body_computes() -> None:
    @torch.library.custom_op("flops_tests::by_body", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    product.register_autograd(
        lambda ctx, gradient: (gradient @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ gradient),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def program() -> None:
        for rows in (3, 2, 3):
            product(rand(rows, 4), rand(4, 5)).sum().backward()

    assert macs(program) == (160, 320)


def test_a_gradient_of_an_activation_or_a_normalisation_is_one_flop_an_element() -> None:
    x, weight, bias, tool = rand(5, 8), rand(8), rand(8), FlopsTool()
    with amanda.apply(tool):
        F.gelu(F.layer_norm(x, (8,), weight, bias)).backward(torch.ones(5, 8))
    flops = {row.type: row.flops for row in tool.result}
    assert (flops["gelu"], flops["gelu_backward"]) == (8 * 40, 40)
    assert (flops["layer_norm"], flops["layer_norm_backward"]) == (7 * 40, 40 + 8 + 8)
