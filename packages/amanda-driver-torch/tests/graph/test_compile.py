"""torch.compile in scopes with compiled="instrument": ops of graphs, before, in and after scopes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import amanda
from amanda.errors import ScopeError

X = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)
GRADIENT = torch.ones(2, 2)


class Counted(amanda.Tool):
    """Calls of routines at ops and backward ops, by namespace's mode, forward op and backward op."""

    def __init__(self, mark: Callable[[Any], Any] = lambda routine: routine) -> None:
        self.analysed: list[tuple[str, ...]] = []
        self.calls: list[tuple[str, ...]] = []
        self.mark = mark
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        key = str(context.namespace).split("/")[-1], context.get_op_type(), context.get_scope()
        self.analysed.append(key)
        context.insert_after_op(self.mark(self.noting(key)))

    def backward(self, context: amanda.OpContext) -> None:
        key = "backward", context.get_backward_op().__name__, context.get_scope()
        self.analysed.append(key)
        context.insert_after_backward_op(self.mark(self.noting(key)))

    def noting(self, key: tuple[str, ...]) -> Callable[..., None]:
        def note(*values: Any) -> None:
            assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in values)
            self.calls.append(key)

        return note


class Scale(amanda.Tool):
    """Multiplies what ReLU gives by a factor, in traceable code."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "relu":
            context.insert_after_op(self.scaled)

    @amanda.traceable
    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor


class Counting:
    """A backend that counts the graphs that it compiles."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self.compile = lookup_backend(name)

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return self.compile(module, inputs)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)
    return nn.Sequential(*layers)


