"""Native code tells calls apart as Python does, and runs the routines of those that it knows."""

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda import interceptor
from amanda.drivers.torch import _reader
from amanda.drivers.torch._reader import Libraries, find_layout, make_reader
from amanda.errors import MutationError, RoutineError

natively = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: only native code reads tensors by itself", run=False
)

READER = make_reader(torch.add)[0] if interceptor.NATIVE else None


def key(*args: Any, **kwargs: Any) -> int:
    assert READER is not None
    return READER.key(args, kwargs)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


@natively
def test_this_build_of_torch_can_be_read() -> None:
    assert READER is not None


@natively
def test_a_torch_that_lacks_a_function_is_read_by_python_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_reader, "_FUNCTION_MODE", "no_such_function")
    with caplog.at_level("WARNING", "amanda"):
        assert make_reader(torch.add) == (None, "it lacks no_such_function")
    assert "it lacks no_such_function" in caplog.text


@natively
@pytest.mark.parametrize("missing", ["_GET_SWITCHES", "_STRIDES"])
def test_a_torch_that_lacks_a_part_is_read_by_other_means_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    monkeypatch.setattr(_reader, missing, "no_such_function")
    with caplog.at_level("WARNING", "amanda"):
        reader, lacking = make_reader(torch.add)
    assert reader is not None
    assert lacking == "no_such_function"
    assert "in part, so that routines take longer: it lacks no_such_function" in caplog.text


