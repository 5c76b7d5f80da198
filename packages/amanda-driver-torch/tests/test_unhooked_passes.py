"""Backward passes that repeat an earlier one run without hooks; tools that follow gradients see the same."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amanda
from amanda import interceptor
from amanda.drivers.torch import _autograd, _nodes, _repeated_passes
from amanda.tools.flops import FlopsTool
from amanda.tools.trace import TraceTool
from amanda.tools.trace._tracker import ExecutionTracker

natively = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: only native hooks tell that they repeat", run=False
)
Disturbance = Callable[["Training"], Any]


@pytest.fixture(autouse=True)
def no_hooks_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nodes.NodeHooks, "of_program", False)
    monkeypatch.setattr(_repeated_passes.PassCounts, "skipped_passes", 0)
    gc.collect()  # graphs of earlier scopes may have got hooks
    leaked = interceptor.Mark.alive()
    marks = SimpleNamespace(alive=lambda: interceptor.Mark.alive() - leaked)
    monkeypatch.setattr(_nodes, "Mark", marks)


class Training:
    """Steps of a small model, the same but for what a disturbance does in some of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Sigmoid()]
        self.model = torch.nn.Sequential(*layers)
        self.first, self.last = layers[0].weight, layers[2].weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.x, self.other_x = torch.rand(3, 4), torch.rand(3, 4)
        self.gradient: torch.Tensor | None = None  # of the loss; None: torch makes it
        self.on_output: Callable[[torch.Tensor], Any] = lambda output: None
        self.leaf_node: Any = None

    def loss(self) -> torch.Tensor:
        output = self.model(self.x)
        self.on_output(output)
        # An addition hands on the very gradient that it gets.
        return output.sum() + 1.0  # type: ignore[no-any-return]

    def step(self) -> None:
        self.loss().backward(self.gradient)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep_leaf_node(self) -> None:
        with amanda.disabled():
            node: Any = self.first.view_as(self.first).grad_fn
            self.leaf_node = node.next_functions[0][0]


def quiet(training: Training) -> None:
    """Change nothing."""


def other_input(training: Training) -> Any:
    training.x = training.other_x  # known by itself: another recorded op in a graph of the same form


def hook_of_an_output(training: Training) -> Any:
    training.on_output = lambda output: output.register_hook(lambda gradient: gradient.sum() and None)


def change_by_a_hook(training: Training) -> Any:
    training.on_output = lambda output: output.register_hook(lambda gradient: gradient * 2)


def hook_of_a_leaf(training: Training) -> Any:
    return training.last.register_hook(lambda gradient: gradient.abs())  # type: ignore[no-untyped-call]


def hook_after_accumulation(training: Training) -> Any:
    return training.first.register_post_accumulate_grad_hook(lambda leaf: training.last.grad.sum() and None)  # type: ignore[union-attr]


def hook_of_a_node(training: Training) -> Any:
    def register(output: torch.Tensor) -> None:
        node: Any = output.grad_fn
        node.register_prehook(lambda gradients: gradients[0].sum() and None)

    training.on_output = register


def hook_of_a_leaf_node(training: Training) -> Any:
    training.keep_leaf_node()
    return training.leaf_node.register_prehook(lambda gradients: gradients[0].sum() and None)


def gradient_of_the_program(training: Training) -> Any:
    training.gradient = torch.tensor(2.0)


def retained_gradient(training: Training) -> Any:
    training.on_output = lambda output: (output.retain_grad(), setattr(training, "output", output))


def saved_tensors_that_read_a_gradient(training: Training) -> Any:
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if training.last.grad is not None:
            training.last.grad.sum()
        return tensor

    return saved_tensors_hooks(lambda tensor: tensor, unpack)


def saved_tensors_elsewhere(training: Training) -> Any:
    return save_on_cpu()


