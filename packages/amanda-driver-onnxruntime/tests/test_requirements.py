"""What the driver says where ONNX Runtime lacks what it needs."""

from __future__ import annotations

import pytest
from onnxruntime.capi.onnxruntime_inference_collection import Session

import amanda
from amanda.drivers.onnxruntime import OnnxRuntimeDriver
from amanda.errors import DriverError


def test_nothing_is_missing_here() -> None:
    OnnxRuntimeDriver().check_private_names()


def test_a_missing_method_is_named_and_the_driver_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Session, "run_async")
    with pytest.raises(DriverError, match=r"lacks .*\.Session\.run_async, .*pip install"):
        OnnxRuntimeDriver().check_private_names()
    with amanda.apply(amanda.Tool()) as scope:
        pass
    assert any("Session.run_async" in reason for _, reason, _ in scope.report)
