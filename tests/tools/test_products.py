"""The table of products, against what PyTorch computes, and the tools that read the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda.tools.dynamic_prune import AttentionPruneTool
from amanda.tools.flops import FlopsTool
from amanda.tools.kit import leaves
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS, StandardMapping, product_of
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.quantize.weights import GPTQTool
from amanda.tools.search import SearchTool
from amanda.tools.weights import WeightReads, weight_input


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def convolution(rank: int, transposed: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
    name = f"conv{'_transpose' * transposed}{rank}d"
    channels = (2, 3) if transposed else (3, 2)
    data, weight = random(1, 2, *[4] * rank), random(*channels, *[2] * rank)
    return getattr(F, name), [data, weight, random(3)]


CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "linear": (F.linear, [random(4, 3), random(2, 3), random(2)]),
    "matmul": (torch.matmul, [random(4, 3), random(3, 2)]),
    "addmm": (torch.addmm, [random(2), random(4, 3), random(3, 2)]),
    "addmv": (torch.addmv, [random(4), random(4, 3), random(3)]),
    "addbmm": (torch.addbmm, [random(4, 2), random(5, 4, 3), random(5, 3, 2)]),
    "baddbmm": (torch.baddbmm, [random(5, 4, 2), random(5, 4, 3), random(5, 3, 2)]),
    "bilinear": (F.bilinear, [random(4, 3), random(4, 2), random(5, 3, 2), random(5)]),
    "conv_tbc": (torch.conv_tbc, [random(6, 2, 3), random(2, 3, 4), random(4)]),
    "einsum": (lambda *operands: torch.einsum("ij,jk", *operands), [random(2, 3), random(3, 4)]),
    **{f"conv{rank}d": convolution(rank, False) for rank in (1, 2, 3)},
    **{f"conv_transpose{rank}d": convolution(rank, True) for rank in (1, 2, 3)},
}  # fmt: skip
"""By its word, a product and its tensors in the order of the inputs."""


@pytest.mark.parametrize("word", CALLS)
def test_a_product_is_linear_in_each_factor_and_adds_its_bias(word: str) -> None:
    call, tensors = CALLS[word]
    product = PRODUCTS[word]
    factors = product.factors or range(len(tensors))
    whole = call(*tensors)
    for position in factors:
        zero, twice = ([one * by if i == position else one for i, one in enumerate(tensors)] for by in (0, 2))
        torch.testing.assert_close(call(*twice) - whole, whole - call(*zero))
        assert not torch.equal(call(*zero), whole)
    assert product.weight in (None, *factors)
    others = [i for i in range(len(tensors)) if i not in factors]
    assert others == ([] if product.bias not in range(len(tensors)) else [product.bias])


def test_tools_see_the_word_of_each_product() -> None:
    seen = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: seen.append((context["type"], product_of(context))))
    with amanda.apply(tool):
        for call, tensors in CALLS.values():
            call(*tensors)
    assert seen == [(word, PRODUCTS[word]) for word in CALLS]


class Product(nn.Module):
    """A product of the input with a parameter."""

    def __init__(self, word: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word = word
        shapes = {"addmv": (8, 16), "matmul": (8, 16), "addbmm": (3, 16, 8), "conv_tbc": (3, 16, 8)}
        self.weight = nn.Parameter(torch.randn(shapes[word]))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.word == "matmul":
            return torch.matmul(self.weight, x)
        if self.word == "conv_tbc":
            return torch.conv_tbc(x, self.weight, self.bias, 1)
        first = (self.weight, x) if self.word == "addmv" else (x, self.weight)
        return getattr(torch, self.word)(self.bias, *first)  # type: ignore[no-any-return]


INPUTS = {"addmv": (16,), "matmul": (16,), "addbmm": (3, 4, 16), "conv_tbc": (10, 2, 16)}


@pytest.mark.parametrize("word", INPUTS)
def test_the_weight_of_every_product_is_pruned_and_its_gradient_is_masked(word: str) -> None:
    model, tool, x = Product(word), PruneTool(0.5), torch.randn(INPUTS[word])
    tool.prepare(model, x)
    with amanda.apply(tool):
        model(x).sum().backward()
    (weight,) = tool.weights
    assert weight.layout == {"addbmm": None, "conv_tbc": "WIO"}.get(word, "OI")
    assert weight.zeros == model.weight.numel() // 2
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad != 0, torch.from_numpy(np.asarray(weight.mask)))


@pytest.mark.parametrize("word", INPUTS)
def test_factors_alone_are_quantised_by_default(word: str) -> None:
    model, tool, x = Product(word), QuantizeTool(), torch.randn(INPUTS[word])
    with amanda.apply(tool), tool.calibrating():
        model(x)
    data = {"matmul": "input 1", "addmv": "input 2", "conv_tbc": "input 0"}.get(word, "input 1")
    assert sorted(row.tensor for row in tool.result) == [data, "weight"]


@pytest.mark.parametrize("word", ["addmv", "matmul"])
def test_the_vector_that_a_weight_multiplies_decides_what_is_dropped(word: str) -> None:
    model, x = Product(word), torch.randn(16)
    tool = PruneTool(0.5, importance="wanda")
    tool.prepare(model, x)
    scores = model.weight.detach().abs() * x.abs()
    (weight,) = tool.weights
    kept = scores >= scores.sort(1).values[:, 8:9]
    assert torch.equal(torch.from_numpy(np.asarray(weight.mask)), kept)


def test_gptq_quantises_the_matrix_of_addmv() -> None:
    model, tool = Product("addmv"), GPTQTool(bits=4, group_size=None)
    with amanda.apply(tool), tool.calibrating():
        for _ in range(20):
            model(torch.randn(16))
    assert [weight.type for weight in tool.weights] == ["addmv"]
    assert not tool.result.left


def rows(x: Tensor, call: Callable[[Tensor], object], extents: tuple[int, ...]) -> Any:
    products: list[Any] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping(), WeightReads())

    def analyse(context: amanda.OpContext) -> None:
        read = weight_input(context)
        data = None if read is None else read.multiplied_input(context)
        if data is not None:
            context.insert_before_op(
                lambda value: products.append((data, value.clone())), inputs=[data.position]
            )

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        call(x)
    ((multiplied, value),) = products
    return multiplied.rows(value, extents)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, "same"])
def test_rows_of_a_convolution_are_what_its_window_reads(groups: int, padding: Any) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=padding, dilation=(1, 2), groups=groups, bias=False)
    x = torch.randn(2, 4, 7, 8)
    matrix = rows(x, layer, tuple(layer.weight.shape))
    weight = layer.weight.detach().reshape(groups, 6 // groups, -1)
    made = (matrix @ weight.mT).movedim(0, 1).reshape(2, -1, 6).mT
    torch.testing.assert_close(made.reshape(layer(x).shape), layer(x).detach(), rtol=1e-5, atol=1e-5)


class StackSizes(TorchDispatchMode):
    """Records how many tensors each stack joins."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat):
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_window_of_a_stem_convolution_is_read_axis_by_axis() -> None:
    layer, x = nn.Conv2d(3, 4, 7, stride=2, padding=3), torch.randn(2, 3, 16, 18)
    with StackSizes() as stacks:
        matrix = rows(x, layer, tuple(layer.weight.shape))
    assert stacks.sizes == [7, 7]
    windows = F.unfold(x, 7, padding=3, stride=2)
    assert torch.equal(matrix, windows.mT.reshape(1, -1, 3 * 7 * 7))


