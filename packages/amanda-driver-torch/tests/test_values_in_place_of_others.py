"""Values that routines give take the place of an op's own: natively from the third call on, as in Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import amanda
from amanda import interceptor
from amanda.errors import RoutineError

natively = pytest.mark.skipif(not interceptor.NATIVE, reason="there is no native code")


class FunctionMode(TorchFunctionMode):
    """Does nothing; under it Python runs every op that has a plan."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class At(amanda.Tool):
    """Inserts routines at the ops of one type."""

    def __init__(self, kind: str, **routines: Callable[..., Any]) -> None:
        self.kind, self.routines = kind, routines
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() != self.kind:
            return
        for point, routine in self.routines.items():
            if point == "before":
                context.insert_before_op(routine, inputs=[0])
            elif point == "after":
                context.insert_after_op(routine, outputs=[0])
            else:
                context.replace_op(routine)


class Program(nn.Module):
    """A program whose ops have the same ids at every call."""

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = program


CALLS = 5


def results(tool: amanda.Tool, program: Callable[[], Any], in_python: bool = False) -> list[Any]:
    """What each of some calls of a program gives: natively from the third on, or in Python each time."""
    module = Program(program)
    with amanda.apply(tool), FunctionMode() if in_python else nullcontext():
        return [module() for _ in range(CALLS)]


def same(kind: str, program: Callable[[], Any], expected: Any, **routines: Callable[..., Any]) -> None:
    """Check that every call gives one value, natively and in Python."""
    for in_python in (False, True):
        for result in results(At(kind, **routines), program, in_python):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


def callers(**routine: Callable[[list[str]], Callable[..., Any]]) -> list[str]:
    """Names of the functions that call a routine at `torch.add`, call after call."""
    names: list[str] = []
    x, y = torch.ones(2), torch.ones(2)
    ((point, make_routine),) = routine.items()
    results(At("add", **{point: make_routine(names)}), lambda: torch.add(x, y))
    return names


def noting(names: list[str]) -> Callable[..., Tensor]:
    """A routine that gives another value, and notes which function called it."""

    def routine(*values: Tensor) -> Tensor:
        names.append(sys._getframe(1).f_code.co_name)
        return values[0] * 2

    return routine


@natively
@pytest.mark.parametrize("point", ["before", "after", "replace"])
def test_from_the_third_call_on_no_python_of_ours_is_passed(point: str) -> None:
    assert callers(**{point: noting})[2:] == ["<lambda>"] * (CALLS - 2)


@pytest.mark.parametrize("grad", [True, False])
def test_inputs_and_outputs_and_replacements(grad: bool) -> None:
    x, y = torch.rand(3, requires_grad=grad), torch.rand(3)
    double, plus = (lambda v: v * 2), (lambda v: v + 1)
    with torch.no_grad():
        expected = [x * 2 + y, x + y + 1, x * 2 + y + 1, x - y]
    same("add", lambda: torch.add(x, y).detach(), expected[0], before=double)
    same("add", lambda: (x + y).detach(), expected[1], after=plus)
    same("add", lambda: torch.add(input=x, other=y).detach(), expected[2], before=double, after=plus)
    same("add", lambda: x.add(y).detach(), expected[3], replace=lambda a, b: a - b)


