"""Which tensors need a gradient, by which the driver knows what it has seen of an op's backward."""

import torch

from amanda.drivers.torch._schema import binding
from amanda.drivers.torch._tensors import TorchTensors

gradients_needed = TorchTensors().needs_grad
X, Y = torch.ones(4), torch.ones(4, requires_grad=True)


def test_each_need_is_told_from_the_others() -> None:
    cases = [[Y, X], [X, Y], [Y, Y], [[X, Y], X]]
    assert len({gradients_needed(inputs) for inputs in cases}) == len(cases)
    assert gradients_needed([Y, 2, X]) == gradients_needed([Y, X])
    assert gradients_needed([X, X]) is None
    with torch.no_grad():
        assert gradients_needed([Y, Y]) is None


def test_arguments_need_what_the_inputs_made_of_them_need() -> None:
    args = (Y, 2, 2)
    inputs = binding(torch.Tensor.view, args).inputs(args)
    assert inputs[1] == (2, 2)
    assert gradients_needed(args) == gradients_needed(inputs)