class Looking(amanda.Tool):
    """Inserts a routine that looks before each op."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_before_op(lambda *_: None))


@natively
def test_calls_are_counted_by_where_they_ran(x: torch.Tensor) -> None:
    before = interceptor.statistics()
    with amanda.apply(Looking()):
        for _ in range(10):
            torch.neg(x)
    after = interceptor.statistics()
    assert after["native"] - before["native"] == 8
    assert after["learned"] - before["learned"] == 1
    assert after["python"]["new op"] - before["python"].get("new op", 0) == 1


@natively
def test_a_scope_that_ran_mostly_in_python_says_so_and_why(x: torch.Tensor) -> None:
    def loop(times: int) -> None:
        for _ in range(times):
            torch.neg(x)

    with amanda.apply(Looking()) as scope:
        loop(3000)
    assert not scope.report
    with amanda.apply(Looking()) as scope, amanda.autodiff_enabled():
        loop(1500)
    (entry,) = scope.report
    assert "ran in Python, several times slower than in native code" in entry.reason
    assert "cache off or autodiff on (1,499)" in entry.reason


@natively
@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x.double(), 1),
        lambda x: (x[0], 1),
        lambda x: (x.to("meta"), 1),
        lambda x: (x.clone().requires_grad_(), 1),
        lambda x: (torch.nn.Parameter(x), 1),
        lambda x: (x, 1.0),
        lambda x: (x, x),
        lambda x: (x, None),
        lambda x: (x, [1]),
        lambda x: (x, (1,)),
        lambda x: (x, True),
        lambda x: (x, False),
        lambda x: (x,),
        lambda x: (x, 1, 1),
        lambda x: ([x], 1),
        lambda x: (x, slice(1)),
        lambda x: (x, torch.float32),
    ],
)
def test_calls_of_another_form_or_signature_have_another_key(
    x: torch.Tensor, call: Callable[[torch.Tensor], tuple[Any, ...]]
) -> None:
    assert 0 != key(*call(x)) != key(x, 1)
    assert key(*call(x)) == key(*call(x))


@natively
def test_values_and_sizes_share_a_key(x: torch.Tensor) -> None:
    assert key(x, 1) == key(torch.zeros(7, 9), 2)
    assert key(x, size=(1, 2)) == key(x, size=(3, 4)) != key(x, (1, 2)) != key(x, other=(1, 2))


@natively
def test_sizes_are_part_of_the_key_where_they_are_asked_for(x: torch.Tensor) -> None:
    def sized(*args: Any) -> int:
        assert READER is not None
        return READER.key(args, {}, True)

    assert sized(x, 1) == sized(torch.zeros_like(x), 2) != key(x, 1)
    assert len({sized(x), sized(x.T), sized(x[:1]), sized([x]), sized([x.T])}) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        assert sized(torch.nested.nested_tensor([x, x])) == 0


@natively
def test_a_gradient_is_part_of_the_key_where_it_can_be_needed(x: torch.Tensor) -> None:
    trained = x.clone().requires_grad_()
    with torch.no_grad():
        assert key(trained) == key(x)
    with torch.inference_mode():
        assert key(trained) == key(x)


class Subclass(torch.Tensor):
    """A tensor that may override anything."""


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@natively
def test_what_may_override_anything_has_no_key(x: torch.Tensor) -> None:
    assert key(x.as_subclass(Subclass)) == 0
    assert key([x, x.as_subclass(Subclass)]) == 0
    assert key(object()) == 0
    for mode in (FunctionMode, DispatchMode):
        with mode():
            assert key(x) == 0
        assert key(x) != 0


@natively
def test_under_transforms_keys_tell_which_layers_of_a_tensor_need_a_gradient(x: torch.Tensor) -> None:
    keys: list[int] = []
    trained = x.clone().requires_grad_()

    def function(y: torch.Tensor) -> torch.Tensor:
        keys.extend(key(value) for value in (y, y.detach(), x, trained))
        return y.sum()

    for transform in (torch.func.vmap, torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        for _ in range(2):
            transform(function)(x)
    vmap, grad, nested = (keys[i : i + 4] for i in (0, 8, 16))
    assert keys == [*vmap, *vmap, *grad, *grad, *nested, *nested]
    # The tensor of the level, detached there or not, has keys of its own; those outside are as they are.
    assert vmap[0] == vmap[1]
    assert vmap[2:] == grad[2:] == nested[2:]
    assert len({*vmap, *grad, *nested, key(x), key(trained), 0}) == 10


@natively
def test_wrappers_of_functionalize_and_traced_tensors_have_no_key(x: torch.Tensor) -> None:
    keys = []

    def function(x: torch.Tensor) -> torch.Tensor:
        keys.append(key(x))
        return x.sum()

    torch.func.functionalize(function)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit, which goes
        torch.jit.trace(function, x, check_trace=False)
    assert keys == [0, 0]
    assert key(x) != 0


@natively
def test_the_layout_of_this_build_is_known() -> None:
    layout, missing_part = find_layout(Libraries())
    assert layout is not None
    assert missing_part == ""


@natively
@pytest.mark.parametrize("missing", ["_GET_SWITCHES", "_END"])
def test_a_torch_of_another_layout_is_read_by_its_functions(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, missing: str
) -> None:
    monkeypatch.setattr(_reader, missing, {"_GET_SWITCHES": "no_such_function", "_END": 0}[missing])
    assert find_layout(Libraries())[0] is None
    reader, _ = make_reader(torch.add)
    assert reader is not None
    x.zero_()
    assert reader.version(x) == x._version
    assert reader.key((x,)) not in {
        reader.key((x.double(),)),
        reader.key((x[0],)),
        reader.key((x.to("meta"),)),
        0,
    }


@natively
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        lambda x: x.to("meta"),
        lambda x: x.to(torch.bfloat16),
        lambda x: x[0],
        lambda x: x.clone().requires_grad_(),
        lambda x: x.clone().requires_grad_() * 2,
    ],
)
def test_tensors_of_any_kind_have_keys_and_versions(x: torch.Tensor, make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds that are in beta
        tensor, alike = make(x), make(x)
    assert key(tensor) == key(alike) not in (0, key(x))
    assert READER is not None
    before = READER.version(tensor)
    assert before == tensor._version
    with torch.no_grad():
        try:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (before + 3,))
        except TypeError:  # before torch 2.5: a single tensor
            torch._C._autograd._unsafe_set_version_counter(tensor, before + 3)  # type: ignore[arg-type]
    assert READER.version(tensor) == tensor._version == before + 3


@natively
def test_a_view_that_needs_no_gradient_is_told_from_one_that_does(x: torch.Tensor) -> None:
    trained = x.clone().requires_grad_()
    assert key(x.t()) == key(x) != key(trained.t()) == key(trained)


@natively
@pytest.mark.parametrize("on", [True, False])
def test_a_routine_runs_with_gradients_off_on_any_thread(x: torch.Tensor, on: bool) -> None:
    modes: list[bool] = []

    def routine(*values: Any) -> None:
        modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(len(modes) % 2 == 0)  # what it leaves is not what the program goes on with

    def program() -> None:
        for _ in range(5):
            with torch.set_grad_enabled(on):
                torch.add(x, 1)
                assert torch.is_grad_enabled() is on

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(routine))
    failures: list[BaseException] = []

    def caught() -> None:
        try:
            program()
        except BaseException as error:
            failures.append(error)

    with amanda.apply(tool):
        program()
        threads = [threading.Thread(target=caught) for _ in range(3)]
        for thread in threads:
            thread.start()
            program()
            thread.join()
        assert torch.is_grad_enabled()
    assert modes == [False] * 35
    assert not failures


@natively
def test_versions_are_those_of_torch(x: torch.Tensor) -> None:
    assert READER is not None
    assert READER.version(x) == x._version
    x.add_(1)
    assert READER.version(x) == x._version == 1
    before = READER.version([x, x])
    x.add_(1)
    assert READER.version([x, x]) != before
    with torch.inference_mode():
        assert READER.version(torch.zeros(1)) is None


class Around(amanda.Tool):
    """A routine before and after every op of a name."""

    def __init__(self, op: str, before: Any = None, after: Any = None, **selected: Any) -> None:
        self.analyses = 0
        self.op, self.before, self.after, self.selected = op, before, after, selected
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() != self.op:
            return
        self.analyses += 1
        if self.before:
            context.insert_before_op(self.before, **self.selected)
        if self.after:
            context.insert_after_op(self.after)


class Program(torch.nn.Module):
    """A program whose ops have the same ids at every call."""

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = program


@pytest.fixture(params=["native", "Python"])
def repeated(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Calls a program five times: natively from the third on, or in Python each time."""

    def run(tool: amanda.Tool, program: Callable[[], Any]) -> list[Any]:
        module = Program(program)
        with amanda.apply(tool):
            results = []
            for _ in range(5):
                with FunctionMode() if request.param == "Python" else nullcontext():
                    results.append(module())
        return results

    return run


