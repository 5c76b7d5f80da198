"""Logs of tools' findings by step of a training: TensorBoard, MLflow, W&B, OpenTelemetry, JSON lines.

with amanda.apply(LiveTool(StatsTool(module="layers.*"), TensorBoardWriter("runs/1"), every=50)):
    train()
"""

from amanda.tools.live._callbacks import keras_callback, lightning_callback, transformers_callback
from amanda.tools.live._command import log_tool
from amanda.tools.live._scalars import scalars_of
from amanda.tools.live._tool import LiveTool
from amanda.tools.live._writers import (
    JSONLinesWriter,
    LiveError,
    MLflowWriter,
    OpenTelemetryWriter,
    ScalarWriter,
    TensorBoardWriter,
    WandbWriter,
)

__all__ = [
    "JSONLinesWriter",
    "LiveError",
    "LiveTool",
    "MLflowWriter",
    "OpenTelemetryWriter",
    "ScalarWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "keras_callback",
    "lightning_callback",
    "log_tool",
    "scalars_of",
    "transformers_callback",
]  # fmt: skip
