"""What several tests look at."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest


@pytest.fixture
def created_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions that are made, the driver's among them."""
    sessions: list[Any] = []
    create = onnxruntime.InferenceSession.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        sessions.append(self)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", recording)
    return sessions
