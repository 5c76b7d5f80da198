"""Graphs of autograd read from memory: their forms are those that torch's own attributes say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import amanda
from amanda import interceptor
from amanda.drivers.torch._node_layout import find_node_layout
from amanda.drivers.torch._nodes import AccumulateGrad
from amanda.interceptor import Graphs
from amanda.tools.flops import FlopsTool

pytestmark = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: only native code reads graphs from memory", run=False
)


def graphs(layout: tuple[int, ...] | None = None) -> Graphs:
    """Return what reads torch's graphs: from memory with a layout, and otherwise by attributes."""
    names = ("grad_fn", "_base", "next_functions", "metadata", "_sequence_nr", "amanda")
    return Graphs(torch.Tensor, AccumulateGrad, *names, lambda node: None, layout)


class Doubled(torch.autograd.Function):
    """A function of the program, whose gradients the graph's form does not decide."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def chain(x: Tensor) -> Tensor:
    for _ in range(20_000):
        x = x + 1
    return x


def written(x: Tensor) -> Tensor:
    y = x.exp()
    y[0] *= 3
    y.view(-1)[1:].mul_(2)
    return y


LAYER, TRANSFORMER = nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layers": lambda x: LAYER(LAYER(x).relu()),
    "three inputs, one of them twice": lambda x: torch.addcmul(x.sin(), x, x),
    "inputs without a gradient": lambda x: torch.cat([x, torch.ones(4, 4), x.detach()]),
    "several outputs": lambda x: (lambda parts: parts[2] * parts[0])(x.chunk(4)),
    "writes": written,
    "a transformer": lambda x: TRANSFORMER(x[None]),
    "a convolution": lambda x: F.conv2d(x[None, None], x[None, None]),
    "a deep graph": chain,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_form_from_memory_is_the_one_that_attributes_say(program: Callable[[Tensor], Tensor]) -> None:
    from_memory, by_attributes = graphs(find_node_layout()), graphs()
    with amanda.apply(FlopsTool()):
        for _ in range(3):  # the first form has classes that are new, and is read by attributes
            roots = [program(torch.rand(4, 4, requires_grad=True)).grad_fn]
            assert from_memory.form(roots) == by_attributes.form(roots) != 0


def test_a_function_of_the_program_has_no_form() -> None:
    from_memory = graphs(find_node_layout())
    for result in (Doubled.apply, lambda x: Doubled.apply(x).sin(), lambda x: Doubled.apply(x.sin()).sin()):
        for _ in range(3):
            output = result(torch.rand(4, requires_grad=True))
            root = output.grad_fn
            assert from_memory.form([root]) == graphs().form([root]) == 0


def test_reading_from_memory_makes_no_object_of_a_node() -> None:
    from_memory = graphs(find_node_layout())
    seen: list[Any] = []
    names = ("grad_fn", "_base", "next_functions", "metadata", "_sequence_nr", "amanda")
    heard = Graphs(torch.Tensor, AccumulateGrad, *names, seen.append, find_node_layout())
    for walked in (from_memory, heard):
        for _ in range(2):
            seen.clear()
            root = chain(torch.rand(2, requires_grad=True)).grad_fn
            walked.form([root])
    assert not seen  # by attributes some nodes of so many are sampled


def test_this_torch_has_a_layout() -> None:
    assert find_node_layout() is not None
    with torch.inference_mode():
        assert find_node_layout() is not None
    with torch.no_grad(), torch.device("meta"):
        assert find_node_layout() is not None
    torch.func.vmap(lambda x: (find_node_layout(), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (find_node_layout(), x.sum())[1])(torch.ones(2))


def test_functions_of_a_mode_have_no_layout() -> None:
    class DoublingMode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return Doubled.apply(result) if isinstance(result, Tensor) and result.requires_grad else result

    with DoublingMode():
        assert find_node_layout() is None


def test_a_layout_is_a_tuple_of_seven_offsets() -> None:
    for wrong in ((1, 2), "offsets", [16] * 7):
        with pytest.raises(TypeError):
            graphs(wrong)  # type: ignore[arg-type]


def test_what_is_no_op_of_torch_is_not_read_from_memory() -> None:
    from_memory = graphs(find_node_layout())
    for other in (1 << 200, "text", torch.ones(1)):
        with pytest.raises(AttributeError):
            from_memory.form([other])