@natively
def test_the_third_call_passes_through_no_python_of_ours(x: torch.Tensor) -> None:
    callers: list[str] = []
    module = Program(lambda: torch.relu(x))
    with amanda.apply(Around("relu", after=lambda _: callers.append(sys._getframe(1).f_code.co_name))):
        for _ in range(4):
            module()
    assert callers == [
        "call_outside_modes",
        "call_outside_modes",
        "<lambda>",
        "<lambda>",
    ]


def test_routines_get_inputs_in_the_order_of_the_schema(x: torch.Tensor, repeated: Any) -> None:
    calls: list[Any] = []
    tool = Around("softmax", before=lambda *values: calls.append(values))
    repeated(tool, lambda: torch.softmax(dim=-1, input=x))
    assert len(calls) == 5
    assert all(values[0] is x and values[1:] == (-1,) for values in calls)


def test_routines_get_defaults_that_the_call_leaves_out_between(x: torch.Tensor, repeated: Any) -> None:
    calls: list[Any] = []
    tool = Around("sum", before=lambda *values: calls.append(values[1:]))
    repeated(tool, lambda: x.sum(dim=0, dtype=torch.float64))
    assert calls == [calls[0]] * 5
    assert calls[0][0] == 0
    assert calls[0][-1] is torch.float64


def test_a_changed_input_is_computed_with(x: torch.Tensor, repeated: Any) -> None:
    tool = Around("add", before=lambda value: value * 2, inputs=[0])
    assert all(torch.equal(y, x * 2 + 1) for y in repeated(tool, lambda: x + 1))


def test_a_routine_may_change_its_mind(x: torch.Tensor, repeated: Any) -> None:
    turns = iter(range(5))
    tool = Around("add", before=lambda value: value * 2 if next(turns) == 3 else None, inputs=[0])
    results = repeated(tool, lambda: x + 1)
    assert [torch.equal(y, x + 1) for y in results] == [True, True, True, False, True]


def test_a_changed_output_is_the_result(x: torch.Tensor, repeated: Any) -> None:
    tool = Around("max", after=lambda values, indices: (values + 1, indices))
    for result in repeated(tool, lambda: torch.max(x, dim=0)):
        assert type(result) is torch.return_types.max
        assert torch.equal(result.values, x.max(dim=0).values + 1)


def test_every_routine_runs_once_and_in_order(x: torch.Tensor, repeated: Any) -> None:
    order: list[str] = []

    class Two(amanda.Tool):
        def __init__(self, name: str) -> None:
            self.name = name
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(lambda a, b: order.append(f"{self.name} before"))
            context.insert_before_op(lambda a: order.append(f"{self.name} changes") or a + 1, inputs=[0])
            context.insert_after_op(lambda a: order.append(f"{self.name} after") or a + 1)

    first = Two("one")
    second = Two("two")
    second.depends_on(first)
    results = repeated(second, lambda: torch.add(x, 1))
    once = ["one before", "one changes", "two before", "two changes", "one after", "two after"]
    assert order == once * 5
    assert all(torch.equal(y, x + 5) for y in results)


