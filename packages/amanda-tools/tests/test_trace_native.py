"""The graph is the same whether native code or Python sees executions that repeat what is recorded."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda import action, interceptor
from amanda.tools.mapping import StandardMapping
from amanda.tools.trace import TraceTool
from amanda.tools.trace import _tool as trace_tool

native_alone = pytest.mark.skipif(not interceptor.NATIVE, reason="native code observes")
Program = Callable[[], Any]
PROGRAMS: list[Program] = []


class CalledObserver:
    """`RepeatObserver` that Python calls at each execution."""

    __amanda_marks__ = frozenset({"observer"})

    def __init__(self, routine: Callable[..., None], records: Any, after: bool = False) -> None:
        self.routine = routine

    def __call__(self, *values: Any, recomputed: bool = False, **options: Any) -> None:
        self.routine(*values, recomputed=recomputed, **options)


class CalledBackwardObserver:
    """`BackwardRepeatObserver` that Python calls at each execution."""

    __amanda_marks__ = frozenset({"observer"})

    def __init__(
        self, routine: Callable[..., None], records: Any, gradients: Any, after: bool = False
    ) -> None:
        self.routine = routine

    def __call__(self, *values: Any, **options: Any) -> None:
        self.routine(*values, **options)


def graph_of(program: Program, *others: amanda.Tool, **options: Any) -> dict[str, Any]:
    """Trace a program; return the graph, without the ids, which count the models of a process."""
    torch.manual_seed(0)
    tool = TraceTool(**options)
    with amanda.apply(*others, tool):
        program()
    graph = tool.graph.to_dict()
    for op in graph["ops"]:
        del op["id"]
    return graph


def graphs_of(monkeypatch: pytest.MonkeyPatch, trace: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what native code and Python record."""
    native = trace()
    with monkeypatch.context() as patch:
        patch.setattr(trace_tool, "RepeatObserver", CalledObserver)
        patch.setattr(trace_tool, "BackwardRepeatObserver", CalledBackwardObserver)
        return native, trace()


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def train(optimizer_of: Callable[[Any], torch.optim.Optimizer], set_to_none: bool = True) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = optimizer_of(model.parameters())
    for step in range(6):
        loss = model(torch.randn(4 + step % 2, 6)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@program
def adamw() -> None:
    train(torch.optim.AdamW)


@program
def adam_of_lists() -> None:
    train(lambda parameters: torch.optim.Adam(parameters, foreach=True), set_to_none=False)


@program
def momentum() -> None:
    train(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), set_to_none=False)


@program
def views_of_written_memory() -> None:
    base, column = torch.zeros(6, 6), torch.ones(6)
    diagonal, rows, even = base.diagonal(), base[1:3], base.flatten()[::2]
    for step in range(5):
        rows.add_(1)
        base[:, step].copy_(column)
        diagonal.mul_(2)
        even.sub_(1)
        (base + 1).relu_()
        column = column + base[step]
        base.view(36).add_(even.sum())


@program
def one_tensor_twice() -> None:
    x = torch.ones(3)
    for _ in range(4):
        x.add_(x)
        torch.mul(x, x, out=x)
        torch.cat([x, x, x[:1]])


@program
def other_tensors_in_a_loop() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    for _ in range(3):
        x = torch.ones(2, 3)
        outputs = []
        for _ in range(12):
            x = torch.tanh(x @ weight)
            outputs.append(x)
        torch.stack(outputs).sum().backward()


