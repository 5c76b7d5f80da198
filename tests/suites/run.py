"""Runs test suites of other projects with and without tools: `python tests/suites/run.py [SUITE ...]`.

Each suite of suites.toml runs once without tools and once in each mode of scoped_tests.py. A new failure is
a test that passes without tools and fails in a scope, twice. Prints new failures by kind, then a table by
suite and mode. Exits with 1 if suites.toml does not list a new failure as known, or lists one that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import children
from rich.console import Console
from rich.table import Table
from scoped_tests import MODES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "suites"
TIMEOUT_SECONDS = 300
LIMIT_SECONDS = 7200.0
console = Console(width=max(100, Console().width))
Outcomes = dict[str, tuple[str, str]]
"""By test: passed, failed or skipped, and the message of the error."""


@dataclass
class Suite:
    """A test suite of another project, as suites.toml describes it."""

    name: str
    install: list[str]
    tests: list[str]
    installed: str = ""
    """The package whose own folder holds the tests, beside its code."""
    env: dict[str, str] = field(default_factory=dict)
    known: list[dict[str, str]] = field(default_factory=list)
    jobs: int = 2
    every: int = 1
    """About one test of so many runs."""

    def folder(self) -> Path:
        """Return the folder that `tests` begin in: that of installed packages, or of the unpacked sdist."""
        if self.installed:
            spec = find_spec(self.installed)
            assert spec is not None
            assert spec.origin is not None
            # Not the package itself, whose modules would stand before those of the same names: keras.random.
            return Path(spec.origin).parents[1]
        distribution = self.install[0]
        target = CACHE / distribution
        if not target.exists():
            with TemporaryDirectory() as downloads:
                pip("download", "--no-binary", ":all:", "--no-deps", "--dest", downloads, distribution)
                (archive,) = Path(downloads).glob("*.tar.gz")
                with tarfile.open(archive) as sources:
                    sources.extractall(target, filter="data")
        (unpacked,) = target.iterdir()
        return unpacked

    def run(self, mode: str, tests: Iterable[str]) -> Outcomes:
        """Run tests in a mode, and return their outcomes."""
        start = time.monotonic()
        support = [ROOT / "tests" / "suites", ROOT / "packages" / "amanda-driver-torch" / "tests" / "support"]
        env = {
            **os.environ,
            **self.env,
            "PYTHONPATH": os.pathsep.join(map(str, support)),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # parameters in the order of a set are the same in each process
            "CUDA_VISIBLE_DEVICES": "",
        }
        with TemporaryDirectory() as home:
            outcomes = Path(home, "outcomes.json")
            settings = Path(home, "pytest.ini")
            settings.write_text("[pytest]\npython_files = test_*.py *_test.py\n")
            plugins = ("-p", "scoped_tests", "-p", "no:cacheprovider", "--config-file", str(settings))
            options = ("--under", mode, "--outcomes", str(outcomes), "--every", str(self.every))
            # A process that dies fails the test that it runs, and xdist starts another in its place.
            command = [
                sys.executable, "-m", "pytest", "-q", "--rootdir=.", "--continue-on-collection-errors",
                f"--numprocesses={self.jobs}", f"--timeout={TIMEOUT_SECONDS}",
            ]  # fmt: skip
            output = children.run(
                [*command, *plugins, *options, *tests], limit=LIMIT_SECONDS, cwd=self.folder(), env=env
            )
            if not outcomes.exists():
                raise RuntimeError(
                    f"pytest wrote no outcomes of {self.name}:\n{output.stdout}{output.stderr}"
                )
            found = {test: tuple(outcome) for test, outcome in json.loads(outcomes.read_text()).items()}
        counts = Counter(outcome for outcome, _ in found.values())
        took = f"{(time.monotonic() - start) / 60:.1f} min"
        write(f"{self.name}, {mode}: {counts['passed']} passed, {counts['failed']} failed, {took}")
        return found

    def is_known(self, test: str, mode: str) -> bool:
        """Return True if suites.toml says why a test fails in a mode."""
        return any(matches(known, test, mode) for known in self.known)


def matches(known: Mapping[str, str], test: str, mode: str) -> bool:
    """Return True if an entry of `known` is about a test in a mode; without `modes` it is about each mode."""
    return fnmatch(test, known["test"]) and mode in known.get("modes", " ".join(MODES)).split()


def pip(*arguments: str) -> None:
    """Run pip at the versions of constraints.txt."""
    quiet = ("--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))
    children.run([sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True)


def suites() -> dict[str, Suite]:
    """Return the suites of suites.toml by name."""
    table = tomllib.loads(Path(__file__).with_name("suites.toml").read_text())
    return {name: Suite(name, **settings) for name, settings in table.items()}


def new_failures(suite: Suite, alone: Outcomes, mode: str) -> dict[str, str]:
    """Return the messages of tests that pass without tools and fail in a mode, also when run again.

    A test that fails without tools when it runs again depends on something else, and is not counted.
    """
    passing = {test for test, (outcome, _) in alone.items() if outcome == "passed"}
    failures = {
        test: message for test, (outcome, message) in suite.run(mode, suite.tests).items()
        if outcome == "failed" and test in passing
    }  # fmt: skip
    if not failures:
        return {}
    files = sorted({test.partition("::")[0] for test in failures})
    again, without = suite.run(mode, files), suite.run("nothing", files)
    return {
        test: again[test][1] for test in failures
        if again.get(test, ("", ""))[0] == "failed" and without.get(test, ("", ""))[0] == "passed"
    }  # fmt: skip


def kind(message: str) -> str:
    """Return an error message without numbers, addresses and quoted names, which differ within a kind."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|-?\d[\d.e+-]*", "…", message)[:110]


