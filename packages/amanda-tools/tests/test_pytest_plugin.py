"""The pytest plugin: what its fixture traces, what its assertions say, and that it waits until asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amanda.tools.pytest import assert_finite, assert_flops, assert_op_counts

pytest_plugins = ["pytester"]

MODEL = """
import pytest, torch
from torch import nn

@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))

x = torch.ones(1, 3, 4, 4)
"""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_flops_are_compared_exactly_or_within_a_share() -> None:
    x = torch.ones(3, 4)
    output = assert_flops(model(), x, macs=3 * (4 * 8 + 8 * 2))
    assert output.shape == (3, 2)
    assert_flops(model(), x, macs=150, rel=0.05)
    with pytest.raises(
        AssertionError, match=r"macs: 144 counted, 150 expected\n.*FLOPs by phase, type"
    ) as raised:
        assert_flops(model(), x, macs=150)
    assert "linear" in str(raised.value)
    with pytest.raises(AssertionError, match=r"macs: 144 counted, 160 expected within 5.00%"):
        assert_flops(model(), x, macs=160, rel=0.05)
    assert_flops(lambda: model()(x).sum().backward(), macs=144 + 48, phase="backward")
    with pytest.raises(TypeError, match="nothing to compare with"):
        assert_flops(model(), x)


def test_op_counts_are_compared_and_near_words_are_suggested() -> None:
    x = torch.ones(3, 4)
    assert_op_counts({"linear": 2, "relu": 1, "conv2d": 0}, model(), x)
    layers = model()
    assert_op_counts({"linear": 2, "relu": 1}, layers, x, exact=True)
    with pytest.raises(AssertionError, match="relu: 1 executed, 0 expected"):
        assert_op_counts({"linear": 2}, layers, x, exact=True)
    with pytest.raises(AssertionError, match=r"Linear: 0 executed, 2 expected \(did you mean 'linear'\?\)"):
        assert_op_counts({"Linear": 2}, layers, x)
    assert_op_counts({"accumulate_grad": 4}, lambda: layers(x).sum().backward(), phase="backward")


def test_a_nan_is_told_with_its_op_and_line() -> None:
    assert assert_finite(model(), torch.ones(3, 4)).shape == (3, 2)
    with pytest.raises(AssertionError, match=rf"First NaN: log \(forward\), {__file__}:\d+"):
        assert_finite(lambda: torch.log(torch.tensor([-1.0])))
    assert_finite(lambda: torch.log(torch.zeros(1)), inf=False)
    with pytest.raises(AssertionError, match="First Inf: log"):
        assert_finite(lambda: torch.log(torch.zeros(1)))


def test_they_hold_in_tensorflow_too() -> None:
    import tensorflow as tf

    @tf.function
    def step(x):
        for _ in tf.range(3):
            x = tf.nn.relu(tf.matmul(x, x))
        return x

    x = tf.ones((4, 4))
    assert_flops(step, x, macs=3 * 64)
    assert_op_counts({"matmul": 3, "relu": 3}, step, x)
    assert_finite(step, x)


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=MODEL + body)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", *options)


def test_the_fixture_traces_calls_blocks_and_whole_bodies(pytester: pytest.Pytester) -> None:
    run(pytester, """
def test_call(amanda_trace, model):
    assert amanda_trace(model, x).shape == (1, 2)
    amanda_trace.assert_op_counts({"conv2d": 1, "linear": 1, "relu": 1, "reshape": 1}, exact=True)
    model(x)
    assert amanda_trace.op_counts()["conv2d"] == 1

def test_block(amanda_trace, model):
    with amanda_trace:
        model(x).sum().backward()
    with amanda_trace:
        model(x)
    amanda_trace.assert_op_counts({"conv2d": 2})
    amanda_trace.assert_op_counts({"conv2d_backward": 1}, phase="backward")
    assert [op.type for op in amanda_trace.graph.ops][:2] == ["conv2d", "relu"]
    amanda_trace.clear()
    assert not amanda_trace.op_counts() and not amanda_trace.graph.ops