def gradients(
    tool: amanda.Tool, program: Callable[[], Tensor], leaf: Tensor, in_python: bool
) -> list[Tensor]:
    module = Program(program)
    results = []
    with amanda.apply(tool), FunctionMode() if in_python else nullcontext():
        for _ in range(CALLS):
            (first,) = torch.autograd.grad(module().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
            results.append(torch.stack([first.detach(), second]))
    return results


@pytest.mark.parametrize("watched", [False, True])
def test_gradients_go_straight_through_twice(watched: bool) -> None:
    w = torch.rand(4, requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    tools = [At("mul", before=lambda v: v * mask), At("pow", after=lambda v: v * mask)]
    for tool in tools:
        if watched:
            tool.add_inst_for_op(lambda _: None, backward=True)
        native, python = (
            gradients(tool, lambda: torch.mul(w.pow(3), 2.0) * w, w, in_python) for in_python in (False, True)
        )
        for result in native + python:
            torch.testing.assert_close(result, python[0], rtol=0, atol=0)


def test_a_parameter_is_masked_in_inference_too() -> None:
    layer, x, mask = nn.Linear(3, 3), torch.rand(2, 3), torch.eye(3)

    class Mask(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: context.insert_before_op(lambda w: w * mask, inputs=[1]))

    expected = F.linear(x, layer.weight * mask, layer.bias).detach()
    for mode in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with mode, amanda.apply(Mask()):
            outputs = [layer(x) for _ in range(CALLS)]
        for output in outputs:
            assert torch.equal(output, expected)
        if isinstance(mode, nullcontext):
            outputs[-1].sum().backward()
            assert layer.weight.grad is not None


def test_writes_through_a_view_of_a_given_value_reach_the_base() -> None:
    def program() -> Tensor:
        x = torch.zeros(4)
        torch.reshape(x, (2, 2)).add_(1)
        return x

    same("reshape", program, torch.ones(4), before=torch.clone)
    same("reshape", program, torch.ones(4), after=torch.clone)


def test_an_op_that_hands_its_input_through() -> None:
    layer = nn.Dropout().eval()

    def program() -> Tensor:
        x = torch.zeros(4)
        layer(x).add_(1)
        return x

    same("dropout", program, torch.ones(4), before=torch.clone)
    same("dropout", program, torch.ones(4), after=torch.clone)
    leaf = torch.ones(2, requires_grad=True)

    def contiguous() -> Tensor:
        with torch.no_grad():
            return leaf.contiguous()

    for result in results(At("contiguous", before=torch.clone), contiguous):
        assert result.requires_grad


def test_an_input_may_stand_for_the_output() -> None:
    def program() -> Tensor:
        x = torch.zeros(4)
        y = torch.neg(x)
        y.add_(1)
        return torch.stack([x, y])

    inputs: list[Tensor] = []

    class Skip(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "neg":
                context.insert_before_op(inputs.append, inputs=[0])
                context.insert_after_op(lambda _: inputs[-1])

    for in_python in (False, True):
        for result in results(Skip(), program, in_python):
            assert torch.equal(result, torch.ones(2, 4))


@pytest.mark.parametrize("grad", [True, False])
def test_routines_within_autograd_may_change_shapes_and_are_differentiated(grad: bool) -> None:
    x, scale = torch.rand(4), torch.tensor(3.0, requires_grad=True)
    w = torch.rand(4, requires_grad=grad)
    half = amanda.differentiable(lambda v: v[:2] * scale)
    tool = [At("mul", before=half), At("sigmoid", after=half)]
    programs = [lambda: torch.mul(w, 2.0), lambda: torch.sigmoid(w * x)]
    expected = [w[:2] * scale * 2.0, torch.sigmoid(w * x)[:2] * scale]
    leaves = [scale, w] if grad else [scale]
    for at, program, expected_result in zip(tool, programs, expected, strict=True):
        gradients = torch.autograd.grad(expected_result.sum(), leaves, retain_graph=True)
        for in_python in (False, True):
            for result in results(at, program, in_python):
                assert torch.equal(result, expected_result)
                result_gradients = torch.autograd.grad(result.sum(), leaves)
                torch.testing.assert_close(result_gradients, gradients, rtol=0, atol=0)
            with torch.no_grad():
                for result in results(at, program, in_python):
                    assert torch.equal(result, expected_result)
                    assert not result.requires_grad


def test_results_keep_their_form() -> None:
    x = torch.tensor([[3.0, 1.0], [2.0, 4.0]])
    expected = torch.max(x, dim=0)
    replace = At("max", replace=lambda v, dim: (v.amax(dim), v.argmax(dim)))
    before = At("max", before=torch.clone)
    after = At("max", after=torch.clone)
    for tool in (replace, before, after):
        for result in results(tool, lambda: torch.max(x, dim=0)):
            assert type(result) is torch.return_types.max
            assert torch.equal(result.values, expected.values)
            assert torch.equal(result.indices, expected.indices)
    same("split", lambda: torch.split(x, 1), torch.split(x, 1), before=torch.clone)
    same(
        "cat",
        lambda: torch.cat([x, x]),
        torch.cat([x + 1, x + 1]),
        before=lambda v: [tensor + 1 for tensor in v],
    )


def test_a_replacement_is_given_others_by_name() -> None:
    x = torch.rand(3)
    gelu = nn.GELU(approximate="tanh")

    def scale_by_length(value: Tensor, approximate: str) -> Tensor:
        return value * len(approximate)

    same("gelu", lambda: gelu(x), x * 4, replace=scale_by_length)
    same("gelu", lambda: gelu(x), x * 2, replace=lambda value: value * 2)
    same("gelu", lambda: gelu(x), x * 4, replace=lambda value, *, approximate: value * len(approximate))
    same("gelu", lambda: gelu(x), x * 4, replace=lambda *values: values[0] * len(values[1]))


def test_a_replacement_may_decline_and_is_differentiated() -> None:
    x, turns = torch.rand(3, requires_grad=True), iter(range(CALLS))
    tool = At("relu", replace=lambda v: NotImplemented if next(turns) % 2 else v * 3)
    gradients = results(tool, lambda: torch.autograd.grad(torch.relu(x).sum(), x)[0])
    for turn, gradient in enumerate(gradients):
        assert torch.equal(gradient, torch.ones(3) if turn % 2 else torch.full((3,), 3.0))


def test_what_cannot_stand_there_is_an_error_at_any_call() -> None:
    x = torch.rand(3)
    wrong = {"shape": lambda: torch.rand(2), "complex": lambda: torch.rand(3, dtype=torch.complex64),
             "no tensor": lambda: 3}  # fmt: skip
    for word, make_wrong in wrong.items():
        for point in ("before", "after"):
            turns = iter(range(CALLS))

            def routine(value: Tensor, make_wrong: Any = make_wrong, turns: Any = turns) -> Any:
                return make_wrong() if next(turns) == 4 else value + 1

            with pytest.raises(RoutineError) as caught:
                results(At("relu", **{point: routine}), lambda: torch.relu(x))
            assert f"insert_{point}_op" in "".join(caught.value.__notes__), word


def test_another_type_is_cast_and_a_leaf_given_is_cut_off() -> None:
    x = torch.rand(3, requires_grad=True)
    parameter = nn.Parameter(torch.ones(3))
    same("relu", lambda: torch.relu(x).detach(), torch.ones(3), before=lambda _: torch.ones(3).double())
    for in_python in (False, True):
        for result in results(At("relu", before=lambda _: parameter), lambda: torch.relu(x), in_python):
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert torch.equal(gradient, torch.ones(3))
    assert parameter.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_forward_mode_gradients_go_through() -> None:
    x, tangent = torch.rand(3), torch.rand(3)

    def program() -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            return forward_ad.unpack_dual(torch.mul(dual, 3)).tangent

    same("mul", program, tangent * 3, before=lambda v: v.detach().clone())


def test_a_leaf_that_an_op_makes_stays_a_leaf() -> None:
    x, w = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))

    def gradient() -> Tensor | None:
        new_leaf = torch.zeros_like(x, requires_grad=True)
        (new_leaf * 2).sum().backward()
        return new_leaf.grad

    same("zeros_like", gradient, torch.full((3,), 2.0), after=lambda v: v + 1)

    def of_parameter() -> Tensor:
        w.grad = None
        torch.relu(x).sum().backward()
        return torch.zeros(1) if w.grad is None else w.grad

    same("relu", of_parameter, torch.zeros(1), replace=lambda _: w, after=lambda v: v * 2)


def test_a_tensor_that_has_left_a_transform_keeps_its_gradient() -> None:
    w, escaped = nn.Parameter(torch.ones(3)), []

    def loss(x: Tensor) -> Tensor:
        escaped.append(x * w)
        return escaped[0].sum()

    torch.func.grad(loss)(torch.ones(3))

    def gradient() -> Tensor:
        return torch.autograd.grad(torch.relu(escaped[0]).sum(), w, retain_graph=True)[0]

    same("relu", gradient, torch.ones(3), before=lambda v: v * 2)


def test_an_inference_tensor_that_needs_a_gradient_gets_none() -> None:
    with torch.inference_mode():
        x = torch.ones(3, requires_grad=True)
    constant, y = torch.full((3,), 7.0), torch.ones(3)
    same("add", lambda: torch.add(x, y), torch.full((3,), 8.0), before=lambda _: constant)
    assert not any(
        result.requires_grad for result in results(At("add", before=lambda _: constant), lambda: x + y)
    )


def test_a_raising_replacement_says_where_it_stands() -> None:
    x, turns = torch.rand(3), iter(range(CALLS))

    def fails(value: Tensor) -> Tensor:
        if next(turns) == 4:
            raise ZeroDivisionError("the user's")
        return value

    with pytest.raises(ZeroDivisionError, match="the user's") as caught:
        results(At("relu", replace=fails), lambda: torch.relu(x))
    assert "replace_op" in "".join(caught.value.__notes__)


def test_a_type_error_of_a_replacement_is_its_own() -> None:
    def fails(value: Tensor) -> Tensor:
        raise TypeError("the user's")

    with pytest.raises(TypeError, match="the user's"):
        results(At("relu", replace=fails), lambda: torch.relu(torch.rand(3)))


def test_one_value_for_two_is_counted_as_one() -> None:
    class Short(At):
        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == self.kind:
                context.insert_before_op(torch.add)

    x, y = torch.rand(3), torch.rand(3)
    with pytest.raises(RoutineError, match="returned 1 value; it was given 2 values"):
        results(Short("atan2"), lambda: torch.atan2(x, y))


def test_ops_within_a_replacement_are_not_instrumented() -> None:
    x, op_types = torch.rand(3), []

    class Counting(At):
        def analyse(self, context: amanda.OpContext) -> None:
            op_types.append(context.get_op_type())
            super().analyse(context)

    results(Counting("relu", replace=lambda v: torch.sigmoid(v)), lambda: torch.relu(x))
    assert op_types == ["relu"]


def test_several_routines_follow_one_another() -> None:
    x, y = torch.rand(3), torch.rand(3)

    class Several(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "sub":
                context.insert_before_op(lambda a, b: (a * 2, b))
                context.insert_before_op(lambda a, b: [a, b + 1])
                context.insert_before_op(lambda a: a + 1, inputs=[0])
                context.insert_after_op(lambda v: v * 2)
                context.insert_after_op(lambda v: v.double())
                context.insert_after_op(lambda v: v + 1)

    expected = (x * 2 + 1 - (y + 1)) * 2 + 1
    for in_python in (False, True):
        for result in results(Several(), lambda: torch.sub(x, y), in_python):
            assert torch.equal(result, expected)


def test_nothing_is_kept_alive() -> None:
    x, references = torch.rand(3), []

    def routine(value: Tensor) -> Tensor:
        new = value + 1
        references.append(weakref.ref(new))
        return new

    for point in ("before", "after"):
        results(At("relu", **{point: routine}), lambda: torch.relu(x).sum())
    assert all(reference() is None for reference in references)


class Emptying:
    """Garbage in a cycle, whose finalizer empties a list and takes over its memory."""

    def __init__(self, values: list[Any]) -> None:
        self.values, self.itself = values, self

    def __del__(self) -> None:
        self.values.clear()
        TAKEN[:] = [[object(), object()] for _ in range(300)]


TAKEN: list[Any] = []


class Doubling(amanda.Tool):
    """Hands an addition lists of other operands, which are emptied once they have been returned."""

    def __init__(self) -> None:
        self.calls = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "add":
            context.insert_before_op(self.doubled)

    def doubled(self, *values: Tensor) -> list[Tensor]:
        self.calls += 1
        results = [value * 2 for value in values]
        if self.calls > 3:  # native code calls it from then on
            Emptying(results)
            gc.enable()
        return results


@natively
def test_a_list_that_is_emptied_after_a_routine_returned_it_still_gives_its_values() -> None:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_threshold(1, 1, 1)
    try:
        with amanda.apply(Doubling()):
            program = Program(torch.add)
            for i in range(8):
                x, y = (torch.full((2,), float(i), requires_grad=True) for _ in range(2))
                total = program(x, y)
                gc.disable()
                assert total.tolist() == [4.0 * i] * 2
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        gc.enable()


def test_leaves_without_a_module_have_ops_of_their_own_in_a_loop() -> None:
    """So a tool's state belongs to the weight that it was made for."""
    ids: list[int] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            op_id = context.get_op_id()
            context.insert_before_op(lambda *_: ids.append(op_id), inputs=[])

    tool.add_inst_for_op(analyse)
    weights = [torch.ones(2, 2, requires_grad=True) for _ in range(3)]
    with amanda.apply(tool):
        for _ in range(2):
            x = torch.ones(1, 2)
            for weight in weights:
                for _ in range(2):
                    x = F.linear(x, weight)
            x.sum().backward()
    assert len(set(ids)) == 3
    assert ids[:6] == ids[6:] == [op_id for op_id in ids[:6:2] for _ in range(2)]
