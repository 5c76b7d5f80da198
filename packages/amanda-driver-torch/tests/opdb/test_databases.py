"""Modules, optimizers and functions of torch's databases compute the same under tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from copies import copied
from torch import Tensor

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

from ._databases import Program, functions, modules, optimizers

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes and deprecations
TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "no-op": Silent, "echo": Unchanged, "fresh": lambda: EqualCopies(copied),
}  # fmt: skip
SAMPLE = 144
"""One module in so many is in the sample."""
WRITTEN_BY_NUMPY = ("NumpyExpMarkDirty",)
"""What NumPy writes into the memory of a tensor is written into the value that a routine gave for that."""


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_modules_of_the_sample_compute_the_same(tool: str) -> None:
    assert not list(different(tool, modules(SAMPLE)))


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_optimizers_of_the_sample_compute_the_same(tool: str) -> None:
    assert not list(different(tool, optimizers(SAMPLE // 18)))


@pytest.mark.parametrize("tool", TOOLS)
def test_autograd_functions_and_custom_ops_compute_the_same(tool: str) -> None:
    assert not list(different(tool, functions()))


@pytest.mark.opdb
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("programs", [modules, optimizers], ids=["modules", "optimizers"])
def test_all_compute_the_same(programs: Any, tool: str, record_property: Callable[[str, int], None]) -> None:
    every = list(programs())
    record_property(programs.__name__, len(every))
    assert not list(different(tool, every))


def different(tool: str, programs: Iterable[Program]) -> Iterator[str]:
    """Names of the programs that compute something else under a tool; those that torch refuses are left."""
    tried = 0
    for program in programs:
        try:
            bare = values(program.run())
        except Exception:
            continue
        tried += 1
        if values(program.run()) != bare:
            continue  # torch does not determine it
        if tool == "fresh" and program.name.startswith(WRITTEN_BY_NUMPY):
            continue
        for context in (nullcontext(), amanda.cache_disabled()):
            yield from (
                f"{program.name}: {difference}"
                for difference in _differs(program, TOOLS[tool](), context, bare)
            )
    assert tried


def _differs(
    program: Program, tool: amanda.Tool, context: AbstractContextManager[None], bare: list[Any]
) -> Iterator[str]:
    try:
        with amanda.apply(tool), context:
            results = program.run()
    except Exception as error:
        yield repr(error)
        return
    exact = not isinstance(tool, EqualCopies)
    with amanda.disabled():
        if values(results) != bare and (exact or not _close(results, program.run())):
            yield f"{results} instead of {program.run()}"


def values(results: list[Any]) -> list[Any]:
    """What can be compared with ==: tensors by their bits."""
    return [_bits(result) if isinstance(result, Tensor) else repr(result) for result in results]


def _bits(tensor: Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return tensor.dtype, tensor.shape, dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _close(results: list[Any], expected: list[Any]) -> bool:
    try:
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    except AssertionError:
        return False
    return True
