"""Programs that are run to be compared: functions, and command lines in processes of their own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import AmandaError
from amanda.options import Name, NonNegativeInt, checked
from amanda.tools.diff._run import Compiled, Run, run_of
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.kit import leaves, tensors_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 8 << 30
"""Bytes of tensors that are kept of a run."""
Extra = tuple[type[amanda.Tool], Mapping[str, Any]]
"""A tool besides the one that records, and its options."""


@dataclass
class FunctionProgram:
    """A function and what it is called with; returned: what it gave at its last run."""

    call: Callable[..., Any]
    inputs: Sequence[Any]
    compiled: Compiled
    max_bytes: int
    returned: list[NDArray[Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name for messages."""
        return getattr(self.call, "__qualname__", type(self.call).__name__)

    def record(self, folder: Path, *extra: Extra) -> Run:
        """Run under a `DumpTool` that keeps all tensors but inputs.

        Of compiled code, what the function returns is kept too: the compiler has the last word on it.
        """
        tool = DumpTool(folder, **_dump_options(self.max_bytes))
        extra_tools = [kind(**options) for kind, options in extra]
        try:
            with amanda.apply(*extra_tools, tool, compiled=self.compiled):
                returned = self.call(*self.inputs)
        except BaseException:
            tool.clear()  # else it would be written when the folder is gone
            raise
        if self.compiled == "instrument":
            tool.add_returned(returned)
        result = tool.result
        if not result.entries:
            raise AmandaError(f"{self.name} executed no op that could be compared")
        if result.failure:
            raise AmandaError(f"what {self.name} computed cannot be kept: {result.failure}")
        remarks = [
            f"{text}: {', '.join(sorted(words))}"
            for extra_tool in extra_tools for text, words in _tool_remarks(extra_tool)
        ]  # fmt: skip
        run = replace(run_of(_complete_dump(result.folder, self.name)), name=self.name, remarks=remarks)
        self.returned = _arrays(returned) if run.in_graph else []
        return run

    def unobserved(self) -> list[NDArray[Any]]:
        """Return what the function gives without any tool."""
        return _arrays(self.call(*self.inputs))


@checked
@dataclass
class Command:
    """Command line of a program, which runs under `amanda run`.  python: its interpreter."""

    line: Name
    compiled: Compiled = "instrument"
    max_bytes: NonNegativeInt = MAX_BYTES
    python: Name = sys.executable

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.line

    def record(self, folder: Path, *extra: Extra) -> Run:
        """Run the program under a `DumpTool`; its output goes to standard error.

        Raises AmandaError for a program that fails or executes no op.
        """
        tools = [(f"{kind.__module__}.{kind.__qualname__}", options) for kind, options in extra]
        tools.append(("dump", {"folder": folder, **_dump_options(self.max_bytes)}))
        under = [
            part for name, options in tools
            for part in ("-t", f"{name}:{','.join(f'{key}={_text(x)}' for key, x in options.items())}")
        ]  # fmt: skip
        command = [self.python, "-m", "amanda", "run", "-q", "--compiled", self.compiled, *under]
        try:
            done = subprocess.run([*command, "--", *shlex.split(self.line)], stdout=sys.stderr.fileno())
        except OSError as error:
            raise AmandaError(f"{self.python} cannot be run: {error.strerror}") from None
        if done.returncode:
            self._check_interpreter()
            raise AmandaError(f"{self.line!r} ended with {_status(done.returncode)}")
        dump_folder = folder if (folder / "index.json").exists() else folder / "rank0"
        if not (dump_folder / "index.json").exists():
            raise AmandaError(f"{self.line!r} executed no op that could be compared")
        run = run_of(_complete_dump(dump_folder, repr(self.line)))
        remarks = [] if dump_folder == folder else ["Of several ranks, rank 0 alone was compared"]
        return replace(run, name=self.line, remarks=remarks)

    def _check_interpreter(self) -> None:
        """Raise AmandaError if Amanda cannot be imported where the program ran."""
        if self.python == sys.executable:
            return
        code = "import amanda.__main__, amanda.tools.dump"
        tried = subprocess.run([self.python, "-c", code], capture_output=True, text=True, errors="replace")
        reason = tried.stderr.strip().rpartition("\n")[2]
        if "ImportError" in reason or "ModuleNotFoundError" in reason:
            raise AmandaError(
                f"{self.python} does not have Amanda ({reason}); install it there, with the driver of the "
                f"framework: {self.python} -m pip install amanda-tools amanda-driver-torch"
            )
        if tried.returncode:
            raise AmandaError(
                f"{self.python} runs no Python code: it ended with {_status(tried.returncode)}"
                f"{reason and f' ({reason})'}; give the interpreter of an environment that has Amanda"
            )


Program = FunctionProgram | Command


def _complete_dump(folder: Path, program: str) -> Dump:
    """Return the dump of a program; raise AmandaError where something could not be written."""
    dump = Dump(folder)
    if dump.incomplete:
        raise AmandaError(
            f"what {program} computed could not all be written to {folder}, so nothing is compared"
        )
    return dump


def _status(code: int) -> str:
    """Return the status of a process in words, or the signal that ended the process."""
    try:
        return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _dump_options(max_bytes: int) -> dict[str, Any]:
    """Return the options of a `DumpTool` that keeps all tensors but inputs."""
    return {
        "inputs": "summary", "outputs": "full", "weights": "full", "gradients": "full", "executions": None,
        "max_bytes": max_bytes, "max_tensor_bytes": max_bytes,
    }  # fmt: skip


def _text(value: Any) -> str:
    text = "none" if value is None else os.fspath(value) if isinstance(value, Path) else str(value)
    return f"'{text}'" if "," in text else text


def _arrays(value: Any) -> list[NDArray[Any]]:
    """Return the tensors in what a function gave."""
    tensors = [leaf for leaf in leaves([value], structures=True) if hasattr(leaf, "shape")]
    dense = [(tensors_of(tensor), tensors_of(tensor).dense(tensor)) for tensor in tensors]
    return [library.exact(tensor) for library, tensor in dense if tensor is not None]


def _tool_remarks(tool: amanda.Tool) -> list[tuple[str, set[str]]]:
    """Return what a tool could not do, in sets of words."""
    attributes = {"ops without float64 ran in float32": "narrow", "an op kept values of its own": "reasons"}
    return [(text, words) for text, name in attributes.items() if (words := getattr(tool, name, None))]
