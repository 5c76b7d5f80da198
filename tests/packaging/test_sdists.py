"""An sdist holds what its tests import, so that they run without the repository."""

from __future__ import annotations

import ast
import configparser
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SUPPORT = [ROOT / "tests" / "support", *ROOT.glob("packages/*/tests/support")]
OF_THE_REPOSITORY = {"testpaths", "norecursedirs", "pythonpath"}


def sdist_settings(package: Path) -> dict[str, Any]:
    settings = tomllib.loads((package / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    sdist: dict[str, Any] = settings["sdist"]
    return sdist


def modules_of(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}


def imported_modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the first part of each name that files below a folder import, with the file."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0], path


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_an_sdist_holds_what_its_tests_import(package: Path) -> None:
    settings = sdist_settings(package)
    assert "tests" in settings["include"]
    supporting = {module for folder in SUPPORT for module in modules_of(folder)}
    sources = [(package / source).resolve() for source in settings["force-include"]]
    included = {module for path in sources if path.is_dir() for module in modules_of(path)}
    included |= {path.stem for path in sources if path.is_file()}
    included |= {path.stem for path in (package / "tests").rglob("*") if path.suffix in ("", ".py")}
    folders = [package / "tests", ROOT / "tests" / "support"]
    imports = (pair for folder in folders for pair in imported_modules(folder))
    assert not [(name, path) for name, path in imports if name in supporting - included]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_file_of_an_sdist_takes_the_place_of_another(package: Path) -> None:
    targets = [
        Path(target, path.name) if source.is_dir() else Path(target)
        for name, target in sdist_settings(package)["force-include"].items()
        for source in [(package / name).resolve()]
        for path in (source.iterdir() if source.is_dir() else [source])
        if path.name != "__pycache__"
    ]
    assert len({*targets}) == len(targets)
    assert not [target for target in targets if (package / target).exists()]


def test_the_settings_of_pytest_are_those_of_the_repository() -> None:
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    parser = configparser.ConfigParser()
    parser.read(ROOT / "tests" / "sdist.ini")
    sdist = dict(parser["pytest"])
    assert sdist.keys() - OF_THE_REPOSITORY == repository.keys() - OF_THE_REPOSITORY
    for name in repository.keys() - OF_THE_REPOSITORY:
        setting = repository[name]
        if isinstance(setting, list):
            words = sdist[name].strip().splitlines() if name == "markers" else shlex.split(sdist[name])
            assert words == setting, name
        else:
            assert sdist[name] == str(setting).lower() or sdist[name] == setting, name