class SummingMode(TorchDispatchMode):
    """Computes with what it sees."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            torch.sum(result)
        return result


def dispatch_mode(training: Training) -> Any:
    return SummingMode()


def anomaly_mode(training: Training) -> Any:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def frozen(training: Training) -> Any:
    training.last.requires_grad_(False)


def gradient_of_a_leaf_that_the_program_sets(training: Training) -> Any:
    training.last.grad = torch.zeros(4, 4)


DISTURBANCES = [
    quiet, other_input, hook_of_an_output, change_by_a_hook, hook_of_a_leaf, hook_after_accumulation,
    hook_of_a_node, hook_of_a_leaf_node, gradient_of_the_program, retained_gradient,
    saved_tensors_that_read_a_gradient, saved_tensors_elsewhere, dispatch_mode, anomaly_mode, frozen,
    gradient_of_a_leaf_that_the_program_sets,
]  # fmt: skip


def disturbed(training: Training, disturbance: Disturbance) -> Iterator[None]:
    """Take a step under a disturbance, which may return a context or a handle; undo what it has changed."""
    output, x = training.on_output, training.x
    effect = disturbance(training)
    try:
        with effect if hasattr(effect, "__enter__") and not hasattr(effect, "remove") else nullcontext():
            yield
    finally:
        training.on_output, training.x, training.gradient = output, x, None
        training.last.requires_grad_(True)
        if hasattr(effect, "remove"):
            effect.remove()


def read_gradients(training: Training) -> None:
    """Read gradients at places of their own, by which the graph shows what they are known as."""
    for leaf in training.model.parameters():
        if leaf.grad is not None:
            leaf.grad.square()
    for tensor in (training.gradient, getattr(getattr(training, "output", None), "grad", None)):
        if tensor is not None:
            tensor.exp()


def unhooked_passes(monkeypatch: pytest.MonkeyPatch, hooked: bool) -> list[Any]:
    """Return a list of the passes that run without hooks from now on; hooked: let each pass have hooks."""
    passes: list[Any] = []
    add_hooks = _autograd._BackwardPass.add_hooks

    def adding(self: Any, outputs: Any) -> None:
        if hooked:
            self._counts = None
        add_hooks(self, outputs)
        if not self._node_handles:
            passes.append(self.thread)

    monkeypatch.setattr(_autograd._BackwardPass, "add_hooks", adding)
    return passes


def graph_of(run: Callable[[TraceTool], Any], hooked: bool, tool: TraceTool | None = None) -> tuple[Any, int]:
    """Return the graph of a program, and the number of its unhooked passes."""
    tool = tool or TraceTool()
    with pytest.MonkeyPatch.context() as monkeypatch:
        passes = unhooked_passes(monkeypatch, hooked)
        run(tool)
    graph = tool.graph.to_dict()
    for op in graph["ops"]:
        del op["id"]  # which counts the models of a process
    return graph, len(passes)


def compare(run: Callable[[TraceTool], Any], at_least: int) -> None:
    """Check that a program has the same graph with all hooks; at_least: number of its unhooked passes."""
    hooked, none = graph_of(run, True)
    _nodes.NodeHooks.of_program = False
    gc.collect()
    unhooked, passes = graph_of(run, False)
    assert none == 0
    assert passes >= at_least
    assert unhooked == hooked


@natively
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_disturbance_is_recorded_as_with_hooks(disturbance: Disturbance, is_read: bool) -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        with amanda.apply(tool):
            training.other_x.exp()
            for turn in range(14):
                for _ in range(1 + turn % 2):
                    for _ in disturbed(training, disturbance if turn in (6, 7, 10) else quiet):
                        training.step()
                        if turn in (7, 13) and is_read:
                            read_gradients(training)
                training.update()

    compare(run, at_least=4)


@natively
def test_gradients_of_leaves_are_known_after_a_pass_without_hooks() -> None:
    training, tool = Training(), TraceTool()
    with amanda.apply(tool):
        for _ in range(8):
            training.step()
            training.optimizer.zero_grad()
        training.step()
        training.last.grad.square()  # type: ignore[union-attr]
    (reader,) = (op for op in tool.graph.ops if op.type in ("square", "pow"))
    assert [op.type for op in tool.graph.producers(reader)] == ["accumulate_grad"]


def of_a_leaf(training: Training, hook: Callable[[], None]) -> None:
    training.first.register_hook(lambda gradient: hook())  # type: ignore[no-untyped-call]


def of_a_leaf_after_accumulation(training: Training, hook: Callable[[], None]) -> None:
    training.first.register_post_accumulate_grad_hook(lambda leaf: hook())


def of_the_node_of_a_leaf(training: Training, hook: Callable[[], None]) -> None:
    training.leaf_node.register_prehook(lambda gradients: hook())


@natively
@pytest.mark.parametrize("register", [of_a_leaf, of_a_leaf_after_accumulation, of_the_node_of_a_leaf])
@pytest.mark.parametrize("seen", ["between", "before"])
def test_hooks_from_outside_of_scopes_are_noticed(
    register: Callable[[Training, Callable[[], None]], None], seen: str
) -> None:
    """The hook does nothing at first, as while a pass would be learned."""

    def run(tool: TraceTool) -> None:
        training, turns = Training(), list[int]()
        training.keep_leaf_node()

        def hook() -> None:
            if len(turns) > 10:
                assert training.last.grad is not None
                training.last.grad.square()

        if seen == "before":
            register(training, hook)
        for scope in range(2):
            with amanda.apply(tool):
                for _ in range(7):
                    turns.append(scope)
                    training.step()
                    training.optimizer.zero_grad()
            if scope == 0 and seen == "between":
                register(training, hook)

    compare(run, at_least=3 if seen == "between" else 0)


@natively
def test_hooks_of_a_graph_from_an_earlier_scope_are_noticed() -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        with amanda.apply(tool):
            for _ in range(6):
                training.step()
            outputs = list[torch.Tensor]()
            training.on_output = outputs.append
            losses = [training.loss() for _ in range(8)]
        outputs[6].register_hook(lambda gradient: gradient.sum() and None)  # type: ignore[no-untyped-call]
        with amanda.apply(tool):
            for loss in losses:
                loss.backward()

    compare(run, at_least=3)


@natively
def test_hooks_of_a_part_from_before_the_scope_are_noticed() -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        inputs = [training.first * 2 for _ in range(8)]
        inputs[6].register_hook(lambda gradient: gradient.sum() and None)  # type: ignore[no-untyped-call]
        with amanda.apply(tool):
            for x in inputs:
                training.model(x).sum().backward()

    compare(run, at_least=0)


@natively
def test_a_pass_in_which_ops_run_is_not_repeated() -> None:
    training = Training()

    def register(output: torch.Tensor) -> None:
        node: Any = output.grad_fn
        node._raw_saved_result.register_hooks(lambda saved: saved, lambda saved: saved * 1)

    training.on_output = register
    with pytest.MonkeyPatch.context() as monkeypatch:
        passes = unhooked_passes(monkeypatch, False)
        with amanda.apply(TraceTool()):
            for _ in range(6):
                training.step()
    assert passes == []


@natively
def test_a_pass_that_anomaly_detection_ends_is_recorded_as_with_hooks() -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        scale = torch.ones(4, requires_grad=True)
        with amanda.apply(tool):
            for turn in range(8):
                with torch.no_grad():
                    scale.fill_(-1.0 if turn == 6 else 1.0)
                loss = training.model(training.x).sum() * scale.sqrt().sum()
                ends = torch.autograd.set_detect_anomaly(True) if turn == 6 else nullcontext()
                with ends, pytest.raises(RuntimeError, match="nan") if turn == 6 else nullcontext():
                    loss.backward()
        del loss

    compare(run, at_least=3)


@natively
def test_executions_of_several_recorded_ops_are_told_apart() -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        with amanda.apply(tool):
            for turn in range(12):
                # The same places with other parameters as input: ops of their own, in graphs of one form.
                for scale in (training.first[0], training.last[0])[: 1 + turn % 2]:
                    (training.model[1](scale) * 2).sum().backward()
                training.step()

    compare(run, at_least=6)


@natively
@pytest.mark.parametrize(("executions", "at_least"), [(1, 4), (2, 0)])
def test_executions_beyond_the_limit_are_counted_at_the_last(executions: int, at_least: int) -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        with amanda.apply(tool):
            for turn in range(16):
                x = torch.rand(4) if turn % 5 else training.first[0] * 1
                training.model[3](training.model[2](x)).sum().backward()

    results = [graph_of(run, hooked, TraceTool(executions=executions)) for hooked in (True, False)]
    assert results[0][0] == results[1][0]
    assert results[1][1] >= at_least


@natively
def test_recomputed_ops_are_recorded_as_with_hooks() -> None:
    def run(tool: TraceTool) -> None:
        training = Training()
        with amanda.apply(tool):
            for turn in range(16):
                if turn % 4 == 3 and turn > 6:
                    x = torch.rand(3, 4, requires_grad=True)
                    checkpoint(training.model, x, use_reentrant=turn % 8 == 7).sum().backward()
                else:
                    training.step()

    compare(run, at_least=1)


@natively
def test_other_tools_that_count_count_beside() -> None:
    counts = []
    for hooked in (True, False):
        training, flops, tool = Training(), FlopsTool(), TraceTool()
        with pytest.MonkeyPatch.context() as monkeypatch:
            passes = unhooked_passes(monkeypatch, hooked)
            with amanda.apply(flops, tool):
                for _ in range(8):
                    training.step()
        assert bool(passes) is not hooked
        counts.append((str(flops.result), [op.calls for op in tool.graph.ops]))
    assert counts[0] == counts[1]


@natively
def test_a_tool_that_sees_gradients_keeps_its_hooks() -> None:
    calls: list[int] = []

    class Seeing(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(
                lambda context: context.insert_before_backward_op(lambda *_: calls.append(1)), backward=True
            )

    training = Training()
    with amanda.apply(TraceTool(), Seeing()):
        for turn in range(8):
            training.step()
            assert len(calls) == (turn + 1) * (len(calls) // (turn + 1))
    assert len(calls) % 8 == 0


@natively
def test_a_pass_without_hooks_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    training, tool = Training(), TraceTool()
    with amanda.apply(tool) as scope:
        for _ in range(5):
            training.step()
        loss = training.loss()
        # Torch raises in the middle of the pass: a tensor that it has saved is written.
        with torch.no_grad():
            training.last.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
    assert "a backward pass that failed" in str(scope.report)


@natively
def test_threads_that_share_leaves_count_each_pass_once() -> None:
    """A pass that adds hooks at the nodes of leaves waits for those of other threads without."""
    training, tool = Training(), TraceTool()
    wide = torch.rand(400, 4)
    pass_count = 40

    def train() -> None:
        for _ in range(pass_count):
            training.model(wide).sum().backward()

    def train_differently() -> None:
        for turn in range(pass_count):
            y = training.model(wide)
            for _ in range(turn % 7):  # graphs of several forms, so that some passes have hooks
                y = y * 2
            y.sum().backward()

    with amanda.apply(tool):
        for _ in range(4):
            training.model(wide).sum().backward()
        threads = [threading.Thread(target=target) for target in (train, train_differently, train)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = [op.calls or 0 for op in tool.graph.ops if op.type == "accumulate_grad"]
    assert sum(calls) == 4 * (3 * pass_count + 4)


def leaf_calls(tool: Any) -> int:
    """Return how many executions of leaves' nodes a tool has counted."""
    if isinstance(tool, TraceTool):
        return sum(op.calls or 0 for op in tool.graph.ops if op.type == "accumulate_grad")
    return sum(op.calls for op in tool.result.ops if op.type == "accumulate_grad")