def test_a_value_written_into_is_an_error_at_the_routine(x: torch.Tensor, repeated: Any) -> None:
    calls = iter(range(5))

    def routine(value: torch.Tensor) -> None:
        if next(calls) == 4:
            value.add_(1)

    tool = Around("add", before=routine, inputs=[0])
    with pytest.raises(MutationError, match="wrote into value 0") as caught:
        repeated(tool, lambda: torch.add(x, 1))
    assert "tool Around, insert_before_op" in "".join(caught.value.__notes__)


def test_an_exception_carries_its_note_and_gradients_stay_on(x: torch.Tensor, repeated: Any) -> None:
    calls = iter(range(5))

    def routine(_: Any) -> None:
        assert not torch.is_grad_enabled()
        if next(calls) == 4:
            raise KeyboardInterrupt("the user's")

    with pytest.raises(KeyboardInterrupt, match="the user's") as caught:
        repeated(Around("relu", after=routine), lambda: torch.relu(x))
    assert "tool Around, insert_after_op" in "".join(caught.value.__notes__)
    assert torch.is_grad_enabled()


def test_a_wrong_result_is_an_error_that_says_what_was_expected(x: torch.Tensor, repeated: Any) -> None:
    calls = iter(range(5))
    tool = Around("add", before=lambda a, b: (a, b, a) if next(calls) == 4 else None)
    with pytest.raises(RoutineError, match="returned 3 values; it was given 2"):
        repeated(tool, lambda: torch.add(x, 1))


def test_what_a_routine_computes_belongs_to_no_graph(x: torch.Tensor, repeated: Any) -> None:
    x.requires_grad_()
    sums: list[torch.Tensor] = []
    tool = Around("mul", before=lambda a, b: sums.append(a + b))
    results = repeated(tool, lambda: x * x)
    assert len(sums) == 5
    assert not any(value.requires_grad for value in sums)
    assert all(y.requires_grad for y in results)


def test_a_differentiable_routine_has_its_gradient(x: torch.Tensor, repeated: Any) -> None:
    scale = torch.tensor(3.0, requires_grad=True)
    tool = Around("mul", before=amanda.differentiable(lambda a: a * scale), inputs=[0])
    for y in repeated(tool, lambda: x * 2):
        (gradient,) = torch.autograd.grad(y.sum(), scale)
        assert torch.equal(gradient, (x * 2).sum())


def test_a_result_of_an_op_in_place_is_written_into_the_tensor(repeated: Any) -> None:
    x = torch.zeros(3)
    results = repeated(Around("add_", after=lambda value: value * 10), lambda: x.add_(1))
    assert all(y is x for y in results)
    assert torch.equal(x, torch.full((3,), 111110.0))


@natively
def test_an_op_in_place_that_has_a_gradient_passes_through_no_python_of_ours(x: torch.Tensor) -> None:
    callers: list[str] = []
    x.requires_grad_()
    module = Program(lambda: (x * 2).relu_())
    with amanda.apply(Around("relu_", after=lambda _: callers.append(sys._getframe(1).f_code.co_name))):
        for _ in range(4):
            module().sum().backward()
    assert callers[2:] == ["<lambda>", "<lambda>"]


@natively
def test_an_op_in_place_goes_through_python_where_what_it_saves_cannot_be_reached(x: torch.Tensor) -> None:
    def of_a_view() -> None:
        (x * 2)[:1].sigmoid_()

    def under_hooks() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            (x * 2).sigmoid_()

    x.requires_grad_()
    can_see_hooks = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # since torch 2.8
    for program in (of_a_view, under_hooks) if can_see_hooks else (of_a_view,):
        callers: list[str] = []
        module = Program(program)
        noting = Around("sigmoid_", after=lambda _, to=callers: to.append(sys._getframe(1).f_code.co_name))
        with amanda.apply(noting):
            for _ in range(4):
                module()
        assert callers == ["call_outside_modes"] * 4


def test_the_sizes_of_a_call_are_one_input(x: torch.Tensor, repeated: Any) -> None:
    calls: list[Any] = []
    tool = Around("view", before=lambda *inputs: calls.append(inputs[1:]))
    assert [y.shape for y in repeated(tool, lambda: x.view(1, -1))] == [(1, x.numel())] * 5
    assert calls == [((1, -1),)] * 5


