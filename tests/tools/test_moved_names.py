"""Names of the kit that are in other packages now work for some versions, and warn."""

from __future__ import annotations

import importlib

import pytest

import amanda.tools.command as command
import amanda.tools.kit as kit


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("WeightTool", "amanda.tools.weights"),
        ("weight_input", "amanda.tools.weights"),
        ("BitField", "amanda.tools.inject"),
        ("rerun", "amanda.tools.rerun"),
        ("canonical", "amanda.tools.axes"),
        ("Dataflow", "amanda.tools.dataflow"),
        ("Progress", "amanda.tools.trials"),
        ("Globs", "amanda.tools.select"),
        ("TensorMap", "amanda.backend"),
        ("read_onnx", "amanda.tools.onnx_graph"),
    ],
)
def test_a_name_that_moved_is_found_with_a_warning(name: str, package: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"amanda.tools.kit.{name} .* use {package}.{name}") as caught:
        value = getattr(kit, name)
    assert value is getattr(importlib.import_module(package), name)
    assert caught[0].filename == __file__


def test_every_name_that_moved_is_where_the_warning_says() -> None:
    for name, package in kit._MOVED.items():
        assert hasattr(importlib.import_module(package), name)


def test_the_function_that_makes_tools_has_its_former_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"command\.made .* use amanda\.tools\.command\.make_tools"):
        assert command.made is command.make_tools


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        kit.no_such_name  # noqa: B018
