"""What `amanda.testing` offers beside the suite: gaps, markers, and a word where pytest is absent."""

from __future__ import annotations

import sys
from typing import Any

import children
import pytest

import amanda
from amanda.testing import DriverTests, FakeDriver, attached, fake, never, notimpl, notyet

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
    with pytest.raises(TypeError, match=r"Tests.lacks names flight; there are backward, .*values"):
        type("Tests", (DriverTests,), {"lacks": {"flight": "no wings"}})


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
