"""What an op writes reaches the program's tensors, whatever values routines give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import amanda
from amanda.drivers.mindspore._signatures import declaration_of
from amanda.tools.nan import NanTool


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_JIT", "0")


def copies(*values: Any) -> list[Any]:
    return [value.copy() if isinstance(value, Tensor) else value for value in values]


def copying(*sides: str) -> amanda.Tool:
    """Equal tensors in the place of inputs, of outputs, or of both."""
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        for side in sides:
            getattr(context, f"insert_{side}_op")(copies)

    tool.add_inst_for_op(analyse)
    return tool


def numbers(shape: tuple[int, ...]) -> Tensor:
    return Tensor(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: nn.SGD(parameters, 0.05, momentum=0.9),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
    "Adam": lambda parameters: nn.Adam(parameters, 0.05),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(parameters, 0.05),
    "RMSProp": lambda parameters: nn.RMSProp(parameters, 0.05),
    "Adagrad": lambda parameters: nn.Adagrad(parameters),
    "FTRL": lambda parameters: nn.FTRL(parameters),
    "AdamOffload": lambda parameters: nn.AdamOffload(parameters, 0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_reach_parameters_and_moments_where_routines_give_copies(name: str) -> None:
    def updated() -> list[bytes]:
        network = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")  # made in the scope, too
        optimizer = OPTIMIZERS[name](network.trainable_params())
        for _ in range(2):
            optimizer((numbers((2, 3)), numbers((2,))))
        return [
            parameter.asnumpy().tobytes()
            for parameter in (*network.get_parameters(), *optimizer.get_parameters())
        ]

    plain = updated()
    with amanda.apply(copying("before", "after")):
        assert updated() == plain


def test_optimizers_are_given_nothing_that_no_kernel_has_written() -> None:
    for make in OPTIMIZERS.values():
        network = nn.Dense(3, 2)
        optimizer, tool = make(network.trainable_params()), NanTool()
        junk = [ops.mul(Tensor(np.full(n, np.nan, np.float32)), 1) for n in (2, 2, 6, 6) * 4]
        del junk  # memory that comes again
        with amanda.apply(tool):
            optimizer((numbers((2, 3)), numbers((2,))))
        assert not tool.result


def test_running_statistics_are_written_in_training_alone() -> None:
    def statistics(training: bool) -> list[bytes]:
        layer = nn.BatchNorm2d(3)
        layer.set_train(training)
        layer(numbers((2, 3, 4, 4)))
        return [statistic.asnumpy().tobytes() for statistic in (layer.moving_mean, layer.moving_variance)]

    plain = statistics(True), statistics(False)
    assert plain[0] != plain[1]
    with amanda.apply(copying("before", "after")):
        assert (statistics(True), statistics(False)) == plain
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_op(
            lambda *values: [value * 2 for value in values], [1, 2, 3, 4]
        )
        if context.get_op_type() == "batch_norm" else None
    )  # fmt: skip
    with amanda.apply(tool):
        assert statistics(False) == plain[1]


def test_batch_norm_gives_tools_no_unwritten_memory() -> None:
    layer, absent_outputs = nn.BatchNorm2d(3), []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: absent_outputs.append([output is None for output in context.get_outputs()]),
        require_outputs=True,
    )
    with amanda.apply(tool):
        result = layer(numbers((2, 3, 4, 4)))
    assert result.shape == (2, 3, 4, 4)
    assert [False, True, True, True, True] in absent_outputs


def test_primitives_declare_what_they_write() -> None:
    assert declaration_of(ops.Adam).written == (0, 1, 2)
    assert declaration_of(ops.Adam).names[-1] == "gradient"
    assert declaration_of(ops.ApplyMomentum).written == (0, 1)
    assert declaration_of(ops.ReLU).written == ()


def row() -> list[Any]:
    x = numbers((3, 3))
    y = x[1]
    y[2] = 40.0
    return [x, y]


def base() -> list[Any]:
    x = numbers((3, 3))
    y = x.T
    x[0, 1] = 40.0
    return [x, y]


def views_of_views() -> list[Any]:
    x = numbers((3, 3))
    y = ops.reshape(x, (9,))
    z = y[2:5]
    z[0] = 7.0
    y[8] = 3.0
    return [x, y, z]


def copied_into() -> list[Any]:
    x = numbers((3, 3))
    y = x.view(9)
    y.copy_(ops.ones_like(y))
    return [x, y]


def column() -> list[Any]:
    x = numbers((3, 3))
    x[:, 1] += 2
    x[1][2] = 5.0
    return [x]


def parameter() -> list[Any]:
    weight = Parameter(numbers((3, 3)), name="weight")
    part = weight[0]
    part[1] = 3.0
    ops.assign_add(weight, ops.ones_like(weight))
    return [weight, part]


@pytest.mark.parametrize("sides", [("before",), ("after",), ("before", "after")])
@pytest.mark.parametrize("program", [row, base, views_of_views, copied_into, column, parameter])
def test_views_and_bases_are_one_memory_where_routines_give_copies(
    program: Callable[[], list[Any]], sides: tuple[str, ...]
) -> None:
    plain = [tensor.asnumpy().tobytes() for tensor in program()]
    with amanda.apply(copying(*sides)):
        for _ in range(2):
            assert [tensor.asnumpy().tobytes() for tensor in program()] == plain


def test_a_changed_view_of_a_parameter_is_what_the_program_gets() -> None:
    weight = Parameter(numbers((2, 3, 4)), name="weight")
    plain = ops.transpose(weight, (0, 2, 1)).asnumpy()
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_after_op(lambda value: value * 2)
        if context.get_op_type() in ("transpose", "view") else None
    )  # fmt: skip
    with amanda.apply(tool):
        changed = ops.transpose(weight, (0, 2, 1)).asnumpy()
        viewed = weight.view(6, 4).asnumpy()
    np.testing.assert_array_equal(changed, plain * 2)
    np.testing.assert_array_equal(viewed, weight.asnumpy().reshape(6, 4) * 2)
