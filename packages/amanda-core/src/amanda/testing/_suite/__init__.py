"""The conformance suite: the numbered meanings of the design, each as tests of a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from amanda import interceptor
from amanda.testing._attached import attached
from amanda.testing._sample import Sample
from amanda.testing._suite._caching import CachingTests
from amanda.testing._suite._contexts import ContextTests
from amanda.testing._suite._failure import FailureTests
from amanda.testing._suite._identity import IdentityTests
from amanda.testing._suite._inputs import InputTests
from amanda.testing._suite._isolation import IsolationTests
from amanda.testing._suite._order import OrderTests
from amanda.testing._suite._routines import RoutineTests
from amanda.testing._suite._scopes import ScopeTests
from amanda.testing._suite._transparency import TransparencyTests


class DriverTests(
    InputTests,
    ContextTests,
    IdentityTests,
    CachingTests,
    IsolationTests,
    RoutineTests,
    OrderTests,
    ScopeTests,
    TransparencyTests,
    FailureTests,
):
    """What holds for every eager driver; a subclass has a fixture `sample` that gives its `Sample`.

    gaps: marks of the tests that do not pass yet, by name: `notimpl`, `notyet` or `never`.
    """

    gaps: ClassVar[dict[str, pytest.MarkDecorator]] = {}

    @pytest.fixture
    def sample(self) -> Sample:
        """The framework under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `sample` that gives a Sample")

    @pytest.fixture(autouse=True)
    def _attached(self, sample: Sample) -> Iterator[None]:
        with attached(sample.driver):
            yield

    def test_the_suite_passes_on_the_pure_python_interceptor(self, request: pytest.FixtureRequest) -> None:
        if not interceptor.NATIVE:
            return
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if request.config.inipath is not None:
            command += ["-c", str(request.config.inipath)]
        done = subprocess.run(
            [*command, f"{request.path}::{type(self).__name__}"],
            env={**os.environ, "AMANDA_NATIVE": "0"},
            cwd=request.config.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-8000:]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, mark in vars(cls).get("gaps", {}).items():
            test = getattr(cls, name, None)
            if not isinstance(test, types.FunctionType):
                raise TypeError(f"{cls.__name__}.gaps names {name}, which is no test of the suite")
            setattr(cls, name, mark(_copied(test)))


def _copied(test: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__dict__.update({**vars(test), "pytestmark": list(getattr(test, "pytestmark", []))})
    return copy