def test_the_sizes_of_a_call_can_be_changed(x: torch.Tensor, repeated: Any) -> None:
    tool = Around("view", before=lambda size: size[::-1], inputs=[1])
    assert [y.shape for y in repeated(tool, lambda: x.view(1, -1))] == [(x.numel(), 1)] * 5
    assert [y.shape for y in repeated(tool, lambda: x.view((1, -1)))] == [(x.numel(), 1)] * 5


@pytest.mark.parametrize("routine", [lambda value: (value,), lambda value: value + 1])
def test_an_op_that_changes_the_rank_of_what_it_writes_runs_once(repeated: Any, routine: Any) -> None:
    added: list[tuple[int, ...]] = []
    x = torch.zeros(1)
    repeated(
        Around("unsqueeze_", after=routine),
        lambda: added.append(tuple(torch.zeros(2, 3).unsqueeze_(0).shape)),
    )
    repeated(
        Around("add", after=routine),
        lambda: added.append(tuple(torch.add(x, x, out=torch.empty(0, 1)).shape)),
    )
    assert added == [(1, 2, 3)] * 5 + [(1,)] * 5


def test_another_dtype_is_analysed_of_its_own(x: torch.Tensor) -> None:
    tool = Around("relu", after=lambda value: None)
    module = Program(lambda x: x.relu())
    with amanda.apply(tool):
        for value in (x, x, x, x.double(), x.double(), x.double(), x[0], x[0], x[0], x):
            module(value)
    assert tool.analyses == 3


@natively
def test_a_tool_that_decides_by_shape_has_a_plan_for_each_and_is_called_natively(x: torch.Tensor) -> None:
    callers: list[tuple[str, torch.Size]] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "relu":
            context.insert_after_op(note, expected=context.get_inputs()[0].shape)

    def note(value: torch.Tensor, expected: torch.Size) -> None:
        assert value.shape == expected
        callers.append((sys._getframe(1).f_code.co_name, expected))

    tool, module = amanda.Tool(), Program(lambda x: x.relu())
    tool.add_inst_for_op(analyse, guard="shape")
    with amanda.apply(tool):
        for value in (x, x, x, x[:1], x[:1], x[:1], x, x, x[:1]):
            module(value)
    names = [name for name, _ in callers]
    assert names[2] == names[5] == names[7] == names[8] != names[0] == names[1] == names[3]
    assert [shape for _, shape in callers[-2:]] == [x.shape, x[:1].shape]


def test_in_autodiff_enabled_a_known_call_is_differentiable(x: torch.Tensor) -> None:
    x.requires_grad_()
    tool = Around("relu", after=lambda value: value * 5)
    module = Program(lambda x: x.relu())
    with amanda.apply(tool):
        for _ in range(5):
            (straight,) = torch.autograd.grad(module(x).sum(), x)
            with amanda.autodiff_enabled():
                (through,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(through, 5 * (x > 0))
    assert torch.equal(straight, 1.0 * (x > 0))


def test_a_tool_s_routines_run_one_at_a_time_on_two_threads(x: torch.Tensor) -> None:
    inside, most = 0, 0
    pause = threading.Event()

    def routine(_: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        pause.wait(0.0005)
        inside -= 1

    module = Program(lambda: torch.relu(x))

    def work() -> None:
        for _ in range(50):
            module()

    with amanda.apply(Around("relu", after=routine)):
        work()
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join(30)
    assert most == 1
    assert inside == 0


def test_a_routine_may_use_its_own_op_without_being_run_for_it(x: torch.Tensor, repeated: Any) -> None:
    calls: list[Any] = []
    tool = Around("relu", after=lambda value: calls.append(torch.relu(value)))
    repeated(tool, lambda: torch.relu(x))
    assert len(calls) == 5


def test_a_known_call_is_forgotten_with_its_parameter() -> None:
    tool = Around("linear", before=lambda *values: None)
    with amanda.apply(tool):
        for expected in (1, 2):
            layer = torch.nn.Linear(3, 3)
            for _ in range(4):
                layer(torch.zeros(1, 3))
            assert tool.analyses == expected


def test_with_backward_tools_a_settled_op_is_left_to_torch(x: torch.Tensor) -> None:
    analyses: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: analyses.append(context.get_op_type()))
    tool.add_inst_for_op(lambda context: analyses.append("backward"), backward=True)
    x.requires_grad_()
    module = Program(lambda x: x.relu())
    with amanda.apply(tool):
        for _ in range(5):
            module(x).sum().backward()
        assert analyses.count("relu") == 1
        frozen = x.detach()
        analyses_before = list(analyses)
        for _ in range(5):
            module(frozen)
        assert analyses == analyses_before
