"""A record tells apart whatever a program could tell apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ._comparison import Count, differences
from ._execution import Program, record
from ._records import difference, results_facts, tensor_facts
from ._tools import ROUTINES
from ._variants import Sample, Variant, database


class Other(torch.Tensor):
    """A subclass."""


BASE = torch.zeros(2, 2)
UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "bits": lambda: torch.full((2, 2), -0.0),
    "nan": lambda: torch.full((2, 2), float("nan")),
    "dtype": lambda: torch.zeros(2, 2, dtype=torch.float64),
    "shape": lambda: torch.zeros(4),
    "strides": lambda: torch.zeros(2, 2).t(),
    "class": lambda: torch.zeros(2, 2).as_subclass(Other),
    "requires_grad": lambda: torch.zeros(2, 2, requires_grad=True),
    "grad_fn": lambda: torch.zeros(2, 2, requires_grad=True) * 1,
    "view": lambda: torch.zeros(4).view(2, 2),
    "version": lambda: torch.ones(2, 2).zero_(),
    "layout": lambda: torch.zeros(2, 2).to_sparse(),
    "conjugate": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_tensors_have_unlike_facts(kind: str) -> None:
    assert difference(tensor_facts(BASE), tensor_facts(torch.zeros(2, 2))) is None
    assert difference(tensor_facts(UNLIKE[kind]()), tensor_facts(BASE)) is not None


def test_an_attribute_of_a_tensor_is_a_fact() -> None:
    marked = torch.zeros(2, 2)
    marked.mark = 1  # type: ignore[attr-defined]
    assert difference(tensor_facts(marked), tensor_facts(BASE)) == ".attributes: ['mark'] instead of []"


def test_what_a_result_shares_with_the_inputs_is_a_fact() -> None:
    x = torch.zeros(2, 2)
    itself, view, copy = (results_facts(result, [x]) for result in (x, x[:], x.clone()))
    assert difference(itself, view) is not None
    assert difference(view, copy) is not None


def noisy(*values: Any) -> list[Any]:
    floats = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in values]
    return [value + 1 if is_float else value for value, is_float in zip(values, floats, strict=True)]


@pytest.mark.parametrize("name", ["add", "sort", "nn.functional.linear"])
def test_a_tool_that_changes_values_is_found_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTINES, "nothing", noisy)
    found_differences = list(differences(database()[name], 2, Count()))
    assert found_differences
    assert all(", nothing: " in difference for difference in found_differences)


def test_a_call_that_raises_and_random_state_are_in_the_record() -> None:
    def fails(x: torch.Tensor) -> None:
        torch.rand(2)
        raise ValueError("no")

    def alone(x: torch.Tensor) -> None:
        raise ValueError("no")

    sample = Sample((torch.ones(2),), {})
    failed, succeeded = (
        record(Program(), Variant("", each), sample, "accumulated") for each in (fails, alone)
    )
    assert failed is not None
    assert failed["error"] == [ValueError, "no", []]
    assert "random state" in str(difference(failed, succeeded))
