"""What a distribution asks for, compared with what is installed; versions and markers of PEP 440 and 508.

The package `packaging`, which does this in full, is not a dependency of the core.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import zip_longest
from typing import NamedTuple

_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;@)]*)\)?[^;]*(?:;(.*))?$")
_CLAUSE = re.compile(r"(===|~=|==|!=|<=|>=|<|>)\s*([^\s,]+)")
_MARKER = re.compile(r"""(\w+)\s*(===|~=|==|!=|<=|>=|<|>|not in|in)\s*['"]([^'"]*)['"]""")


class Unfit(NamedTuple):
    """A requirement that what is installed does not meet."""

    name: str
    specifier: str
    installed: str


class _Requirement(NamedTuple):
    name: str
    specifier: str
    extra: str
    installed: str | None


def unfit_requirements(dist: Distribution) -> Iterator[Unfit]:
    """Yield what a distribution asks for in another version than is installed, not what is absent.

    What it asks for in an extra counts where all that the extra asks for is installed.
    """
    requirements = [
        requirement for text in dist.requires or () if (requirement := _parse_requirement(text)) is not None
    ]
    # An extra that is not installed as a whole was not asked for by anybody.
    incomplete_extras = {
        requirement.extra
        for requirement in requirements
        if requirement.extra and requirement.installed is None
    }
    for name, specifier, extra, installed in requirements:
        if installed is not None and extra not in incomplete_extras and not fits(installed, specifier):
            yield Unfit(name, specifier, installed)


def _parse_requirement(text: str) -> _Requirement | None:
    """Read a requirement, such as "torch>=2.4; extra == 'torch'".

    None for one that does not apply here, or cannot be read; one by URL takes any version.
    """
    match = _NAME.match(text)
    if match is None:
        return None
    name, specifier, marker = match[1], match[2].replace(" ", ""), match[3] or ""
    if not _marker_applies(marker):
        return None
    comparisons = _MARKER.findall(marker)
    extra = next((value for variable, _, value in comparisons if variable == "extra"), "")
    try:
        installed = distribution(name).version
    except PackageNotFoundError:
        installed = None
    return _Requirement(name, specifier, extra, installed)


def fits(version: str, specifier: str) -> bool:
    """Return True if a version meets every comparison of a specifier, as of "<2.14,>=2.4".

    A pre-release counts as its release, except for "===".
    """
    return all(_satisfies(version, operator, release) for operator, release in _CLAUSE.findall(specifier))


def _satisfies(version: str, operator: str, required: str) -> bool:
    """Return True if a version meets one comparison of a specifier."""
    if operator == "===":
        return version == required
    release, required_release = release_numbers(version), release_numbers(required)
    if operator == "~=":
        required_prefix = required_release[:-1]
        has_prefix = release[: len(required_release) - 1] == required_prefix
        return has_prefix and _compare_releases(release, required_release) >= 0
    if required.endswith(".*"):
        has_prefix = release[: len(required_release)] == required_release
        return has_prefix if operator == "==" else not has_prefix
    order = _compare_releases(release, required_release)
    return {"==": order == 0, "!=": order != 0, "<": order < 0, ">": order > 0,
            "<=": order <= 0, ">=": order >= 0}[operator]  # fmt: skip


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of "2.13.0rc1+cpu"; () where it has none."""
    match = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def _compare_releases(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return a number above 0 for a later first release, below 0 for an earlier one; 2.0 equals 2."""
    differences = [a - b for a, b in zip_longest(first, second, fillvalue=0)]
    return next((difference for difference in differences if difference), 0)


def _marker_applies(marker: str) -> bool:
    """Return True if a requirement holds here, in one extra or another, or cannot be parsed."""
    # Markers become T and F, and `and`, `or` and parentheses are folded until nothing changes.
    text = _MARKER.sub(lambda match: "T" if _comparison_holds(*match.groups()) else "F", marker).strip()
    previous_text = None
    while text != previous_text:
        previous_text = text
        text = re.sub(r"\(\s*([TF])\s*\)", r"\1", text)
        text, and_count = re.subn(r"([TF]) and ([TF])", lambda m: "T" if m[1] == m[2] == "T" else "F", text)
        if not and_count:
            text = re.sub(r"([TF]) or ([TF])", lambda m: "T" if "T" in m.groups() else "F", text)
    return text != "F"


def _comparison_holds(name: str, operator: str, value: str) -> bool:
    """Return True if a marker's comparison holds on this system; unknown names hold."""
    present_value = _marker_environment().get(name)
    # Unknown here, so the requirement counts: to ask too much is said, to ask too little would be silent.
    if present_value is None:  # also an `extra`
        return True
    if name.endswith("_version"):
        return fits(present_value, f"{operator}{value}")
    return {"==": present_value == value, "!=": present_value != value, "in": present_value in value,
            "not in": present_value not in value}.get(operator, True)  # fmt: skip


def _marker_environment() -> dict[str, str]:
    """Return the values of the environment markers of PEP 508."""
    return {
        "python_version": ".".join(map(str, sys.version_info[:2])),
        "python_full_version": platform.python_version(),
        "implementation_name": sys.implementation.name,
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_system": platform.system(),
        "sys_platform": sys.platform,
    }