@program
def checkpoints() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    for _ in range(4):
        x = torch.ones(4, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        checkpoint(model, x, use_reentrant=True).sum().backward()


@program
def several_passes() -> None:
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for _ in range(4):
        y = (x * weight).exp() + weight * x
        y.sum().backward(retain_graph=True)
        y.prod().backward()
        (gradient,) = torch.autograd.grad((x**3 * weight).sum(), x, create_graph=True)
        gradient.sum().backward()


@program
def accumulated_gradients_are_read() -> None:
    layer = nn.Linear(3, 3)
    for _ in range(5):
        layer(torch.ones(2, 3)).sum().backward()
        assert layer.weight.grad is not None
        layer.weight.grad.norm().item()
        layer.weight.grad.mul_(0.5)


@program
def hooks() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    for _ in range(4):
        y = x.exp()
        y.register_hook(lambda gradient: gradient + 1)
        y.sum().backward()


@program
def errors_in_ops() -> None:
    x = torch.ones(3, requires_grad=True)
    for step in range(6):
        with pytest.raises(RuntimeError):
            x + torch.ones(2)
        y = x * (torch.ones(2) if step == 5 else torch.ones(3)) if step < 5 else x * 2
        y.sum().backward()
        with pytest.raises(RuntimeError):
            y.sum().backward(gradient=torch.ones(7))


@program
def storages_that_change() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    for step in range(5):
        x.add_(1)
        y.data = x if step % 2 else torch.zeros(4)
        y.mul_(2)
        x.set_(torch.arange(4.0))
        x.sum()
        x.untyped_storage().resize_(64)


@program
def ids_used_again() -> None:
    x = torch.ones(3)
    for _ in range(10):
        y = x + 1
        y.mul_(2)
        del y
        gc.collect()
        z = torch.zeros(3)
        (z + x).sum()


@program
def lists_and_scalars() -> None:
    x = torch.ones(4, 4)
    for _ in range(4):
        a, b = x.chunk(2)
        torch.cat([a, b], dim=0)
        torch.max(x, 0)
        x[0, :2]
        x[0:1, None] += 1
        x.index_put_((torch.tensor([0]),), torch.ones(1))
        torch.broadcast_tensors(x, torch.ones(1))
        torch.split(x, [1, 3])
        float(x.sum())


@program
def sparse_gradients() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    for step in range(4):
        table(torch.tensor([step, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def no_autodiff() -> None:
    layer = nn.Linear(3, 3)
    for _ in range(4):
        with torch.no_grad():
            layer.weight.add_(layer(torch.ones(3)))
        with torch.inference_mode():
            y = layer(torch.ones(3))
            y.add_(1)
            y[:1].mul_(2)


@program
def transforms() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (weight * x).sum().square()

    weight, x = torch.ones(3), torch.ones(4, 3)
    for _ in range(4):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
        (weight * x).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@program
def python_functions() -> None:
    x = torch.ones(3, requires_grad=True)
    for _ in range(4):
        Doubled.apply(x * 1).sum().backward()  # type: ignore[no-untyped-call]


@program
def threads() -> None:
    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        for _ in range(4):
            (x * 2).exp().sum().backward()
            x.grad = None

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


def run_random_op(chance: random.Random, tensors: list[torch.Tensor]) -> None:
    """Run an op on some of these tensors, or write, add or drop one."""
    x, y = (chance.choice(tensors) for _ in range(2))
    chosen = chance.randrange(12)
    if chosen == 0:
        tensors.append(x.view(-1)[: chance.randrange(1, 9)])
    elif chosen == 1:
        tensors.append(x.view(-1)[chance.randrange(2) :: 2])
    elif chosen == 2:
        x.mul_(0.5)
    elif chosen == 3:
        x.copy_(y.reshape(-1)[:1])
    elif chosen == 4:
        tensors.append(torch.cat([x.reshape(-1), y.reshape(-1)]))
    elif chosen == 5:
        tensors.append(x + 1)
    elif chosen == 6 and len(tensors) > 4:
        del tensors[chance.randrange(len(tensors))]
    elif chosen == 7:
        torch._foreach_add_([x, y], 1.0)
    elif chosen == 8:
        weight = torch.ones(x.shape, requires_grad=True)
        for _ in range(2):
            (x.detach() * weight).sum().backward()
    elif chosen == 9:
        F.relu(x, inplace=True)
    elif chosen == 10:
        tensors.append(x.t() if x.dim() == 2 else x.expand(2, -1))
    else:
        torch.sum(y).item()


def random_program(seed: int) -> Program:
    """Return a program that repeats steps of ops chosen at random, on tensors that share memory."""

    def run() -> None:
        chance = random.Random(seed)
        tensors: list[torch.Tensor] = []
        state = chance.getstate()
        for repetition in range(chance.randrange(2, 5)):
            if repetition == 0 or chance.random() < 0.4:
                tensors = [torch.ones(2, 4) for _ in range(3)]
            if repetition and chance.random() < 0.7:
                chance.setstate(state)  # the same ops again
            state = chance.getstate()
            for _ in range(25):
                # An op that is refused has begun an execution that never ends.
                with contextlib.suppress(RuntimeError):
                    run_random_op(chance, tensors)

    return run


@pytest.mark.parametrize("options", [{}, {"executions": 1}, {"executions": 2, "limit": 12}])
@pytest.mark.parametrize("program", PROGRAMS)
def test_native_code_records_the_graph_that_python_records(
    program: Program, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    native, called = graphs_of(monkeypatch, lambda: graph_of(program, **options))
    assert native == called


@pytest.mark.parametrize("seed", range(40))
def test_native_code_records_the_graph_of_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = [{}, {"executions": 1}, {"executions": 3, "limit": 40}][seed % 3]
    native, called = graphs_of(monkeypatch, lambda: graph_of(random_program(seed), **options))
    assert native == called


class Exchange(amanda.Tool):
    """Give other values to some ops at some executions, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.insert)
        self.add_inst_for_op(self.insert_backward, backward=True)

    def insert(self, context: amanda.OpContext) -> None:
        if context["type"] in ("linear", "gelu", "mul"):
            context.insert_before_op(self.other)
            context.insert_after_op(self.other)

    def insert_backward(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.other)

    def other(self, *values: Any) -> Any:
        self.calls += 1
        if self.calls % 7:
            return None
        changed = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        return changed if len(changed) != 1 else changed[0]


@pytest.mark.parametrize("program", [adamw, several_passes, hooks])
def test_native_code_records_the_values_of_other_tools(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, called = graphs_of(monkeypatch, lambda: graph_of(program, Exchange()))
    assert native == called


@pytest.mark.parametrize("program", [adamw, checkpoints, views_of_written_memory])
def test_two_tools_record_the_same(program: Program) -> None:
    other = TraceTool(executions=2)
    native = graph_of(program, other)
    assert native == graph_of(program)
    assert other.graph.to_dict()["ops"]


def test_a_scope_that_opens_again_and_a_new_graph_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace() -> list[Any]:
        layer, graphs = nn.Linear(3, 3), []
        tool = TraceTool()
        for step in range(6):
            layer(torch.ones(2, 3)).sum().backward()  # unseen, and writes the gradients
            if step == 3:
                graphs.append(tool.graph)
                tool.clear()
            with amanda.apply(tool):
                for _ in range(3):
                    layer(torch.ones(2, 3)).sum().backward()
                    with amanda.disabled():
                        layer.weight.data.add_(1)
            graphs.append(tool.graph)
        return [[(op.type, op.calls, op.inputs, op.makes) for op in graph.ops] for graph in graphs]

    native, called = graphs_of(monkeypatch, trace)
    assert native == called


def test_the_graph_counts_the_executions_of_native_code() -> None:
    x, tool = torch.ones(3), TraceTool()
    with amanda.apply(tool):
        for calls in range(1, 6):
            x.exp()
            graph = tool.graph
            assert graph is tool.graph
            assert [op.calls for op in graph.ops] == [calls]


def test_threads_count_every_execution() -> None:
    model, tool = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), TraceTool()
    x = torch.ones(2, 4)

    def work() -> None:
        for _ in range(50):
            model(x)

    with amanda.apply(tool):
        model(x)
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert sum(op.calls or 0 for op in tool.graph.ops) == 3 * 201


@native_alone
def test_native_code_serves_repeated_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for observer in (action.RepeatObserver, action.BackwardRepeatObserver):

        def record(self: Any, *values: Any, call: Any = observer.__call__, **options: Any) -> None:
            calls.append(options["program_op"].op.type)
            call(self, *values, **options)

        monkeypatch.setattr(observer, "__call__", record)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 4)
    with amanda.apply(TraceTool()):
        for _ in range(5):
            calls.clear()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert calls == []


def test_failed_passes_keep_no_gradients() -> None:
    """Where another tool has changed the gradient, Python makes up for the routine before the op."""
    is_failing, storages = False, []

    def fail(gradient: torch.Tensor) -> None:
        if is_failing:
            raise ValueError("no")

    class After(amanda.Tool):
        def __init__(self, routine: Callable[[torch.Tensor], Any]) -> None:
            self.routine = routine
            self.add_inst_for_op(self.insert, backward=True)

        def insert(self, context: amanda.OpContext) -> None:
            if context.get_backward_op().__name__ == "ExpBackward0":
                context.insert_after_backward_op(self.routine)

    x = torch.randn(8, requires_grad=True)
    with amanda.apply(After(lambda gradient: gradient * 2), After(fail), tool := TraceTool()):
        for step in range(12):
            is_failing = step > 5
            y = x.exp()
            y.register_hook(lambda gradient: storages.append(weakref.ref(gradient.untyped_storage())))
            with pytest.raises(ValueError, match="no") if is_failing else contextlib.nullcontext():
                y.mul(3.0).sum().backward()
        del y
        gc.collect()
        assert [storage() for storage in storages[6:]] == [None] * 6
        assert len(storages) == 12
    assert tool.result is not None