def trained(net: nn.Module, call: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The output and the gradients of one training step."""
    with amanda.disabled():
        net.zero_grad()
        net.load_state_dict(network().state_dict())
    output = call(X)
    output.backward(GRADIENT)
    with amanda.disabled():
        return [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_ops_are_those_of_eager_mode_and_own_graphs_run_after_the_scope(
    name: str, compiled_before: bool
) -> None:
    eager, tool = Counted(), Counted()
    net = network()
    with amanda.apply(eager):
        expected = trained(net, net)
    backend = Counting(name)
    compiled = torch.compile(net, backend=backend)
    if compiled_before:
        assert equal(trained(net, compiled), expected)
    for _ in range(2):
        tool.calls.clear()
        with amanda.apply(tool, compiled="instrument") as scope:
            assert equal(trained(net, compiled), expected)
        assert backend.count == 1 + compiled_before
        assert [entry.what for entry in scope.report] == ["graph given to the backend Counting"]
        graph = [key for key in tool.calls if key[0] == "graph"]
        assert [("eager", *key[1:]) for key in graph] == [key for key in eager.analysed if key[0] == "eager"]
        backward = sorted(key for key in tool.calls if key[0] == "backward")
        assert backward == sorted(key for key in eager.calls if key[0] == "backward")
    called = len(tool.calls)
    assert equal(trained(net, compiled), expected)
    assert backend.count == 2
    assert len(tool.calls) == called
    assert sum(key[0] == "graph" for key in tool.analysed) == len(graph)


def test_an_empty_tool_leaves_the_graph_as_it_is() -> None:
    net = network()
    backend = Counting("aot_eager")
    compiled = torch.compile(net, backend=backend)
    with amanda.apply(amanda.Tool(), compiled="instrument"):
        output = trained(net, compiled)
    assert backend.count == 1
    assert equal(trained(net, compiled), output)
    assert backend.count == 1


def test_compiled_callables_run_op_by_op_by_default() -> None:
    tool = Counted()
    with amanda.apply(tool):
        torch.compile(network(), backend="eager")(X)
    assert {key[0] for key in tool.analysed} == {"eager"}


def test_another_way_is_an_error_that_names_both() -> None:
    with pytest.raises(ScopeError, match="apply: compiled is 'both'; give 'eager' or 'instrument'"):
        amanda.apply(amanda.Tool(), compiled="both")  # type: ignore[arg-type]


class Masking(amanda.Tool):
    """Masks the weights of linear ops."""

    def __init__(self, mark: Callable[[Any], Any], mask: Any) -> None:
        self.mark, self.mask, self.calls = mark, mask, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_before_op(self.mark(self.masked), inputs=["weight"])

    def masked(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight * self.mask


def plain(routine: Any) -> Any:
    return routine


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
@pytest.mark.parametrize("mark", [plain, amanda.traceable, amanda.differentiable])
def test_a_changed_weight_and_its_gradient_are_those_of_eager_mode(
    name: str, mark: Callable[[Any], Any]
) -> None:
    mask = torch.rand(2, 144).round()
    net = network()
    with amanda.apply(Masking(mark, mask)):
        expected = trained(net, net)
    tool = Masking(mark, mask)
    compiled = torch.compile(net, backend=name)
    counts = []
    for _ in range(3):
        with amanda.apply(tool, compiled="instrument"):
            assert equal(trained(net, compiled), expected)
        counts.append(tool.calls)
    each_time = name == "eager" or mark is not amanda.traceable
    assert counts[2] - counts[1] == each_time


def test_what_a_traceable_routine_holds_is_read_at_each_execution() -> None:
    mask = torch.ones(2, 144)
    tool = Masking(amanda.traceable, mask)
    net = network()
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad(), amanda.apply(tool, compiled="instrument"):
        compiled(X)
        mask.zero_()
        assert torch.equal(compiled(X), net[4].bias.expand(2, 2))


def test_other_tools_have_graphs_of_their_own_and_scopes_nest() -> None:
    net = network()
    compiled = torch.compile(net, backend="eager")
    outer, inner = Counted(), Counted()
    with torch.no_grad():
        for _ in range(2):
            with amanda.apply(outer, compiled="instrument"):
                compiled(X)
                first = len(outer.calls)
                assert not inner.calls
                with amanda.apply(inner, compiled="instrument"):
                    compiled(X)
                assert len(outer.calls) == 2 * first
                assert len(inner.calls) == first
            outer.calls.clear()
            inner.calls.clear()
        with amanda.apply(inner, compiled="instrument"):
            compiled(X)
        assert not outer.calls
        assert len(inner.calls) == first


def test_a_tool_that_changes_has_its_graphs_made_again() -> None:
    tool = Counted()
    compiled = torch.compile(network(), backend="eager")
    with torch.no_grad():
        with amanda.apply(tool, compiled="instrument"):
            compiled(X)
            analysed = len(tool.analysed)
        tool.add_inst_for_op(tool.forward)
        with amanda.apply(tool, compiled="instrument"):
            compiled(X)
            compiled(X)
    assert len(tool.analysed) == 3 * analysed


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.observer])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_graphs_end_with_their_tools(backend: str, mark: Callable[[Any], Any]) -> None:
    compiled, tools = torch.compile(network(), backend=backend), []
    expected = compiled(X)
    for _ in range(3):
        tool = Counted(mark)
        with amanda.apply(tool, compiled="instrument"):
            compiled(X).backward(GRADIENT)
        assert tool.calls
        tools.append(weakref.ref(tool))
        del tool
        gc.collect()
        assert [reference() for reference in tools] == [None] * len(tools)
    assert torch.equal(compiled(X), expected)


def test_a_graph_of_a_traceable_routine_ends_with_its_tool() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="aot_eager")
    for factor in (2.0, 3.0):
        tool = Scale(factor)
        with amanda.apply(tool, compiled="instrument"):
            first = compiled(X)
            tool.factor = 5.0
            second = compiled(X)
        assert torch.equal(first, torch.relu(X) * factor + 1)
        assert torch.equal(second, torch.relu(X) * 5 + 1)
        reference = weakref.ref(tool)
        del tool
        gc.collect()
        assert reference() is None
    assert torch.equal(compiled(X), torch.relu(X) + 1)


def test_models_of_one_class_have_ops_of_their_own() -> None:
    ids: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: ids.append(context.get_op_id()))

    @torch.compile(backend="eager")
    def run(net: nn.Module, x: torch.Tensor) -> Any:
        return net(x)

    x = torch.ones(1, 2)
    nets = [nn.Linear(2, 2) for _ in range(2)]
    with amanda.apply(tool, compiled="instrument"):
        for net in [*nets, *nets]:
            run(net, x)
    assert len(ids) == len(set(ids)) == 2


def test_graph_breaks_dynamic_sizes_and_several_graphs() -> None:
    tool = Counted()

    @torch.compile(backend="aot_eager", dynamic=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        z = y.reshape(y.shape[0] * y.shape[1])
        return torch.nn.functional.normalize(z, dim=0)

    def plainly(x: torch.Tensor) -> torch.Tensor:
        z = torch.relu(x).reshape(x.shape[0] * x.shape[1])
        return torch.nn.functional.normalize(z, dim=0)

    with amanda.apply(tool, compiled="instrument"):
        for size in (3, 5, 7):
            with amanda.disabled():
                x = torch.linspace(-1, 1, 2 * size).reshape(2, size)
                expected = plainly(x)
            output = run(x)
            with amanda.disabled():
                assert torch.equal(output, expected)
    eager = Counted()
    with amanda.apply(eager):
        plainly(x)
    assert [key[1] for key in tool.calls] == [key[1] for key in eager.calls] * 3
    assert {key[0] for key in tool.calls} == {"graph"}


def test_exceptions_of_tools_are_themselves() -> None:
    def fails(*values: Any) -> None:
        raise KeyError("lost")

    compiled = torch.compile(network(), backend="aot_eager")
    analysis, routine = amanda.Tool(), amanda.Tool()
    analysis.add_inst_for_op(fails)
    routine.add_inst_for_op(lambda context: context.insert_before_op(fails))
    for tool in (analysis, routine):
        with (
            torch.no_grad(),
            pytest.raises(KeyError, match="lost") as raised,
            amanda.apply(tool, compiled="instrument"),
        ):
            compiled(X)
        assert "conv2d" in "".join(raised.value.__notes__)
    bare = network()(X)
    assert torch.equal(torch.compile(network(), backend="eager")(X), bare)


def test_what_one_execution_hands_on_reaches_its_backward_routines() -> None:
    handed: list[tuple[int, int]] = []

    def forward(value: Any, run: dict[str, Any]) -> None:
        run["sum"] = int(value.sum())

    def backward(value: Any, run: dict[str, Any]) -> None:
        handed.append((run["sum"], int(value.sum())))

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(forward, inputs=[0]))

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "ReluBackward0":
            context.insert_before_backward_op(backward, grad_outputs=[0])

    tool.add_inst_for_op(analyse, backward=True)
    run = torch.compile(lambda x: torch.relu(x), backend="aot_eager")
    values = [torch.full((2,), float(i), requires_grad=True) for i in (1, 2, 3)]
    gradients = [torch.full((2,), float(10 * i)) for i in range(3)]
    with amanda.apply(tool, compiled="instrument"):
        outputs = [run(value) for value in values]
        for i in (1, 0, 2):
            outputs[i].backward(gradients[i])
    assert handed == [(4, 20), (2, 0), (6, 40)]


def test_replacements_and_replaced_gradients() -> None:
    def instead(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def gradients(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5

    class Replacing(amanda.Tool):
        def __init__(self, mark: Callable[[Any], Any]) -> None:
            self.mark = mark
            self.add_inst_for_op(self.forward)
            self.add_inst_for_op(self.backward, backward=True)

        def forward(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "relu":
                context.replace_op(self.mark(instead))

        def backward(self, context: amanda.OpContext) -> None:
            if context.get_backward_op().__name__ == "TanhBackward0":
                context.replace_backward_op(self.mark(gradients))

    for mark in (plain, amanda.traceable):
        for backend in ("eager", "aot_eager"):
            run = torch.compile(lambda x: torch.tanh(torch.relu(x)), backend=backend)
            x = torch.tensor([0.5, -2.0], requires_grad=True)
            with amanda.apply(Replacing(mark), compiled="instrument"):
                output = run(x)
                output.sum().backward()
            assert torch.equal(output, torch.tanh(x * x))
            assert x.grad is not None
            assert torch.equal(x.grad, 10 * x.detach())


@pytest.mark.parametrize("routine", [plain, amanda.traceable])
def test_a_changed_output_of_an_in_place_op_is_in_the_tensor(routine: Callable[[Any], Any]) -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "add_":
            context.insert_after_op(routine(lambda value: value * 10))

    tool.add_inst_for_op(analyse)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        return y + 0

    for backend in ("eager", "aot_eager"):
        x = torch.ones(2, requires_grad=True)
        with amanda.apply(tool, compiled="instrument"):
            output = torch.compile(run, backend=backend)(x)
            output.sum().backward()
        assert output.tolist() == [30, 30]
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_inductor_gives_what_it_gave() -> None:
    net = network()
    compiled = torch.compile(net)
    bare = trained(net, compiled)
    tool = Counted(amanda.observer)
    with amanda.apply(tool, compiled="instrument"):
        for _ in range(2):
            observed = trained(net, compiled)
    for value, expected in zip(observed, bare, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    assert {key[0] for key in tool.calls} == {"graph", "backward"}
    assert sorted(tool.calls) == sorted(2 * tool.analysed)


class Masked(amanda.Tool):
    """Gives every linear layer, and the gradient of its weight, a mask of its own."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_before_op(self.masking(), inputs=["weight"])

    def backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(self.masking())

    def masking(self) -> Callable[[torch.Tensor], torch.Tensor]:
        mask = torch.tensor([1.0, 0.0, 1.0, 0.0])

        @amanda.traceable
        def masked(value: torch.Tensor) -> torch.Tensor:
            return value * mask

        return masked


def test_each_op_of_a_graph_holds_tensors_of_its_own_from_the_first_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(2, 4)
    results = []
    compiled = torch.compile(model, backend="aot_eager")
    instrumenting = amanda.apply(Masked(), compiled="instrument")
    for called, scope in ((model, amanda.apply(Masked())), (compiled, instrumenting)):
        model.zero_grad()
        with scope:
            output = called(x)
            output.sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[1], results[0])
