"""Versions that distributions ask for."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from amanda.plugins.requirements import fits, unfit_requirements


@pytest.mark.parametrize(
    ("version", "specifier", "fit"),
    [
        ("2.13.0+cpu", "<2.14,>=2.4", True),
        ("2.15.0", "<2.14,>=2.4", False),
        ("2.14.0.dev20260101", "<2.14", False),
        ("2.3.1", ">=2.4", False),
        ("2.4", ">=2.4.0", True),
        ("2.4.0", "==2.4", True),
        ("2.4.1", "==2.4", False),
        ("2.4.1", "==2.4.*", True),
        ("2.4.1", "!=2.4.*", False),
        ("2.4.1", "!=2.4.0", True),
        ("1.4.5", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1!2.0", ">1", True),
        ("0.1.0", "", True),
        ("weekly", "===weekly", True),
    ],
)
def test_a_version_fits_what_is_asked_for(version: str, specifier: str, fit: bool) -> None:
    assert fits(version, specifier) == fit


def test_an_extra_counts_where_all_that_it_asks_for_is_installed(tmp_path: Path) -> None:
    for companion, unfit in (("cffi>=1", ["pluggy"]), ("a-package-that-nobody-has", [])):
        unmet = unfit_requirements(
            driver(tmp_path, "pluggy<1; extra == 'one'", f"{companion}; extra == 'one'")
        )
        assert [requirement.name for requirement in unmet] == unfit


def driver(place: Path, *requirements: str) -> Distribution:
    """An installed distribution that asks for others."""
    place = place / "driver-0.1.dist-info"
    place.mkdir(exist_ok=True)
    lines = "".join(f"Requires-Dist: {text}\n" for text in requirements)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: driver\nVersion: 0.1\n{lines}")
    return Distribution.at(place)


@pytest.mark.parametrize(
    ("requirement", "unfit"),
    [
        ("pluggy<1", True),
        ("pluggy (<1)", True),
        ("pluggy[testing] <1,>=0.1", True),
        ("pluggy>=1", False),
        ("a-package-that-nobody-has<1", False),
        ("pluggy @ https://example.org/pluggy.whl", False),
        ("pluggy<1; extra == 'tensorflow'", True),
        ("pluggy<1; python_version < '3'", False),
        ("pluggy<1; python_version >= '3.8' and (sys_platform == 'none' or os_name != 'none')", True),
        ("pluggy<1; (python_version < '3') and extra == 'all'", False),
        (f"pluggy<1; sys_platform in '{sys.platform} none'", True),
        ("pluggy<1; 'linux' not in sys_platform", True),
    ],
)
def test_what_is_installed_is_compared_with_what_a_distribution_asks_for(
    tmp_path: Path, requirement: str, unfit: bool
) -> None:
    unmet = list(unfit_requirements(driver(tmp_path, requirement)))
    assert [requirement.name for requirement in unmet] == ["pluggy"] * unfit
