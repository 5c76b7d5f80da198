"""Quantised caches of models that generate, against caches that are quantised by hand."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.quantize import KVCacheTool, QuantizeError, quantized_states

IDS = torch.arange(1, 25).reshape(2, 12)


@pytest.fixture(params=["llama", "gpt2", "llama, eager"])
def model(request: Any, transformers: Any) -> Any:
    return made(transformers, request.param)


def made(transformers: Any, kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    config._attn_implementation = "eager" if "eager" in kind else "sdpa"
    return transformers.LlamaForCausalLM(config).eval()


def by_hand(x: Tensor, bits: int, size: int, axis: str) -> Tensor:
    """Round each group of keys or values (batch, heads, tokens, channels), one group after another."""
    made = x.float().numpy().copy()
    rows = made if axis == "token" else made.swapaxes(-1, -2)
    for start in range(0, rows.shape[-1], size):
        for row in np.ndindex(rows.shape[:-1]):
            group = rows[row][start : start + size]
            least, scale = group.min(), (group.max() - group.min()) / np.float32(2**bits - 1)
            group[:] = np.rint((group - least) / scale) * scale + least
    return torch.from_numpy(made)


class HandCache:
    """Make a DynamicCache whose layers quantise what leaves the residual window."""

    def __init__(self, transformers: Any, bits: int, size: int, axes: tuple[str, str], residual: int) -> None:
        from transformers.cache_utils import DynamicLayer

        class Layer(DynamicLayer):  # type: ignore[misc]
            done = (0, 0)

            def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
                super().update(keys, values)
                for i, (name, axis) in enumerate(zip(("keys", "values"), axes, strict=True)):
                    held = getattr(self, name)
                    last = max(held.shape[-2] - residual, 0)
                    last -= last % size if axis == "channel" else 0
                    if last > self.done[i]:
                        old = held[..., self.done[i] : last, :]
                        parts = [held[..., : self.done[i], :], by_hand(old, bits, size, axis)]
                        setattr(self, name, torch.cat([*parts, held[..., last:, :]], -2))
                        self.done = (last, self.done[1]) if i == 0 else (self.done[0], last)
                return self.keys, self.values

        self.cache = transformers.DynamicCache()
        self.cache.layers = [Layer(), Layer()]


def call(model: nn.Module, ids: Tensor, cache: Any) -> Any:
    """Return a model's output for tokens that follow those of a cache, and extend the cache."""
    parameters = inspect.signature(model.forward).parameters
    # Transformers renames the argument in 5.24.
    name = "cache" if "cache" in parameters else "past_key_values"
    return model(ids, **{name: cache}, use_cache=True)


def steps(model: nn.Module, cache: Any) -> Tensor:
    """Return the logits of a prompt of five tokens and of seven steps with a token each."""
    logits = []
    with torch.no_grad():
        for part in (IDS[:, :5], *IDS[:, 5:].split(1, 1)):
            logits.append(call(model, part, cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("bits", "axes", "residual"),
    [(2, ("token", "token"), 0), (4, ("channel", "token"), 3), (8, ("channel", "channel"), 1)],
)
def test_logits_are_those_of_a_cache_quantised_by_hand(
    model: Any, transformers: Any, bits: int, axes: Any, residual: int
) -> None:
    tool = KVCacheTool(bits, 4, *axes, residual=residual)
    with amanda.apply(tool):
        found = steps(model, transformers.DynamicCache())
    wanted = steps(model, HandCache(transformers, bits, 4, axes, residual).cache)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    assert (found - steps(model, transformers.DynamicCache())).abs().max() > 1e-4
    assert not tool.left


def test_steps_are_those_of_transformers_quantized_layer(transformers: Any) -> None:
    from transformers.cache_utils import QuantizedLayer

    class Layer(QuantizedLayer):  # type: ignore[misc]
        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return by_hand(tensor, 8, 4, "token")

        def _dequantize(self, tensor: Tensor) -> Tensor:
            return tensor

    # Its layers round what they return of the prompt at the next step, and keep the newest token.
    cache = transformers.DynamicCache()
    cache.layers = [Layer(residual_length=1), Layer(residual_length=1)]
    model = made(transformers, "llama")
    with torch.no_grad():
        wanted = [call(model, one, cache).logits for one in IDS.split(1, 1)]
        own, tool = transformers.DynamicCache(), KVCacheTool(8, 4, residual=1)
        with amanda.apply(tool):
            found = [call(model, one, own).logits for one in IDS.split(1, 1)]
    # They round older tokens at each step again, which moves them by an ulp.
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=0, atol=1e-5)


