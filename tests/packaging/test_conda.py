"""What the recipes for conda-forge say is what the distributions' metadata say."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import children
import pytest
import yaml

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The recipe of each distribution, of sdists that hold their own names."""
    folder = tmp_path_factory.mktemp("dist")
    for name in NAMES:
        (folder / f"{name.replace('-', '_')}-0.2.0.tar.gz").write_text(name)
    children.run([sys.executable, ROOT / ".ci/conda.py", folder], check=True)
    return {name: yaml.safe_load((folder / "conda" / name / "recipe.yaml").read_text()) for name in NAMES}


def test_every_distribution_has_a_recipe_of_its_sdist(recipes: dict[str, dict[str, Any]]) -> None:
    for name, recipe in recipes.items():
        assert recipe["package"]["name"] == name
        assert recipe["source"]["sha256"] == hashlib.sha256(name.encode()).hexdigest()
        assert recipe["source"]["url"].endswith(f"/{name.replace('-', '_')}-${{{{ version }}}}.tar.gz")


def test_requirements_have_the_names_of_conda_forge_and_no_markers(
    recipes: dict[str, dict[str, Any]],
) -> None:
    assert recipes["amanda-driver-torch"]["requirements"]["run"] == [
        "python >=3.10", "amanda-core <0.3,>=0.2", "pytorch >=2.4",
    ]  # fmt: skip
    tools = recipes["amanda-tools"]["requirements"]["run"]
    assert {"ml_dtypes >=0.5", "tomli >=2"} <= set(tools)


def test_the_core_alone_is_built_for_each_platform(recipes: dict[str, dict[str, Any]]) -> None:
    pure = [name for name, recipe in recipes.items() if recipe["build"].get("noarch") == "python"]
    assert pure == [name for name in NAMES if name != "amanda-core"]
    assert recipes["amanda-core"]["requirements"]["build"] == ["${{ compiler('c') }}"]
