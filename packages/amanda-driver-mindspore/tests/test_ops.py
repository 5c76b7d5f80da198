"""What the driver makes of MindSpore's ways to call an op, beyond what the suite asks of every framework."""

from __future__ import annotations

import re
import threading
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function
from repository import repository_path

import amanda


class Named(amanda.Tool):
    """Keeps the names of the ops that it meets, forward and backward, and may act at those of one name."""

    def __init__(self, only: str = "", action: str = "", routine: Any = None, *select: Any) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.attributes: dict[str, Any] = {}
        self._act = only, action, routine, select
        self.add_inst_for_op(self._look)
        self.add_inst_for_op(
            lambda context: self.backward.append(context.get_backward_op().__name__), backward=True
        )

    def _look(self, context: amanda.OpContext) -> None:
        name = context.get_op_type()
        self.forward.append(name)
        self.attributes.update({name: context.get_attrs()})
        only, action, routine, select = self._act
        if name == only:
            getattr(context, action)(routine, *select)


def numbers(values: Any) -> Tensor:
    return Tensor(np.array(values, np.float32))


def test_every_spelling_of_an_op_has_one_name() -> None:
    x, tool = numbers([1.0, 2.0]), Named()
    with amanda.apply(tool):
        _ = x + x, mint.add(x, x), x.add(x), x.abs(), ops.abs(x), abs(x), x[0], x.clamp(0, 1), x.clip(0, 1)
    assert tool.forward == ["add"] * 3 + ["abs"] * 3 + ["getitem"] + ["clamp"] * 2


def test_what_native_code_does_in_python_is_one_op() -> None:
    x, tool = numbers([1.0, 2.0]), Named()
    with amanda.apply(tool):
        x.logaddexp(x)
    assert tool.forward == ["logaddexp"]


def test_settings_of_a_primitive_are_attributes() -> None:
    tool = Named()
    convolution = nn.Conv2d(3, 4, 3, stride=2)
    with amanda.apply(tool):
        convolution(numbers(np.ones((1, 3, 8, 8))))
        ops.matmul(numbers(np.ones((2, 3))), numbers(np.ones((3, 2))))
        numbers(np.ones((2, 6))).reshape(3, 4)
    assert tool.attributes["conv2d"]["stride"][-2:] == (2, 2)
    assert tool.attributes["reshape"]["shape"] == (3, 4)


@pytest.mark.parametrize("call", ["assign_add", "copy_", "setitem"])
def test_ops_that_write_give_what_they_gave_and_write_what_routines_return(call: str) -> None:
    def written() -> list[float]:
        x = numbers([1.0, 2.0])
        if call == "assign_add":
            ops.AssignAdd()(x, numbers([1.0, 1.0]))
        elif call == "copy_":
            x.copy_(numbers([5.0, 6.0]))
        else:
            x[0] = 7.0
        return list(x.asnumpy().tolist())

    plain = written()
    with amanda.apply(Named(call, "insert_before_op", lambda *_: None)):
        assert written() == plain
    if call != "setitem":  # whose routine after it gets nothing
        with amanda.apply(Named(call, "insert_after_op", lambda value: value * 10)):
            assert written() == [10 * value for value in plain]


