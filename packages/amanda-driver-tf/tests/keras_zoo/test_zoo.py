"""Models of all families train under tools that change nothing as they train without, in every mode.

A sample of them is tested by default, all of them by `-m "zoo_tf or not zoo_tf"`, as `nox -s zoo_tf` does.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

from . import models
from .observation import Facts, attributes, differences, distances, replaced
from .programs import PROGRAMS, FunctionProgram, Program
from .subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")  # what models warn of is not ours

KNOWN: dict[tuple[str, str], str] = {}
"""Why a model is not as it is without tools in a mode, by its name and the mode; one that is fails."""


def fresh() -> EqualCopies:
    """A tool that gives equal new tensors; handles and variants are handed back."""
    return EqualCopies(lambda value: tf.identity(value) if is_plain(value) else value)


def is_plain(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)


Make = Callable[[], Unchanged]
ONE_BY_ONE: tuple[tuple[Make, ...], ...] = ((Silent,), (Unchanged,), (fresh,))
TOGETHER: tuple[tuple[Make, ...], ...] = ((Silent, Unchanged, fresh),)
"""In one scope, which builds one graph for both: so models beyond the sample are tested."""

ROUNDING = 1e-3
"""Where grappler fuses operators that a tool holds apart: largest difference over the largest magnitude."""


def parameters() -> Iterator[Any]:
    """Every model in every mode; those that are not in the sample are marked."""
    for subject in models.subjects():
        for mode in PROGRAMS:
            sampled = subject.name in models.SAMPLE or (subject.name, mode) in models.SAMPLE_TOGETHER
            marks = [] if sampled else [pytest.mark.zoo_tf]
            if (subject.name, mode) in KNOWN:
                marks.append(pytest.mark.xfail(strict=True, reason=KNOWN[subject.name, mode]))
            yield pytest.param(subject, mode, id=f"{subject.name}-{mode}", marks=marks)


@contextmanager
def grappler(on: bool) -> Iterator[None]:
    """With or without what fuses and folds operators; oneDNN's own pass, which the environment turns off,
    fuses the gradients of a convolution's bias and kernel besides.
    """
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


@pytest.fixture
def without_fusion() -> Iterator[None]:
    with grappler(on=False):
        yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("without_fusion")
@pytest.mark.parametrize(("subject", "mode"), list(parameters()))
def test_a_model_trains_under_tools_as_without(subject: Subject, mode: str) -> None:
    program = PROGRAMS[mode](subject)
    bare = program.observed().facts
    before = attributes()
    for tools in ONE_BY_ONE if subject.name in models.SAMPLE else TOGETHER:
        check_steps(program, bare, before, [make() for make in tools])
    assert differences(bare, program.observed().facts) == [], "it differs without a tool"


def check_steps(program: Program, bare: Facts, before: Mapping[Any, Any], tools: Sequence[Unchanged]) -> None:
    """Two steps under tools are as they are without, and instrumented alike."""
    work: list[list[tuple[int, int, int]]] = []
    facts = program.observed(
        lambda: amanda.apply(*tools),
        lambda: work.append([(tool.analyses, tool.backward_analyses, tool.calls) for tool in tools]),
    ).facts
    assert differences(bare, facts) == []
    assert replaced(before) == []
    for (forward, backward, calls), second in zip(*work, strict=True):
        assert forward > 0
        assert backward > 0
        assert calls >= forward + backward
        assert second[:2] == (forward, backward), "a second step has ops that are new"
        assert second[2] == 2 * calls, "a second step runs as many routines"


@pytest.mark.slow
@pytest.mark.usefixtures("without_fusion")
@pytest.mark.parametrize("name", sorted(models.SAMPLE))
def test_a_function_traced_in_a_scope_is_as_one_traced_outside(name: str) -> None:
    subject = next(candidate for candidate in models.subjects() if candidate.name == name)
    program = FunctionProgram(subject)
    bare = program.observed().facts
    program.make()
    tool = Unchanged()
    assert differences(bare, program.observed(lambda: amanda.apply(tool)).facts) == []
    assert tool.calls > 0
    assert differences(bare, program.observed().facts) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["session", "function"])
@pytest.mark.parametrize("name", sorted(models.SAMPLE))
def test_where_grappler_fuses_a_tool_changes_rounding_alone(name: str, mode: str) -> None:
    subject = next(candidate for candidate in models.subjects() if candidate.name == name)
    with grappler(on=True):
        program = PROGRAMS[mode](subject)
        bare = program.observed(steps=1).arrays
        under = program.observed(lambda: amanda.apply(Silent()), steps=1).arrays
    far = {where: value for where, value in distances(bare, under).items() if value > ROUNDING}
    assert far == {}
