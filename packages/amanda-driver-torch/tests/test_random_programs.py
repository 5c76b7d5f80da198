"""Random programs compute under tools that give equal values what they compute without."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from copies import copied
from hypothesis import HealthCheck, example, given, settings
from random_programs import Step, programs, run

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

EXAMPLES = int(os.environ.get("AMANDA_EXAMPLES", "30"))
"""How many programs each test runs; `nox -s opdb` runs more."""


def outcome(program: list[Step]) -> list[Any] | None:
    """What a program computes, or None where torch refuses it."""
    with contextlib.suppress(RuntimeError):
        return run(program)
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(
    "make_tool", [Silent, Unchanged, lambda: EqualCopies(copied)], ids=["no-op", "echo", "fresh"]
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(program=programs())
@example(program=[Step("half", 2, 0, "grad"), Step("copy_", 3, 0, "grad"), Step("add", 2, 0, "grad")])
@example(program=[Step("expand", 2, 0, "no_grad"), Step("mul_", 3, 0, "grad"), Step("half", 2, 2, "grad")])
def test_a_program_computes_the_same(make_tool: Any, cached: bool, program: list[Step]) -> None:
    bare = outcome(program)
    if bare is None:
        return
    module = torch.nn.Module()
    module.forward = lambda: run(program)  # so its ops are the same each time, and native code runs them
    with amanda.apply(make_tool()), contextlib.nullcontext() if cached else amanda.cache_disabled():
        results = [module() for _ in range(4 if cached else 1)]
    for each in results:
        for value, expected in zip(flat(each), flat(bare), strict=True):
            assert (value is None) == (expected is None)
            if value is not None:
                torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-6, equal_nan=True)


def flat(values: list[Any]) -> list[Any]:
    """Tensors in lists, as one list."""
    return [item for value in values for item in (flat(value) if isinstance(value, list) else [value])]
