"""Attributes that are replaced for a while leave a class what it was to native code too."""

import torch

import amanda
from amanda.interceptor.attributes import Patches


def test_tensors_of_one_number_are_numbers_in_a_list(harmless: amanda.Tool) -> None:
    numbers = [torch.tensor(1), torch.nn.Parameter(torch.tensor(2), requires_grad=False)]
    with amanda.apply(harmless):
        inside = torch.tensor(numbers)
    assert inside.tolist() == torch.tensor(numbers).tolist() == [1, 2]


def test_a_class_and_its_heirs_do_not_become_sequences() -> None:
    class Lent(torch.Tensor):
        pass

    class Heir(Lent):
        pass

    numbers = [torch.tensor(1).as_subclass(Lent), torch.tensor(2).as_subclass(Heir)]
    attributes = Patches()
    attributes.set(Lent, "__getitem__", lambda self, index: "own")
    attributes.set(Lent, "__setitem__", lambda self, index, value: None)
    assert numbers[1][()] == "own"
    inside = torch.tensor(numbers)
    attributes.restore()
    assert inside.tolist() == torch.tensor(numbers).tolist() == [1, 2]
    assert numbers[1][()] == 2
