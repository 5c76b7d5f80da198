"""Programs of many shapes in a scope: nested checkpoints, deep models, generators, Parameter subclasses."""

import sys
from collections.abc import Iterator
from typing import Any

import children
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import amanda


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def model_ops(op_log: Any) -> list[int]:
    """Ids of the ops of the model, without those by which torch keeps tensors."""
    return [op_id for op_id, name in zip(op_log.ids, op_log.names, strict=True) if name in ("linear", "tanh")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_recompute_under_the_first_ids(op_log: Any, reentrant: bool) -> None:
    inner, outer = network(), network()
    x = X.clone().requires_grad_()

    def program(value: torch.Tensor) -> torch.Tensor:
        return outer(checkpoint(inner, value, use_reentrant=reentrant))  # type: ignore[no-any-return]

    with amanda.apply(op_log):
        loss = checkpoint(program, x, use_reentrant=reentrant).sum()
        first = model_ops(op_log)
        loss.backward()
    assert len(first) == 4
    assert len(model_ops(op_log)) > 4
    assert {*model_ops(op_log)} == {*first}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_a_checkpointed_transformer_has_the_ids_of_the_plain_one(
    transformers: Any, op_log: Any, reentrant: bool
) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model, tokens = transformers.BertModel(config).train(), torch.randint(0, 50, (1, 4))
    with amanda.apply(op_log):
        model(tokens)
        plain = {*op_log.ids}
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        op_log.ids.clear()
        op_log.names.clear()
        model(tokens).last_hidden_state.sum().backward()
    machinery = ("CheckpointFunction", "detach", "ones_like")
    ids = [op_id for op_id, name in zip(op_log.ids, op_log.names, strict=True) if name not in machinery]
    assert len(ids) > len(plain)
    assert len({*ids} - plain) == 1  # the sum


class Wrapping(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if self.inner is None else self.inner(x) + 1  # type: ignore[no-any-return]


def test_a_model_as_deep_as_the_stack_allows_runs_in_a_scope_too(harmless: amanda.Tool, op_log: Any) -> None:
    model = Wrapping(None)
    for _ in range(150):
        model = Wrapping(model)
    bare = model(X)
    with amanda.apply(harmless):
        assert torch.equal(model(X), bare)
    with amanda.apply(op_log):
        model(X)
    assert len({*op_log.ids}) == 151


def test_a_scope_opened_in_a_forward_sees_what_follows_in_it(op_log: Any) -> None:
    class Opening(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.abs(x)
            with amanda.apply(op_log):
                x = torch.relu(x)
            return x + 1

    model = Opening()
    for _ in range(3):
        model(X)
    assert op_log.names == ["relu"] * 3
    assert len({*op_log.ids}) == 1


def test_a_generator_that_is_closed_early_closes_its_scope(op_log: Any) -> None:
    def outputs() -> Iterator[torch.Tensor]:
        with amanda.apply(op_log):
            for _ in range(3):
                yield torch.relu(X)

    generator = outputs()
    next(generator)
    next(generator)
    generator.close()
    torch.relu(X)
    assert op_log.names == ["relu", "relu"]


def test_parameters_of_a_subclass_tell_ops_apart(op_log: Any) -> None:
    class Scaled(torch.nn.Parameter):
        pass

    weights = [Scaled(torch.ones(4, 4)), Scaled(torch.ones(4, 4))]
    with amanda.apply(op_log):
        for _ in range(2):
            outputs = [F.linear(X, weight) for weight in weights]
    assert type(weights[0]) is Scaled
    assert op_log.ids[:2] == op_log.ids[2:]
    assert len({*op_log.ids}) == 2
    assert torch.equal(*outputs)


class Tagged(torch.Tensor):
    """A tensor of a class of its own, as libraries have them for weights of other formats."""


@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.nn.Parameter(torch.ones(4, 4).as_subclass(Tagged)),
        lambda: torch.ones(4, 4).as_subclass(Tagged).requires_grad_(),
        lambda: torch.ones(4, 4).requires_grad_(),
    ],
)
def test_leaves_of_a_subclass_tell_rounds_of_a_loop_apart(weight: Any, op_log: Any) -> None:
    weights = [weight(), weight()]
    with amanda.apply(op_log):
        for _ in range(2):
            for each in weights:
                F.linear(X, each)
    assert op_log.ids[:2] == op_log.ids[2:]
    assert len({*op_log.ids}) == 2


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*quint8.*", "ignore:.*qint8.*")
def test_quantized_tensors_pass_an_empty_tool_and_one_that_looks(harmless: amanda.Tool) -> None:
    def run() -> torch.Tensor:
        return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8).dequantize()

    bare = run()
    with amanda.apply(harmless):
        assert torch.equal(run(), bare)
        assert torch.equal(run(), bare)


LEFT_OPEN = """
import amanda
import torch

tool = amanda.Tool()
tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *outputs: None))
scope = amanda.apply(tool)
scope.__enter__()
torch.relu(torch.ones(2, requires_grad=True)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "del tool, scope", "raise SystemExit"])
def test_a_process_that_ends_with_a_scope_open_says_nothing(then: str) -> None:
    ended = children.run([sys.executable, "-c", f"{LEFT_OPEN}{then}"], check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
