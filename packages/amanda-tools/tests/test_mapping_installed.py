"""Rules of StandardMapping that a distribution brings, for a framework that the tools do not know."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import amanda
from amanda.testing import FakeDriver, attached, fake
from amanda.tools.mapping import RuleError, StandardMapping, _installed

RULE = """
def standard(context):
    context["type"] = "rectifier" if context.get_op().__name__ == "relu" else context.get_op().__name__
"""

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution on the path: its name, the entry's value, and the source of `mapping_of_<name>`."""

    def put(name: str, value: str, source: str) -> None:
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[amanda.mappings]\nfake = {value}\n")
        (tmp_path / f"mapping_of_{name}.py").write_text(source)
        _installed._entries.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield put
    _installed._entries.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("mapping_of_"):
            del sys.modules[module]


class Types(amanda.Tool):
    """Keeps the words of the ops that it meets."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.depends_on(StandardMapping())
        self.add_inst_for_op(lambda context: self.seen.append(context["type"]))


def seen() -> list[str]:
    types = Types()
    with attached(FakeDriver), amanda.apply(types):
        fake.relu(fake.add(fake.tensor([1.0]), fake.tensor([-2.0])))
    return types.seen


def test_a_distributions_rule_maps_the_ops_of_its_framework(install: Install) -> None:
    install("first", "mapping_of_first:standard", RULE)
    assert seen() == ["add", "rectifier"]


def test_a_rule_is_imported_at_the_first_op_alone(install: Install) -> None:
    install("first", "mapping_of_first:standard", RULE)
    StandardMapping()
    assert "mapping_of_first" not in sys.modules


def test_a_rule_that_cannot_be_imported_is_an_error_that_names_its_distribution(install: Install) -> None:
    install("first", "mapping_of_first:standard", "import nothing_of_that_name")
    with pytest.raises(RuleError, match=r"mapping_of_first:standard of first 1\.0.*nothing_of_that_name"):
        seen()


def test_a_rule_that_is_no_function_is_an_error(install: Install) -> None:
    install("first", "mapping_of_first:standard", "standard = 3")
    with pytest.raises(RuleError, match=r"of first 1\.0 is 3"):
        seen()


def test_two_rules_for_one_framework_are_an_error_that_names_both(install: Install) -> None:
    install("first", "mapping_of_first:standard", RULE)
    install("second", "mapping_of_second:standard", RULE)
    with pytest.raises(RuleError, match=r"of first 1\.0 and .*of second 1\.0 both map the ops of fake"):
        seen()
