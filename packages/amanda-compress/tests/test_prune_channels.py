"""Pruning of channels: groups, masks, and models that become smaller."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import let_torchvision_load
from torch import Tensor, nn

import amanda
from amanda.tools.prune import PruneError
from amanda.tools.prune.channels import ChannelPruneResult, ChannelPruneTool, _plan


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(),
        nn.Linear(8 * 16, 20), nn.ReLU(), nn.Linear(20, 5),
    )  # fmt: skip


X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    """Two branches that are added, and one that is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.left(x)
        found: Tensor = self.head(self.norm(torch.cat([x, self.right(x)], 1)))
        return found


class Heads(nn.Module):
    """Attention by hand, with two queries for each key and value."""

    def __init__(self, features: int = 32, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, 4
        self.q = nn.Linear(features, heads * self.head_dim)
        self.k, self.v = (nn.Linear(features, kv_heads * self.head_dim) for _ in range(2))
        self.out, self.head = nn.Linear(heads * self.head_dim, features), nn.Linear(features, 3)
        self.norm = nn.LayerNorm(features)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        found: Tensor = self.head(self.norm(self.out(y)))
        return found


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.middle(self.embed(tokens)))
        return found


class ByNumber(nn.Module):
    """Channels that code counts by fixed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(self.first(x).relu()).view(-1, 16))
        return found


def randomize(model: nn.Module) -> nn.Module:
    """Give normalisations values of their own, so that a dead channel is not 0 by chance."""
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d) and one.running_var is not None and one.running_mean is not None:
            one.running_var.uniform_(0.5, 1.5)
            one.running_mean.normal_()
        if "Norm" in type(one).__name__ and isinstance(getattr(one, "weight", None), nn.Parameter):
            nn.init.normal_(one.weight, 1, 0.2)
            if getattr(one, "bias", None) is not None:
                nn.init.normal_(one.bias, 0, 0.2)
    return model


def first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def removed(model: nn.Module, *example: Tensor, **options: Any) -> ChannelPruneResult:
    """Remove channels; check that the model computes what it did with masks, not what it did before."""
    randomize(model).eval()
    tool = ChannelPruneTool(**options)
    with torch.no_grad():
        dense = first(model(*example))
        tool.prepare(model, *example)
        with amanda.apply(tool):
            masked = first(model(*example))
        result = tool.finalize(model, remove=True)
        assert tool.result is result
        smaller = first(model(*example))
    assert torch.allclose(smaller, masked, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(smaller, dense, rtol=1e-3, atol=1e-3)
    assert sum(one.numel() for one in model.parameters()) == result.kept_parameters < result.parameters
    return result


def sizes(result: ChannelPruneResult) -> dict[str, tuple[int, int]]:
    return {row["module"]: (row["channels"], row["kept"]) for row in result.to_dict()["rows"]}


def test_layers_become_smaller_with_those_that_depend_on_them() -> None:
    model = network()
    result = removed(model, X)
    assert sizes(result) == {"0": (16, 8), "3": (8, 4), "5": (20, 10)}
    assert result.left == {"7.weight": "the model returns them"}
    assert (model[0].out_channels, model[1].num_features, model[3].in_channels) == (8, 8, 8)
    assert (model[3].out_channels, model[5].in_features, model[7].in_features) == (4, 4 * 16, 10)


def test_channels_that_are_added_go_together_and_concatenated_ones_apart() -> None:
    model = Residual()
    assert sizes(removed(model, X)) == {"stem": (8, 4), "right": (4, 2)}
    assert (model.left.out_channels, model.norm.num_features, model.head.in_channels) == (4, 6, 6)


@pytest.mark.parametrize(("groups", "kept"), [(16, 16), (8, 8), (2, 2)])
def test_grouped_convolutions_lose_groups_or_the_same_places_in_each(groups: int, kept: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=groups), nn.Conv2d(16, 4, 1))
    removed(model, X)
    assert model[1].groups == (groups // 2 if groups > 2 else 2)
    assert model[1].weight.shape[:2] == (8, 16 // groups if groups > 2 else 4)
    assert model[1].in_channels == model[1].out_channels == model[2].in_channels == 8


@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 16), nn.GroupNorm(2, 16), nn.GroupNorm(1, 16)])
def test_group_norm(norm: nn.GroupNorm) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), norm, nn.ReLU(), nn.Conv2d(16, 4, 1))
    removed(model, X)
    assert norm.num_channels == 8
    assert norm.num_groups == {8: 4, 2: 2, 1: 1}[norm.num_groups if norm.num_groups < 4 else 8]


def test_shuffles_and_transposed_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.ChannelShuffle(3), nn.ReLU(), nn.Conv2d(12, 16, 1), nn.PixelShuffle(2),
        nn.ConvTranspose2d(4, 8, 2), nn.Conv2d(8, 3, 1),
    )  # fmt: skip
    removed(model, X)
    assert (model[3].in_channels, model[3].out_channels) == (6, 8)
    assert (model[5].in_channels, model[5].out_channels, model[6].in_channels) == (2, 4, 4)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16)])
def test_features_of_a_normalisation(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.GELU(), nn.Linear(16, 3))
    removed(model, torch.rand(2, 8))
    assert norm.normalized_shape == (8,)


def test_whole_heads_go_with_the_queries_that_share_a_key() -> None:
    model = Heads()
    result = removed(model, torch.rand(2, 6, 32))
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 4)
    assert (model.q.out_features, model.k.out_features, model.out.in_features) == (16, 8, 16)
    assert result.left == {"head.weight": "the model returns them"}


def test_tied_weights_stay_tied() -> None:
    model = Tied()
    removed(model, torch.arange(10)[None])
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.shape == (10, 8)
    assert (model.embed.embedding_dim, model.head.in_features) == (8, 8)


def test_an_op_that_does_not_suit_fewer_channels_is_left_and_named() -> None:
    model = ByNumber()
    result = removed(model, torch.rand(2, 8))
    assert sizes(result) == {"first": (16, 8)}
    assert "view" in result.left["second.weight"] or "reshape" in result.left["second.weight"]
    assert "second.weight are left whole" in str(result)


class EverySecond(nn.Module):
    """Channels that code selects by their numbers, of whichever there are."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(1 if first else 8, 3)
        self.index: Any = slice(0, 1) if first else slice(None, None, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.two(self.one(x).relu())[:, self.index])
        return found


