"""Versions that do not fit: a framework newer than the last that was tested, a package that breaks one."""

from __future__ import annotations

import logging
import sys
import types
from importlib import metadata

import pytest

import amanda
from amanda.backend import SelfTestProgram
from amanda.plugins.entries import ImportFailure, run_import
from amanda.scope.attachment import attachment
from amanda.scope.driver import framework_version
from amanda.testing import FakeDriver, attached, fake


class NewerDriver(FakeDriver):
    """A driver whose tests ran on an older version."""

    newest_tested = "0.9"


class DeafDriver(NewerDriver):
    """A driver that sees another op than it says."""

    def self_test_program(self) -> SelfTestProgram:
        """Return a program without the op."""
        return super().self_test_program()._replace(op_type="matmul")


class FailingDriver(NewerDriver):
    """A driver whose program cannot run on this version."""

    def self_test_program(self) -> SelfTestProgram:
        """Return a program that raises."""
        return SelfTestProgram(lambda: [1 / 0], "relu")


class UntriedDriver(NewerDriver):
    """A driver without a program."""

    def self_test_program(self) -> None:
        """Return None."""


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test be the first of its process."""
    monkeypatch.setattr(attachment, "_tried_drivers", set())


def test_a_newer_version_is_said_once_with_the_number_of_checks(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_type()))
    with attached(NewerDriver):
        with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool) as scope:
            fake.mul(fake.tensor([1.0]), 2.0)
        with amanda.apply(tool) as second:
            pass
    assert [entry.reason for entry in scope.report] == [
        "1.0 is newer than the last that was tested (0.9); 7 checks passed"
    ]
    assert len(caplog.records) == 1
    assert second.report == []
    # The program's tools see nothing of the self-test.
    assert seen == ["mul"]


def test_a_version_that_was_tested_is_not_mentioned() -> None:
    with attached(FakeDriver), amanda.apply(amanda.Tool()) as scope:
        pass
    assert scope.report == []


def test_a_framework_without_a_version_has_that_of_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake, "__version__")
    assert framework_version(fake.__name__) == ""
    assert str(FakeDriver().namespace).split("/")[1] == "0"
    module = types.ModuleType("amanda-core")
    monkeypatch.setitem(sys.modules, "amanda-core", module)
    assert framework_version("amanda-core") == metadata.version("amanda-core")


def test_a_driver_without_a_program_is_attached_and_the_version_is_said() -> None:
    with attached(UntriedDriver), amanda.apply(amanda.Tool()) as scope:
        pass
    assert [entry.reason for entry in scope.report] == ["1.0 is newer than the last that was tested (0.9)"]


@pytest.mark.parametrize(
    ("driver", "failure"),
    [
        (DeafDriver, "of matmul tools did not see its op, a routine before it, a routine after it"),
        (FailingDriver, "relu raises ZeroDivisionError"),
    ],
)
def test_a_driver_that_fails_its_self_test_is_not_used(driver: type[NewerDriver], failure: str) -> None:
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_type()))
    for _ in range(2):
        with attached(driver), amanda.apply(tool) as scope:
            assert fake.mul(fake.tensor([1.0]), 2.0).numbers == [2.0]
        (entry,) = scope.report
        assert entry.what == driver.__name__
        assert "1.0 is newer than the last that was tested (0.9)" in entry.reason
        assert failure in entry.reason
    assert seen == []


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (AttributeError("module 'pluggy' has no attribute 'bool'"), "pip install another version of pluggy"),
        (
            ImportError("cannot import name 'x' from 'pluggy' (a file)"),
            "pip install another version of pluggy",
        ),
        (AttributeError("module 'frame' has no attribute 'bool'"), "reinstall"),
        (AttributeError("module 'nobody_has_this' has no attribute 'bool'"), "reinstall"),
        (RuntimeError("no accelerator"), "reinstall"),
    ],
)
def test_a_package_that_does_not_fit_a_framework_is_named(error: Exception, fix: str) -> None:
    def load() -> None:
        raise error

    with pytest.raises(ImportFailure) as failure:
        run_import(load)
    assert failure.value.fix("reinstall", "frame").endswith(fix)