def report(suite: Suite, alone: Outcomes, failures: Mapping[str, Mapping[str, str]], table: Table) -> bool:
    """Add a suite's row to the table, and print the unexpected; return True if there is any."""
    counts = Counter(outcome for outcome, _ in alone.values())
    cells, unexpected = [], False
    for mode, messages in failures.items():
        unknown = {test: message for test, message in messages.items() if not suite.is_known(test, mode)}
        known = len(messages) - len(unknown)
        cells.append(f"{len(unknown)}" + (f" (+ {known} known)" if known else ""))
        unexpected |= bool(unknown)
        for text, number in Counter(kind(message) for message in unknown.values()).most_common():
            example = next(test for test, message in unknown.items() if kind(message) == text)
            write(f"{suite.name}, {mode}: {number} x {text}\n    {example}")
    for entry in suite.known if suite.every == 1 else []:
        if not any(matches(entry, test, mode) for mode, messages in failures.items() for test in messages):
            write(f"{suite.name}: passes, but is listed as known: {entry['test']}")
            unexpected = True
    table.add_row(suite.name, str(counts["passed"]), str(counts["failed"]), *cells)
    return unexpected


def write(text: str) -> None:
    """Print a text as it is: names of tests have brackets, which rich would take for markup."""
    console.print(text, markup=False, highlight=False)


def main() -> int:
    """Run the suites that the command line names, or all of them."""
    available = suites()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="SUITE", help=f"all if none is named: {', '.join(available)}"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: 2)")
    parser.add_argument("--every", type=int, default=1, help="run about one test of so many (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(available):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    table = Table("suite", "pass", "fail", *(f"new under {mode}" for mode in MODES[1:]))
    unexpected = False
    for suite in [available[name] for name in arguments.names or available]:
        suite.jobs, suite.every = arguments.jobs, arguments.every
        alone = suite.run("nothing", suite.tests)
        if not any(outcome == "passed" for outcome, _ in alone.values()):
            raise RuntimeError(f"no test of {suite.name} passes without tools: {alone}")
        failures = {mode: new_failures(suite, alone, mode) for mode in MODES[1:]}
        unexpected |= report(suite, alone, failures, table)
    console.print(table)
    return int(unexpected)


if __name__ == "__main__":
    sys.exit(main())