def test_channels_that_are_selected_by_number_are_left() -> None:
    torch.manual_seed(2)
    result = removed(EverySecond(first=False), torch.rand(2, 8))
    assert sizes(result) == {"one": (16, 8)}
    assert "getitem" in result.left["two.weight"]


def test_a_channel_that_is_selected_by_its_number_is_left_alone() -> None:
    torch.manual_seed(0)
    result = removed(EverySecond(first=True), torch.rand(2, 8))
    assert sizes(result) == {"one": (16, 8), "two": (15, 7)}


class Features(nn.Module):
    """Attention that takes the features of a head from those of its input, and keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv = nn.Linear(8, 16), nn.Linear(16, 48)
        self.out, self.last, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.bias, self.kept = nn.Parameter(torch.rand(4, 1, 1)), {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, length, features = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, features // 4).permute(2, 0, 3, 1, 4)
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias.expand(4, length, length)
        y = ((q @ k.transpose(-1, -2)) + self.kept["bias"]).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(batch, length, features))
        found: Tensor = self.head(self.last(y))
        return found


def test_code_that_counts_by_its_input_leaves_the_input() -> None:
    model = Features()
    tool = ChannelPruneTool()
    tool.prepare(model, torch.rand(2, 5, 8))
    assert "reshape" in tool.result.left["stem.weight"]
    assert "qkv.weight" in tool.result.left


def test_gates_and_slopes() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GLU(), nn.PReLU(16), nn.Linear(16, 3))
    removed(model, torch.rand(4, 8))
    assert (model[0].out_features, model[2].weight.shape, model[3].in_features) == (16, (8,), 8)


def test_what_is_not_followed_is_left_and_named() -> None:
    model = nn.LSTM(8, 8)
    tool = ChannelPruneTool()
    tool.prepare(model, torch.rand(2, 3, 8))
    assert "lstm" in tool.result.left["weight_hh_l0"]
    assert tool.result.kept_parameters == tool.result.parameters


def test_a_dead_channel_is_zero_behind_its_normalisation() -> None:
    model = randomize(network()).eval()
    tool = ChannelPruneTool()
    tool.prepare(model, X)
    with torch.no_grad(), amanda.apply(tool):
        behind = model[:2](X)
    assert (behind.abs().amax((0, 2, 3)) == 0).sum() == 8
    tool.finalize(model)
    assert torch.equal(model[:2](X), behind)
    assert model[0].out_channels == 16


def test_masks_that_parameters_cannot_have_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    tool = ChannelPruneTool()
    tool.prepare(model, torch.rand(2, 8))
    with pytest.raises(PruneError, match=r"layer_norm is over .* remove=True"):
        tool.finalize(model)


def test_gradients_of_removed_channels_are_zero() -> None:
    model = network()
    tool = ChannelPruneTool()
    tool.prepare(model, X)
    with amanda.apply(tool):
        model(X).square().sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    assert (gradient.flatten(1).abs().amax(1) == 0).sum() == 8


def test_training_goes_on_with_the_optimizers_state() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = network(X).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    held = step(model, optimizer)  # a graph that autograd still holds
    tool = ChannelPruneTool(round_to=8)
    tool.prepare(model, X)
    with amanda.apply(tool):
        step(model, optimizer)
    tool.finalize(model, remove=True, optimizer=optimizer)
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].shape == model[0].weight.shape == (8, 3, 3, 3)
    assert step(model, optimizer) < held


def test_a_removal_that_fails_leaves_model_and_optimizer_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).square().sum().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    tool = ChannelPruneTool()
    tool.prepare(model, X)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(nn.Linear, "__setattr__", fail)  # convolutions are smaller by then
    with pytest.raises(RuntimeError, match="no memory"):
        tool.finalize(model, remove=True, optimizer=optimizer)
    monkeypatch.undo()
    after = model.state_dict(), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert model[0].out_channels == 16
    tool.finalize(model, remove=True, optimizer=optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape == (8, 3, 3, 3)


def test_a_smaller_model_is_saved_copied_and_exported() -> None:
    model = network()
    removed(model, X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    exported = torch.export.export(model, (X,)).module()
    for other in (loaded, copy.deepcopy(model), exported):
        assert torch.allclose(other(X), model(X), atol=1e-6)


def test_the_model_is_as_it_was_after_prepare() -> None:
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    ChannelPruneTool().prepare(model, X)
    assert model.training
    assert model[1].training
    assert model[0].out_channels == 16
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def kept_channels(importance: Any, model: nn.Module, **options: Any) -> list[int]:
    tool = ChannelPruneTool(importance=importance, module="0", **options)
    copied = copy.deepcopy(model)
    for one, own in zip(copied.parameters(), model.parameters(), strict=True):
        one.grad = own.grad
    tool.prepare(copied, torch.rand(2, 4))
    kept: list[int] = tool._plan.keep_masks[0].nonzero()[0].tolist()  # type: ignore[union-attr]
    return kept


def test_importance_is_of_all_weights_of_the_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    rows = torch.cat([model[0].weight, model[2].weight.T], 1).detach()
    model(torch.rand(8, 4)).square().sum().backward()
    gradients = torch.cat([model[0].weight.grad, model[2].weight.grad.T], 1)
    expected = {
        "l1": rows.abs().sum(1), "l2": rows.norm(dim=1), "taylor": (rows * gradients).square().sum(1),
    }  # fmt: skip
    for name, worth in expected.items():
        assert kept_channels(name, model) == sorted(worth.topk(3).indices.tolist())

    def last(values: dict[str, Tensor]) -> Tensor:
        assert {name: tuple(one.shape) for name, one in values.items()} == {
            "0.weight:0": (6, 4), "2.weight:1": (6, 3),
        }  # fmt: skip
        return torch.arange(6)

    assert kept_channels(last, model) == [3, 4, 5]
    assert kept_channels("random", model) == kept_channels("random", model)
    assert kept_channels("random", model) != kept_channels("random", model, seed=3)


def test_a_global_budget_compares_groups() -> None:
    model = network()
    worth = {"0": 3.0, "3": 2.0, "5": 1.0}

    def by_layer(values: dict[str, Tensor]) -> list[float]:
        return [worth[min(values)[0]]] * len(next(iter(values.values())))

    result = removed(model, X, scope="global", importance=by_layer)
    assert sizes(result) == {"0": (16, 16), "3": (8, 5), "5": (20, 1)}


def test_budgets_of_flops_and_rounding() -> None:
    result = removed(network(), X, of="flops", sparsity=0.6)
    assert result.flops == pytest.approx(0.4, abs=0.06)
    result = removed(network(), X, round_to=8, sparsity=0.6)
    assert sizes(result) == {"0": (16, 8), "3": (8, 8), "5": (20, 8)}


class Slow(nn.Module):
    """A call takes a second for each channel of a convolution, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 20, 1), nn.Conv2d(20, 2, 1)
        self.clock = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.clock += self.one.weight.shape[0]
        found: Tensor = self.two(self.one(x).relu())
        return found


