"""The TensorFlow driver registers, serves no mode, and says so."""

from __future__ import annotations

import pytest

from amanda.backend import DRIVER_API, Driver
from amanda.drivers.tensorflow import TensorFlowDriver
from amanda.errors import DriverError


def test_it_is_a_driver_that_claims_no_mode() -> None:
    assert issubclass(TensorFlowDriver, Driver)
    assert (TensorFlowDriver.api, TensorFlowDriver.framework, TensorFlowDriver.modes) == (
        DRIVER_API,
        "tensorflow",
        (),
    )


def test_attaching_says_that_no_mode_is_served_yet() -> None:
    with pytest.raises(DriverError, match="serves no mode of TensorFlow yet"):
        TensorFlowDriver().attach()


def test_a_scope_reports_it_and_goes_on(tmp_path, monkeypatch, caplog) -> None:
    """With a stand-in module of TensorFlow's name: the driver does not get as far as to use it."""
    import amanda

    (tmp_path / "tensorflow.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with amanda.apply(amanda.Tool()) as scope:
        import tensorflow  # noqa: F401
    monkeypatch.delitem(__import__("sys").modules, "tensorflow")
    assert [entry.what for entry in scope.report] == ["TensorFlowDriver"]
    assert "pip install --upgrade amanda-driver-tf" in str(scope.report)
