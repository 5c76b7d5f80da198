"""Recipes for conda-forge of the sdists in a folder: `python .ci/conda.py dist` fills dist/conda."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONDA = {"torch": "pytorch", "ml-dtypes": "ml_dtypes"}
"""Names of conda-forge where they differ from those of PyPI."""
NATIVE = {"amanda-core"}
"""Distributions with C code, which conda-forge builds for each platform and Python."""


def recipe(name: str, sdist: Path) -> dict[str, Any]:
    """Return the recipe of a distribution, in version 1 of conda-forge's format."""
    settings = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())
    project, pip = settings["project"], "python -m pip install . -vv --no-deps --no-build-isolation"
    build: dict[str, Any] = {"number": 0, "script": pip}
    if name not in NATIVE:
        scripts = [f"{script} = {goal}" for script, goal in project.get("scripts", {}).items()]
        build |= {"noarch": "python"} | ({"python": {"entry_points": scripts}} if scripts else {})
    python = f"python {project['requires-python']}"
    found = {
        "host": [python, "pip", *map(requirement, settings["build-system"]["requires"])],
        "run": [python, *map(requirement, project["dependencies"])],
    }
    if name in NATIVE:
        found = {"build": ["${{ compiler('c') }}"], **found}
    archive = f"{name[0]}/{name}/{name.replace('-', '_')}-${{{{ version }}}}.tar.gz"
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    return {
        "schema_version": 1,
        "context": {"version": project["version"]},
        "package": {"name": name, "version": "${{ version }}"},
        "source": {"url": f"https://pypi.org/packages/source/{archive}", "sha256": digest},
        "build": build,
        "requirements": found,
        "tests": [{"python": {"imports": ["amanda"], "pip_check": True}}],
        "about": {
            "homepage": project["urls"]["Paper"],
            "license": project["license"],
            "license_file": project["license-files"],
            "summary": project["description"],
        },
    }


def requirement(text: str) -> str:
    """Return a requirement in conda's words; those of some Pythons alone are asked for on all."""
    found = Requirement(text)
    return f"{CONDA.get(found.name, found.name)} {found.specifier}".rstrip()


def main(folder: Path) -> None:
    """Write the recipe of each distribution of which the folder has an sdist."""
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        name = path.parent.name
        for sdist in folder.glob(f"{name.replace('-', '_')}-*.tar.gz"):
            place = folder / "conda" / name
            place.mkdir(parents=True, exist_ok=True)
            (place / "recipe.yaml").write_text(
                yaml.safe_dump(recipe(name, sdist), sort_keys=False, width=110)
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
