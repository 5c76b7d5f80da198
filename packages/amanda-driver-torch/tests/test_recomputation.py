"""What torch.utils.checkpoint runs again is the same execution again."""

import gc
import importlib
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import amanda
from amanda.drivers.torch._requirements import CHECKPOINT_GENERATOR, log_once

Kind = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def selective() -> Any:
    """Return the contexts of a checkpoint that keeps products."""
    policies = torch.utils.checkpoint.CheckpointPolicy
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        lambda context, op, *args, **kwargs: (
            policies.MUST_SAVE if op in products else policies.PREFER_RECOMPUTE
        )
    )


def nested(function: Callable[[Tensor], Tensor], x: Tensor, use_reentrant: bool) -> Tensor:
    inner = partial(checkpoint, function, use_reentrant=use_reentrant)
    outer: Tensor = checkpoint(lambda value: inner(value).sin(), x, use_reentrant=use_reentrant)
    return outer.asin()


class Calling(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def composable(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    module = function if isinstance(function, nn.Module) else Calling(function)
    if not module._forward_pre_hooks:
        checkpoint_module(module)
    output: Tensor = module(x)
    return output


KINDS: dict[str, Kind] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "nested reentrant": partial(nested, use_reentrant=True),
    "nested non-reentrant": partial(nested, use_reentrant=False),
    "composable": composable,
}
if hasattr(torch.utils.checkpoint, "CheckpointPolicy"):  # since torch 2.5
    KINDS["selective"] = partial(checkpoint, use_reentrant=False, context_fn=selective)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class Net(nn.Module):
    def __init__(self, save: Kind | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.save = nn.Linear(4, 8), nn.Linear(8, 1), save
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.block(x) if self.save is None else self.save(self.block, x)
        output: Tensor = self.last(x)
        return output


class Scaling(amanda.Tool):
    """Multiplies what tanh gives by a random factor, one for each execution."""

    def __init__(self, type: str = "tanh") -> None:
        self.type, self.random, self.decisions = type, random.Random(0), list[tuple[float, bool]]()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == self.type:
            context.insert_after_op(self.scale)

    def scale(self, value: Tensor, run: dict[str, Any], *, recomputed: bool) -> Tensor:
        factor: float = (
            run.setdefault("factor", self.random.random()) if "factor" not in run else run["factor"]
        )
        self.decisions.append((factor, recomputed))
        return value * factor


class Looking(amanda.Tool):
    """Observers at every op: one that hears of executions, and one that hears of recomputations too."""

    def __init__(self) -> None:
        self.executions, self.every = list[str](), list[tuple[str, bool]]()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.hear, outputs=[], op=context.get_op_type())
        context.insert_before_op(self.hear_again, op=context.get_op_type())

    @amanda.observer
    def hear(self, op: str) -> None:
        self.executions.append(op)

    @amanda.observer
    def hear_again(self, *values: Any, op: str, recomputed: bool) -> None:
        self.every.append((op, recomputed))


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def trained(save: Kind | None, tool: amanda.Tool | None, steps: int = 3) -> list[Tensor]:
    net = Net(save)
    with nullcontext() if tool is None else amanda.apply(tool):
        for number in range(steps):
            torch.manual_seed(number)
            net(torch.randn(3, 4)).square().sum().backward()
    return gradients(net)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@pytest.mark.parametrize("switch", [nullcontext, amanda.cache_disabled])
def test_a_recomputation_finds_in_run_what_the_first_execution_decided(
    kind: Kind, switch: Callable[[], AbstractContextManager[None]]
) -> None:
    plain = Scaling()
    expected = trained(None, plain)
    tool = Scaling()
    with switch():
        gradients = trained(kind, tool)
    factors = [factor for factor, recomputed in tool.decisions if not recomputed]
    assert factors == [factor for factor, _ in plain.decisions]
    assert {factor for factor, recomputed in tool.decisions if recomputed} <= set(factors)
    assert any(recomputed for _, recomputed in tool.decisions)
    tolerance = 1e-5 if kind in (KINDS["nested reentrant"], KINDS["nested non-reentrant"]) else 0
    for wanted_gradient, gradient in zip(expected, gradients, strict=True):  # sin and asin round
        torch.testing.assert_close(wanted_gradient, gradient, rtol=tolerance, atol=tolerance)


def test_observers_hear_of_an_execution_once(kind: Kind) -> None:
    tool = Looking()
    trained(kind, tool)
    first = [op for op, recomputed in tool.every if not recomputed]
    assert sorted(tool.executions) == sorted(first)
    assert [first.count(op) for op in ("linear", "tanh")] == [12, 6]
    assert any(recomputed for _, recomputed in tool.every)


def test_batches_in_flight_keep_their_decisions_apart(kind: Kind) -> None:
    def pipelined(save: Kind | None, tool: amanda.Tool) -> list[Tensor]:
        net = Net(save)
        with amanda.apply(tool):
            for _ in range(2):
                losses = [net(torch.full((3, 4), float(i))).sum() for i in range(3)]
                for loss in losses:
                    loss.backward()
        return gradients(net)

    for expected, value in zip(pipelined(None, Scaling()), pipelined(kind, Scaling()), strict=True):
        torch.testing.assert_close(expected, value, rtol=1e-5, atol=1e-5)


def test_each_further_backward_pass_recomputes_the_same_execution() -> None:
    def twice(save: Kind | None) -> list[Tensor]:
        net = Net(save)
        with amanda.apply(Scaling()):
            for i in range(2):
                loss = net(torch.full((3, 4), float(i))).sum()
                loss.backward(retain_graph=True)
                loss.backward()
        return gradients(net)

    assert equal(twice(None), twice(KINDS["non-reentrant"]))


def test_a_recomputation_to_its_end_is_the_same_execution() -> None:
    expected = trained(None, Scaling())
    with set_checkpoint_early_stop(False):
        assert equal(expected, trained(KINDS["non-reentrant"], Scaling()))


def test_recomputed_ops_have_the_ids_of_their_first_execution(kind: Kind) -> None:
    ids: dict[bool, set[int]] = {False: set(), True: set()}

    class Identifying(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_after_op(self.hear, outputs=[], op_id=context.get_op_id())

        @amanda.observer
        def hear(self, op_id: int, *, recomputed: bool) -> None:
            ids[recomputed].add(op_id)

    trained(kind, Identifying())
    assert len(ids[True]) > 1
    assert ids[True] <= ids[False]


def test_a_checkpoint_of_modules_that_is_imported_in_a_scope_is_torchs_own_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.distributed._composable.checkpoint_activation"
    monkeypatch.delitem(sys.modules, name)
    with amanda.apply(Scaling()):
        module: Any = importlib.import_module(name)
    generator = getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR)
    assert getattr(module, CHECKPOINT_GENERATOR) is generator
    assert not hasattr(generator, "__wrapped__")


def test_a_checkpoint_of_modules_that_runs_otherwise_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = importlib.import_module("torch.distributed._composable.checkpoint_activation")
    monkeypatch.delattr(module, CHECKPOINT_GENERATOR)
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(Scaling()):
        pass
    assert "ops that composable checkpoints recompute have ids of their own" in caplog.text


def test_rounds_of_a_loop_recall_their_own_decisions(kind: Kind) -> None:
    class Loop(nn.Module):
        def __init__(self, save: Kind | None) -> None:
            super().__init__()
            self.save, self.weight = save, nn.Parameter(torch.ones(3))

        def rounds(self, x: Tensor) -> Tensor:
            for _ in range(70):  # more than have ids of their own
                x = torch.tanh(x * self.weight)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.rounds(x) if self.save is None else self.save(self.rounds, x)

    def run(save: Kind | None) -> list[Tensor]:
        net = Loop(save)
        with amanda.apply(Scaling()):
            for _ in range(3):
                net(torch.full((3,), 5.0, requires_grad=True)).sum().backward()
        return gradients(net)

    for expected, value in zip(run(None), run(kind), strict=True):
        torch.testing.assert_close(expected, value, rtol=1e-5, atol=1e-20)


def test_run_of_what_runs_again_keeps_no_tensor() -> None:
    references: list[weakref.ref[Tensor]] = []

    class Keeping(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "tanh":
                context.insert_after_op(self.keep_value)

        def keep_value(self, value: Tensor, run: dict[str, Any]) -> None:
            assert not (run.keys() - {"number"}) or "value" in run
            run["value"], run["number"] = value.clone(), len(references)
            references.append(weakref.ref(run["value"]))

    net, x = Net(KINDS["reentrant"]), torch.rand(3, 4)
    with amanda.apply(Keeping()):
        for _ in range(4):
            loss = net(x).sum()
            gc.collect()
            assert all(reference() is None for reference in references)
            loss.backward()


def test_what_was_decided_is_freed_with_the_graph(kind: Kind) -> None:
    class Decision:
        pass

    decisions: list[weakref.ref[Decision]] = []

    class Deciding(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.decide, inputs=[])

        def decide(self, run: dict[str, Any]) -> None:
            decision = run["decision"] = Decision()
            decisions.append(weakref.ref(decision))

    net, x = Net(kind), torch.rand(3, 4)
    with amanda.apply(Deciding()):
        for _ in range(3):
            loss = net(x).sum()
            assert any(reference() is not None for reference in decisions)
            loss.backward()
            del loss
            gc.collect()
            assert all(reference() is None for reference in decisions)


def test_an_exception_in_a_checkpoint_leaves_nothing_behind() -> None:
    tool = Looking()

    def fails(x: Tensor) -> Tensor:
        raise ValueError("of the program")

    with amanda.apply(tool):
        for use_reentrant in (False, True):
            with pytest.raises(ValueError, match="of the program"):
                checkpoint(fails, torch.rand(3, requires_grad=True), use_reentrant=use_reentrant)
        torch.rand(3).tanh()
    assert tool.every[-1] == ("tanh", False)
    assert trained(None, tool)


def test_a_recomputation_on_another_thread_is_the_same_execution() -> None:
    def run(save: Kind | None) -> list[Tensor]:
        net = Net(save)
        with amanda.apply(Scaling()) as scope:
            for i in range(3):
                loss = net(torch.full((3, 4), float(i))).sum()
                thread = threading.Thread(target=scope.bind(loss.backward))
                thread.start()
                thread.join()
        return gradients(net)

    assert equal(run(None), run(KINDS["non-reentrant"]))
    assert equal(run(None), run(KINDS["reentrant"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_models_of_transformers_train_as_without_checkpoints(transformers: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip

    def run(use_reentrant: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        tokens = torch.arange(8)[None]
        with amanda.apply(Scaling("silu")):
            for _ in range(2):
                model(tokens, labels=tokens).loss.backward()
        return gradients(model)

    expected = run(None)
    assert equal(expected, run(False))
    assert equal(expected, run(True))
