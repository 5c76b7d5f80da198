"""Backward passes in scopes with some of the tools of the forward pass."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from leaves import leaf
from torch import Tensor

import amanda
from amanda.tools.flops import FlopsTool


class Watched(amanda.Tool):
    """Notes its analysis of the backward op of tanh, and each execution; all such tools share a log."""

    log: list[str]

    def __init__(self, name: str) -> None:
        self.title = name
        self.add_inst_for_op(self._before, backward=True)
        self.add_inst_for_op(self._after, backward=True, require_outputs=True)

    def _before(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "TanhBackward0":
            assert all([context.get_inputs(), context.get_outputs(), context.get_grad_outputs()])
            self.log.append(f"analysis {self.title}")
            context.insert_before_backward_op(lambda *_: self.log.append(self.title))

    def _after(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "TanhBackward0":
            assert context.get_grad_inputs()
            context.insert_after_backward_op(lambda *_: self.log.append(f"{self.title} after"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log that the tools share."""
    log: list[str] = []
    monkeypatch.setattr(Watched, "log", log, raising=False)
    return log


@pytest.fixture
def t(log: list[str]) -> Watched:
    return Watched("t")


@pytest.fixture
def u(log: list[str]) -> Watched:
    return Watched("u")


@pytest.fixture
def passing() -> Callable[..., None]:
    """Goes forward in a scope of some tools, at one place, and backward in scopes of others in turn."""
    x, module = leaf(2), torch.nn.Tanh()

    def run(forward: list[amanda.Tool], *backward: list[amanda.Tool]) -> None:
        with amanda.apply(*forward) as scope:
            y = module(x).sum()
        for i, tools in enumerate(backward):
            with amanda.apply(*tools) as scope:
                y.backward(retain_graph=i + 1 < len(backward))
            assert scope.report == []

    return run


