"""What a release needs: metadata, a citation, changelogs, warnings of what goes."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def settings(distribution: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((distribution / "pyproject.toml").read_text())
    return found


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_the_metadata_is_complete(distribution: Path) -> None:
    project = settings(distribution)["project"]
    assert project["name"] == distribution.name
    for key in (
        "version",
        "description",
        "readme",
        "license",
        "license-files",
        "authors",
        "keywords",
        "urls",
    ):
        assert project[key], key
    assert project["requires-python"] == ">=3.10"
    assert "Typing :: Typed" in project["classifiers"]
    minors = {line.rpartition(".")[2] for line in project["classifiers"] if ":: Python :: 3." in line}
    assert {"10", "11", "12"} <= minors <= {"10", "11", "12", "13", "14"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_the_changelog_is_of_this_version(distribution: Path) -> None:
    found = settings(distribution)
    towncrier = found["tool"]["towncrier"]
    assert (towncrier["name"], towncrier["version"]) == (distribution.name, found["project"]["version"])
    assert towncrier["start_string"] in (distribution / towncrier["filename"]).read_text()


def test_the_changelog_of_the_project_begins_with_the_version_of_the_core() -> None:
    core = settings(ROOT / "packages/amanda-core")["project"]["version"]
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == core


def test_pushes_and_pull_requests_run_the_suite() -> None:
    workflow = yaml.load((ROOT / ".github/workflows/tests.yml").read_text(), yaml.BaseLoader)
    assert {"push", "pull_request"} == set(workflow["on"])
    matrix = workflow["jobs"]["suite"]["strategy"]["matrix"]
    assert {one["os"] for one in matrix["include"]} | set(matrix["os"]) == {
        f"{system}-latest" for system in ("ubuntu", "macos", "windows")
    }
    sessions = {"types", "lint", "tests", "tests_slow", "release", "docs", "recipes"}
    assert sessions <= set(" ".join(matrix["command"]).split())


def test_what_takes_hours_runs_each_night() -> None:
    workflow = yaml.load((ROOT / ".github/workflows/nightly.yml").read_text(), yaml.BaseLoader)
    assert "schedule" in workflow["on"]
    commands = " ".join(workflow["jobs"]["session"]["strategy"]["matrix"]["command"]).split()
    sessions = {"suites", "opdb", "zoo", "zoo_tf", "fuzz", "soak", "jax", "mindspore"}
    assert sessions <= set(commands)
    suites = tomllib.loads((ROOT / "tests/suites/suites.toml").read_text())
    assert set(suites) <= set(commands)


def test_distributions_bound_the_core_by_its_minor() -> None:
    core = Version(settings(ROOT / "packages/amanda-core")["project"]["version"])
    bounds = f"amanda-core>={core.major}.{core.minor},<{core.major}.{core.minor + 1}"
    others = [path for path in DISTRIBUTIONS if path.name != "amanda-core"]
    assert [path.name for path in others if bounds not in settings(path)["project"]["dependencies"]] == []


def test_every_distribution_has_the_licence_of_the_project() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert [path.name for path in DISTRIBUTIONS if (path / "LICENSE").read_text() != licence] == []


def test_the_extras_that_pages_name_exist() -> None:
    extras = {path.name: settings(path)["project"].get("optional-dependencies", {}) for path in DISTRIBUTIONS}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    named = 0
    for page in pages:
        for distribution, listed in re.findall(r"(amanda-[\w-]+)\[([\w,-]+)\]", page.read_text()):
            for extra in listed.split(","):
                assert extra in extras[distribution], f"{page} names {distribution}[{extra}]"
                named += 1
    assert named > 5


def test_every_driver_and_the_tools_are_extras_of_the_core() -> None:
    extras = settings(ROOT / "packages/amanda-core")["project"]["optional-dependencies"]
    listed = " ".join(line for lines in extras.values() for line in lines)
    assert [path.name for path in DISTRIBUTIONS[1:] if path.name not in listed] == []


def test_the_citation_is_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = citation["preferred-citation"]
    assert citation["cff-version"] == "1.2.0"
    assert len(paper["authors"]) == 13
    for path in DISTRIBUTIONS:
        assert settings(path)["project"]["urls"]["Paper"].endswith(paper["doi"])


MECHANISM = ("deprecated", "renamed", "warn_deprecated")


def deprecations() -> Iterator[tuple[Path, Any, Any]]:
    """Yield where sources say what is deprecated, since when, and the version that removes it."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "deprecated" in text or "renamed(" in text else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) in MECHANISM:
                values = {keyword.arg: keyword.value for keyword in call.keywords}
                values |= dict(zip(("name", "use", "since", "gone"), call.args, strict=False))
                yield path, values["since"], values["gone"]


def test_what_is_deprecated_says_when_it_goes_and_is_not_due() -> None:
    versions = {path.name: Version(settings(path)["project"]["version"]) for path in DISTRIBUTIONS}
    mechanism = ROOT / "packages/amanda-core/src/amanda/options/checking.py"
    for path, since, gone in deprecations():
        if path != mechanism:
            distribution, version = ast.literal_eval(since).split()
            first, last = Version(version), Version(ast.literal_eval(gone))
            assert first <= versions[distribution] < last, f"{path}: what it warns of is to go"
            assert last.minor - first.minor >= 2, f"{path}: docs/deprecation.md promises two versions"


def test_every_deprecation_goes_through_the_mechanism() -> None:
    mechanism = ROOT / "packages/amanda-core/src/amanda/options/checking.py"
    warned = [
        path for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
        if "DeprecationWarning," in path.read_text()
    ]  # fmt: skip
    assert warned == [mechanism]