def test_gradients_of_value_and_grad_are_changed_at_backward_ops_and_at_leaves() -> None:
    weight = Parameter(numbers([2.0, 3.0]), name="weight")
    step = ms.value_and_grad(lambda x: ops.relu(x * weight).sum(), 0, [weight])
    x = numbers([1.0, 1.0])
    tool = amanda.Tool()

    def change(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(lambda grad: grad * 10)

    tool.add_inst_for_op(change, backward=True)
    _, (of_x, (of_weight,)) = step(x)
    assert (of_x.asnumpy().tolist(), of_weight.asnumpy().tolist()) == ([2.0, 3.0], [1.0, 1.0])
    with amanda.apply(tool):
        _, (of_x, (of_weight,)) = step(x)
    assert (of_x.asnumpy().tolist(), of_weight.asnumpy().tolist()) == ([20.0, 30.0], [10.0, 10.0])


class Doubled(_Function):  # type: ignore[misc]
    """Twice its input; its gradient is said to be five times what comes."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 5


def test_a_function_with_a_backward_of_its_own_is_an_op_around_those_in_it() -> None:
    tool, x = Named(), numbers([1.0])
    with amanda.apply(tool):
        gradient = ms.grad(lambda x: Doubled.apply(x).sum())(x)
    assert gradient.asnumpy().tolist() == [5.0]
    assert tool.forward == ["Doubled", "mul", "sum", "mul"]  # the last one is its backward's own
    assert "DoubledBackward" in tool.backward


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_under_grad_gives_the_same_and_runs_the_ops_twice(reentrant: bool) -> None:
    class Layer(nn.Cell):  # type: ignore[misc]
        def construct(self, x: Any) -> Any:
            return ops.relu(x * 2) * x

    layer, x = Layer(), numbers([1.0, -2.0])
    gradient = ms.grad(lambda x: ms.recompute(layer, x, use_reentrant=reentrant).sum())
    plain = gradient(x).asnumpy().tolist()
    op_ids: list[int] = []
    tool = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        if context.get_op_type() == "relu":
            op_id = context.get_op_id()
            context.insert_before_op(lambda *_: op_ids.append(op_id))

    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        assert gradient(x).asnumpy().tolist() == plain
    assert len(op_ids) == 2
    assert len(set(op_ids)) == 1


@ms.jit
def compiled(x: Any) -> Any:
    return x * 2 + 1


def test_compiled_functions_are_reported_and_run_op_by_op_where_mindspore_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool, x = Named(), numbers([1.0])
    with amanda.apply(tool) as scope:
        compiled(x)
    assert tool.forward == []
    assert "compiled compiled" in str(scope.report)
    monkeypatch.setenv("MS_JIT", "0")
    with amanda.apply(tool):
        compiled(x)
    assert tool.forward == ["mul", "add"]


def test_threads_train_in_scopes_of_their_own() -> None:
    ops_by_thread: dict[int, list[str]] = {}

    def train(number: int) -> None:
        tool = Named()
        with amanda.apply(tool):
            ms.grad(lambda x: ops.relu(x * number).sum())(numbers([1.0]))
        ops_by_thread[number] = [*tool.forward, *tool.backward]

    for number in (1, 2):  # gradients on two threads at once fail in MindSpore itself
        thread = threading.Thread(target=train, args=(number,))
        thread.start()
        thread.join(60)
    assert ops_by_thread[1] == ops_by_thread[2]
    assert {"relu", "ReLUBackward"} <= set(ops_by_thread[1])


@pytest.mark.parametrize("page", ["docs/mindspore.md", "packages/amanda-driver-mindspore/README.md"])
def test_the_snippets_of_the_pages_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = repository_path(page).read_text()
    snippets = re.findall(r"^```py(?:thon)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {"__name__": "page"})
    for printed in capsys.readouterr().out.splitlines():
        assert f"`{printed}`" in text


def test_an_exception_at_a_leaf_leaves_later_gradients_as_they_are() -> None:
    weight = Parameter(numbers([2.0, 3.0]), name="weight")
    step = ms.grad(lambda x: ops.relu(x * weight).sum(), None, [weight])
    x = numbers([1.0, 1.0])

    def refuse(grad: Any) -> None:
        raise ZeroDivisionError

    def look(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(refuse)

    tool = amanda.Tool()
    tool.add_inst_for_op(look, backward=True)
    plain = step(x)[0].asnumpy().tolist()
    with amanda.apply(tool), pytest.raises(ZeroDivisionError):
        step(x)
    assert step(x)[0].asnumpy().tolist() == plain
    with amanda.apply(Named()):
        assert step(x)[0].asnumpy().tolist() == plain