@pytest.mark.amanda_trace
def test_body(amanda_trace, model):
    model(x)
    amanda_trace.assert_op_counts({"conv2d": 1})

def test_wrong(amanda_trace, model):
    amanda_trace(model, x)
    amanda_trace.assert_op_counts({"conv2d": 2})
""", "--strict-markers").assert_outcomes(passed=3, failed=1)  # fmt: skip


SNAPSHOT = """
@pytest.mark.parametrize("size", [4])
def test_graph(amanda_trace, model, size):
    amanda_trace(lambda: {expression}.sum().backward())
    amanda_trace.assert_snapshot()
    amanda_trace.assert_snapshot("forward", backward=False)
"""


def test_a_graph_is_stored_beside_the_test_and_a_change_of_it_is_shown(pytester: pytest.Pytester) -> None:
    same, changed_test = SNAPSHOT.format(expression="model(x)"), SNAPSHOT.format(expression="model(x).exp()")
    missing = run(pytester, same)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no graph to compare with*--amanda-update writes it*"])
    run(pytester, same, "--amanda-update").assert_outcomes(passed=1)
    stored = pytester.path / "__graphs__" / "test_it" / "test_graph-4-.forward.txt"
    assert stored.read_text().splitlines() == [
        "conv2d(input float32[1,3,4,4], 0.weight, 0.bias) -> float32[1,4,2,2]  # 0",
        "relu(conv2d@-1) -> float32[1,4,2,2]  # 1",
        "reshape(relu@-1) -> float32[1,16]  # 2",
        "linear(reshape@-1, 3.weight, 3.bias) -> float32[1,2]  # 3",
        "sum(linear@-1) -> float32[]",
        "ones_like(sum@-1) -> float32[]",
    ]
    run(pytester, "\n\n\n" + same).assert_outcomes(passed=1)  # lines may move
    changed = run(pytester, changed_test)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*+exp(linear@-1) -> float32?1,2?*", "*writes it anew*"])
    run(pytester, changed_test, "--amanda-update").assert_outcomes(passed=1)
    assert "exp(" in stored.read_text()


def test_nothing_is_imported_until_a_test_asks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        def test_it(request):
            assert request.config.pluginmanager.has_plugin("amanda")
            loaded = [name for name in sys.modules if name.startswith("amanda.tools.")]
            assert not loaded
            assert not {"torch", "tensorflow", "numpy", "pandas", "rich"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*warning*")


@pytest.mark.long
def test_without_the_fixture_nothing_is_instrumented_and_it_can_be_off(
    pytester: pytest.Pytester,
) -> None:
    body = """
def test_plain(model):
    import sys
    model(x)
    assert "amanda.drivers.torch" not in sys.modules
"""
    pytester.makepyfile(test_it=MODEL + body)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    pytester.makepyfile(test_it="def test_asks(amanda_trace): pass")
    off = pytester.runpytest_subprocess("-p", "no:amanda", "-p", "no:cacheprovider")
    off.assert_outcomes(errors=1)
    off.stdout.fnmatch_lines(["*fixture 'amanda_trace' not found*"])


def test_assertions_are_of_compiled_code_where_they_are_asked_to() -> None:
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *values: ran.append("compiled") or graph(*values)  # type: ignore[func-returns-value]

    torch._dynamo.reset()
    compiled, x = torch.compile(model(), backend=backend), torch.ones(2, 4)
    assert_finite(compiled, x)
    assert_flops(compiled, x, macs=96)
    assert not ran
    assert_finite(compiled, x, compiled="instrument")
    assert_flops(compiled, x, macs=96, compiled="instrument")
    assert_op_counts({"linear": 2, "relu": 1}, compiled, x, exact=True, compiled="instrument")
    assert ran == ["compiled"] * 3
    torch._dynamo.reset()
