"""Models of all kinds train under tools that change nothing as they train without.

A sample of them is tested by default, all of them by `-m "zoo or not zoo"`, as `nox -s zoo` does.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from copies import copied

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

from . import timm_models, transformers_models
from .observation import apart, computed, differences, is_within, nudged, observed
from .subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")  # what models warn of is not ours

KNOWN: dict[str, str] = {}
"""Why a model is not as it is without tools, by its name; one that is fails."""


def parameters() -> Iterator[Any]:
    """Every model; those that are not in the sample are marked."""
    for module in (transformers_models, timm_models):
        for subject in module.subjects():
            marks = [] if subject.name in module.SAMPLE else [pytest.mark.zoo]
            if subject.name in KNOWN:
                marks.append(pytest.mark.xfail(strict=True, reason=KNOWN[subject.name]))
            package = module.__name__.rpartition(".")[2].partition("_")[0]
            yield pytest.param(subject, id=f"{package}-{subject.name}", marks=marks)


@pytest.fixture(autouse=True)
def _one_thread(transformers: Any) -> Iterator[None]:
    """One thread, so that sums have one order; what a model held is freed before the next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("subject", list(parameters()))
def test_a_model_trains_under_tools_as_without(subject: Subject) -> None:
    torch.manual_seed(0)
    model, inputs = subject.make()
    steps = subject.settles + 1
    bare = observed(model, inputs, steps=steps)
    assert differences(bare, observed(model, inputs, steps=steps)) == [], "it differs without a tool"
    for tool in (Silent(), Unchanged()):
        work: list[tuple[int, int]] = []
        facts = observed(
            model,
            inputs,
            lambda tool=tool: amanda.apply(tool),  # type: ignore[misc]
            lambda tool=tool, work=work: work.append((tool.analyses + tool.backward_analyses, tool.calls)),  # type: ignore[misc]
            steps,
        )
        assert differences(bare, facts) == []
        assert work[0][1] >= work[0][0] > 0
        assert work[-1][0] == work[-2][0], "a step that takes the same way has ops that are new"


@pytest.mark.parametrize("subject", list(parameters()))
def test_a_model_computes_under_equal_new_values_what_it_computes_without(subject: Subject) -> None:
    torch.manual_seed(0)
    model, inputs = subject.make()
    tool = EqualCopies(copied)
    tensors = computed(model, inputs, lambda: amanda.apply(tool))
    expected = computed(model, inputs)
    names = apart(tensors, expected)
    if names:
        # Gradients that are 0 but for rounding, as of a bias ahead of a normalisation: what is left of large
        # terms that cancel is as far apart once the weights differ in their last digits.
        control = computed(nudged(model), inputs)
        names = [name for name in names if not is_within(tensors[name], expected[name], control[name])]
    assert names == []
    assert tool.calls > tool.analyses > 0
