"""What `amanda.testing` offers beside the suite: gaps, markers, and a word where pytest is absent."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import children
import pytest

import amanda
from amanda.testing import DriverTests, FakeDriver, Sample, attached, fake, never, notimpl, notyet
from amanda.testing._ladder import Rung, summary
from amanda.testing._suite import RUNGS
from amanda.testing._tools import notes

GAP = "test_none_means_no_change"


@pytest.mark.parametrize("marker", [never, notimpl, notyet])
def test_a_gap_is_a_strict_xfail_with_its_reason(marker: Any) -> None:
    class Tests(DriverTests):
        gaps = {GAP: marker("no such luck")}  # noqa: RUF012

    (mark,) = getattr(Tests, GAP).pytestmark
    assert mark.name == "xfail"
    assert mark.kwargs["strict"]
    assert "no such luck" in mark.kwargs["reason"]


def test_a_gap_marks_the_subclass_alone() -> None:
    class Tests(DriverTests):
        gaps = {GAP: never("not here")}  # noqa: RUF012

    assert getattr(Tests, GAP) is not getattr(DriverTests, GAP)
    assert not hasattr(getattr(DriverTests, GAP), "pytestmark")


def test_a_gap_keeps_the_parameters_of_its_test() -> None:
    name = "test_writing_into_a_given_value_is_an_error"

    class Tests(DriverTests):
        gaps = {name: never("not here")}  # noqa: RUF012

    assert [mark.name for mark in getattr(Tests, name).pytestmark] == ["parametrize", "xfail"]


def test_a_gap_that_names_no_test_is_an_error() -> None:
    with pytest.raises(TypeError, match="test_nonsense, which is no test"):
        type("Tests", (DriverTests,), {"gaps": {"test_nonsense": never("not here")}})


def test_tests_of_a_capability_that_a_driver_lacks_are_not_collected() -> None:
    name = "test_a_scope_does_not_follow_a_fork"

    class Tests(DriverTests):
        lacks = {"fork": "children wait forever"}  # noqa: RUF012

    class Heir(Tests):
        pass

    assert getattr(Tests, name) is getattr(Heir, name) is None
    assert callable(getattr(DriverTests, name))


def test_a_capability_that_no_test_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Tests.lacks names flight; there are auxiliary_state, .*values"):
        type("Tests", (DriverTests,), {"lacks": {"flight": "no wings"}})


def test_the_tests_of_a_suite_are_collected_from_the_foot_of_the_ladder_to_its_top(
    pytestconfig: pytest.Config,
) -> None:
    suite = f"{Path(__file__).with_name('test_fake_driver.py')}::TestFakeDriver"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        suite,
    ]
    listed = children.run(command, cwd=pytestconfig.rootpath).stdout
    names = re.findall(r"::(test_\w+)", listed)
    # The suite marks its gaps anew, so they come after what it inherits.
    order = dict.fromkeys(
        rung_of(name) for name in names if name != "test_an_op_looked_up_before_the_scope_is_seen"
    )
    assert [*order] == [*RUNGS, None]
    assert [rung.title for rung in RUNGS[:3]] == ["the sample", "seeing ops", "contexts"]


def rung_of(test: str) -> type[Rung] | None:
    """Return the rung that a test is on; None for the test of the suite as a whole."""
    return next((rung for rung in RUNGS if test in vars(rung)), None)


def test_a_failure_says_what_was_expected_and_what_a_driver_implements() -> None:
    class Forgetful(FakeDriver):
        def bind(self, site: Any, args: Any, kwargs: Any) -> Any:
            raise NotImplementedError

    sample: Any = SimpleNamespace(numbers=list, tensor=fake.tensor, relu=lambda x: fake.relu(x))
    with attached(Forgetful), pytest.raises(NotImplementedError) as caught:
        DriverTests().test_an_op_computes_in_a_scope_what_it_computes_without_one(sample)
    note = "\n".join(notes(caught.value))
    assert 'on the rung "seeing ops": an op computes in a scope what it computes' in note
    assert "To be written: Forgetful.bind in " in note
    assert "  bind: Return the call with its inputs in schema order." in note


def test_each_rung_names_what_drivers_have() -> None:
    for rung in RUNGS:
        for name in rung.implement:
            assert summary(name), f"no docstring says what {name} is"


def test_a_method_that_a_sample_does_not_have_says_how_to_declare_that() -> None:
    class Poor(Sample):
        pass

    Poor.__abstractmethods__ = frozenset()
    with pytest.raises(NotImplementedError, match=r'no checkpoint; .*lacks = \{"checkpoints": "reason"\}'):
        Poor().checkpoint(fake.relu, fake.tensor([1.0]))


def test_an_attached_driver_is_used_within_its_context_alone() -> None:
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    x = fake.tensor([1.0])
    with amanda.apply(tool):
        fake.relu(x)
    with attached(FakeDriver), attached(FakeDriver), amanda.apply(tool):
        fake.relu(x)
    with amanda.apply(tool):
        fake.relu(x)
    assert names == ["relu"]


def test_without_pytest_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['pytest'] = None; import amanda; import amanda.testing"
    done = children.run([sys.executable, "-c", program])
    assert 'amanda.testing needs pytest: pip install "amanda-core[testing]"' in done.stderr
    assert "another exception" not in done.stderr