class AtLeastFour(nn.Module):
    """A layer that a program refuses to make narrower than four channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.shape[1] < 4:
            raise ValueError("too narrow")
        made: Tensor = self.second(y)
        return made


def test_a_share_that_a_model_does_not_suit_leaves_others_to_a_budget_of_latency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_plan, "_share_of_time", lambda plan, example, named: plan.remaining_work)
    tool = ChannelPruneTool(of="latency", sparsity=0.4)
    tool.prepare(AtLeastFour().eval(), torch.randn(3, 6))
    assert tool.result.latency is not None
    assert 0.5 < tool.result.latency <= 0.6


def test_a_budget_of_latency_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Slow()
    monkeypatch.setattr("amanda.tools.prune.channels._plan.perf_counter", lambda: model.clock)
    result = removed(model, X, of="latency", sparsity=0.6)
    assert result.latency == 0.4
    assert sizes(result) == {"one": (20, 8)}
    assert "A call takes 40.0% of the time" in str(result)
    monkeypatch.undo()
    measured = removed(network(), X, of="latency").latency
    assert measured is not None
    assert measured > 0
    assert removed(network(), X, of="flops").latency is None


def test_layers_are_selected_and_excluded() -> None:
    assert sizes(removed(network(), X, module="0")) == {"0": (16, 8)}
    result = removed(network(), X, exclude=["0", "3"])
    assert sizes(result) == {"5": (20, 10)}
    assert result.left["0.weight"] == "0 is excluded"
    nested = nn.Sequential(network()[:4], network()[4:])
    assert sizes(removed(copy.deepcopy(nested), X, module="0")) == {"0.0": (16, 8), "0.3": (8, 4)}
    assert sizes(removed(nested, X, exclude="0")) == {"1.5": (20, 10)}


class OfOthers(nn.Module):
    """Computes with modules that are no part of it, or with empty slices."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.num_heads = nn.Linear(8, 16), nn.Linear(16, 4), 4
        self.activations = [nn.ReLU(), nn.GELU()]
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.compute(self, self.first(x)))
        return found


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "compute",
    [
        lambda net, x: nn.Sequential(nn.ReLU(), nn.Dropout(0.1).eval())(x),
        lambda net, x: net.activations[1](net.activations[0](x)),
        lambda net, x: Attention(net.num_heads)(x),
        lambda net, x: torch.cat([x[..., :16] * 2, x[..., 16:]], -1),
        lambda net, x: torch.cat([x.new_zeros(2, 5, 0), x.relu()], -1),
        lambda net, x: torch.cat(torch.tensor_split(x, [0, 16], -1), -1),
        lambda net, x: torch.cat([x, x[:, :0]], 1),
    ],
)
def test_modules_made_in_forward_and_empty_slices_leave_channels_removable(compute: Any) -> None:
    result = removed(OfOthers(compute), torch.rand(2, 5, 8))
    assert sizes(result) == {"first": (4, 2) if "heads" in compute.__code__.co_names else (16, 8)}


