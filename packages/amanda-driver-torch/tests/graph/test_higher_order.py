"""Higher-order ops in compiled functions: ops inside of them run as they are, and the report names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import amanda


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def in_cond(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    return result


def in_map(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = mapped(lambda row: row.sin(), x)
    return result


def in_scan(x: torch.Tensor) -> torch.Tensor:
    _, rows = scan(lambda carry, row: (carry + row, row.sin()), torch.zeros(3), x)
    result: torch.Tensor = rows
    return result


def in_while(x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64)
    _, last = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x.sin()), (start, x))
    result: torch.Tensor = last
    return result


def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(lambda x: x.sin(), x, use_reentrant=False)
    return result


def in_function(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize(
    ("inner", "subject", "inside"),
    [
        (in_cond, "cond", "1 sin, 1 cos"),
        (in_map, "map_impl", "1 sin"),
        (in_scan, "scan", "sin"),
        (in_while, "while_loop", "sin"),
        (in_checkpoint, "tag_activation_checkpoint", "1 sin"),
        (in_function, "autograd_function_apply", "mul"),
    ],
)
def test_the_report_names_the_ops_inside_and_numbers_stay(
    inner: Callable[[torch.Tensor], torch.Tensor], subject: str, inside: str
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x.exp()).tanh()

    op_types: list[str] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if str(context.namespace).endswith("graph"):
            op_types.append(context.get_op_type())
        context.insert_after_op(amanda.observer(lambda *outputs: None))

    tool.add_inst_for_op(analyse)
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    x.requires_grad_(subject in ("tag_activation_checkpoint", "autograd_function_apply"))
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    bare = compiled(x)
    with amanda.apply(tool, compiled="instrument") as scope:
        result = compiled(x)
    assert torch.equal(result, bare)
    assert op_types[0] == "exp"
    assert op_types[-1] == "tanh"
    assert not {"sin", "cos"} & set(op_types)
    (entry,) = (reported for reported in scope.report if reported.what == subject)
    assert entry.reason.startswith("ops inside of a higher-order op are not instrumented: ")
    assert inside in entry.reason
    assert entry.where.startswith(__file__)
