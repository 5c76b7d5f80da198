"""Ways of going backward: twice, to a higher order, in part, in batches, from edges, in other scopes."""

import _thread
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from leaves import leaf, same
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import amanda
from amanda import interceptor
from amanda.drivers.torch import _autograd, _shared_nodes

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]


def test_a_graph_gone_through_twice_runs_its_routines_twice_and_is_analysed_once(applied: Applied) -> None:
    x, analysed, executed = leaf(1, 2), [], []

    def record(context: amanda.OpContext) -> None:
        analysed.append(context.get_backward_op_id())
        context.insert_before_backward_op(lambda *grads: executed.append(1), grad_outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(record, backward=True)
    with amanda.apply(tool):
        y = x.exp().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert (len(analysed), len(executed)) == (3, 6)


def test_without_the_cache_each_pass_through_a_graph_is_analysed_with_the_values_of_its_op() -> None:
    x, analysed, executed = leaf(1, 2), [], []

    def record(context: amanda.OpContext) -> None:
        analysed.append((context.get_forward_op_type(), context.get_inputs()[0].tolist()))
        context.insert_before_backward_op(lambda *grads: executed.append(1), grad_outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(record, backward=True)
    with amanda.apply(tool) as scope, amanda.cache_disabled():
        y = x.exp().sum()
        for keep in (True, True, False):
            y.backward(retain_graph=keep)
    assert len(analysed) == len(executed) == 9
    assert analysed[:3] == analysed[3:6] == analysed[6:]
    assert ("exp", x.tolist()) in analysed
    assert scope.report == []


def test_without_the_cache_values_are_let_go_of_after_the_last_pass() -> None:
    x, values = leaf(1, 2), []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: values.append(weakref.ref(context.get_outputs()[0])), backward=True)
    with amanda.apply(tool), amanda.cache_disabled():
        y = x.exp().sum()
        y.backward(retain_graph=True)
        y.backward()
    gc.collect()
    assert [reference() for reference in values if reference() is not None and reference() is not y] == []


def test_nodes_of_the_second_order_belong_to_the_op_of_the_first(backward_ops: Any) -> None:
    x, tool = leaf(1, 2), backward_ops()
    with amanda.apply(tool):
        for _ in range(2):
            (grad,) = torch.autograd.grad((x.exp() * 3).sum(), x, create_graph=True)
            first = len(tool.pairs)
            grad.sum().backward()
    assert ("exp", "MulBackward0") in tool.pairs
    assert ("__mul__", "MulBackward0") in tool.pairs
    assert len(tool.pairs) == len(set(tool.ids)) == first


def test_gradients_differentiated_now_and_then_are_seen_like_those_always(backward_ops: Any) -> None:
    x, at_first, later = leaf(1, 2), backward_ops(), backward_ops()

    def step(penalty: bool) -> None:
        loss = (x.exp() * 3).sum()
        if penalty:
            (loss,) = torch.autograd.grad(loss, x, create_graph=True)
        loss.sum().backward()

    with amanda.apply(at_first):
        for penalty in (True, False):
            step(penalty)
    with amanda.apply(later) as scope:
        for penalty in (False, False, True, False, True):
            step(penalty)
    assert ("exp", "MulBackward0") in later.pairs
    assert sorted(later.pairs) == sorted(at_first.pairs)
    assert [entry.what for entry in scope.report] == ["the first differentiation of gradients"]


def test_backward_ops_that_an_op_makes_for_some_shapes_alone_are_seen_from_the_next_pass_on() -> None:
    """A product of batches is expanded unless it has the batch's size already."""
    weight = torch.randn(2, 4, 5, requires_grad=True)
    names: list[str] = []
    tool = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        context.insert_after_backward_op(lambda *_: names.append(name), grad_inputs=[])

    def step(batch: int) -> list[str]:
        names.clear()
        torch.matmul(torch.randn(batch, 2, 6, 4), weight).backward(torch.ones(batch, 2, 6, 5))
        return sorted(names)

    tool.add_inst_for_op(look, backward=True)
    with amanda.apply(tool) as scope:
        first = [step(1) for _ in range(3)]
        assert scope.report == []
        step(3)
        (entry,) = scope.report
        later = [step(3), step(3), step(1)]
    assert first[0] == first[1] == first[2] == later[2]
    assert later[0] == later[1] != first[0]
    assert "BmmBackward0" in later[0]
    assert entry.what == "the first pass through a backward op that matmul makes for some inputs alone"
    with amanda.apply(tool):
        assert step(3) == later[0]


def test_a_gradient_is_changed_at_every_order(acting: Act, applied: Applied) -> None:
    x = torch.tensor(2.0, requires_grad=True)

    def program(orders: int) -> Tensor:
        y = x.pow(3)
        for _ in range(orders):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
        return y.detach()

    tool = acting("insert_before_backward_op", "PowBackward0", amanda.differentiable(lambda grad: grad * 10))
    assert [applied(tool, lambda orders=orders: program(orders)).item() for orders in (1, 2)] == [120, 1200]


def test_a_gradient_of_an_inner_tensor_is_instrumented(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)

    def program() -> Tensor:
        inner = x * 2
        return torch.autograd.grad(inner.exp().sum(), inputs=inner)[0]

    plain = program()
    same(
        applied(acting("insert_after_backward_op", "ExpBackward0", lambda grad: grad * 2), program), plain * 2
    )


def test_what_one_backward_pass_leaves_out_is_analysed_in_the_next(backward_ops: Any) -> None:
    x, p, tool = leaf(1, 2), torch.nn.Parameter(torch.ones(2)), backward_ops()
    with amanda.apply(tool):
        for inputs in ([x], [p]):
            (x * p).sum().backward(inputs=inputs)
    assert tool.pairs.count(("__mul__", "AccumulateGrad")) == 2


def test_a_batch_of_gradients_is_instrumented(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    tool = acting("insert_before_backward_op", "ExpBackward0", lambda grad: grad * 2)

    def program() -> Tensor:
        return torch.autograd.grad(x.exp(), x, torch.eye(2), is_grads_batched=True)[0]

    same(applied(tool, program), program() * 2)


def test_a_batch_of_gradients_in_hooks_is_brought_to_routines_that_take_run(applied: Applied) -> None:
    names: list[str] = []

    def note(*values: Any, name: str, run: dict[Any, Any]) -> None:
        run[name] = values
        names.append(name)

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(note, name=context.get_op().__name__))

    def program() -> Tensor:
        x = leaf(1, 2)
        y = x.exp()
        y.register_hook(lambda grad: grad.sin().expand(2))
        return torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)[0]

    same(applied(tool, program), program())
    assert {"exp", "sin", "expand"} <= {*names}
    assert not {name for name in names if "batch_dim" in name}


