"""Rules of mapping and classes of tensors that distributions bring for frameworks that the tools lack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda.testing import FakeDriver, attached, fake
from amanda.tools.kit import TensorsError, _tensors, tensors_of
from amanda.tools.mapping import RuleError, StandardMapping, _mapping

RULE = """
def standard(context):
    context["type"] = "rectifier" if context.get_op().__name__ == "relu" else context.get_op().__name__
"""

TENSORS = """
from amanda.tools.kit import Tensors

class Array:
    def __init__(self, values): self.values = values

class ArrayTensors(Tensors):
    def to_numpy(self, x): return x.values
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution on the path: its name, the entry's value, and the source of `mapping_of_<name>`."""

    def clear() -> None:
        _mapping._installed_entries.cache_clear()
        _tensors._tensors.cache_clear()

    def put(name: str, value: str, source: str, group: str = "amanda.mappings", entry: str = "fake") -> None:
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry} = {value}\n")
        (tmp_path / f"mapping_of_{name}.py").write_text(source)
        clear()

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield put
    clear()
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
    with pytest.raises(RuleError, match=r"of first 1\.0 and .*of second 1\.0 both serve fake"):
        seen()


def array_of_first() -> Any:
    return importlib.import_module("mapping_of_first").Array([1.0, 2.0])


def test_a_distribution_brings_arithmetic_for_its_tensors(install: Install) -> None:
    install("first", "mapping_of_first:ArrayTensors", TENSORS, "amanda.tensors", "mapping_of_first")
    array = array_of_first()
    assert tensors_of(array).to_numpy(array) == [1.0, 2.0]  # type: ignore[comparison-overlap]


def test_tensors_of_a_library_that_nobody_brings_are_converted_by_autoray() -> None:
    assert type(tensors_of(Fraction(1))) is _tensors.Tensors


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            "mapping_of_first:Array",
            r"tensors mapping_of_first:Array of first 1\.0 is .*subclass",
        ),
        ("mapping_of_first:Nothing", r"of first 1\.0 cannot be imported.*upgrade or uninstall"),
    ],
)
def test_a_broken_class_of_tensors_is_an_error_that_names_its_distribution(
    value: str, told: str, install: Install
) -> None:
    install("first", value, TENSORS, "amanda.tensors", "mapping_of_first")
    with pytest.raises(TensorsError, match=told):
        tensors_of(array_of_first())


def test_two_classes_of_tensors_for_one_library_are_an_error_that_names_both(install: Install) -> None:
    install("first", "mapping_of_first:ArrayTensors", TENSORS, "amanda.tensors", "mapping_of_first")
    install("second", "mapping_of_second:ArrayTensors", TENSORS, "amanda.tensors", "mapping_of_first")
    with pytest.raises(TensorsError, match=r"of first 1\.0 and .*of second 1\.0 both serve mapping_of_first"):
        tensors_of(array_of_first())
