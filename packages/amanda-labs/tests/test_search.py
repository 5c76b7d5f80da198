"""Architecture search in PyTorch: choices, mixtures, searches and the models that come of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.search import Choice, Evolution, PolicyGradient, Random, Search, SearchError, SearchTool
from amanda.tools.select import select

CHOICES = [
    Choice(["keep", "conv5", "conv3g2", "conv1", "skip"], type="conv2d"),
    Choice(["keep", "relu", "gelu", "skip"], type=["sigmoid", "relu"]),
    Choice(["keep", "bits4", "width0.5"], type="linear"),
]


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(2, 4, 4, 4)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        if self.in_place:
            out += x
            return out
        return x + out


def prepared(model: nn.Module, x: Tensor, choices: Any = CHOICES, **options: Any) -> SearchTool:
    tool = SearchTool(choices, **options)
    tool.prepare(model, x)
    return tool


def drawn(tool: SearchTool, count: int) -> list[dict[str, str]]:
    numbers = np.random.default_rng(0)
    return [Random().ask(tool.space, numbers) for _ in range(count)]


def test_the_first_candidates_change_nothing(model: nn.Module, images: Tensor) -> None:
    tool = prepared(model, images)
    with amanda.apply(tool):
        inside = model(images)
    assert torch.equal(inside, model(images))
    assert tool.architecture == {
        "0/conv2d": "keep", "1/sigmoid": "keep", "2/conv2d": "keep", "3/relu_": "keep", "5/linear": "keep"
    }  # fmt: skip


def test_finalized_models_compute_what_architectures_do(model: nn.Module, images: Tensor) -> None:
    tool = prepared(model, images)
    for architecture in drawn(tool, 12):
        tool.architecture = architecture
        with amanda.apply(tool):
            expected = model(images)
        finalized_model = tool.finalize(model)
        assert torch.equal(finalized_model(images), expected), architecture
        modules = {type(module).__module__.partition(".")[0] for module in finalized_model.modules()}
        assert modules == {"torch"}


def test_flops_are_those_of_the_finalized_model(model: nn.Module, images: Tensor) -> None:
    tool = prepared(model, images, [Choice(["keep", "conv5", "conv3g2", "conv1"], type="conv2d")])
    for architecture in drawn(tool, 6):
        tool.architecture, flops = architecture, FlopsTool()
        finalized_model = tool.finalize(model)
        with amanda.apply(flops):
            finalized_model(images)
        assert tool.flops() == sum(place.calls * (place.flops or 0) for place in flops.result.ops)
        assert tool.size() == sum(4 * parameter.numel() for parameter in finalized_model.parameters())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_block_is_skipped(in_place: bool, images: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Block(in_place), nn.Conv2d(4, 4, 1))
    tool = prepared(model, images, [Choice(["keep", "skip"], type="add")])
    (name,) = tool.space
    whole = tool.flops()
    tool.architecture = {name: "skip"}
    x, x_by_hand = images.clone().requires_grad_(), images.clone().requires_grad_()
    with amanda.apply(tool):
        output = model(x)
        output.sum().backward()
    expected = model[2](model[0](x_by_hand))
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(x.grad, x_by_hand.grad)  # type: ignore[arg-type]
    with amanda.apply(tool), torch.inference_mode():
        assert torch.equal(model(images), expected)
    remaining_model = prepared(nn.Sequential(model[0], model[2]), images, [])
    assert tool.flops() == remaining_model.flops() < whole
    assert tool.size() == remaining_model.size()
    with pytest.raises(SearchError, match=r"'skip' of 1/__i?add__ at .*test_search.py:\d+ is no module"):
        tool.finalize(model)


class InPlace(nn.Module):
    """Ops in place with settings of their own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.add_(x, alpha=2)
        return F.elu(y, 2.0, inplace=True)


def test_ops_in_place_keep_their_settings(images: Tensor) -> None:
    x, x_by_hand = ((images - 0.5).requires_grad_() for _ in range(2))
    tool = prepared(InPlace(), x, ["add=keep|skip", "elu=keep|gelu"])
    assert set(tool.space.values()) == {("keep", "skip"), ("keep", "gelu")}
    with amanda.apply(tool):
        output = InPlace()(x)
        output.sum().backward()
    expected = InPlace()(x_by_hand)
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(x.grad, x_by_hand.grad)  # type: ignore[arg-type]