def test_each_tool_analyses_an_op_once_in_whichever_pass_it_is_open(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    first = ["analysis t", "t", "t after"]
    passing([u, t], [t])
    assert log == first
    passing([u, t], [t], [], [u, t], [u], [t])
    both = ["u", "t", "u after", "t after"]
    later = ["t", "t after", "analysis u", *both, "u", "u after", "t", "t after"]
    assert log == [*first, *later]
    log.clear()
    passing([u, t], [u, t])
    passing([u, t], [u, t])
    assert log == both * 2


def test_a_tool_that_did_not_see_the_forward_pass_is_not_called(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    passing([t], [t, u])
    passing([t], [u])
    assert log == ["analysis t", "t", "t after"]


def test_without_the_cache_each_pass_is_analysed_by_the_tools_that_are_open(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    with amanda.cache_disabled():
        passing([t, u], [t], [u], [t, u], [t])
    assert [entry for entry in log if entry.startswith("analysis")] == [
        f"analysis {name}" for name in "tutut"
    ]
    assert log[:3] == ["analysis t", "t", "t after"]
    assert log[-3:] == ["analysis t", "t", "t after"]


def test_a_backward_routine_may_change_a_gradient_in_a_smaller_scope() -> None:
    double, plus = amanda.Tool(), amanda.Tool()

    def change(tool: amanda.Tool, routine: Callable[[Tensor], Tensor]) -> None:
        tool.add_inst_for_op(
            lambda context: (
                context.insert_after_backward_op(routine)
                if context.get_backward_op().__name__ == "TanhBackward0"
                else None
            ),
            backward=True,
        )

    change(double, lambda grad: grad * 2)
    change(plus, lambda grad: grad + 1)
    x, module = leaf(2), torch.nn.Tanh()
    expected = 1 - x.detach().tanh() ** 2
    cases = [([plus], expected + 1), ([double], expected * 2), ([double, plus], expected * 2 + 1)]
    for tools, expected_gradient in cases * 2:
        x.grad = None
        with amanda.apply(double, plus):
            y = module(x).sum()
        with amanda.apply(*tools):
            y.backward()
        assert torch.allclose(x.grad, expected_gradient)


def test_a_tool_that_opens_later_finds_what_its_dependency_put_in_the_context(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    base = amanda.Tool()
    base.add_inst_for_op(lambda context: context.update(word=context.get("word", 0) + 1), backward=True)
    base.add_closing_inst_for_op(lambda context: context.pop("word"), backward=True)
    read = []
    for tool in (t, u):
        tool.depends_on(base)
        tool.add_inst_for_op(lambda context: read.append(context["word"]), backward=True)
    for tools in ([t], [u], [u, t]):
        passing([t, u], tools)
    assert set(read) == {1}
    expected = ["analysis t", "t", "t after", "analysis u", "u", "u after", "t", "u", "t after", "u after"]
    assert log == expected


def test_a_dependency_that_another_tools_stands_for_is_open_with_its_dependent(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    class Words(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: context.update(word="seen"), backward=True)

        def stands_for(self) -> str:
            return "words"

    read = []
    for tool in (t, u):
        tool.depends_on(Words())
        tool.add_inst_for_op(lambda context: read.append(context["word"]), backward=True)
    passing([t, u], [u])
    assert log == ["analysis u", "u", "u after"]
    assert set(read) == {"seen"}


def test_routines_of_a_dependency_that_another_tools_stands_for_run_with_its_dependent(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    class Shared(Watched):
        def stands_for(self) -> str:
            return "shared"

    for tool in (t, u):
        tool.depends_on(Shared(f"for {tool.title}"))
    passing([t, u], [u], [t], [t, u], [])
    log.clear()
    for tools in ([u], [t]):
        passing([t, u], tools)
    for name, passed in (("u", log[:4]), ("t", log[4:])):
        assert passed == ["for t", name, "for t after", f"{name} after"]


def test_an_analysis_that_fails_leaves_that_of_another_tool(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    failing = [True]

    def fail(context: amanda.OpContext) -> None:
        if failing:
            raise ZeroDivisionError("in the analysis")

    u.add_inst_for_op(fail, backward=True)
    passing([t, u], [t])
    with pytest.raises(ZeroDivisionError, match="in the analysis"):
        passing([t, u], [t, u])
    log.clear()
    passing([t, u], [t])
    failing.clear()
    passing([t, u], [t, u])
    assert log == ["t", "t after", "analysis u", "t", "u", "t after", "u after"]


def test_of_two_replacements_the_second_is_refused_in_a_later_pass(passing: Any) -> None:
    tools = [amanda.Tool() for _ in range(2)]
    for tool in tools:
        tool.add_inst_for_op(
            lambda context: (
                context.replace_backward_op(lambda grad: grad)
                if context.get_backward_op().__name__ == "TanhBackward0"
                else None
            ),
            backward=True,
        )
    passing(tools, tools[:1])
    passing(tools, tools[:1])
    with pytest.raises(amanda.errors.ReplaceConflictError):
        passing(tools, tools)


def test_a_pass_after_one_that_let_go_of_the_graph_is_reported(
    t: Watched, u: Watched, log: list[str]
) -> None:
    x = leaf(2)
    for tool in (t, u):
        tool.add_inst_for_op(lambda context: None, backward=True)
    with amanda.apply(t, u):
        y = (x + 1).sum()
    with amanda.apply(t):
        y.backward()
    with amanda.apply(t, u) as scope:
        y.backward()  # neither op saves a tensor, so autograd lets it
    assert {entry.what for entry in scope.report} == {
        "the first pass of Watched through a backward op of add",
        "the first pass of Watched through a backward op of sum",
    }


def test_a_gradient_of_a_gradient_is_seen_by_the_tools_that_are_open(
    t: Watched, u: Watched, log: list[str]
) -> None:
    calls = []
    for tool in (t, u):
        tool.add_inst_for_op(
            lambda context, tool=tool: context.insert_before_backward_op(
                lambda *_: calls.append((tool.title, context.get_backward_order())), grad_outputs=[]
            ),
            backward=True,
        )
    x, module = leaf(2), torch.nn.Tanh()
    for _ in range(3):
        calls.clear()
        with amanda.apply(t, u):
            y = module(x).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        with amanda.apply(u) as scope:
            gradient.pow(2).sum().backward()
    assert scope.report == []
    assert {order for name, order in calls if name == "u"} == {1, 2}
    assert calls.count(("u", 2)) > 0


def test_disabled_tools_are_not_called_and_are_analysed_later(
    t: Watched, u: Watched, log: list[str], passing: Any
) -> None:
    with amanda.disabled():
        passing([t, u], [t])
    x, module = leaf(2), torch.nn.Tanh()
    with amanda.apply(t, u):
        y = module(x).sum()
    with amanda.apply(t):
        with amanda.disabled():
            y.backward(retain_graph=True)
        assert log == []
        y.backward()
    assert log == ["analysis t", "t", "t after"]


class Executed(amanda.Tool):
    """Counts executions of ops and of backward ops."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.add_inst_for_op(
            lambda context: context.insert_before_op(self._count(context.get_op()), inputs=[])
        )
        self.add_inst_for_op(
            lambda context: context.insert_before_backward_op(
                self._count(context.get_backward_op()), grad_outputs=[]
            ),
            backward=True,
        )

    def _count(self, op: Any) -> Callable[[], None]:
        return lambda: self.runs.update([op.__name__])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_in_the_scope_of_the_backward_pass_if_its_own_has_closed(
    reentrant: bool,
) -> None:
    x, module = leaf(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())

    def forward() -> Tensor:
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum()

    together, apart, forward_tool = Executed(), Executed(), Executed()
    for _ in range(2):
        with amanda.apply(together):
            forward().backward()
        with amanda.apply(forward_tool, apart):
            y = forward()
        with amanda.apply(apart):
            y.backward()
        with amanda.apply(forward_tool), amanda.apply(together):
            y = forward()
        with amanda.apply(forward_tool), amanda.apply(together):
            y.backward()
    assert apart.runs == Counter({name: count // 2 for name, count in together.runs.items()})
    assert apart.runs["TanhBackward0"] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_with_the_values_of_its_tools_in_another_scope(reentrant: bool) -> None:
    double = amanda.Tool()
    double.add_inst_for_op(
        lambda context: (
            context.insert_before_op(amanda.differentiable(lambda value: value * 2))
            if context.get_op_type() == "tanh"
            else None
        )
    )
    x, module = leaf(2), torch.nn.Tanh()
    with amanda.apply(double):
        y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum()
    with amanda.apply(double):
        y.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * (1 - (2 * x.detach()).tanh() ** 2), atol=1e-6)


class Starting(torch.autograd.Function):
    """An op whose backward op starts another backward pass; below 60 of them autograd takes a thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, innermost: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Starting.run(ctx.depth - 1, ctx.innermost)
        return *grads, None, None

    @classmethod
    def run(cls, depth: int, innermost: Callable[[], None]) -> None:
        if depth == 0:
            innermost()
            return
        with torch.enable_grad():
            y = cls.apply(leaf(1), depth, innermost)
        y.backward()


@pytest.mark.parametrize("depth", [0, 61, 62])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_on_a_thread_of_autograd_in_the_scope_of_the_backward_pass(
    reentrant: bool, depth: int
) -> None:
    threads: list[int] = []
    x, module = leaf(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())

    def forward(x: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        return module(x)  # type: ignore[no-any-return]

    tool = Executed()
    with amanda.apply(tool):
        y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant).sum()
    tool.runs.clear()
    with amanda.apply(tool):
        Starting.run(depth, y.backward)
    assert (len(set(threads)) > 1) is (depth > 0)
    assert [tool.runs[name] for name in ("linear", "tanh", "TanhBackward0", "AddmmBackward0")] == [1] * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_thread_of_autograd_that_recomputes_what_ran_outside_of_scopes_is_reported(reentrant: bool) -> None:
    x, module = leaf(1, 2), torch.nn.Tanh()
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum()
    tool = Executed()
    with amanda.apply(tool) as scope:
        Starting.run(61, y.backward)
    assert not tool.runs["tanh"]
    assert [entry.what for entry in scope.report if entry.what.startswith("thread ")]


@pytest.mark.parametrize("depth", [0, 62])
def test_a_transform_on_a_thread_of_autograd_does_not_differentiate_gradients(
    depth: int, backward_ops: Any
) -> None:
    def transform() -> None:
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(2))

    with amanda.apply(backward_ops()) as scope:
        for _ in range(2):
            leaf(1).sin().sum().backward()
        Starting.run(depth, transform)
    assert "the first differentiation of gradients" not in [entry.what for entry in scope.report]


@pytest.mark.parametrize("has_leaf", [False, True], ids=["a result", "a leaf"])
def test_a_backward_op_that_is_new_in_an_inner_scope_is_analysed_by_tools_of_both(has_leaf: bool) -> None:
    x, weight = torch.rand(2, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    outer, inner = FlopsTool(), FlopsTool()
    with amanda.apply(outer):
        for step in range(2):
            with amanda.apply(inner) if step else nullcontext():
                value = x.detach().requires_grad_() if step and has_leaf else x.sin()
                (value @ weight).sum().backward()
    # The inner tool reads what mappings of the outer one write into contexts.
    assert inner.result.total("macs", "backward") == 2 * inner.result.total("macs", "forward") == 64
    assert outer.result.total("macs", "backward") == 128


def test_a_pass_outside_of_scopes_runs_where_torch_has_kept_none_as_its_callers_context() -> None:
    def outside() -> None:
        opened.wait(60)
        torch._C._stash_obj_in_tls("context", None)  # as torch 2.12 does after each pass
        try:
            w.square().sum().backward()
        finally:
            getattr(torch._C, "_remove_obj_from_tls", lambda key: None)("context")

    w, opened = leaf(), threading.Event()
    thread = threading.Thread(target=outside)  # not in the scope, which opens later
    thread.start()
    with amanda.apply(FlopsTool()):
        opened.set()
        thread.join()
    assert w.grad is not None
