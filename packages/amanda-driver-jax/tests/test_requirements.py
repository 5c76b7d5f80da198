"""Private names of JAX that are absent."""

from __future__ import annotations

import logging
from importlib import import_module

import pytest
from jax._src import pjit
from jax._src.export import _export

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.drivers.jax._requirements import first_present
from amanda.testing import attached
from amanda.tools.kit import RequiredNames


@pytest.mark.parametrize("module", ["amanda.tools.kit._tensors_host", "amanda.tools.search._libraries"])
def test_jax_has_what_tools_lean_on(module: str) -> None:
    required = [names for names in vars(import_module(module)).values() if isinstance(names, RequiredNames)]
    (jax,) = [names for names in required if names.framework == "jax"]
    jax.check()


def test_a_name_without_which_nothing_is_instrumented_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pjit, "_infer_params")
    with attached(JaxDriver), amanda.apply(amanda.Tool()) as scope:
        pass
    (entry,) = scope.report
    assert "jax._src.pjit._infer_params" in str(entry)


def test_a_name_that_moved_is_found() -> None:
    assert first_present("pjit:_moved", "pjit:_infer_params") == "pjit:_infer_params"
    assert first_present("pjit:_moved", "tree_util:_moved") == "pjit:_moved"


def test_what_is_not_done_without_an_optional_name_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(_export.Exported, "call")
    with caplog.at_level(logging.WARNING, "amanda"), attached(JaxDriver), amanda.apply(amanda.Tool()):
        pass
    assert "exported programs are not reported" in caplog.text