class Shared(nn.Module):
    """Layers that share a weight, and an activation at two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.before = self.after = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(self.second(self.before(self.first(x))))
        return output


@pytest.mark.parametrize(
    ("choice", "label"), [("linear@first=keep|width0.5", "width0.5"), ("sigmoid=keep|relu", "relu")]
)
def test_finalizing_follows_shared_weights_and_modules(choice: str, label: str) -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(3, 4)
    tool = prepared(model, x, choice)
    tool.architecture = dict.fromkeys(tool.space, label)
    with amanda.apply(tool):
        expected = model(x)
    assert torch.equal(tool.finalize(model)(x), expected)


def test_a_model_of_one_op_is_finalized() -> None:
    tool = prepared(nn.Sigmoid(), torch.ones(2), "sigmoid=keep|relu")
    tool.architecture = dict.fromkeys(tool.space, "relu")
    assert type(tool.finalize(nn.Sigmoid())) is nn.ReLU


class Cell(nn.Module):
    """A mixture by hand, as in the code of Liu et al. 2019."""

    def __init__(self, conv: nn.Conv2d, wide: Tensor, alphas: list[Tensor]) -> None:
        super().__init__()
        self.conv, self.wide = conv, nn.Parameter(wide.detach().clone())
        self.alphas = nn.ParameterList(nn.Parameter(alpha.detach().clone()) for alpha in alphas)

    def forward(self, x: Tensor) -> Tensor:
        ops: list[list[Callable[[Tensor], Tensor]]] = [
            [self.conv, lambda x: F.conv2d(x, self.wide, self.conv.bias, padding=2), lambda x: x],
            [torch.sigmoid, F.relu],
        ]
        for alpha, candidates in zip(self.alphas, ops, strict=True):
            shares = torch.softmax(alpha, -1)
            x = sum(share * op(x) for share, op in zip(shares, candidates, strict=True))
        return x


@pytest.mark.parametrize("compiled", ["eager", "instrument"])
def test_gradients_of_a_mixture_are_those_of_a_cell_by_hand(images: Tensor, compiled: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid())
    choices = ["conv2d=keep|conv5|skip", "sigmoid=keep|relu"]
    tool = prepared(model, images, choices, mixture=True, seed=3)
    cell = Cell(nn.Conv2d(4, 4, 3, padding=1), next(iter(tool.weights())), list(tool.alphas()))
    cell.conv.load_state_dict(model[0].state_dict())
    run = torch.compile(model, backend="aot_eager") if compiled == "instrument" else model
    x, x_by_hand = images.clone().requires_grad_(), images.clone().requires_grad_()
    with amanda.apply(tool, compiled=compiled):
        outputs = run(x)
        outputs.square().sum().backward()
    expected = cell(x_by_hand)
    expected.square().sum().backward()
    assert torch.equal(outputs, expected)
    mine = [x, *model.parameters(), *tool.weights(), *tool.alphas()]
    theirs = [x_by_hand, *cell.conv.parameters(), cell.wide, *cell.alphas]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))
    assert len(list(tool.parameters())) == 3


def test_settling_chooses_the_heaviest_within_limits(model: nn.Module, images: Tensor) -> None:
    tool = prepared(model, images, mixture=True)
    start = tool.flops({name: labels[0] for name, labels in tool.space.items()})
    with torch.no_grad():
        for alpha in tool.alphas():
            alpha.copy_(torch.tensor([0.0, 2.0, 1.0, -1.0, -2.0][: len(alpha)]))
    with pytest.raises(SearchError, match="the candidates are mixed; call settle"):
        tool.finalize(model)
    assert set(tool.settle().values()) == {"conv5", "relu", "bits4"}
    assert tool.flops() > start
    assert tool.flops(tool.settle(limits={"flops": start})) <= start
    with pytest.raises(SearchError, match=r"flops are .* at least, above 1"):
        tool.settle(limits={"flops": 1})


@pytest.mark.parametrize("scale", [1.0, 1000.0], ids=["open", "decided, with probabilities of 0"])
def test_settling_holds_all_limits_at_once(scale: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    tool = prepared(model, torch.ones(1, 8), "linear=keep|bits2|width0.5|width0.125", mixture=True)
    with torch.no_grad():
        next(tool.alphas()).copy_(scale * torch.tensor([3.0, 2.0, 1.0, 0.0]))
    limits = {"flops": 0.6 * tool.flops(), "size": 0.2 * tool.size()}
    assert tool.settle(limits) == {"0/linear": "width0.125"}  # type: ignore[arg-type]
    assert tool.flops() <= limits["flops"]
    assert tool.size() <= limits["size"]


def test_an_architecture_of_another_model_is_told(model: nn.Module, images: Tensor) -> None:
    tool = SearchTool(CHOICES)
    tool.architecture = {"9/sigmoid": "relu"}
    with amanda.apply(tool):
        model(images)
    assert tool.unmatched() == ["the architecture chooses relu at 9/sigmoid, which is no op with a choice"]


def test_costs_that_are_not_finite_are_errors(model: nn.Module, images: Tensor) -> None:
    def latency() -> float:
        return float("nan")

    search = Search(prepared(model, images), lambda: 1.0, "random", costs=[latency], progress=False)
    result = search.run(trials=2)
    assert [trial.error for trial in result.trials] == ["ValueError: latency is nan"] * 2
    assert result.best is None


def test_a_search_over_bits_finds_the_front_of_an_enumeration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.rand(400, 8)
    labels = model(x).argmax(1)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == labels).float().mean())

    tool = prepared(model, x[:1], ["linear=keep|bits8|bits4|bits3|bits2"])
    search = Search(tool, accuracy, "evolution", costs=["size"], metric="accuracy", progress=False)
    result = search.run(trials=100)
    points = []
    for bits in product((None, 8, 4, 3, 2), repeat=2):
        tools = [
            select(QuantizeTool(method="dynamic", weight_bits=width, activation_bits=None), module=module)
            for module, width in zip("02", bits, strict=True) if width is not None
        ]  # fmt: skip
        with amanda.apply(amanda.Tool(), *tools):
            metric = accuracy()
        size = sum((width or 32) / 8 * part for width, part in zip(bits, (128, 64), strict=True)) + 4 * 20
        points.append((metric, size))
    front = [p for p in points if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]
    assert len(result.trials) == 25
    assert [(trial.metric, trial.costs["size"]) for trial in result.front] == sorted(set(front), reverse=True)
    assert len(front) > 3
    assert tool.architecture == result.front[0].architecture
    content = json.loads(result.save(tmp_path / "search.json").read_text())
    assert content["schema"] == "amanda.search"
    assert len(result.to_pandas()) == 25
    assert "<svg" in result.save(tmp_path / "search.svg").read_text()
    assert "The search ended: every architecture that was drawn is known" in str(result)


def test_evolution_finds_the_front_of_an_enumeration_with_fewer_visits() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    model, x = nn.Sequential(*layers), torch.randn(400, 8)
    labels = model(x).argmax(1)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == labels).float().mean())

    tool = prepared(model, x[:1], ["linear=keep|bits8|bits4|bits3|bits2"])
    options: dict[str, Any] = {"costs": ["size"], "progress": False}
    whole = Search(tool, accuracy, "random", **options).run(trials=125)
    some = Search(tool, accuracy, Evolution(population=20, sample=10), **options).run(trials=90)
    fronts = [[(trial.metric, trial.costs["size"]) for trial in result.front] for result in (whole, some)]
    assert (len(whole.trials), len(some.trials), len(fronts[0])) == (125, 90, 13)
    assert fronts[0] == fronts[1]


def reward(tool: SearchTool) -> Callable[[], float]:
    """A metric that knows the best candidate of each op."""
    expected = {
        "0/conv2d": "conv5",
        "1/sigmoid": "gelu",
        "2/conv2d": "conv1",
        "3/relu_": "skip",
        "5/linear": "bits4",
    }
    return lambda: sum(expected[name] == label for name, label in tool.architecture.items())


def test_evolution_and_the_policy_find_more_than_chance(model: nn.Module, images: Tensor) -> None:
    tool = prepared(model, images)
    means: dict[str, float] = {}
    controllers: dict[str, Any] = {
        "random": Random(), "evolution": Evolution(20, 5), "policy": PolicyGradient(rate=0.5)
    }  # fmt: skip
    for name, controller in controllers.items():
        search = Search(tool, reward(tool), controller, train=lambda: None, progress=False)
        means[name] = float(np.mean([trial.metric or 0 for trial in search.run(trials=200).trials[-40:]]))
    assert means["evolution"] > means["random"] + 1.5
    assert means["policy"] > means["random"] + 1.5


def test_limits_and_failures_and_budgets(
    model: nn.Module, images: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = prepared(model, images)
    limit = tool.flops()

    def evaluate() -> float:
        if tool.architecture["1/sigmoid"] == "gelu":
            raise ValueError("no gelu here")
        return float("nan") if tool.architecture["1/sigmoid"] == "relu" else 1.0

    def latency() -> float:
        return 0.5

    search = Search(tool, evaluate, "random", costs=["flops", latency], limits={"flops": limit})
    trials = search.run(trials=30).trials
    assert all(trial.costs["flops"] <= limit for trial in trials if trial.metric is not None)
    assert {trial.error for trial in trials} == {"", "ValueError: no gelu here", "ValueError: metric is nan"}
    assert {trial.costs["latency"] for trial in trials if trial.metric is not None} == {0.5}
    assert "30/30" in capsys.readouterr().err
    assert len(search.run(seconds=0.0).trials) == 30
    nothing = Search(tool, evaluate, limits={"flops": 1}, progress=False).run(trials=3)
    assert nothing.best is None
    assert "above the limits" in str(nothing)


def test_state_and_architecture_survive_a_restart(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    tool = prepared(model, images, mixture=True)
    with torch.no_grad():
        for parameter in tool.parameters():
            parameter.add_(0.5)
    tool.settle()
    tool.architecture = {"0/conv2d": "conv5", "5/linear": "width0.5"}
    again = SearchTool(CHOICES, mixture=True, architecture=tool.save(tmp_path / "architecture.json"))
    again.load_state_dict(tool.state_dict())
    again.mixture = False
    with amanda.apply(tool):
        expected = model(images)
    with amanda.apply(again):
        assert torch.equal(model(images), expected)
    assert again.architecture == tool.architecture


def test_candidates_that_an_op_cannot_have_are_told(model: nn.Module, images: Tensor) -> None:
    choices = [Choice(["keep", "conv2", "conv3g3", "skip", "gelu"], type="conv2d", module="2"),
               Choice(["keep", "skip"], type="conv3d")]  # fmt: skip
    tool = prepared(model, images, choices)
    assert tool.space == {}
    assert list(tool.result.remarks) == [
        "No op was selected by type=conv3d; did you mean conv2d?",
        "There is no conv2 at 2/conv2d: windows of 3 and 2 have no common centre.",
        "There is no conv3g3 at 2/conv2d: 4 to 8 channels are not 3 groups.",
        "There is no skip at 2/conv2d: its output may have another shape than its input.",
        "There is no gelu at 2/conv2d: conv2d is no activation.",
    ]
    with amanda.apply(SearchTool(choices[1:])) as scope:
        model(images)
    assert "no op was selected by type=conv3d; did you mean conv2d?" in str(scope.report)


class Convolving(nn.Module):
    """A convolution by `torch.convolution`, which has two inputs that `conv2d` has not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.convolution(x, self.weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_a_convolution_that_is_not_called_as_conv2d_keeps_its_window(images: Tensor) -> None:
    tool = SearchTool(["conv2d=keep|conv5"])
    tool.prepare(Convolving(), images)
    assert "called as torch.convolution" in str(tool.result)


def test_a_function_is_a_candidate(model: nn.Sequential, images: Tensor) -> None:
    def halved(x: Tensor) -> Tensor:
        return x / 2

    tool = prepared(model, images, [Choice(["keep", halved], type="sigmoid")])
    tool.architecture = {"1/sigmoid": "halved"}
    with amanda.apply(tool):
        output = model(images)
    assert torch.equal(output, model[2:](model[0](images) / 2))


class Activations(nn.Sequential):
    """Two activations, and convolutions of which one has few channels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )


ACTIVATION = Choice(["keep", "gelu", "tanh"], type=["sigmoid", "relu"], shared=True)
SHARED = "all type=sigmoid+relu"


def test_a_shared_choice_is_one_of_all_its_ops() -> None:
    torch.manual_seed(0)
    model, x = Activations(), torch.rand(2, 1, 4, 4)
    tool = prepared(model, x, [ACTIVATION, "all conv2d=keep|conv3g2|conv5|skip"])
    assert tool.space == {"all type=conv2d": ("keep", "conv5"), SHARED: ("keep", "gelu", "tanh")}
    assert list(tool.result.remarks) == [
        "There is no conv3g2 at all type=conv2d: 0/conv2d cannot have it: 1 to 4 channels are not 2 groups.",
        "There is no skip at all type=conv2d: 0/conv2d cannot have it: its output may have another shape "
        "than its input.",
    ]
    whole = tool.flops()
    tool.architecture = {SHARED: "tanh", "all type=conv2d": "conv5"}
    with amanda.apply(tool):
        output = model(x)
    finalized = tool.finalize(model)
    assert torch.equal(finalized(x), output)
    assert [type(module) for module in finalized][1::2] == [nn.Tanh, nn.Tanh]
    assert [finalized[i].kernel_size for i in (0, 2)] == [(5, 5), (5, 5)]
    assert {(row[5], row[7]) for row in tool.result.rows()} == {
        (SHARED, "tanh"),
        ("all type=conv2d", "conv5"),
    }
    tool.architecture = {SHARED: "keep"}
    assert tool.flops() == prepared(tool.finalize(model), x, []).flops() > whole


@pytest.mark.parametrize("name", ["random", "evolution", "policy", "optuna"])
def test_a_search_tries_each_shared_choice_once(name: Any) -> None:
    tool = prepared(Activations(), torch.rand(2, 1, 4, 4), [ACTIVATION])
    result = Search(tool, lambda: 1.0, name, progress=False).run(trials=10)
    assert sorted(trial.architecture[SHARED] for trial in result.trials) == ["gelu", "keep", "tanh"]


def test_a_shared_mixture_has_the_sum_of_the_gradients_of_its_ops(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Activations(), torch.rand(2, 1, 4, 4)
    shared = prepared(model, x, [ACTIVATION], mixture=True)
    alone = prepared(model, x, [Choice(["keep", "gelu", "tanh"], type=["sigmoid", "relu"])], mixture=True)
    (alpha,) = shared.alphas()
    with torch.no_grad():
        for parameter in alone.alphas():
            parameter.copy_(alpha)
    outputs = []
    for tool in (shared, alone):
        with amanda.apply(tool):
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    torch.testing.assert_close(alpha.grad, sum(parameter.grad for parameter in alone.alphas()))
    assert len(list(shared.parameters())) == 1
    again = SearchTool([ACTIVATION], mixture=True)
    again.load_state_dict(shared.state_dict())
    with amanda.apply(again):
        assert torch.equal(model(x), outputs[0])
    chances = shared.sites[0].decision.probabilities()
    assert shared.settle() == {SHARED: max(chances, key=chances.__getitem__)}
    again = SearchTool([ACTIVATION], architecture=shared.save(tmp_path / "found.json"))
    again.prepare(model, x)
    assert again.architecture == shared.architecture


def test_a_mixture_drops_what_a_later_op_cannot_have() -> None:
    torch.manual_seed(0)
    first, x = nn.Linear(4, 4), torch.rand(3, 4)
    second = nn.Linear(4, 5)
    tool = prepared(first, x, ["all linear=keep|skip|bits4"], mixture=True)
    (alpha,) = tool.alphas()
    with torch.no_grad():
        alpha.copy_(torch.tensor([0.0, 9.0, 1.0]))
    with amanda.apply(tool), torch.no_grad():
        second(first(x))
    assert tool.space == {"all type=linear": ("keep", "bits4")}
    assert any("no skip at all type=linear" in remark for remark in tool.result.remarks)
    with amanda.apply(tool):
        inside = first(x)
        inside.square().sum().backward()
    assert alpha.grad is not None
    assert alpha.grad[1] == 0 != alpha.grad[0]
    tool.settle()
    parts = []
    for label in ("keep", "bits4"):
        tool.architecture = {"all type=linear": label}
        with amanda.apply(tool):
            parts.append(first(x))
    shares = torch.softmax(torch.tensor([0.0, 1.0]), -1)
    torch.testing.assert_close(inside, shares[0] * parts[0] + shares[1] * parts[1])


def test_an_op_that_has_too_little_of_a_shared_choice_is_left_out() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)), torch.rand(3, 4)
    tool = prepared(model, x, "all linear=keep|skip")
    assert [site.name for site in tool.sites] == ["0/linear"]
    assert list(tool.result.remarks) == [
        "There is no skip at 1/linear: its output may have another shape than its input."
    ]
    tool.architecture = {"all type=linear": "skip"}
    with amanda.apply(tool):
        assert torch.equal(model(x), model[1](x))


def test_warning_comes_once_for_a_search(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))), torch.rand(1, 4)
    tool = SearchTool(["relu=keep|tanh|gelu", "conv2d=keep|conv5"])
    tool.prepare(model, x)
    Search(tool, lambda: model(x).sum().item(), "random", progress=False).run(trials=8)
    assert caplog.text.count("no op was selected by type=conv2d") == 1
