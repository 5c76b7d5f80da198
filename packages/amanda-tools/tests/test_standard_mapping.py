"""StandardMapping on PyTorch: its words are the documented ones, its indices point at the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from repository import repository_path
from seen_types import types_in
from torch import nn

import amanda
from amanda.interceptor import NATIVE
from amanda.testing import never
from amanda.tools.mapping import StandardMapping, itemsize


def documented() -> list[tuple[str, str]]:
    pairs, page = [], repository_path("docs/vocabulary.md").read_text()
    for row in page.split("## Words of `type`")[1].split("##")[0].splitlines():
        if row.startswith("| `"):
            words, spellings = (re.findall(r"`(.+?)`", cell) for cell in re.split(r"(?<!\\)\|", row)[1:3])
            if len(words) == 1:
                pairs += [(words[0], spelling) for spelling in spellings]
            else:
                pairs += [(" ".join(words), spelling.replace(r"\|", "|")) for spelling in spellings]
    assert len(pairs) > 60
    return pairs


WITHOUT_A_COMPILER = {"a ** 2": never("a closure of torch holds what Tensor.__pow__ calls")}


def marked() -> list[Any]:
    gaps = {} if NATIVE else WITHOUT_A_COMPILER
    return [pytest.param(*pair, marks=gaps.get(pair[1], ())) for pair in documented()]


@pytest.mark.parametrize(("words", "spelling"), marked())
def test_the_documented_words_are_given(words: str, spelling: str) -> None:
    names = {
        "torch": torch, "nn": nn, "F": F, "a": torch.rand(3, 3), "b": torch.rand(3, 3),
        "m": torch.rand(3, 3) > 0.5, "i": torch.tensor([0, 1, 2]),
        "x1": torch.rand(1, 2, 8), "w1": torch.rand(2, 2, 3), "x": torch.rand(1, 2, 8, 8),
        "w": torch.rand(2, 2, 3, 3), "x3": torch.rand(1, 2, 8, 8, 8), "w3": torch.rand(2, 2, 3, 3, 3),
    }  # fmt: skip
    assert types_in(lambda: eval(spelling, names))[-1] in words.split()


def test_every_documented_word_is_reached() -> None:
    rows = repository_path("docs/vocabulary.md").read_text().split("## Words of `type`")[1].split("##")[0]
    assert all(len(row.split("|")) >= 4 for row in rows.splitlines() if row.startswith("| `"))


class Linear3d(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(2, 2, -1))


class Product(nn.Module):
    def __init__(self, weight_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.weight_first = weight_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x if self.weight_first else x @ self.weight


class TransposedProduct(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(torch.zeros(4), x, self.weight.t())


IMAGE = torch.rand(2, 4, 8, 8)
ROWS = torch.rand(4, 4)
WEIGHTED: list[tuple[str, nn.Module, torch.Tensor]] = [
    ("conv1d", nn.Conv1d(4, 3, 3), torch.rand(2, 4, 8)),
    ("conv2d", nn.Conv2d(4, 3, 3), IMAGE),
    ("conv2d", nn.Conv2d(4, 6, 3, groups=2, bias=False), IMAGE),
    ("conv2d", nn.Conv2d(4, 3, 3), torch.rand(4, 8, 8)),
    ("conv3d", nn.Conv3d(4, 3, 3), torch.rand(2, 4, 8, 8, 8)),
    ("conv_transpose2d", nn.ConvTranspose2d(4, 3, 3), IMAGE),
    ("linear", nn.Linear(4, 5), ROWS),
    ("linear", nn.Linear(4, 4), ROWS),
    ("linear", nn.Linear(4, 5, bias=False), ROWS[0]),
    ("linear", Linear3d(4, 5), ROWS),
    ("linear", Linear3d(4, 5, bias=False), ROWS),
    ("matmul", Product(), ROWS),
    ("matmul", Product(weight_first=True), ROWS),
    ("matmul", Product(), torch.rand(2, 4, 4)),
    ("batch_norm", nn.BatchNorm2d(4), IMAGE),
    ("batch_norm", nn.BatchNorm2d(4).eval(), IMAGE),
    ("layer_norm", nn.LayerNorm(4), ROWS),
    ("group_norm", nn.GroupNorm(2, 4), IMAGE),
    ("prelu", nn.PReLU(4), ROWS),
    ("embedding", nn.Embedding(10, 4), torch.tensor([1, 2])),
    ("embedding_bag", nn.EmbeddingBag(10, 4), torch.tensor([[1, 2]])),
]


class Weights(amanda.Tool):
    """Collects the weight of every op that has one, and the gradients given at its index."""

    def __init__(self) -> None:
        self.depends_on(StandardMapping())
        self.types: list[str] = []
        self.weights: list[Any] = []
        self.grads: list[Any] = []
        self.promised = 0
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.before_backward, backward=True)
        self.add_inst_for_op(self.backward, backward=True, require_outputs=True)

    def forward(self, context: amanda.OpContext) -> None:
        if context["weight_index"] is not None:
            self.types.append(context["type"])
            self.weights.append(context.get_inputs()[context["weight_index"]])

    def before_backward(self, context: amanda.OpContext) -> None:
        self.promised += context["weight_grad_index"] is not None

    def backward(self, context: amanda.OpContext) -> None:
        if context["weight_grad_index"] is not None:
            grads = context.get_grad_inputs()
            assert grads is not None
            self.grads.append(grads[context["weight_grad_index"]].clone())


@pytest.mark.parametrize(("kind", "module", "x"), WEIGHTED)
def test_indices_point_at_the_weight_and_its_gradient(kind: str, module: nn.Module, x: torch.Tensor) -> None:
    tool = Weights()
    module.zero_grad()
    with amanda.apply(tool):
        module(x).sum().backward()
    assert tool.types == [kind]
    assert tool.weights[0] is module.weight
    assert len(tool.grads) == tool.promised == 1
    assert torch.equal(tool.grads[0], module.weight.grad)


def test_a_transposed_weight_is_a_weight() -> None:
    module, tool = TransposedProduct(), Weights()
    with amanda.apply(tool):
        module(ROWS).sum().backward()
    assert tool.types == ["addmm"]
    assert torch.equal(tool.grads[0].t(), module.weight.grad)


def test_a_frozen_weight_has_no_gradient() -> None:
    module, tool = nn.Conv2d(4, 3, 3), Weights()
    module.weight.requires_grad_(False)
    with amanda.apply(tool):
        module(IMAGE).sum().backward()
    assert len(tool.weights) == 1
    assert tool.grads == []


def test_the_gradient_is_found_without_a_forward_routine() -> None:
    module = nn.Linear(4, 5)
    facts: list[tuple[Any, ...]] = []

    def look(context: amanda.OpContext) -> None:
        facts.append((context["type"], context["backward_type"], context["weight_grad_index"]))

    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(look, backward=True, require_outputs=True)
    with amanda.apply(tool):
        module(ROWS).backward(torch.ones(4, 5))
    assert sorted(facts) == [
        ("linear", "accumulate_grad", None),
        ("linear", "accumulate_grad", None),
        ("linear", "linear_backward", None),
        ("linear", "transpose_backward", 0),
    ]


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


BACKWARD: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x + 1, "add_backward"),
    (lambda x: -x, "neg_backward"),
    (lambda x: x @ x, "matmul_backward"),
    (lambda x: F.relu(x * 1, inplace=True), "relu_backward"),
    (lambda x: F.max_pool2d(x[None], 2), "max_pool2d_backward"),
    (lambda x: F.layer_norm(x, (4,)), "layer_norm_backward"),
    (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm_backward"),
    (lambda x: F.conv1d(x, torch.rand(2, 4, 3)), "conv1d_backward"),
    (lambda x: F.conv_transpose1d(x, torch.rand(4, 2, 3)), "conv_transpose1d_backward"),
    (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), "scaled_dot_product_attention_backward"),
    (lambda x: x.view(16), "reshape_backward"),
    (lambda x: x.T, "transpose_backward"),
    (lambda x: x[0], "select_backward"),
    (lambda x: nn.LSTM(4, 3)(x)[0], "lstm_backward"),
    (lambda x: Custom.apply(x), "Custom_backward"),  # type: ignore[no-untyped-call]
]


@pytest.mark.parametrize(("call", "backward_type"), BACKWARD)
def test_the_own_gradient_has_the_ops_word(
    call: Callable[[torch.Tensor], torch.Tensor], backward_type: str
) -> None:
    x = torch.rand(4, 4, requires_grad=True)
    words: list[str] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: words.append(context["backward_type"]), backward=True)
    with amanda.apply(tool):
        call(x).sum().backward()
    assert backward_type in words


def test_double_backward_has_a_word() -> None:
    x = torch.rand(1, 2, 8, 8, requires_grad=True)
    words: list[str] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: words.append(context["backward_type"]), backward=True)
    with amanda.apply(tool):
        y = F.conv2d(x, torch.rand(2, 2, 3, 3, requires_grad=True)).pow(2).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.sum().backward()
    assert "conv2d_backward_backward" in words


def test_what_differentiates_gradients_gives_no_gradient_of_a_weight() -> None:
    """The weight is square, so that shapes do not tell its gradient from that of its transpose."""
    x, weight = torch.rand(2, 3, requires_grad=True), nn.Parameter(torch.rand(3, 3))
    indices: list[tuple[int, int | None]] = []

    def look(context: amanda.OpContext) -> None:
        if context["type"] == "linear":
            indices.append((context.get_backward_order(), context["weight_grad_index"]))

    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(look, backward=True, require_outputs=True)
    with amanda.apply(tool):
        (grad,) = torch.autograd.grad(F.linear(x, weight).pow(2).sum(), x, create_graph=True)
        grad.sum().backward()
    assert 0 in [index for order, index in indices if order == 1]
    assert {index for order, index in indices if order == 2} == {None}


@pytest.mark.parametrize(
    ("call", "layout", "weight_layout"),
    [
        (lambda: F.conv2d(IMAGE, torch.rand(3, 4, 3, 3)), "NCHW", "OIHW"),
        (lambda: F.conv2d(IMAGE[0], torch.rand(3, 4, 3, 3)), "CHW", "OIHW"),
        (lambda: F.conv2d(IMAGE.contiguous(memory_format=torch.channels_last), torch.rand(3, 4, 3, 3)),
         "NCHW", "OIHW"),
        (lambda: F.conv_transpose1d(IMAGE[0], torch.rand(8, 3, 3)), "NCW", "IOW"),
        (lambda: torch.convolution(IMAGE, torch.rand(3, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False,
                                   [0, 0], 1), "NCHW", "OIHW"),
        (lambda: F.conv3d(IMAGE[None].transpose(1, 2), torch.rand(1, 4, 1, 1, 1)), "NCDHW", "OIDHW"),
        (lambda: F.avg_pool2d(IMAGE, 2), "NCHW", None),
        (lambda: F.batch_norm(ROWS, torch.zeros(4), torch.ones(4)), "NC", None),
        (lambda: F.linear(ROWS, ROWS), None, "OI"),
        (lambda: ROWS @ nn.Parameter(ROWS), None, "IO"),
        (lambda: nn.Parameter(ROWS) @ ROWS, None, "OI"),
        (lambda: ROWS + ROWS, None, None),
    ],
)  # fmt: skip
def test_layouts(call: Callable[[], Any], layout: str | None, weight_layout: str | None) -> None:
    layouts: list[tuple[str | None, str | None]] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: layouts.append((context["layout"], context["weight_layout"])))
    with amanda.apply(tool):
        call()
    assert layouts[-1] == (layout, weight_layout)


def test_accessors() -> None:
    facts: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        values = context.get_inputs()
        facts.extend([context["shape"](values[0]), context["dtype"](values[0]), context["shape"](values[1])])

    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        torch.mul(IMAGE, 2)
    assert facts == [(2, 4, 8, 8), "float32", None]


@pytest.mark.parametrize(("call", "in_place"), [(lambda x: x.add_(1), True), (lambda x: x.add(1), False)])
def test_in_place(call: Callable[[torch.Tensor], Any], in_place: bool) -> None:
    facts: list[tuple[str, bool]] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: facts.append((context["type"], context["in_place"])))
    x = torch.zeros(2)
    with amanda.apply(tool):
        call(x)
    assert facts == [("add", in_place)]


def test_own_rules_come_after_the_standard_ones() -> None:
    words: list[str] = []
    mapping = StandardMapping(rules=[["pytorch", lambda context: context.update(family=context["type"][:4])]])
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(lambda context: words.append(context["family"]))
    with amanda.apply(tool):
        F.conv2d(IMAGE, torch.rand(3, 4, 3, 3))
    assert words[-1] == "conv"


def test_phases() -> None:
    phases: dict[str, set[str]] = {}

    def look(context: amanda.OpContext) -> None:
        phases.setdefault(context["phase"], set()).add(context["backward_type"] or context["type"])

    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(look)
    tool.add_inst_for_op(look, backward=True)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], foreach=False)
    with amanda.apply(tool):
        weight.exp().sum().backward()
        optimizer.step()
    assert phases["forward"] >= {"exp", "sum"}
    assert phases["backward"] >= {"exp_backward", "sum_backward"}
    assert phases["optimizer"] == {"add"}


class _Own(torch.optim.Optimizer):
    """A step of one's own, on data and with gradients on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, _Own])
