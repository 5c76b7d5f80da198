"""Token skimming against a BERT that takes tokens away by hand."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.dynamic_prune import AttentionPruneTool

KEEP = 0.6


class Layer(nn.Module):
    """A layer of BERT, with the ops of attention written out, of one, or of nn.MultiheadAttention."""

    def __init__(self, way: str, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.way, self.heads = way, heads
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = nn.functional.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias).chunk(
            3, -1
        )
        return [one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v)]

    def attend(self, x: Tensor) -> Tensor:
        if self.way in ("weights", "module"):
            return self.attention(x, x, x, need_weights=self.way == "weights")[0]  # type: ignore[no-any-return]
        q, k, v = self.split(x)
        if self.way == "sdpa":
            made = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            made = ((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        y: Tensor = self.attention.out_proj(made.transpose(1, 2).flatten(2))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "normed first":
            x = x + self.attend(self.norm1(x))
            return x + self.down(self.up(self.norm2(x)).relu())
        x = self.norm1(x + self.attend(x))
        y: Tensor = self.norm2(self.down(self.up(x).relu()) + x)
        return y


class Encoder(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(30, 12), nn.LayerNorm(12)
        self.layers = nn.Sequential(*(Layer(way) for _ in range(3)))
        for layer in self.layers:
            nn.init.normal_(layer.attention.in_proj_weight, std=1.0)  # attention that differs between tokens
            nn.init.normal_(layer.attention.out_proj.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.layers(self.norm(self.embedding(tokens)))
        return y


def by_hand(model: Encoder, tokens: Tensor, size: int) -> Tensor:
    """The states of all tokens, of those that were taken away the last."""
    x = model.norm(model.embedding(tokens))
    left = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    states = torch.zeros_like(x)
    count = tokens.shape[1] // size
    for layer in model.layers:
        first = layer.way == "normed first"
        q, k, v = layer.split(layer.norm1(x) if first else x)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        made = layer.attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
        x = x + made if first else layer.norm1(x + made)
        made = layer.down(layer.up(layer.norm2(x) if first else x).relu())
        x = x + made if first else layer.norm2(x + made)
        states = states.scatter(1, left[..., None].expand_as(x), x)
        score = weights.sum((1, 2)).detach().unflatten(1, (-1, size)).mean(2)
        score[:, 0] = 1e9
        count = math.ceil(KEEP * count)
        units = score.topk(count).indices.sort().values
        places = (units[..., None] * size + torch.arange(size)).flatten(1)
        left = left.gather(1, places)
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
    return states


TOKENS = (torch.arange(24) * 7 % 29).reshape(2, 12)


@pytest.mark.parametrize(
    ("way", "size"),
    [("eager", 1), ("eager", 2), ("normed first", 1), ("sdpa", 2), ("module", 1), ("weights", 2)],
)
def test_states_and_gradients_are_those_of_a_model_that_takes_tokens_away(way: str, size: int) -> None:
    model = Encoder(way).double()
    tool = AttentionPruneTool("token" if size == 1 else "block", keep=KEEP, block=size)
    wanted = by_hand(model, TOKENS, size)
    gradients = torch.autograd.grad((wanted**3).sum(), list(model.parameters()))
    with amanda.apply(tool):
        found = model(TOKENS)
        (found**3).sum().backward()
    torch.testing.assert_close(found, wanted)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    pruned = [row[6] * 12 for row in tool.result.rows()]
    assert pruned == pytest.approx([0, 4, 7] if size == 1 else [0, 4, 6])


class Learned(nn.Module):
    """The encoder with skim predictors written into the source, which drop tokens by masks."""

    def __init__(self, model: Encoder, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.skims = [
            {key.split("/")[2]: value.detach().clone().requires_grad_() for key, value in state.items()
             if key.startswith(f"layers.{i}/")} for i in range(3)
        ]  # fmt: skip
        self.shares: list[Tensor] = []

    def forward(self, tokens: Tensor, noise: np.random.Generator | None) -> Tensor:
        x, alive = self.model.norm(self.model.embedding(tokens)), torch.ones(tokens.shape, dtype=torch.double)
        for layer, skim in zip(self.model.layers, self.skims, strict=True):
            self.shares.append(alive.mean())
            q, k, v = layer.split(x)
            weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).exp()
            seen = alive.detach()
            weights = weights * seen[:, None, None]
            weights = weights / weights.sum(-1, keepdim=True) * seen[:, None, :, None]
            features = torch.cat([weights.sum(2), weights.diagonal(dim1=-2, dim2=-1)], 1).transpose(1, 2)
            hidden = (features @ skim["skim.hidden.weight"] + skim["skim.hidden.bias"]).tanh()
            logits = (hidden @ skim["skim.weight"] + skim["skim.bias"]).squeeze(-1)
            if noise is not None:
                u = noise.uniform(1e-8, 1 - 1e-8, logits.shape)
                logits = logits + torch.tensor(np.log(u / (1 - u)))
            soft = logits.sigmoid()
            hard = (logits > 0).float() + soft - soft.detach()
            made = layer.attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
            stays = alive[..., None]
            x = layer.norm1(x + made) * stays + x * (1 - stays)
            x = layer.norm2(layer.down(layer.up(x).relu()) + x) * stays + x * (1 - stays)
            alive = torch.cat([alive[:, :1], alive[:, 1:] * hard[:, 1:]], 1)
        return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_learned_skimming_has_the_gradients_of_a_model_that_was_modified(way: str, training: bool) -> None:
    model = Encoder(way).double()
    tool = AttentionPruneTool(by="learned", keep=0.3, strength=50.0, seed=2)
    tool.prepare(model, TOKENS)
    for name, value in tool.state_dict().items():
        if name.endswith("skim.weight"):
            nn.init.normal_(value, std=2.0)
    tool.train(training)
    other = Learned(model, tool.state_dict())
    wanted = other(TOKENS, np.random.default_rng([2, 1]) if training else None)
    budget = 50 * (sum(other.shares) / 3 - 0.3) ** 2
    trained = [value for skim in other.skims for value in skim.values()]
    gradients = torch.autograd.grad(
        (wanted**3).sum() + budget, [*model.parameters(), *trained], allow_unused=True
    )
    with amanda.apply(tool):
        found = model(TOKENS)
        ((found**3).sum() + tool.loss()).backward()
    torch.testing.assert_close(tool.loss(), budget)
    torch.testing.assert_close(found, wanted)
    for parameter, gradient in zip([*model.parameters(), *tool.parameters()], gradients, strict=True):
        if gradient is None:  # what the last attention says is of no use
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient)
    assert sum(gradient is None for gradient in gradients) == 4
    assert 0.1 < tool.result.rows()[2][6] < 1


Q, K, V = torch.randn(3, 2, 4, 5, 8).unbind()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((Q, K, V), {}),
        ((Q, K, V), {"is_causal": True}),
        ((Q, K, V), {"scale": 0.1}),
        ((Q, K, V), {"attn_mask": torch.randn(5, 5)}),
        ((Q, K, V), {"attn_mask": torch.arange(25).reshape(5, 5) % 3 > 0}),
        ((Q, K, V), {"attn_mask": torch.arange(5)[:, None].expand(5, 5) > 1}),  # rows that see nothing
        ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}),
        ((Q[:, 0], K[:, 0], V[:, 0]), {"attn_mask": torch.arange(25).reshape(5, 5) % 2 > 0}),
        ((Q[:, :, :2], K, V), {}),
        ((Q[None], K[None], V[None]), {}),
    ],
)
def test_what_drops_nothing_attends_as_pytorch_does(
    given: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    wanted = nn.functional.scaled_dot_product_attention(*given, **options)
    with amanda.apply(AttentionPruneTool()):
        found = nn.functional.scaled_dot_product_attention(*given, **options)
    torch.testing.assert_close(found, wanted)


def test_padding_that_is_masked_is_dropped_first() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
    )
    padding = torch.arange(8) >= 6
    tool = AttentionPruneTool(keep=0.75)
    x = torch.randn(1, 8, 12)
    with amanda.apply(tool):
        found = model(x, src_key_padding_mask=padding[None])
    wanted = model(x, src_key_padding_mask=padding[None])
    torch.testing.assert_close(found[:, :6], wanted[:, :6])
    assert tool.result.rows()[1][6] == 0.25


def test_without_the_cache_and_in_half_precision_it_drops_as_much() -> None:
    model = Encoder("eager")
    dropped = []
    for scope in (nullcontext(), amanda.cache_disabled(), torch.autocast("cpu", torch.bfloat16)):
        tool = AttentionPruneTool(keep=0.5)
        with scope, amanda.apply(tool):
            model(TOKENS).sum().backward()
        dropped.append([row[5:7] for row in tool.result.rows()])
    assert dropped[0] == dropped[1] == dropped[2]
    assert dropped[0][2][1] >= 0.5


def test_what_pytorch_computes_in_one_op_is_said() -> None:
    model = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
    tool = AttentionPruneTool()
    with torch.no_grad(), amanda.apply(tool):
        model(torch.randn(2, 5, 12))
    assert not tool.result.rows()
    assert "_transformer_encoder_layer_fwd is one fused op" in str(tool.result)


@pytest.mark.parametrize("way", ["weights", "module"])
def test_sequences_may_come_before_the_batch(way: str) -> None:
    model = Encoder(way)
    batch_first, tool = AttentionPruneTool(keep=KEEP), AttentionPruneTool(keep=KEEP)
    with amanda.apply(batch_first):
        wanted = model(TOKENS)
    for layer in model.layers:
        layer.attention.batch_first = False
    with amanda.apply(tool):
        found = model(TOKENS.t())
    torch.testing.assert_close(found.transpose(0, 1), wanted)
    assert tool.result.rows()[2][6] > 0.5


def test_attention_to_another_sequence_is_left_as_it_is() -> None:
    model = nn.Transformer(12, 2, 2, 2, 20, dropout=0.0, batch_first=True)
    x, y = torch.randn(2, 2, 9, 12).unbind()
    tool = AttentionPruneTool(keep=0.5)
    with amanda.apply(tool):
        model(x, y)
    assert [(row[2], round(row[6] * 9)) for row in tool.result.rows()] == [
        ("encoder.layers.0.self_attn", 0), ("encoder.layers.1.self_attn", 4),
        ("decoder.layers.0.self_attn", 0), ("decoder.layers.1.self_attn", 4),
    ]  # fmt: skip


class Cached(nn.Module):
    """Attention to a sequence whose keys and values go through a cache, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            layer(one).unflatten(-1, (3, 4)).transpose(1, 2)
            for layer, one in zip(self.layers, (x, y, y), strict=True)
        )
        k, v = torch.cat([torch.tensor([]), k], -2), torch.cat([torch.tensor([]), v], -2)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def test_keys_from_a_cache_are_of_the_sequence_that_they_were_made_of() -> None:
    model, tool = nn.ModuleList(Cached() for _ in range(4)), AttentionPruneTool(keep=0.5)
    x, y = torch.randn(2, 2, 8, 12).unbind()
    with amanda.apply(tool):
        for i, layer in enumerate(model):
            x = layer(x, x if i % 2 == 0 else y)
    assert [row[6] for row in tool.result.rows()] == [0, 0.5]


class Windows(nn.Module):
    """Attention in windows that are shifted from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            windows = x.reshape(-1, 4, 12)
            made, _ = layer(windows, windows, windows, need_weights=False)
            x = (x + made.reshape(x.shape)).roll(2, 1)
        return x


def test_windows_of_another_layer_are_other_sequences() -> None:
    model, x, tool = Windows(), torch.randn(2, 8, 12), AttentionPruneTool(keep=0.5)
    wanted = model(x)
    with amanda.apply(tool):
        torch.testing.assert_close(model(x), wanted)
    assert [row[6] for row in tool.result.rows()] == [0, 0]
