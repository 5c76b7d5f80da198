"""partition: the stages of a model compute what it computes, with its own parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import Logits, Residual, Tied
from torch import Tensor, nn

import amanda
from amanda.tools.partition import PartitionError, PartitionResult, PartitionTool, Pipeline

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes")


def planned(model: nn.Module, x: tuple[Tensor, ...], stages: int) -> PartitionResult:
    tool: PartitionTool[PartitionResult] = PartitionTool(stages=stages)
    with amanda.apply(tool):
        model(*x).sum().backward()
    return tool.result


def assert_stages_are_the_model(model: nn.Module, x: tuple[Tensor, ...], stages: int) -> Pipeline:
    """Assert equal outputs, gradients and states, and that no stage has a tensor of its own."""
    whole = copy.deepcopy(model)
    pipeline = planned(copy.deepcopy(model), x, stages).pipeline(model, x)
    made = torch.fx.Interpreter(pipeline.pipe.split_gm).run(*x)
    output = made[0] if isinstance(made, (tuple, list)) else made
    expected = whole(*x)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad), name
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    modules = [pipeline.pipe.get_stage_module(i) for i in range(stages)]
    model_tensors = {id(one) for one in (*model.parameters(), *model.buffers())}
    for module in modules:
        assert {id(one) for one in (*module.parameters(), *module.buffers())} <= model_tensors
    assert {name for module in modules for name in module.state_dict()} == state.keys()
    return pipeline


class Recurrent(nn.Module):
    """A block that is called several times, then a part of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.block(x).tanh()
        output: Tensor = self.head(self.block[1](x))
        return output


class TwiceAndOnce(nn.Module):
    """A module that is called twice at the beginning and once at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.layers = nn.Linear(16, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.layers[0](self.shared(x).tanh()))
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        output: Tensor = self.shared(x)
        return output


class TiedFunction(nn.Module):
    """A head that is a function of the embedding's weight, and tensors that no op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("unread", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.linear(x, self.embedding.weight)


class Counter(nn.Module):
    """A buffer that each call assigns or changes, at the beginning, in the middle or at the end."""

    count: Tensor
    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), kind
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "add":
            self.count += 1
        if self.kind == "assign":
            self.count = self.count + 1
        x = self.layers[0](x)
        if self.kind == "average":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        if self.kind == "at the end":
            x, self.count = x * (self.count + 1), self.count + 1
        return x * self.count if self.kind == "add" else x - self.mean


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, 20, (2, 5)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), lambda: (torch.rand(2, 16),)),
    "residual": (Residual, lambda: (torch.rand(2, 3, 8, 8),)),
    "recurrent": (Recurrent, lambda: (torch.rand(2, 16),)),
    "twice-and-once": (TwiceAndOnce, lambda: (torch.rand(2, 16),)),
    "tied": (Tied, lambda: (*tokens(), torch.rand(2, 5))),
    "tied-function": (TiedFunction, tokens),
    **{
        kind: (lambda kind=kind: Counter(kind), lambda: (torch.rand(2, 16),))
        for kind in ("add", "assign", "average", "at the end")
    },
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_the_bits_of_the_model_with_its_own_tensors(name: str, training: bool) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    assert_stages_are_the_model(make().train(training), inputs(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["albert", "gpt2", "t5"])
def test_stages_of_models_with_shared_weights_compute_their_bits(
    name: str, stages: int, training: bool, transformers: Any
) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 30, (2, 6))
    pipeline = assert_stages_are_the_model(transformer(name, transformers).train(training), (x,), stages)
    assert pipeline.shared


def transformer(name: str, transformers: Any) -> nn.Module:
    if name == "albert":
        none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "classifier_dropout_prob": 0}
        sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
        config = transformers.AlbertConfig(vocab_size=30, num_hidden_layers=4, **sizes, **none)
        return Logits(transformers.AlbertForSequenceClassification(config))
    if name == "gpt2":
        none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False}
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 30}
        return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none)))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    none = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    return T5(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=30, **sizes, **none)))


class T5(Logits):
    """An encoder and a decoder that read the same tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens, decoder_input_ids=tokens).logits
        return output


def test_parameter_of_a_module_called_in_two_stages_is_shared() -> None:
    pipeline = assert_stages_are_the_model(Recurrent(), (torch.rand(2, 16),), 2)
    assert set(pipeline.shared["block.1.1.weight"]) == {0, 1}


@pytest.mark.parametrize(
    ("block", "words"),
    [(torch.no_grad, r"torch.no_grad\(\)"), (lambda: torch.autocast("cpu"), "torch.autocast")],
)
def test_block_that_the_exporter_keeps_apart_is_an_error(block: Callable[[], Any], words: str) -> None:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with block():
                y = x @ x.T
            output: Tensor = super().forward(x) + y.sum()
            return output

    model, x = nn.Sequential(Block(nn.Linear(16, 16)), nn.Linear(16, 16)), (torch.rand(2, 16),)
    with pytest.raises(PartitionError, match=f"module '0' runs a block under {words}"):
        planned(model, x, 2).pipeline(model, x)
