"""Which versions were tried: sessions write docs/support.json, and docs/support.md is made from it.

`python -m amanda_docs.support KIND VERSION WHAT PYTEST-ARGUMENTS` runs pytest and records its counts.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from packaging.specifiers import SpecifierSet

from amanda_docs.pages import DOCS, ROOT

DATA, PAGE = DOCS / "support.json", DOCS / "support.md"
SUPPORTED = {
    "Python": ("amanda-core", r'requires-python = "(.+)"'),
    "PyTorch": ("amanda-driver-torch", r'"torch(>=.+)"'),
    "TensorFlow": ("amanda-driver-tf", r'tensorflow = \["tensorflow(>=.+)"\]'),
    "MindSpore": ("amanda-driver-mindspore", r'"mindspore(>=[^;]+);'),
    "JAX": ("amanda-driver-jax", r'"jax(>=[^;]+);'),
    "ONNX Runtime": ("amanda-driver-onnxruntime", r'"onnxruntime(>=.+)"'),
}
"""Where the metadata says which versions are meant to work."""
MINORS = {
    "Python": range(10, 15),
    "PyTorch": range(4, 20),
    "TensorFlow": range(16, 30),
    "MindSpore": range(10, 20),
    "JAX": range(10, 20),
    "ONNX Runtime": range(0),
}
HEAD = """# Versions that work

This page lists the versions that the metadata of the distributions allows. For a version with *ran*, the
tests ran on the given machine and date. A version with *expected* is allowed, but was not tested.
No distribution has an upper bound. On a version that is newer than the last that was tested, a driver looks
up every undocumented name that it needs and runs a self-test of one op, as its first scope opens; the report
and `amanda doctor` say what came of it.
The nox sessions `pythons`, `torch_versions`, `tf_versions`, `mindspore`, `jax`, `opdb_onnx`, `opdb_tf`,
`opdb_mindspore` and `opdb_jax` write this page. The last four call every operator under four tools that
change nothing: one that looks, one that gives back the same values, one that gives equal new values, and one
that does so by traceable routines. Every bit of every result and gradient has to be the same. On JAX that
holds for the one that looks: routines keep XLA from fusing operators, which changes last digits.
"""


def record(kind: str, version: str, report: Path, what: str, data: Path = DATA) -> None:
    """Add what a run of pytest came to, in place of an earlier run of the same tests on this version."""
    told = json.loads(data.read_text()) if data.exists() else []
    rows = [row for row in told if (row["kind"], row["version"], row["what"]) != (kind, version, what)]
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        counts = {name: number + int(suite.get(name, 0)) for name, number in counts.items()}
    failed = counts["failures"] + counts["errors"]
    rows.append(
        {
            "kind": kind,
            "version": version,
            "what": what,
            "passed": counts["tests"] - failed - counts["skipped"],
            "failed": failed,
            "not counted": counts["skipped"],
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": f"{platform.system()} {platform.machine()}",
        }
    )
    if told_numbers := _numbers_told(report):
        rows[-1]["calls"] = told_numbers
    rows.sort(key=lambda row: (row["kind"], _numbers(row["version"])))
    data.write_text(json.dumps(rows, indent=1) + "\n")


def _numbers_told(report: Path) -> dict[str, int]:
    """Return sums of the numbers that tests have recorded as properties, such as of calls."""
    sums: dict[str, int] = {}
    for one in ElementTree.parse(report).getroot().iter("property"):
        sums[one.get("name", "")] = sums.get(one.get("name", ""), 0) + int(one.get("value", 0))
    return sums


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page that the data make."""
    parts = [HEAD]
    for kind in SUPPORTED:
        parts.append(f"\n## {kind}\n\n{_allowed(kind)}\n")
        lines = ["", "| version | | tests | passed | failed | skipped, or expected to fail | when, where |"]
        lines += ["|---|---|---|---|---|---|---|", *_lines(kind, rows)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _lines(kind: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    ran = [row for row in rows if row["kind"] == kind]
    minors = {_minor(row["version"]) for row in ran}
    newest = max((_numbers(minor) for minor in minors), default=[])
    # Of versions that came later nothing is expected: the driver tries them as it attaches.
    expected = [
        {"version": minor} for minor in allowed(kind) if minor not in minors and _numbers(minor) < newest
    ]
    for row in sorted([*ran, *expected], key=lambda row: _numbers(row["version"])):
        if "date" in row:
            calls = ", ".join(f"{number:,} {name}" for name, number in row.get("calls", {}).items())
            what = f"{row['what']}: {calls}" if calls else row["what"]
            cells = ["ran", what, row["passed"], row["failed"], row["not counted"]]
            cells.append(f"{row['date']}, {row['machine']}")
        else:
            cells = ["expected", "", "", "", "", ""]
        yield f"| {row['version']} | {' | '.join(map(str, cells))} |"


def allowed(kind: str) -> list[str]:
    """The minor versions that the metadata allows."""
    specifiers = SpecifierSet(_requirement(kind))
    major = 3 if kind == "Python" else 2
    return [one for minor in MINORS[kind] if specifiers.contains(one := f"{major}.{minor}")]


def _requirement(kind: str) -> str:
    distribution, pattern = SUPPORTED[kind]
    found = re.search(pattern, (ROOT / "packages" / distribution / "pyproject.toml").read_text())
    if found is None:
        raise ValueError(f"the metadata of {distribution} does not say which {kind} it is for")
    return found[1]


def _allowed(kind: str) -> str:
    return f"{SUPPORTED[kind][0]} allows `{_requirement(kind)}`."


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def main(kind: str, version: str, what: str, *arguments: str) -> int:
    """Run pytest, record its counts, write the page, and return the exit status of pytest."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # The family whose files hold what tests record of themselves.
        junit = ("-o", "junit_family=xunit1", f"--junitxml={report}")
        command = [sys.executable, "-m", "pytest", *junit, *arguments]
        status = subprocess.run(command, check=False).returncode
        if status in (0, 1):
            record(kind, version, report, what)
            PAGE.write_text(page(json.loads(DATA.read_text())))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
