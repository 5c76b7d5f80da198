"""The conformance suite: tests of a driver, from a look at the sample to function transforms."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from amanda import interceptor
from amanda.plan.action import ActionType
from amanda.testing._ladder import Rung
from amanda.testing._sample import Sample, attached
from amanda.testing._suite._backward import BackwardTests, GradientTests
from amanda.testing._suite._caching import CachingTests
from amanda.testing._suite._contexts import ContextTests, SeeingTests
from amanda.testing._suite._identity import IdentityTests
from amanda.testing._suite._order import OrderTests
from amanda.testing._suite._routines import AfterTests, BeforeTests, ReplacementTests
from amanda.testing._suite._samples import SampleTests
from amanda.testing._suite._scopes import ScopeTests, ThreadTests
from amanda.testing._suite._transforms import TransformTests
from amanda.testing._suite._transparency import FailureTests, MemoryTests, TransparencyTests


# The ladder from its top to its foot: pytest collects the bases of a class from the last to the first.
class DriverTests(
    TransformTests,
    MemoryTests,
    TransparencyTests,
    FailureTests,
    ThreadTests,
    ScopeTests,
    OrderTests,
    CachingTests,
    IdentityTests,
    GradientTests,
    BackwardTests,
    ReplacementTests,
    AfterTests,
    BeforeTests,
    ContextTests,
    SeeingTests,
    SampleTests,
    Rung,
):
    """Meanings that hold for every eager driver; a subclass has a fixture `sample` of type `Sample`.

    The tests are a ladder: with `pytest -x` the first failure shows what to write next.
    """

    @pytest.fixture
    def sample(self) -> Sample:
        """The framework under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `sample` that gives a Sample")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests with an argument `point` or `insertion` for each of the passes that the framework has.

        At collection: a test for a pass that the framework lacks would be a gap of every such driver.
        """
        forward_only = "backward" in self.lacks
        if "point" in metafunc.fixturenames:
            # Numbers of POINTS: two of each pass.
            metafunc.parametrize("point", range(2 if forward_only else 4))
        if "insertion" in metafunc.fixturenames:
            actions = [action for action in ActionType if not (forward_only and action.is_backward)]
            metafunc.parametrize("insertion", [action.value for action in actions])

    @pytest.fixture(autouse=True)
    def _attached(self, sample: Sample) -> Iterator[None]:
        """Attach the driver, and have the framework record for autodiff, during a test."""
        with attached(sample.driver), sample.recording_autodiff():
            yield

    def test_the_suite_passes_on_the_pure_python_interceptor(self, request: pytest.FixtureRequest) -> None:
        if not interceptor.NATIVE:
            return
        # In a process of its own, since the interceptor is chosen when it is imported.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if request.config.inipath is not None:
            # The settings of this run, among them the paths of what is tested.
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


RUNGS: tuple[type[Rung], ...] = tuple(
    kind for kind in reversed(DriverTests.__mro__) if "title" in vars(kind) and kind is not Rung
)
"""The rungs of the ladder, from its foot to its top."""