@natively
@pytest.mark.parametrize("kind", [TraceTool, FlopsTool])
def test_a_pass_that_adds_hooks_waits_for_one_without(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks at the nodes of leaves would count the other thread's pass, which counts itself."""
    training, tool, order = Training(), kind(), list[str]()
    add_hooks, remove_hooks = _autograd._BackwardPass.add_hooks, _autograd._BackwardPass.remove_hooks
    has_begun, is_waiting = threading.Event(), threading.Event()
    wait = _repeated_passes.UnhookedPasses.wait_for_other_threads

    def adding(self: Any, outputs: Any) -> None:
        add_hooks(self, outputs)
        if threading.current_thread() is other:
            order.append("hooked")
        elif is_last and not self._node_handles:
            has_begun.set()
            is_waiting.wait(60)

    def waiting(self: Any) -> None:
        if threading.current_thread() is other:
            is_waiting.set()
        wait(self)

    def removing(self: Any) -> None:
        if is_last and threading.current_thread() is not other:
            order.append("unhooked")
        remove_hooks(self)

    def train_otherwise() -> None:
        has_begun.wait(60)
        (training.loss() * 2).backward()

    monkeypatch.setattr(_autograd._BackwardPass, "add_hooks", adding)
    monkeypatch.setattr(_autograd._BackwardPass, "remove_hooks", removing)
    monkeypatch.setattr(_repeated_passes.UnhookedPasses, "wait_for_other_threads", waiting)
    is_last, other = False, threading.Thread(target=train_otherwise)
    with amanda.apply(tool):
        for _ in range(5):
            training.step()
        other.start()
        is_last = True
        training.step()
        other.join()
    assert order == ["unhooked", "hooked"]
    assert leaf_calls(tool) == 4 * 7


@natively
def test_a_pass_without_hooks_is_counted_after_a_routine_on_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routines of a tool run one at a time, and the counts at the end of a pass are routines too."""
    training, tool, order = Training(), TraceTool(), list[str]()
    repeat_or_learn, before_op = _repeated_passes.PassCounts.repeat_or_learn, ExecutionTracker.before_op
    has_run, is_recording = threading.Event(), threading.Event()

    def counting(self: Any, *nodes_and_marks: Any) -> None:
        if is_last:
            has_run.set()
            assert is_recording.wait(60)
        repeat_or_learn(self, *nodes_and_marks)
        if is_last:
            order.append("counted")

    def recording(self: Any, *inputs: Any, **options: Any) -> None:
        if threading.current_thread() is other:
            is_recording.set()
            time.sleep(0.2)  # in which the other thread would count
            order.append("recorded")
        before_op(self, *inputs, **options)

    def compute() -> None:
        assert has_run.wait(60)
        torch.ones(2).cos()

    monkeypatch.setattr(_repeated_passes.PassCounts, "repeat_or_learn", counting)
    monkeypatch.setattr(ExecutionTracker, "before_op", recording)
    is_last, other = False, threading.Thread(target=compute)
    with amanda.apply(tool):
        for _ in range(5):
            training.step()
        other.start()
        is_last = True
        training.step()
        other.join()
    assert order[0] == "recorded"
    assert leaf_calls(tool) == 4 * 6


@natively
def test_a_pass_that_leaves_nodes_to_another_one_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pass has hooked the leaves since it looked: its own hooks are not all that count it."""
    training, tool = Training(), FlopsTool()
    find_nodes, remove_hooks = (
        _autograd._BackwardPass._find_marked_nodes,
        _autograd._BackwardPass.remove_hooks,
    )
    has_looked, is_hooked, has_learned = (threading.Event() for _ in range(3))

    def finding(self: Any, outputs: Any) -> None:
        if threading.current_thread() is learner:
            has_looked.set()
            is_hooked.wait(60)
        find_nodes(self, outputs)
        if threading.current_thread() is other:
            is_hooked.set()

    def removing(self: Any) -> None:
        if threading.current_thread() is other:
            has_learned.wait(60)
        remove_hooks(self)

    def train(factors: int) -> None:
        loss = training.model(training.x)
        for _ in range(factors):
            loss = loss * 2
        loss.sum().backward()

    def learn() -> None:
        train(3)
        has_learned.set()

    def train_otherwise() -> None:
        has_looked.wait(60)
        train(2)

    def run(*threads: threading.Thread) -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    learner, other = threading.Thread(target=learn), threading.Thread(target=train_otherwise)
    with amanda.apply(tool):
        for factors in (0, 1, 0, 1):  # analyses, in threads as later
            run(threading.Thread(target=train, args=(factors,)))
        monkeypatch.setattr(_autograd._BackwardPass, "_find_marked_nodes", finding)
        monkeypatch.setattr(_autograd._BackwardPass, "remove_hooks", removing)
        run(other, learner)
        monkeypatch.undo()
        for _ in range(10):
            run(threading.Thread(target=train, args=(3,)))
    assert leaf_calls(tool) == 4 * 16


@natively
@pytest.mark.parametrize("kind", [TraceTool, FlopsTool])
def test_a_pass_without_hooks_that_an_interrupt_left_behind_is_forgotten(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, remove_hooks, counts = Training(), _autograd._BackwardPass.remove_hooks, list[int]()

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with amanda.apply(kind()) as scope:
        for turn in range(7):
            is_interrupted = turn == 5
            method = interrupted if is_interrupted else remove_hooks
            monkeypatch.setattr(_autograd._BackwardPass, "remove_hooks", method)
            with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
                training.step()
            counts.append(len(_repeated_passes.PassCounts.unhooked.passes))
    assert counts == [0, 0, 0, 0, 0, 1, 0]
    assert "a backward pass that failed" not in str(scope.report)  # it ran all, and is counted now


def test_no_pass_without_hooks_begins_while_others_wait_to_add_theirs() -> None:
    passes = _repeated_passes.UnhookedPasses()
    first, second = (SimpleNamespace(under_way=[], thread=0) for _ in range(2))
    assert passes.begin(first)
    begun: list[bool] = []
    ended = passes._changed.wait

    def end_first(timeout: float) -> None:
        passes.lock.release()
        begun.append(passes.begin(second))
        passes.lock.acquire()
        passes.remove(first)

    passes._changed.wait = end_first  # type: ignore[method-assign, assignment]
    running, _repeated_passes.is_running = _repeated_passes.is_running, lambda backward_pass: True
    try:
        with passes.lock:
            passes.wait_for_other_threads()
    finally:
        _repeated_passes.is_running = running
        passes._changed.wait = ended  # type: ignore[method-assign]
    assert begun == [False]
    assert passes.begin(second)
