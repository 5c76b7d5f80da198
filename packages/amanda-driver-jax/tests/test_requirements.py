"""Private names of JAX that are absent."""

from __future__ import annotations

import logging

import pytest
from jax._src import pjit
from jax._src.export import _export

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached
from amanda.tools.kit._requirements import REQUIRED, check


@pytest.mark.parametrize("who", [one for one in REQUIRED if one[1] == "jax"], ids=" ".join)
def test_jax_has_what_tools_lean_on(who: tuple[str, str]) -> None:
    check(*who)


def test_a_name_without_which_nothing_is_instrumented_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pjit, "_infer_params")
    with attached(JaxDriver), amanda.apply(amanda.Tool()) as scope:
        pass
    (entry,) = scope.report
    assert "jax._src.pjit._infer_params" in str(entry)


def test_what_is_not_done_without_an_optional_name_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(_export.Exported, "call")
    with caplog.at_level(logging.WARNING, "amanda"), attached(JaxDriver), amanda.apply(amanda.Tool()):
        pass
    assert "exported programs are not reported" in caplog.text
