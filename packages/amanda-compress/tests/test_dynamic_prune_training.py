"""Predictors trained on scikit-learn's digits: targets are reached, and state outlives the tool."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.errors import AmandaError
from amanda.tools.dynamic_prune import (
    ActivationPruneTool,
    AttentionPruneTool,
    DynamicChannelPruneTool,
    DynamicPruneTool,
)
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.stats import StatsTool

TRAINED = 1500


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.second(self.norm1(self.first(x)).relu()))).relu()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Sixteen patches of 2x2, and a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 17, 16) * 0.5)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([torch.zeros_like(patches[:, :1]), patches], 1) + self.places
        y: Tensor = self.head(self.encoder(tokens)[:, 0])
        return y


@pytest.fixture(scope="module")
def digits() -> Iterator[tuple[Tensor, Tensor]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower with more
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    images, labels = load_digits(return_X_y=True)
    yield torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.backends.mha.set_fastpath_enabled(fast)
    torch.set_num_threads(threads)


def trained(
    make: Callable[[], nn.Module], tool: DynamicPruneTool, digits: tuple[Tensor, Tensor], steps: int
) -> nn.Module:
    """A model that was trained with a tool, at last with the masks of inference."""
    torch.manual_seed(0)
    images, labels = digits
    model = make()
    tool.prepare(model, images[:4])
    optimizer = torch.optim.Adam([*model.parameters(), *tool.parameters()], lr=0.01)
    with amanda.apply(tool):
        for step in range(steps):
            batch = torch.randint(0, TRAINED, (64,))
            tool.train(step < 0.6 * steps)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch]) + tool.loss()
            loss.backward()
            optimizer.step()
    tool.train(False)
    tool.clear()
    return model.eval()


def mean_pruned(tool: DynamicPruneTool) -> float:
    pruned = [row[6] for row in tool.result.rows()]
    return sum(pruned) / len(pruned)


Reached = Callable[[DynamicPruneTool], bool]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], DynamicPruneTool], Reached]] = {
    "channels": (
        convolutional,
        lambda: DynamicChannelPruneTool(0.5, penalty=1e-4),
        lambda tool: mean_pruned(tool) >= 0.5 and tool.result.saved > 0.7,
    ),
    "positions": (
        convolutional,
        lambda: ActivationPruneTool(budget=0.5),
        lambda tool: abs(tool.result.saved - 0.5) < 0.1,
    ),
    "tokens": (
        Transformer,
        lambda: AttentionPruneTool(by="learned", keep=0.7, strength=10.0),
        lambda tool: abs(mean_pruned(tool) - 0.3) < 0.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["positions", *(pytest.param(name, marks=pytest.mark.long) for name in ("channels", "tokens"))]
)
def test_the_target_is_reached_on_digits_and_outlives_the_tool(
    name: str, digits: tuple[Tensor, Tensor]
) -> None:
    make, tool_of, reached = CASES[name]
    tool = tool_of()
    model = trained(make, tool, digits, 200 if make is Transformer else 120)
    images, labels = (one[TRAINED:] for one in digits)
    with torch.no_grad(), amanda.apply(tool):
        said = model(images)
    accuracy = (said.argmax(1) == labels).float().mean().item()
    assert accuracy > 0.6  # 0.72 to 0.93 with other seeds
    assert reached(tool)

    file = io.BytesIO()
    torch.save(tool.state_dict(), file)
    file.seek(0)
    again = tool_of()
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        again.prepare(model, images)
        with amanda.apply(again):
            assert torch.equal(model(images), said)
    assert len(list(again.parameters())) == len(list(tool.parameters())) > 0


@pytest.mark.parametrize("name", CASES)
def test_state_that_is_loaded_later_is_computed_with_and_trained_on(
    name: str, digits: tuple[Tensor, Tensor]
) -> None:
    make, tool_of, _ = CASES[name]
    images, labels = (one[:16] for one in digits)

    def start(tool: DynamicPruneTool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make()
        model.eval()
        tool.prepare(model, images)
        return model, torch.optim.SGD([*model.parameters(), *tool.parameters()], 0.1, momentum=0.9)

    def train(
        tool: DynamicPruneTool, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
    ) -> list[Tensor]:
        with amanda.apply(tool):
            for _ in range(steps):
                optimizer.zero_grad()
                (F.cross_entropy(model(images), labels) + tool.loss()).backward()
                optimizer.step()
        return [one.detach().clone() for one in [*model.parameters(), *tool.parameters()]]

    tool = tool_of()
    one = start(tool)
    train(tool, *one, 2)
    saved = copy.deepcopy([one[0].state_dict(), tool.state_dict(), one[1].state_dict()])
    again = tool_of()
    other = start(again)
    other[0].load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    other[1].load_state_dict(saved[2])
    assert all(map(torch.equal, train(tool, *one, 2), train(again, *other, 2)))

    third = tool_of()
    third.load_state_dict({key: value[..., :0] for key, value in tool.state_dict().items()})
    assert third.waiting_state()
    with pytest.raises(AmandaError, match="it belongs to another model"):
        third.prepare(one[0], images)


def test_what_was_loaded_is_trained_by_itself(digits: tuple[Tensor, Tensor]) -> None:
    model, images = convolutional(), digits[0][:16]
    tool, other = DynamicChannelPruneTool(), DynamicChannelPruneTool()
    tool.prepare(model, images)
    other.load_state_dict(tool.state_dict())
    other.prepare(model, images)
    assert not {id(one) for one in tool.parameters()} & {id(one) for one in other.parameters()}


def test_the_same_seed_gives_the_same_training(digits: tuple[Tensor, Tensor]) -> None:
    runs = []
    for _ in range(2):
        tool = AttentionPruneTool(by="learned", seed=7)
        model = trained(Transformer, tool, digits, 4)
        runs.append([*model.parameters(), *tool.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_dynamic_tools_run_beside_each_other_and_beside_others(digits: tuple[Tensor, Tensor]) -> None:
    images = digits[0][:16]
    torch.manual_seed(1)
    model = convolutional().eval()

    def run(*tools: amanda.Tool) -> Tensor:
        with torch.no_grad(), amanda.apply(*tools):
            y: Tensor = model(images)
        return y

    channels, positions = DynamicChannelPruneTool(), ActivationPruneTool()
    for tool in (channels, positions):
        tool.prepare(model, images)
    wanted = run(channels, positions)
    flops, stats, nan = FlopsTool(), StatsTool(), NanTool()
    assert torch.equal(run(flops, channels, stats, positions, nan), wanted)
    assert not torch.equal(run(channels), wanted)
    dense = flops.result.by("type").rows()
    macs = next(row[2] for row in dense if row[0] == "conv2d")
    channels.clear()
    run(channels)
    assert sum(row[7] for row in channels.result.rows()) == macs


@pytest.mark.parametrize("kind", [DynamicChannelPruneTool, ActivationPruneTool])
def test_without_the_cache_and_in_half_precision_predictors_say_the_same(
    kind: Callable[[], DynamicPruneTool], digits: tuple[Tensor, Tensor]
) -> None:
    images = digits[0][:16]
    torch.manual_seed(1)
    model, tool = convolutional().eval(), kind()
    with torch.no_grad():
        tool.prepare(model, images)
        with amanda.apply(tool):
            wanted = model(images)
            with amanda.cache_disabled():
                assert torch.equal(model(images), wanted)
            tool.clear()
            with torch.autocast("cpu", torch.bfloat16):
                half = model(images)
    assert half.dtype == torch.bfloat16
    assert tool.result.saved > 0.1
    assert len(list(tool.parameters())) == len(tool.state_dict())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DynamicChannelPruneTool(density=0), "density is 0"),
        (lambda: ActivationPruneTool(budget=1.5), "budget is 1.5"),
        (lambda: AttentionPruneTool(keep=-1), "keep is -1"),
        (lambda: AttentionPruneTool(unit="word"), "unit is 'word'; give 'token' or 'block'"),
        (lambda: AttentionPruneTool(by="chance"), "by is 'chance'"),
        (lambda: AttentionPruneTool(block=0), "block is 0"),
        (lambda: AttentionPruneTool(protect=-1), "protect is -1"),
        (lambda: AttentionPruneTool(protect=1.5), "protect is 1.5"),  # type: ignore[arg-type]
        (lambda: DynamicChannelPruneTool(seed="a"), "seed is 'a'"),  # type: ignore[arg-type]
        (lambda: AttentionPruneTool(by="learned", hidden=0), "hidden is 0"),
        (lambda: ActivationPruneTool(temperature=0), "temperature is 0"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], DynamicPruneTool], said: str) -> None:
    with pytest.raises(AmandaError, match=said):
        make()
