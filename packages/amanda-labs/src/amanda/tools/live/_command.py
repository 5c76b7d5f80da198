"""The options `log` and `every` of `amanda run`: a tool that is logged to a writer by its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import amanda
from amanda.errors import did_you_mean
from amanda.tools.command import Session
from amanda.tools.live._tool import LiveTool
from amanda.tools.live._writers import (
    JSONLinesWriter,
    LiveError,
    MLflowWriter,
    OpenTelemetryWriter,
    ScalarWriter,
    TensorBoardWriter,
    WandbWriter,
    begin_run,
)

logger = logging.getLogger("amanda")

_WRITERS: Mapping[str, Callable[..., ScalarWriter]] = {
    "tensorboard": TensorBoardWriter,
    "mlflow": MLflowWriter,
    "wandb": WandbWriter,
    "opentelemetry": OpenTelemetryWriter,
    "jsonl": lambda file="live.jsonl": JSONLinesWriter(file),
}


def log_tool(tool: amanda.Tool, log: str, every: int) -> LiveTool:
    """Return a tool that logs another one to a writer by its name: "tensorboard", "jsonl:stats.jsonl".

    Of the processes of a program the first logs, which may be a rank.  Calls with one `log` share a writer.

    Args:
        tool: Tool whose result is logged.
        log: Name of the writer.  Behind a colon may follow the folder of "tensorboard", the file of "jsonl",
            the experiment of "mlflow" or the project of "wandb".
        every: Steps from one record to the next.

    Raises:
        LiveError: For another writer, and for a tool that cannot be logged.
    """
    kind, colon, place = log.partition(":")
    if kind not in _WRITERS:
        names = did_you_mean(kind, _WRITERS)
        # `log` alone is read as a switch that is on.
        fault = "log names no writer" if log == "true" else f"there is no writer {kind!r}"
        raise LiveError(f"{fault}; {names}")
    if log not in _writer_by_log:
        writer = _WRITERS[kind](place) if colon else _WRITERS[kind]()
        _writer_by_log[log] = _FirstProcessWriter(writer)
    return LiveTool(tool, _writer_by_log[log], every)


_writer_by_log: dict[str, _FirstProcessWriter] = {}
"""Writers of this process, by the texts that name them: tools that name the same place share its writer."""


class _FirstProcessWriter:
    """A writer that writes in the first process of a program alone; others have no run of their own."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer: Any = writer
        self._has_logged_place = False

    @property
    def _is_in_first_process(self) -> bool:
        session = Session.present()
        return session is None or session.label.partition(".restart")[0] in ("main", "rank0")

    def begin(self, step: int) -> None:
        if self._is_in_first_process:
            begin_run(self._writer, step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step, if this is the first process; log the place of the writer once."""
        if self._is_in_first_process:
            self._writer.scalars(step, values)
            if not self._has_logged_place:
                # At once: whoever watches has to know where.
                logger.warning("steps are logged to %s", self, extra={"live": True})
                self._has_logged_place = True

    def close(self) -> None:
        self._writer.close()

    def __str__(self) -> str:
        return str(self._writer)
