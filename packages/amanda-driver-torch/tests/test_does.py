"""The forward actions: what a routine is given, and what becomes of what it returns."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import same
from torch import Tensor

import amanda

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]

X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
WEIGHT = torch.ones(2, 3)


def doubled(*values: Any) -> list[Any]:
    return [
        value * 2 if isinstance(value, Tensor) and value.is_floating_point() else value for value in values
    ]


IMAGE, KERNEL = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
OUT = torch.empty(2, 3)
CALLS: dict[str, tuple[Callable[[], Any], str, list[Any]]] = {
    "a default before a keyword": (
        lambda: torch.conv2d(IMAGE, KERNEL, stride=2), "conv2d", [IMAGE, KERNEL, None, 2],
    ),
    "keywords": (lambda: torch.add(alpha=2, other=WEIGHT, input=X), "add", [X, WEIGHT, 2]),
    "trailing defaults left out": (lambda: F.linear(X, WEIGHT), "linear", [X, WEIGHT]),
    "a spread size": (lambda: X.view(3, 2), "view", [X, (3, 2)]),
    "a list of tensors": (lambda: torch.cat([X, WEIGHT], dim=1), "cat", [[X, WEIGHT], 1]),
    "an index": (lambda: X[0, 1:], "__getitem__", [X, (0, slice(1, None))]),
    "out": (lambda: torch.add(X, WEIGHT, out=OUT), "add", [X, WEIGHT, 1, OUT]),
    "a factory": (lambda: torch.zeros(2, 3), "zeros", [(2, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_inputs_are_in_the_order_of_the_schema(case: str, acting: Act, applied: Applied) -> None:
    program, op, expected = CALLS[case]
    calls: list[tuple[Any, ...]] = []
    applied(acting("insert_before_op", op, lambda *inputs: calls.append(inputs)), program)
    assert len(calls) == 3
    for inputs in calls:
        for value, expected_value in zip(inputs, expected, strict=True):
            assert value is expected_value or type(value) is type(expected_value)
            if not isinstance(value, Tensor | list):
                assert value == expected_value


@pytest.mark.parametrize("case", CALLS)
def test_an_op_can_be_run_on_other_inputs_which_no_tool_sees(case: str) -> None:
    program, op, _ = CALLS[case]
    computed: list[Any] = []
    names: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        names.append(context.get_op().__name__)
        if names[-1] == op:
            compute = context.get_computation()
            context.insert_before_op(lambda *inputs: computed.append(compute(deepcopy(inputs))))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        result = program()
    same(computed, [result])
    assert names == [op]


@pytest.mark.parametrize("select", [[1], 1, "dim", ["dim"], [-1]])
def test_an_input_is_selected_by_position_or_name(select: Any, acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "sum", lambda dim: 0, inputs=select)
    same(applied(tool, lambda: X.sum(dim=1)), X.sum(dim=0))


def test_a_default_that_comes_before_a_keyword_can_be_given_a_value(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "conv2d", lambda bias: torch.full((1,), 9.0), inputs=["bias"])
    result = applied(tool, lambda: torch.conv2d(IMAGE, KERNEL, stride=2))
    same(result, torch.conv2d(IMAGE, KERNEL, torch.full((1,), 9.0), 2))


def test_a_keyword_can_be_changed(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "conv2d", lambda stride: 1, inputs=["stride"])
    same(applied(tool, lambda: torch.conv2d(IMAGE, KERNEL, stride=2)), torch.conv2d(IMAGE, KERNEL))


def test_a_size_can_be_changed(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "view", lambda size: (3, 2), inputs=["size"])
    same(applied(tool, lambda: X.view(2, 3)), X.view(3, 2))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_tensors_is_one_input(kind: Any, acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "stack", lambda tensors: [tensor * 2 for tensor in tensors], inputs=[0])
    same(applied(tool, lambda: torch.stack(kind([X, WEIGHT]))), torch.stack([X, WEIGHT]) * 2)


def test_a_routine_that_returns_what_it_was_given_changes_nothing(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "relu", lambda x: x)
    inputs: list[Tensor] = []
    watch = acting("insert_before_op", "relu", inputs.append)
    with amanda.apply(tool, watch):
        torch.relu(X)
    assert inputs[0] is X


MANY: dict[str, Callable[[], Any]] = {
    "max": lambda: torch.max(X, 1),
    "topk": lambda: X.topk(2),
    "linalg_svd": lambda: torch.linalg.svd(X),
    "split": lambda: X.split(1),
    "unbind": lambda: X.unbind(),
    "meshgrid": lambda: torch.meshgrid(X[0], X[1], indexing="ij"),
    "_foreach_add": lambda: torch._foreach_add([X, WEIGHT], 1),
}


@pytest.mark.parametrize("op", MANY)
def test_many_outputs_can_be_changed_and_keep_their_type(op: str, acting: Act, applied: Applied) -> None:
    plain = MANY[op]()
    result = applied(acting("insert_after_op", op, doubled), MANY[op])
    assert type(result) is type(plain)
    same([*result], doubled(*plain))


def test_one_of_many_outputs_can_be_selected(acting: Act, applied: Applied) -> None:
    values, indices = applied(
        acting("insert_after_op", "max", lambda values: values * 2, outputs=[0]), lambda: torch.max(X, 1)
    )
    same(values, X.max(1).values * 2)
    same(indices, X.max(1).indices)


@pytest.mark.parametrize(
    ("op", "program", "value"),
    [
        ("item", lambda: X.sum().item(), 42.0),
        ("equal", lambda: torch.equal(X, X), False),
        ("tolist", lambda: X.tolist(), [7]),
        ("__bool__", lambda: bool(X.sum() < 0), False),
    ],
)
def test_an_output_that_is_no_tensor_can_be_changed(
    op: str, program: Any, value: Any, acting: Act, applied: Applied
) -> None:
    assert applied(acting("insert_after_op", op, lambda _: value), program) == value


def test_an_op_that_writes_and_returns_nothing_gives_its_routines_what_it_writes(
    acting: Act, applied: Applied
) -> None:
    calls: list[tuple[Any, ...]] = []

    def program() -> Tensor:
        x = torch.zeros(2)
        x[0] = 1
        return x

    def note(*outputs: Tensor) -> None:
        calls.append(tuple(x.tolist() for x in outputs))

    result = applied(acting("insert_after_op", "__setitem__", note), program)
    assert calls == [([1.0, 0.0],)] * 3
    same(result, torch.tensor([1.0, 0.0]))


def test_an_op_that_neither_writes_nor_returns_gives_its_routines_nothing(
    acting: Act, applied: Applied
) -> None:
    calls: list[tuple[Any, ...]] = []
    tool = acting("insert_after_op", "_assert_async", lambda *outputs: calls.append(outputs))
    assert applied(tool, lambda: torch._assert_async(torch.ones(1))) is None
    assert calls == [()] * 3


def test_a_factory_has_its_result_changed(acting: Act, applied: Applied) -> None:
    same(
        applied(acting("insert_after_op", "arange", lambda x: x + 1), lambda: torch.arange(3)),
        torch.arange(1, 4),
    )


def test_a_view_gives_way_to_the_value_of_a_routine(acting: Act, applied: Applied) -> None:
    same(applied(acting("insert_after_op", "view", lambda x: x * 2), lambda: X.view(-1)), X.view(-1) * 2)


def test_another_floating_type_is_cast_back(acting: Act, applied: Applied) -> None:
    result = applied(acting("insert_after_op", "relu", lambda x: x.double() * 2), lambda: torch.relu(X))
    same(result, torch.relu(X) * 2)


def test_a_differentiable_routine_may_change_shape_and_kind(acting: Act, applied: Applied) -> None:
    routine = amanda.differentiable(lambda x: x[0].to(torch.complex64))
    same(
        applied(acting("insert_after_op", "relu", routine), lambda: torch.relu(X)), torch.relu(X)[0].cfloat()
    )


def test_the_identity_as_a_replacement_removes_an_op(acting: Act, applied: Applied) -> None:
    assert applied(acting("replace_op", "relu", lambda x: x), lambda: torch.relu(X)) is X


def test_a_replacement_is_given_what_was_selected(acting: Act, applied: Applied) -> None:
    tool = acting("replace_op", "linear", lambda weight: weight + 1, inputs=["weight"])
    same(applied(tool, lambda: F.linear(X, WEIGHT)), WEIGHT + 1)


def test_routines_run_around_a_replacement() -> None:
    def record(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "relu":
            context.insert_before_op(lambda x: x + 1)
            context.replace_op(lambda x: x * 10)
            context.insert_after_op(lambda x: x - 1)

    tool = amanda.Tool()
    tool.add_inst_for_op(record)
    with amanda.apply(tool):
        same(torch.relu(X), (X + 1) * 10 - 1)


@pytest.mark.parametrize("op", ["max", "topk", "linalg_svd"])
def test_a_tuple_from_a_replacement_becomes_the_named_tuple_of_the_op(
    op: str, acting: Act, applied: Applied
) -> None:
    plain = MANY[op]()
    result = applied(acting("replace_op", op, lambda *_: tuple(plain)), MANY[op])
    assert type(result) is type(plain)
    same(result, plain)


def test_a_replacement_runs_under_no_grad_too(acting: Act, applied: Applied) -> None:
    def program() -> Tensor:
        with torch.no_grad():
            return torch.relu(X.clone().requires_grad_())

    result = applied(acting("replace_op", "relu", lambda x: x * 2), program)
    same(result, X * 2)
    assert not result.requires_grad


def error_of(tool: amanda.Tool, program: Callable[[], Any]) -> tuple[BaseException, str]:
    with pytest.raises(amanda.AmandaError) as raised, amanda.apply(tool):
        program()
    (note,) = raised.value.__notes__
    return raised.value, note


ERRORS: dict[str, tuple[str, Any, Callable[[], Any], str]] = {
    "shape": (
        "insert_after_op", lambda x: x[0], lambda: torch.relu(X),
        "returned shape (3,) where shape (2, 3) was given",
    ),
    "complex": (
        "insert_after_op", lambda x: x.cfloat(), lambda: torch.relu(X),
        "returned torch.complex64 where torch.float32 was given",
    ),
    "whole numbers": (
        "insert_after_op", lambda x: x.int(), lambda: torch.relu(X),
        "returned torch.int32 where torch.float32 was given",
    ),
    "no tensor": (
        "insert_after_op", lambda x: 1, lambda: torch.relu(X), "returned int where a tensor was given",
    ),
    "too many": (
        "insert_after_op", lambda x: (x, x), lambda: torch.relu(X), "returned 2 values; it was given 1",
    ),
    "mutation": ("insert_before_op", lambda x: x.add_(0), lambda: torch.relu(X), "wrote into value 0"),
    "silent mutation": (
        "insert_before_op", lambda x: [x.add_(0)].clear(), lambda: torch.relu(X), "wrote into value 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_says_what_was_given_and_expected_and_where(case: str, acting: Act) -> None:
    action, routine, program, message = ERRORS[case]
    error, note = error_of(acting(action, "relu", routine), program)
    assert message in str(error)
    assert note.startswith(f"[amanda] tool Acting, {action}(")
    assert " of relu (op 0x" in note
    assert f"called from {__file__}:" in note


def test_a_list_must_keep_its_length(acting: Act) -> None:
    tool = acting("insert_before_op", "cat", lambda tensors: tensors[:1], inputs=[0])
    error, _ = error_of(tool, lambda: torch.cat([X, X]))
    assert "returned 1 values where a list of 2 tensors was given" in str(error)


def test_an_unknown_input_is_an_error_that_lists_those_there_are(acting: Act) -> None:
    tool = acting("insert_before_op", "sum", lambda _: None, inputs=["dimension"])
    error, _ = error_of(tool, lambda: X.sum(1))
    assert "asked for 'dimension'; it has 2 values (self, dim)" in str(error)


def test_an_exception_of_a_routine_reaches_the_user_as_itself(acting: Act) -> None:
    def fail(x: Tensor) -> None:
        raise ZeroDivisionError("mine")

    with (
        pytest.raises(ZeroDivisionError, match="mine") as raised,
        amanda.apply(acting("insert_before_op", "relu", fail)),
    ):
        torch.relu(X)
    assert len(raised.value.__notes__) == 1
