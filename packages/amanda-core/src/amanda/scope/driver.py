"""The base of drivers, which scopes attach to frameworks, and checks of the names that drivers need."""

from __future__ import annotations

import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from types import CodeType
from typing import Any, ClassVar, NamedTuple

from amanda.errors import DriverError
from amanda.interceptor import codes
from amanda.interceptor.attributes import Patches
from amanda.interceptor.imports import missing_names
from amanda.interceptor.opid import FRAMEWORK
from amanda.namespace import Namespace
from amanda.scope.report import Report

DRIVER_API = 2
"""Number of the driver interface; it grows when a driver written for the last one would break."""

_DRIVERS = "amanda.drivers."


def framework_version(name: str) -> str:
    """Return the version of an imported framework, else of the distribution of its name; "" if unknown."""
    version = getattr(sys.modules[name], "__version__", None)
    if version is None:
        from importlib import metadata  # slow to import, and few frameworks need it

        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
    return str(version or "")


class SelfTestProgram(NamedTuple):
    """A small program by which a driver shows that it serves the version of its framework that runs.

    run: executes one op, and its backward op where the mode has any; returns the op's result, then the
    gradient, as numbers.  op_type, backward_op_type: forward types of the two; "" for none.
    """

    run: Callable[[], Sequence[float]]
    op_type: str
    backward_op_type: str = ""


class Driver(ABC):
    """Interception of one framework, in one or more of its modes, which scopes attach and detach.

    api: the `DRIVER_API` that the driver was written for, as a number.
    framework: import name of the framework.
    packages: import names of other packages whose code is the framework's too.
    modes: what the driver serves, e.g. ("eager",).
    newest_tested: newest release of the framework that the driver's tests ran on, e.g. "2.15"; "" if unknown.
    namespace_tag: name of the framework in namespaces; "" for the last part of its import name.
    private_names: undocumented names of the framework without which nothing is instrumented, as
    "package.module:Class.method"; looked up before `attach`.
    """

    api: ClassVar[int]
    framework: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[tuple[str, ...]]
    newest_tested: ClassVar[str] = ""
    namespace_tag: ClassVar[str] = ""
    private_names: ClassVar[Sequence[str]] = ()

    @cached_property
    def namespace(self) -> Namespace:
        """Return the tags of the ops that this driver brings: framework, its version, and the first mode."""
        version = framework_version(self.framework) or "0"
        # Without a suffix such as "+cu128": a rule for a version holds for all its builds.
        return Namespace(
            f"{self.namespace_tag or self._short_name}/{re.split('[+-]', version)[0]}/{self.modes[0]}"
        )

    @cached_property
    def patches(self) -> Patches:
        """Return the changes that this driver makes to the framework, which `detach` undoes."""
        return Patches()

    def register_framework(self) -> None:
        """Mark the code that is not the user's; called once, before the first `attach`.

        That is the code of the framework's packages, and of the driver's own below `amanda.drivers`.
        """
        for name in (self.framework, *self.packages):
            for root in _code_locations(name):
                codes.add_root(root, FRAMEWORK)
        # Of base classes too: a driver may derive from one of another mode of its framework.
        for kind in type(self).__mro__:
            if kind.__module__.startswith(_DRIVERS):
                package = _DRIVERS + kind.__module__.removeprefix(_DRIVERS).partition(".")[0]
                for root in _code_locations(package):
                    self.skip_code(root)

    def skip_code(self, *code: str | CodeType) -> None:
        """Leave code out of the places of ops: a file, a folder with a slash at its end, or a code object."""
        for place in code:
            codes.skip(place)

    def check_private_names(self) -> None:
        """Raise DriverError, with the release to install, if the framework lacks one of `private_names`."""
        check_private_names(self.private_names, f"{self.modes[0]} mode", self.framework, self.newest_tested)

    @abstractmethod
    def attach(self) -> None:
        """Start to intercept; called when the first scope of the process opens."""

    def on_state_change(self) -> None:  # noqa: B027 - few frameworks cache what they trace
        """Follow the state that has been put in force on the calling thread; called while attached.

        Does nothing unless a driver overrides it.
        """

    def before_detach(self, report: Report) -> None:  # noqa: B027 - few drivers have something to finish
        """Finish what tools have begun, as the last scope closes; called before `detach`.

        Does nothing unless a driver overrides it.
        """

    def detach(self) -> None:
        """Leave the framework as it was found; called after the last scope has closed."""
        self.patches.restore()

    def missing_native_support(self) -> str:
        """Say what native code lacks to read this build of the framework; "" where it lacks nothing."""
        return ""

    def self_test_program(self) -> SelfTestProgram | None:
        """Return a small program for the self-test, which runs on newer versions and in `amanda doctor`.

        None, as unless a driver overrides it, leaves the self-test out. Called while attached.
        """
        return None

    def private_name_count(self) -> int:
        """Return the number of undocumented names of the framework that the driver has found."""
        return len(self.private_names)

    @property
    def _short_name(self) -> str:
        # The last part of the import name, as in "amanda.testing.fake".
        return self.framework.rpartition(".")[2]


def check_private_names(names: Iterable[str], subject: str, framework: str, newest_tested: str) -> None:
    """Raise DriverError where a framework lacks a name; this imports the modules of the names.

    Args:
        names: As in `Driver.private_names`.
        subject: What needs them, in a few words.
        framework: Import name of the framework.
        newest_tested: Newest version of the framework that is tested, for the error.
    """
    absent = ", ".join(name.replace(":", ".") for name in missing_names(names))
    if not absent:
        return
    fix = "install an earlier release, or a newer driver"
    if newest_tested:
        fix = (
            f"the driver was tested with {framework} up to {newest_tested}: "
            f'pip install "{framework}=={newest_tested}.*", or a newer driver'
        )
    version = getattr(sys.modules[framework], "__version__", "")
    raise DriverError(
        f"{framework} {version} lacks {absent}, without which {subject} cannot be instrumented; {fix}"
    )


def code_within(function: Any, name: str) -> CodeType:
    """Return the code of a function that is defined within another, at any depth.

    Args:
        function: Function with the code of the others.
        name: Name of the inner function.

    Raises:
        DriverError: If there is none of the name.
    """
    unsearched: list[CodeType] = [function.__code__]
    while unsearched:
        code = unsearched.pop(0)
        if code.co_name == name and code is not function.__code__:
            return code
        unsearched += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    raise DriverError(f"{function.__module__}.{function.__qualname__} defines no function {name}")


def _code_locations(name: str) -> Iterator[str]:
    """Yield the folders of a package, or the file of a module; nothing if it is not installed."""
    module = sys.modules.get(name)
    try:
        # Found without an import, which might take seconds or fail.
        spec = importlib.util.find_spec(name) if module is None else None
    except (ImportError, ValueError):
        return
    folders = getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if folders:
        yield from (f"{folder}/" for folder in folders)
    elif file:
        yield file