def test_layers_in_a_plain_list_are_left_and_named() -> None:
    hidden = [nn.Linear(16, 16), nn.Linear(16, 16)]
    net = OfOthers(lambda net, x: hidden[1](hidden[0](x).relu()))
    tool = ChannelPruneTool()
    tool.prepare(net, torch.rand(2, 5, 8))
    result = tool.finalize(net, remove=True)
    assert not sizes(result)
    assert "is of no module of the model" in result.left["first.weight"]
    assert "is of no module of the model" in result.left["(Linear)"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_compute_as_they_are_masked(frozen: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    net = nn.Sequential(nn.Linear(12, 32), layer, nn.Linear(32, 4)).requires_grad_(not frozen).eval()
    x, tool = torch.rand(2, 5, 12), ChannelPruneTool(sparsity=0.5)
    tool.prepare(net, x)
    with torch.no_grad(), amanda.apply(tool):
        masked = net(x)
    assert torch.backends.mha.get_fastpath_enabled()
    assert set(sizes(tool.finalize(net, remove=True))) == {"0", "1.self_attn", "1.linear1"}
    with torch.no_grad():  # by the fused op
        assert torch.allclose(net(x), masked, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sparsity": 2}, "sparsity is 2"), ({"importance": "l3"}, "importance is 'l3'"),
        ({"scope": "op"}, "scope is 'op'"), ({"of": "energy"}, "of is 'energy'"),
        ({"round_to": 0}, "round_to is 0"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PruneError, match=told):
        ChannelPruneTool(**options)


def test_errors_say_what_was_given() -> None:
    with pytest.raises(PruneError, match="no layer with channels was selected by module=nine"):
        ChannelPruneTool(module="nine").prepare(network(), X)
    with pytest.raises(PruneError, match='"taylor" reads gradients, and 0'):
        ChannelPruneTool(importance="taylor").prepare(network(), X)
    with pytest.raises(PruneError, match=r"importance gave values of shape \(1,\)"):
        ChannelPruneTool(importance=lambda values: [1.0]).prepare(network(), X)
    with pytest.raises(PruneError, match="prepare"):
        ChannelPruneTool().finalize(network(), remove=True)
    with pytest.raises(PruneError, match="given a int"):
        ChannelPruneTool().prepare(3)


MODELS: dict[str, Callable[[Any], Any]] = {
    "resnet18": lambda timm: (timm.create_model("resnet18"), 64),
    "resnet50": lambda timm: (timm.create_model("resnet50"), 64),
    "regnety_002": lambda timm: (timm.create_model("regnety_002"), 64),
    "mobilenetv2_050": lambda timm: (timm.create_model("mobilenetv2_050"), 64),
    "densenet121": lambda timm: (timm.create_model("densenet121"), 64),
    "convnext_atto": lambda timm: (timm.create_model("convnext_atto"), 64),
    "vit_tiny": lambda timm: (
        timm.create_model("vit_tiny_patch16_224", depth=2, num_heads=6, img_size=32, qk_norm=True), 32
    ),
    "swin": lambda timm: (
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 1, 1, 1), embed_dim=48
        ), 64,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_timm(name: str) -> None:
    let_torchvision_load()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, extent = MODELS[name](timm)
    result = removed(model, torch.rand(1, 3, extent, extent), sparsity=0.4)
    assert set(result.left.values()) == {"the model returns them"}
    assert len(result.left) == 1
    assert result.flops < 0.6


BY_THEIR_INPUT: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("beit_base_patch16_224", {"depth": 2, "embed_dim": 192, "num_heads": 6, "img_size": 32}, 32),
    "crossvit": ("crossvit_tiny_240", {}, 240), "edgenext": ("edgenext_xx_small", {}, 64),
    "efficientformer": ("efficientformer_l1", {}, 224), "levit": ("levit_128s", {}, 224),
    "pvt_v2": ("pvt_v2_b0", {}, 64), "tiny_vit": ("tiny_vit_5m_224", {}, 224),
    "xcit": ("xcit_nano_12_p16_224", {}, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("beit", "levit") else pytest.mark.long)
        for name in BY_THEIR_INPUT
    ],
)
def test_models_whose_attention_counts_by_its_input_lose_other_channels(name: str) -> None:
    let_torchvision_load()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model_name, options, extent = BY_THEIR_INPUT[name]
    model = randomize(timm.create_model(model_name, **options)).eval()
    x, tool = torch.rand(1, 3, extent, extent), ChannelPruneTool(sparsity=0.4)
    with torch.no_grad():
        tool.prepare(model, x)
        with amanda.apply(tool):
            masked = first(model(x))
        result = tool.finalize(model, remove=True)
        smaller = first(model(x))
    assert torch.allclose(smaller, masked, rtol=1e-4, atol=1e-5)
    assert sum(one.numel() for one in model.parameters()) == result.kept_parameters
    assert result.flops < 0.8
    trained = first(model.train()(torch.rand(2, 3, extent, extent)))
    trained.square().mean().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama tied", "bert", "gpt2", "distilbert", "deberta", "phi3"])
def test_models_of_transformers(name: str) -> None:
    let_torchvision_load()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": "tied" in name,
    }  # fmt: skip
    if "llama" in name:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama))
    elif name == "phi3":
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**llama, pad_token_id=0))
    elif name == "distilbert":
        distilbert = {"vocab_size": 100, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}
        config = transformers.DistilBertConfig(**distilbert)
        model = transformers.DistilBertForSequenceClassification(config)
    elif name == "deberta":
        del llama["num_key_value_heads"]
        config = transformers.DebertaV2Config(**llama)
        model = transformers.DebertaV2ForSequenceClassification(config)
    elif name == "bert":
        del llama["num_key_value_heads"]
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**llama))
    else:
        sizes = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    result = removed(model, torch.arange(12)[None])
    assert len(result.left) <= 4
    assert result.flops < 0.4
    model(
        torch.arange(12)[None],
        labels=torch.zeros(1, dtype=torch.long) if "bert" in name else torch.arange(12)[None],
    ).loss.backward()
