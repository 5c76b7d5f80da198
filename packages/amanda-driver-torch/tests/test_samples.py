"""Torch's own sample calls, under a tool that observes every op and one that copies every value."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opinfo import op_db
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import amanda

EVERY = 8
"""One op of so many is tried; all of them take some minutes."""

# The results of these are what memory held, or depend on which views share it.
UNDETERMINED = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")
ALIASING = ("as_strided", "nn.functional.linear_cross_entropy")


def copied(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        return value.clone()
    if isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value):
        return [copied(one) for one in value]
    return value


def copies(*values: Any) -> list[Any]:
    return [copied(value) for value in values]


def nothing(*values: Any) -> None:
    return None


class Everywhere(amanda.Tool):
    """One routine before and after every op and backward op."""

    def __init__(self, routine: Any) -> None:
        self.routine, self.executed = routine, 0
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        self.executed += 1
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)


def results(op: Any, sample: Any) -> list[Any]:
    """Outputs and gradients of one call."""
    torch.manual_seed(0)
    outputs = tree_leaves(op.op(sample.input, *sample.args, **sample.kwargs))
    leaves = [one for one in tree_leaves((sample.input, sample.args, sample.kwargs)) if _trains(one)]
    made = [one for one in outputs if _trains(one)]
    if made and leaves:
        ones = [torch.ones_like(one) for one in made]
        outputs += torch.autograd.grad(made, leaves, ones, allow_unused=True)
    return [one.detach() if isinstance(one, Tensor) else one for one in outputs]


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def samples() -> Iterator[tuple[Any, Any]]:
    for op in op_db()[::EVERY]:
        no_call = op.name.startswith("jiterator") or torch.float32 not in op.dtypes  # the first: CUDA alone
        if op.name in UNDETERMINED or no_call:
            continue
        yield op, next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)))


@pytest.mark.parametrize("routine", [nothing, copies])
@pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes and deprecations
def test_outputs_and_gradients_are_bit_identical(routine: Any) -> None:
    tried = 0
    for op, sample in samples():
        if routine is copies and op.name in ALIASING:
            continue
        expected, tool = results(op, sample), Everywhere(routine)
        with amanda.apply(tool):
            found = [results(op, sample), results(op, sample)]
        assert tool.executed or op.name == "broadcast_shapes", op.name
        for one in found:
            try:
                assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
            except (AssertionError, ValueError) as error:
                raise AssertionError(op.name) from error
        tried += 1
    assert tried > 60
