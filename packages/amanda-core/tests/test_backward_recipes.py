"""Two ways to bring backward ops to tools where autodiff has no hooks on its nodes; the guide quotes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary, ref

import pytest

from amanda import interceptor
from amanda.backend import BackwardStep, State, Trace
from amanda.interceptor import Detour, Suspension
from amanda.testing import DriverTests, FakeDriver, Sample, fake, never
from amanda.testing._fake_driver import FakeCall, _instrumented_checkpoint
from amanda.testing.fake import Tensor, _autograd, _operators

from .test_fake_driver import FakeSample

run_backward = _autograd.run_backward  # the framework's own, whatever stands in its place in a scope


class Execution:
    """Result of `capture_backward_ops`: the execution of the calls of `Call.invoke` within it."""

    current = threading.local()

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def __enter__(self) -> Execution:
        self.outer, self.current.execution = getattr(self.current, "execution", None), self
        return self

    def __exit__(self, *_: object) -> None:
        self.current.execution = self.outer


class BackwardType:
    """The type of a backward op: a name for tools, as autodiff shows none."""

    def __init__(self, op: Any) -> None:
        self.__name__ = f"{op.__name__.capitalize()}Backward"


class RecipeDriver(FakeDriver):
    """The driver of the fake framework, with another `Call`, and other backward passes."""

    def attach(self) -> None:
        run_backward, checkpoint = _autograd.run_backward, _operators.checkpoint
        stand_ins = {site.target: Detour(site) for site in self._sites}
        functions = {
            run_backward: self.followed(run_backward),
            checkpoint: _instrumented_checkpoint(checkpoint),
        }
        self.patches.replace({**stand_ins, **functions}, [fake, _operators, _autograd])
        self.patches.track_module_calls(fake.Module)

    def followed(self, run_backward: Callable[..., None]) -> Callable[..., None]:
        """Return a function that runs a backward pass, after which ids at the top level count anew."""

        def run(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            run_backward(outputs, grads)
            if interceptor.active() is not None:
                interceptor.reset_root()

        return run

    def capture_backward_ops(self) -> Any:
        return Execution()

    def attach_trace(self, trace: Trace, nodes: Any, values: list[Any]) -> None:
        nodes.trace = trace


def differentiable(function: Callable[[list[Any]], list[Tensor]], inputs: list[Any], backward: Any) -> Any:
    """Return the outputs of a function, with a gradient of its own: what such a framework offers."""
    with fake.no_grad():
        outputs = function(inputs)
    fresh = [output.detach() for output in outputs]
    _autograd.record("Function", inputs, fresh, backward)
    return fresh


class CustomGradientCall(FakeCall):
    """A call whose op has a gradient that the driver gives, where a tool may have work at it."""

    def invoke(self, inputs: list[Any]) -> Any:
        execution = getattr(Execution.current, "execution", None)
        if execution is None or self.written_positions or self.op.__name__ in ("item", "cat"):
            return super().invoke(inputs)
        leaves: list[Any] = [_leaf(value) for value in inputs]
        results: list[Tensor] = []

        def forward(_: list[Any]) -> list[Tensor]:
            with fake.enable_grad():
                results[:] = self.driver.flatten(super(CustomGradientCall, self).invoke(leaves))[0]
            return results

        def backward(grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
            return self.driver.differentiated(execution.trace, self.op, results, leaves, grad_outputs)

        outputs = differentiable(forward, inputs, backward)
        return fake.Halves(*outputs) if len(outputs) > 1 else outputs[0]


class CustomGradientDriver(RecipeDriver):
    """A driver of a framework in which a function may have a gradient of its own."""

    call_type = CustomGradientCall

    def differentiated(
        self,
        trace: Trace | None,
        op: Any,
        outputs: list[Tensor],
        leaves: list[Any],
        grad_outputs: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of an op's inputs, with the routines of the open tools around."""
        if trace is None or State.current().stack is None:
            return gradients(outputs, leaves, grad_outputs)
        step = BackwardStep(self, trace, BackwardType(op), 0, State.current())
        with Suspension():
            entering = step.run_before(list(grad_outputs))
            leaving = step.run_after(gradients(outputs, leaves, entering), entering)
        self.mark_backward_analysed(trace)
        return leaving


def gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Any], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of leaves that the framework computes by itself."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf.grad = None
    pairs = [(output, grad) for output, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
    if pairs:
        run_backward(*map(list, zip(*pairs, strict=True)))
    return [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]


def _taken_gradient(tensor: Tensor | None) -> Tensor | None:
    """Return the gradient that a backward pass has left on a tensor, and remove it."""
    if tensor is None:
        return None
    gradient, tensor.grad = tensor.grad, None
    return gradient


def _leaf(value: Any) -> Any:
    """Return a leaf with a tensor's numbers, which needs a gradient if the tensor does."""
    if not isinstance(value, Tensor):
        return value
    return Tensor(value.numbers, value.shape, value.dtype, requires_grad=value.requires_grad)


class Cut:
    """An op between two pieces of the graph: the backward pass of one piece ends here, and Python goes on.

    inputs: what the program gave to the op.  leaves: what the op ran on.  results: what it gave.
    handed: leaves that the program was given in the place of the results.
    """

    def __init__(self, op: Any, inputs: list[Any], execution: Execution) -> None:
        self.op, self.inputs, self.execution = op, inputs, execution
        self.leaves: list[Any] = [_leaf(value) for value in inputs]
        self.results: list[Tensor] = []
        self.handed: list[ref[Tensor]] = []


class CutCall(FakeCall):
    """A call whose op is cut off from the graph around, where a tool may have work at its backward op."""

    def invoke(self, inputs: list[Any]) -> Any:
        execution = getattr(Execution.current, "execution", None)
        if execution is None or self.written_positions or self.op.__name__ in ("item", "cat"):
            return super().invoke(inputs)
        cut = Cut(self.op, inputs, execution)
        outputs = super().invoke(cut.leaves)
        cut.results = list(outputs) if isinstance(outputs, fake.Halves) else [outputs]
        if not cut.results[0].requires_grad:
            return outputs
        handed = [_leaf(result) for result in cut.results]
        cut.handed = [ref(tensor) for tensor in handed]
        for tensor in handed:
            # A cut lives as long as what the program was given, and holds what is before it.
            tensor.cut = cut
        CutDriver.cuts[next(CutDriver.numbers)] = cut
        return fake.Halves(*handed) if len(handed) > 1 else handed[0]


class CutDriver(RecipeDriver):
    """A driver of a framework whose backward pass is one native call, without hooks and custom gradients."""

    call_type = CutCall
    cuts: ClassVar[WeakValueDictionary[int, Cut]] = WeakValueDictionary()
    numbers: ClassVar[Any] = count()

    def register_framework(self) -> None:
        """Follow backward passes for good: a graph that outlives its scope is cut, too."""
        super().register_framework()
        for holder in (fake, _autograd):
            holder.run_backward = self.followed(run_backward)  # type: ignore[attr-defined]

    def detach_value(self, value: Any) -> Any:
        # What the program was given is a leaf: a trace that held it would keep its cut alive.
        if isinstance(value, Tensor) and not isinstance(value, fake.Parameter):
            return value.detach()
        return super().detach_value(value)

    def followed(self, run_backward: Callable[..., None]) -> Callable[..., None]:
        def run(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            run_backward(outputs, grads)
            # Whatever read the results of an op ran after it, so its gradient is complete in this order.
            for _, cut in sorted(self.cuts.items(), reverse=True):
                grads_of_results = [_taken_gradient(reference()) for reference in cut.handed]
                if any(grads_of_results):
                    self.go_on(cut, grads_of_results)
            if interceptor.active() is not None:
                interceptor.reset_root()

        return run

    def go_on(self, cut: Cut, grad_outputs: list[Tensor | None]) -> None:
        """Run the backward pass of an op, with routines around, and then that of its inputs."""
        trace, state = cut.execution.trace, State.current()
        if trace is None or state.stack is None:
            grad_inputs = gradients(cut.results, cut.leaves, grad_outputs)
        else:
            step = BackwardStep(self, trace, BackwardType(cut.op), 0, state)
            with Suspension():
                entering = step.run_before(grad_outputs)
                grad_inputs = step.run_after(gradients(cut.results, cut.leaves, entering), entering)
            self.mark_backward_analysed(trace)
        for value, grad in zip(cut.inputs, grad_inputs, strict=True):
            if isinstance(value, Tensor) and value.requires_grad and grad is not None:
                run_backward([value], [grad])


LACKS = {
    "batched_values": "nothing maps a function over samples",
    "jvp": "gradients are of backward mode alone",
    "leaves": "no op stores a gradient",
    "vmap": "nothing maps a function over samples",
}


class CustomGradientSample(FakeSample):
    driver = CustomGradientDriver
    many_backward_ops = 1
    relu_backward = "ReluBackward"


class TestCustomGradients(DriverTests):
    """The suite on gradients that the driver gives."""

    lacks: ClassVar = LACKS
    gaps: ClassVar = {
        "test_an_op_looked_up_before_the_scope_is_seen": never("operators in Python are attributes"),
    }

    # The sample is in a module with another one, which no program finds by itself.
    test_ids_are_the_same_in_another_process = None  # type: ignore[assignment]
    test_the_suite_passes_on_the_pure_python_interceptor = None  # type: ignore[assignment]

    @pytest.fixture
    def sample(self) -> Sample:
        return CustomGradientSample()


@pytest.fixture(autouse=True, scope="module")
def _restored() -> Iterator[None]:
    yield
    for holder in (fake, _autograd):
        holder.run_backward = run_backward  # type: ignore[attr-defined]


class CutSample(CustomGradientSample):
    driver = CutDriver
    lasting_patches = ("run_backward",)


class TestCuts(TestCustomGradients):
    """The suite on a graph that is cut at the ops."""

    gaps: ClassVar = {
        "test_nothing_is_left_on_tensors_and_modules": never("a tensor holds the cut before it"),
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return CutSample()