def test_what_an_optimizers_closure_computes_is_no_optimizers(kind: Any) -> None:
    model, factor = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    optimizer = kind([*model.parameters(), factor], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(1, 2)) * factor, torch.zeros(1, 2))
        loss.backward()
        return loss

    phases = _phases_of(lambda: optimizer.step(closure))
    assert phases["forward"] >= {"linear", "mul", "mse_loss"}
    assert "add" in phases["optimizer"]
    assert not phases["optimizer"] & {"linear", "mse_loss"}


def test_a_model_that_is_called_by_a_module_of_optimizers_is_in_the_forward_pass() -> None:
    averaged, x = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)), torch.ones(1, 2)
    assert _phases_of(lambda: averaged(x)) == {"forward": {"linear"}}


def _phases_of(program: Callable[[], Any]) -> dict[str, set[str]]:
    """The types that a program has, by phase."""
    phases: dict[str, set[str]] = {}
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: phases.setdefault(context["phase"], set()).add(context["type"]))
    with amanda.apply(tool):
        program()
    return phases


def test_a_parameter_that_is_not_initialised_yet_has_no_shape() -> None:
    shapes: list[Any] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: shapes.extend(map(context["shape"], context.get_inputs()[:1])))
    lazy = nn.LazyLinear(2)
    with amanda.apply(tool):
        lazy(torch.ones(1, 3))
    assert None in shapes
    assert (1, 3) in shapes