def test_backward_from_an_edge_and_to_an_edge_is_instrumented(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    tool = acting("insert_before_backward_op", "ExpBackward0", lambda grad: grad * 2)

    def program() -> Tensor:
        y = x.exp()
        return torch.autograd.grad(get_gradient_edge(y), get_gradient_edge(x), torch.ones(2))[0]

    same(applied(tool, program), program() * 2)


def test_backward_from_several_outputs_is_one_pass(backward_ops: Any) -> None:
    x, tool = leaf(1, 2), backward_ops()
    with amanda.apply(tool):
        torch.autograd.backward([x.exp().sum(), x.sin().sum()])
    assert sorted(tool.pairs) == [
        ("exp", "AccumulateGrad"), ("exp", "ExpBackward0"), ("sin", "SinBackward0"),
        ("sum", "SumBackward0"), ("sum", "SumBackward0"),
    ]  # fmt: skip


def test_a_graph_made_outside_the_scope_is_not_instrumented(backward_ops: Any) -> None:
    tool = backward_ops()
    y = leaf(1).exp().sum()
    with amanda.apply(tool):
        y.backward()
    assert tool.pairs == []


def test_a_graph_is_instrumented_where_a_scope_with_its_tool_is_open_again(
    backward_ops: Any,
) -> None:
    tool, other_tool = backward_ops(), backward_ops()
    with amanda.apply(tool):
        y = leaf(1).exp().sum()
    y.backward(retain_graph=True)
    with amanda.apply(other_tool):
        y.backward(retain_graph=True)
    assert tool.pairs == other_tool.pairs == []
    with amanda.apply(tool):
        y.backward()
    assert [op for op, _ in tool.pairs] == ["sum", "exp", "exp"]


def test_a_pass_waits_until_one_on_another_thread_has_hooked_the_nodes_that_both_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, idents = leaf(1, 2), []
    has_listed, has_ended = threading.Event(), threading.Event()
    list_nodes = _autograd._BackwardPass._find_marked_nodes

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(lambda gradient: idents.append(threading.get_ident()))

    def list_nodes_and_pause(self: Any, outputs: Any) -> None:
        list_nodes(self, outputs)
        if threading.current_thread() is not threading.main_thread():
            has_listed.set()
            has_ended.wait(0.5)  # until the other pass has ended, had it not waited for this one

    def backward() -> None:
        weight.exp().sum().backward()

    monkeypatch.setattr(_autograd._BackwardPass, "_find_marked_nodes", list_nodes_and_pause)
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    with amanda.apply(tool) as scope:
        for _ in range(3):
            backward()
        idents.clear()
        other = threading.Thread(target=scope.bind(backward))
        other.start()
        assert has_listed.wait(10)
        backward()
        has_ended.set()
        other.join()
    assert set(idents) == {other.ident, threading.get_ident()}
    assert len(idents) == 2


def test_passes_on_two_threads_call_the_routines_of_a_parameter_once_each() -> None:
    weight, idents = leaf(1, 2), []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(lambda gradient: idents.append(threading.get_ident()))

    def backward(reached: threading.Event, go_on: threading.Event) -> None:
        def wait(gradient: Tensor) -> None:
            reached.set()
            go_on.wait(10)

        y = weight.exp()
        y.register_hook(wait)
        y.sum().backward()

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    with amanda.apply(tool) as scope:
        open_way = threading.Event()
        open_way.set()
        backward(threading.Event(), open_way)  # analysed here
        idents.clear()
        threads, events = [], [(threading.Event(), threading.Event()) for _ in range(2)]
        for reached, go_on in events:
            threads.append(threading.Thread(target=scope.bind(backward), args=(reached, go_on)))
            threads[-1].start()
            assert reached.wait(10)
        for thread, (_, go_on) in zip(threads, events, strict=True):
            go_on.set()
            thread.join()
    assert len(idents) == len(set(idents)) == 2
    weight.exp().sum().backward()
    assert len(idents) == 2


@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("point", ["analysis", "before", "after"])
def test_a_pass_that_a_tool_runs_at_a_leaf_calls_no_routine_there(point: str, is_parameter: bool) -> None:
    x = torch.nn.Parameter(torch.ones(2)) if is_parameter else leaf(1, 1)
    analysed, calls = list[str](), list[bool]()

    def run_pass(*_: Any) -> None:
        calls.append(interceptor.active() is None)
        assert len(calls) < 10, "the routine is called in its own pass"
        with torch.enable_grad():
            (x * 3).sum().backward()  # through the node at which the routine runs

    def record(context: amanda.OpContext) -> None:
        analysed.append(context.get_backward_op().__name__)
        if analysed[-1] != "AccumulateGrad":
            return
        if point == "analysis":
            run_pass()
        elif point == "before":
            context.insert_before_backward_op(run_pass, grad_outputs=[])
        else:
            context.insert_after_backward_op(run_pass, grad_inputs=[])

    tool, step_count = amanda.Tool(), 4
    tool.add_inst_for_op(record, backward=True)
    with amanda.apply(tool) as scope:
        for _ in range(step_count):
            (x * 2).sum().backward()
    assert len(analysed) == 3
    assert calls == [True] * (1 if point == "analysis" else step_count)
    same(x.grad, torch.full((2,), 2.0 * step_count + 3.0 * len(calls)))
    assert scope.report == []


def test_a_pass_that_a_routine_runs_is_no_step_of_the_program() -> None:
    """Else ops outside of modules would be numbered anew in the middle of a step."""

    def ids_of_ops(routine: Callable[..., None]) -> list[int]:
        ids: list[int] = []

        def record(context: amanda.OpContext) -> None:
            op_id = context.get_op_id()
            context.insert_after_op(lambda *_: ids.append(op_id), outputs=[])
            context.insert_after_op(routine, outputs=[])

        tool = amanda.Tool()
        tool.add_inst_for_op(record)
        with amanda.apply(tool):
            for _ in range(2):
                x = leaf(1, 2)
                for _ in range(3):
                    x = apply_cosine(x)
                x.sum().backward()
        return ids

    def run_pass(*_: Any) -> None:
        with torch.enable_grad():
            leaf(1).exp().backward()

    assert ids_of_ops(run_pass) == ids_of_ops(lambda *_: None)


def apply_cosine(x: Tensor) -> Tensor:
    return x.cos()


class Calling(torch.autograd.Function):
    """The identity, which calls a function in a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], Any]) -> Tensor:
        ctx.function = function
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            ctx.function()
        return gradient, None


def of_leaves(calls: list[str], op: str | None = None) -> amanda.Tool:
    """Return a tool whose routine at the nodes of leaves adds the name of its thread to a list.

    op: name of the ops whose leaves have the routine; None for all.
    """

    def analyse(context: amanda.OpContext) -> None:
        is_leaf = context.get_backward_op().__name__ == "AccumulateGrad"
        if is_leaf and op in (None, context.get_forward_op_type()):
            context.insert_before_backward_op(lambda gradient: calls.append(threading.current_thread().name))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    return tool


def on_other_thread(function: Callable[[], Any]) -> None:
    """Run a function on another thread, and wait for its end."""
    thread = threading.Thread(target=function, name="other")
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def directly(function: Callable[[], Any]) -> None:
    function()


@pytest.mark.parametrize("run", [on_other_thread, directly])
def test_an_op_whose_first_pass_is_within_another_one_keeps_the_routines_of_its_leaf(
    run: Callable[..., None],
) -> None:
    weight, calls = leaf(1, 2), []

    def backward() -> None:
        weight.exp().sum().backward()

    with amanda.apply(of_leaves(calls)):
        Calling.apply(weight.sin(), lambda: run(backward)).sum().backward()
        assert len(calls) == 2
        for _ in range(3):
            run(backward)
    assert len(calls) == 5


@pytest.mark.parametrize("op", ["sin", "exp"])
@pytest.mark.parametrize("is_analysed", [False, True])
def test_routines_of_a_leaf_act_in_passes_of_their_op_alone_where_two_are_under_way(
    op: str, is_analysed: bool
) -> None:
    weight, calls = leaf(1, 2), []

    def inner_pass() -> None:
        weight.exp().sum().backward()

    def outer_pass(function: Callable[[], None]) -> None:
        Calling.apply(weight.sin(), function).sum().backward()

    with amanda.apply(of_leaves(calls, op)):
        for _ in range(3 * is_analysed):
            inner_pass()
            outer_pass(lambda: None)
        calls.clear()
        for _ in range(4):
            outer_pass(lambda: on_other_thread(inner_pass))
        main = threading.main_thread().name
        assert calls == [main if op == "sin" else "other"] * 4
        calls.clear()
        inner_pass()
        outer_pass(lambda: None)
    assert calls == [main]
    outer_pass(lambda: on_other_thread(inner_pass))
    assert calls == [main]


@pytest.mark.parametrize("is_analysed", [False, True])
def test_a_scope_of_one_thread_sees_its_passes_where_another_pass_has_hooked_the_leaf(
    is_analysed: bool,
) -> None:
    weight, outer_calls, inner_calls = leaf(1, 2), [], []
    inner_tool = of_leaves(inner_calls)

    def backward_in_scope() -> None:
        with amanda.apply(inner_tool):
            weight.exp().sum().backward()

    def outer_pass(function: Callable[[], None]) -> None:
        Calling.apply(weight.sin(), function).sum().backward()

    with amanda.apply(of_leaves(outer_calls)):
        for _ in range(3 * is_analysed):
            backward_in_scope()
            outer_pass(lambda: None)
        inner_calls.clear()
        outer_calls.clear()
        for _ in range(3):
            outer_pass(lambda: on_other_thread(backward_in_scope))
    assert inner_calls == ["other"] * 3
    assert outer_calls == ["other", threading.main_thread().name] * 3


def test_two_threads_that_run_one_graph_at_the_same_time_see_a_pass_each() -> None:
    weight, calls, inner_passes = leaf(1, 2), [], []

    def start_other() -> None:
        if threading.current_thread() is threading.main_thread():
            inner_passes.append(on_other_thread(lambda: y.backward(retain_graph=True)))

    with amanda.apply(of_leaves(calls)):
        y = Calling.apply(weight.sin(), start_other).sum()
        for _ in range(4):
            y.backward(retain_graph=True)
    assert len(inner_passes) == 4
    assert calls == ["other", threading.main_thread().name] * 4


def test_where_the_pass_of_a_thread_is_unknown_the_first_has_its_routines_and_a_report_says_so() -> None:
    """The engine's threads are such where torch does not bring the caller's context there."""
    calls, reports, node = list[str](), list[str](), object()

    class Pass(_shared_nodes.NodeSharing):
        under_way: ClassVar[list[Any]] = []

        def __init__(self, name: str) -> None:
            self._node_handles, self._shared_ids = [], {id(node)}
            self._state: Any = SimpleNamespace(report=lambda subject, reason: reports.append(subject))
            self.under_way.append(self)
            self.hook = self.hook_of_pass(node, lambda gradient: calls.append(name))

    def call_hook(entry: Pass, *expected_calls: str) -> None:
        count = len(reports)
        _thread.start_new_thread(entry.hook, (None,))  # the first function on the stack of its thread
        deadline = time.monotonic() + 10
        while len(reports) == count or calls != [*expected_calls]:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    first, second = Pass("first"), Pass("second")
    call_hook(second)
    call_hook(first, "first")
    Pass.under_way.remove(first)
    call_hook(second, "first", "second")
    assert set(reports) == {"backward ops that passes on several threads share"}
    second.hook(None)  # of no pass: this thread is not the engine's
    assert calls == ["first", "second"]


def test_a_pass_that_fails_leaves_the_passes_of_other_threads_their_routines() -> None:
    weight, calls, threads = leaf(1, 2), [], []
    is_under_way, has_failed = threading.Event(), threading.Event()

    def pause() -> None:
        is_under_way.set()
        has_failed.wait(10)

    def fail() -> None:
        other = threading.Thread(
            target=lambda: Calling.apply(weight.exp(), pause).sum().backward(), name="other"
        )
        threads.append(other)
        other.start()
        assert is_under_way.wait(10)
        raise KeyboardInterrupt

    with amanda.apply(of_leaves(calls)):
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                Calling.apply(weight.sin(), fail).sum().backward()
            has_failed.set()
            threads.pop().join(10)
            is_under_way.clear()
            has_failed.clear()
    assert calls == ["other"] * 4


@pytest.mark.parametrize("is_first", [False, True])
def test_a_pass_on_a_leaf_calls_no_routine_of_a_pass_around_it(is_first: bool) -> None:
    """Such a pass runs the node of the leaf alone, which no op has made."""
    weight, calls = leaf(1, 2), []

    def outer_pass(function: Callable[[], None]) -> None:
        Calling.apply(weight.sin(), function).sum().backward()

    with amanda.apply(of_leaves(calls)):
        for _ in range(3 * (not is_first)):
            outer_pass(lambda: None)
        calls.clear()
        outer_pass(lambda: weight.backward(torch.ones(2)))
    assert len(calls) == 1


def run_disabled(function: Callable[[], Any]) -> None:
    with amanda.disabled():
        function()


def run_outside(function: Callable[[], Any]) -> None:
    """Run a function on a thread of which the scope knows nothing."""
    on_other_thread(lambda: contextvars.Context().run(function))


@pytest.mark.parametrize("run", [run_disabled, run_outside])
def test_a_pass_that_no_tool_sees_calls_no_routine_of_a_pass_around_it(run: Callable[..., None]) -> None:
    weight, calls = leaf(1, 2), []
    with amanda.apply(of_leaves(calls)):
        for _ in range(4):
            y = Calling.apply(weight.sin(), lambda: run(lambda: weight.exp().sum().backward()))
            y.sum().backward()
    assert len(calls) == 4


def test_a_pass_outside_of_scopes_calls_no_routine_of_a_pass_that_begins_meanwhile() -> None:
    weight, calls, tool = leaf(1, 2), [], amanda.Tool()
    is_under_way, has_ended = threading.Event(), threading.Event()
    of_scope = of_leaves(calls)

    def inner_pass() -> None:
        with amanda.apply(of_scope):
            Calling.apply(weight.exp(), pause).sum().backward()

    def pause() -> None:
        is_under_way.set()
        has_ended.wait(10)

    def begin_inner_pass() -> None:
        inner.start()
        assert is_under_way.wait(10)

    for _ in range(3):
        inner = threading.Thread(target=inner_pass, name="inner")
        with amanda.apply(tool):
            y = Calling.apply(weight.sin(), begin_inner_pass).sum()
            contextvars.Context().run(y.backward)
        has_ended.set()
        inner.join(10)
        is_under_way.clear()
        has_ended.clear()
    assert calls == ["inner"] * 3