def test_infinite_values_beside_the_padding_leave_the_padding_zero() -> None:
    layer = nn.Conv1d(1, 1, 3, padding=1)
    matrix = rows(torch.tensor([[[torch.inf, 2.0]]]), layer, (1, 1, 3))
    assert matrix.tolist() == [[[0, torch.inf, 2], [torch.inf, 2, 0]]]


class Crossed(nn.Module):
    """Attention over another sequence of the same length, with projections by einsum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 2, 4)) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("bte,ehd->bhtd", value, weight)
            for value, weight in ((x, self.q), (memory, self.k), (memory, self.v))
        )
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("is_crossed", [True, False])
def test_attention_over_another_sequence_keeps_all_tokens_where_einsum_projects(is_crossed: bool) -> None:
    model, tool = Crossed(), AttentionPruneTool(keep=0.5)
    x, memory = torch.randn(2, 1, 6, 8)
    with amanda.apply(tool):
        x, memory = x.relu(), memory.relu()
        model(x, memory if is_crossed else x)
    assert len(tool.result.rows()) == (0 if is_crossed else 1)


def test_a_product_with_the_weight_on_the_left_is_not_skipped_to_its_weight() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    tool = SearchTool(["matmul=keep|skip"])
    with amanda.apply(tool):
        weight @ torch.randn(4, 4)
    assert "its output may have another shape" in str(tool.result)


@pytest.mark.parametrize("word", CALLS)
def test_each_gradient_of_a_factor_costs_as_much_as_the_product(word: str) -> None:
    (call, tensors), tool = CALLS[word], FlopsTool()
    given = [one.clone().requires_grad_() for one in tensors]
    with amanda.apply(tool):
        call(*given).sum().backward()
    factors = PRODUCTS[word].factors or range(len(tensors))
    macs = (tool.result.total("macs", phase) for phase in ("forward", "backward"))
    assert len(factors) * next(macs) == next(macs) > 0


def test_every_product_is_quantised_by_default_unless_it_has_several_weights() -> None:
    from amanda.tools.quantize._tool import TYPES

    assert set(PRODUCTS) - SEVERAL_WEIGHTS <= set(TYPES)


def test_leaves_are_those_of_lists_and_of_what_models_return() -> None:
    @dataclass
    class Output:
        logits: int
        states: tuple[int, ...]

    values = [1, [2, (3,)], {"a": 4}, Output(5, (6, 7))]
    assert leaves(values) == [1, 2, 3, *values[2:]]
    assert leaves(values, structures=True) == [1, 2, 3, 4, 5, 6, 7]