def test_sizes_of_elements_are_those_of_torch() -> None:
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert {dtype: itemsize(str(dtype).removeprefix("torch.")) for dtype in dtypes} == {
        dtype: dtype.itemsize for dtype in dtypes
    }
    assert itemsize("resource") is itemsize(None) is None


def test_one_mapping_serves_all_tools_of_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[StandardMapping] = []
    own = StandardMapping._apply_before

    def counted(self: StandardMapping, context: amanda.OpContext) -> None:
        calls.append(self)
        own(self, context)

    monkeypatch.setattr(StandardMapping, "_apply_before", counted)

    class Reading(amanda.Tool):
        def __init__(self, backward: bool = False) -> None:
            self.types: list[str] = []
            self.depends_on(StandardMapping())
            self.add_inst_for_op(lambda context: self.types.append(context["type"]), backward=backward)

    tools = Reading(), Reading(), Reading(backward=True)
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(*tools):
        (x * 2).sum().backward()
    assert tools[0].types == tools[1].types == ["mul", "sum", "ones_like"]
    assert set(tools[2].types) == {"mul", "sum"}
    assert len(set(calls)) == 1
    assert len(calls) == len(tools[0].types) + len(tools[2].types)


def test_a_mapping_with_rules_of_its_own_is_no_other() -> None:
    def rename(context: amanda.OpContext) -> None:
        context["type"] = "mine"

    class Reading(amanda.Tool):
        def __init__(self, mapping: StandardMapping) -> None:
            self.types: list[str] = []
            self.depends_on(mapping)
            self.add_inst_for_op(lambda context: self.types.append(context["type"]))

    added = StandardMapping()
    added.add_inst_for_op(rename)
    for mapping in (StandardMapping([["*", rename]]), added):
        plain, tool = Reading(StandardMapping()), Reading(mapping)
        with amanda.apply(plain, tool):
            torch.ones(2) * 2
        assert tool.types == ["mine", "mine"]