def test_bytes_and_noise_are_told(model: Any) -> None:
    tool = KVCacheTool(4, 16, residual=6)
    with torch.no_grad(), amanda.apply(tool):
        model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    heads = 2 if "Llama" in type(model).__name__ else 4
    tokens = 12 + 4
    rows = [
        dict(zip([one.name for one in tool.result.columns], row, strict=True)) for row in tool.result.rows()
    ]
    assert [row["tensor"] for row in rows] == ["keys", "values"] * 2
    for row in rows:
        assert row["before"] == 2 * heads * tokens * 16 * 4
        assert row["after"] == 2 * heads * ((tokens - 6) * (16 // 2 + 2 * 4) + 6 * 16 * 4)
        assert (row["tokens"], row["quantised"]) == (tokens, tokens - 6)
        assert 15 < row["SQNR"] < 40
    assert tool.result.after == sum(row["after"] for row in rows)
    assert f"{tool.result.before:,}" in str(tool.result)


def test_beam_search_and_halves_are_quantised(transformers: Any) -> None:
    model = made(transformers, "llama").bfloat16()
    tool = KVCacheTool(4, 16, residual=2)
    with torch.no_grad(), amanda.apply(tool):
        model.generate(IDS, max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0)
    (first, *_) = tool.caches
    assert first.shape[0] == 6
    assert first.itemsize == 2
    assert first.quantised_tokens == first.shape[-2] - 2


def test_a_model_without_a_growing_cache_is_told(transformers: Any) -> None:
    model = made(transformers, "llama")
    tool = KVCacheTool(4, 16)
    with torch.no_grad(), amanda.apply(tool):
        model(IDS, use_cache=False)
    assert "No op was met that makes a cache grow" in str(tool.result)
    with torch.no_grad(), amanda.apply(tool):
        model.generate(IDS, max_new_tokens=3, cache_implementation="static", do_sample=False, pad_token_id=0)
    assert "cache of fixed size" in str(tool.result)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        call(model, IDS, cache)
        with amanda.apply(tool):
            call(model, IDS[:, :1], cache)
    assert "continues 12 tokens that the tool has not seen" in str(tool.result)
    assert not tool.caches


def test_a_longer_cache_of_before_is_left_where_another_began(transformers: Any) -> None:
    model, tool, cache = (
        made(transformers, "llama"),
        KVCacheTool(4, 16, residual=0),
        transformers.DynamicCache(),
    )
    with torch.no_grad():
        call(model, IDS, cache)
        with amanda.apply(tool):
            model(IDS[:, :5], use_cache=True)
            call(model, IDS[:, :1], cache)
    assert "continues 12 tokens that the tool has not seen" in str(tool.result)
    assert [one.quantised_tokens for one in tool.caches] == [5] * 4


def test_two_models_share_a_tool_where_axes_agree(transformers: Any) -> None:
    models = [made(transformers, "llama"), made(transformers, "llama")]
    tool, apart = KVCacheTool(4, 16, residual=0), KVCacheTool(4, 4, "channel", "token")
    with torch.no_grad(), amanda.apply(tool):
        one, other = (model(IDS, use_cache=True).logits for model in models)
    assert torch.equal(one, other)
    assert len(tool.caches) == 8
    with torch.no_grad(), amanda.apply(apart):
        models[0](IDS, use_cache=True)
        with pytest.raises(QuantizeError, match="a path in two models"):
            models[1](IDS, use_cache=True)


class Joins(nn.Module):
    """Calls torch.cat in all ways."""

    def forward(self, x: Tensor) -> list[Tensor]:
        whole, out = x.long(), torch.empty(0)
        return [
            torch.cat([x, x]), torch.cat((x, x), axis=-2), torch.cat([x, x], 2, out=out), out,
            torch.cat(tensors=[x, x], dim=-2), torch.cat([x], -2), torch.cat([x, x, x], -2),
            torch.cat([whole[:, :, :0], whole], -2), torch.cat([x[0], x[0]], -2),
        ]  # fmt: skip


def test_other_concatenations_stay(transformers: Any) -> None:
    x, tool = torch.randn(1, 2, 4, 8), KVCacheTool(2, 4, residual=0)
    with amanda.apply(tool):
        found = Joins()(x)
    for one, wanted in zip(found, Joins()(x), strict=True):
        assert torch.equal(one, wanted)
    assert not tool.caches


def test_an_empty_tensor_of_four_axes_begins_a_cache() -> None:
    x, tool = torch.randn(1, 2, 4, 8), KVCacheTool(2, 4, residual=0)
    with amanda.apply(tool):
        found = torch.cat([x[:, :, :0], x], 2)
    assert torch.equal(found, quantized_states(x, 2, 4, "token"))
    assert not tool.left


def test_gradients_pass_straight_through() -> None:
    x, tool = torch.randn(1, 2, 6, 8, requires_grad=True), KVCacheTool(2, 4, residual=2)
    gradient = torch.randn(1, 2, 6, 8)
    with amanda.apply(tool):
        found = torch.cat([torch.tensor([]), x], -2)
    found.backward(gradient)
    assert torch.equal(x.grad, gradient)
    assert torch.equal(found[:, :, :4], quantized_states(x.detach()[:, :, :4], 2, 4, "token"))
    assert torch.equal(found[:, :, 4:], x[:, :, 4:])


def test_double_precision_stays(transformers: Any) -> None:
    x = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    least, most = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    scale = (most - least) / 255
    wanted = np.rint((x.numpy() - least) / scale) * scale + least
    np.testing.assert_allclose(quantized_states(x, 8, 8, "token").numpy(), wanted, rtol=0, atol=1e-14)


def test_channels_and_tokens_fit_groups(transformers: Any) -> None:
    model = made(transformers, "llama")
    with torch.no_grad(), amanda.apply(KVCacheTool()), pytest.raises(QuantizeError, match="have 16 channels"):
        model(IDS, use_cache=True)
    tool, cache = KVCacheTool(4, 4, keys="channel", residual=0), transformers.DynamicCache()
    with torch.no_grad(), amanda.apply(tool):
        call(model, IDS, cache)
        cache.crop(-3)
        with pytest.raises(QuantizeError, match="had 12 tokens, and have 9 of them now"):
            call(model, IDS[:, :1], cache)


class Growing(nn.Module):
    """Makes a cache of keys, and one of values."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [torch.cat([x[:, :, :0], x], 2) for _ in range(2)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Growing(), Growing()

    def forward(self, x: Tensor) -> Any:
        return self.first(x), self.last(x)


@pytest.mark.parametrize("options", [{"module": "first"}, {"exclude": ["last"]}, {"exclude": "las?"}])
def test_caches_are_selected_by_modules(options: Any) -> None:
    model, x, tool = Model(), torch.randn(1, 2, 4, 8), KVCacheTool(2, 4, residual=0, **options)
    with amanda.apply(tool) as scope:
        first, last = model(x)
    assert [one.module for one in tool.caches] == ["first", "first"]
    assert torch.equal(first[0], quantized_states(x, 2, 4, "token"))
    assert torch.equal(last[0], x)
    assert scope.report == []


def test_a_module_without_a_cache_is_named() -> None:
    tool = KVCacheTool(2, 4, residual=0, module="middle")
    with amanda.apply(tool):
        Model()(torch.randn(1, 2, 4, 8))
    assert tool.result.remarks == ["No op was selected by module=middle; there were first, last."]


def test_equal_numbers_stay(transformers: Any) -> None:
    x = torch.full((1, 2, 4, 8), 0.3)
    assert torch.equal(quantized_states(x, 2, 4, "token"), x)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bits": 1}, "bits is 1; give an integer from 2 to 8"),
        ({"bits": 9}, "bits is 9"),
        ({"group_size": 0}, "group_size is 0; give an integer >= 1"),
        ({"residual": -1}, "residual is -1"),
        ({"keys": "head"}, "keys"),
    ],
)
def test_options_are_checked(options: dict[str, Any], why: str) -> None:
    with pytest.raises(QuantizeError, match=why):
        KVCacheTool(**options)
