"""The runs of one comparison: a, b, the control of a, and b with a value of a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast, get_args

from amanda.errors import AmandaError
from amanda.tools.diff._compare import Pair, array_distance
from amanda.tools.diff._comparing import MARGIN, Comparing, Expected
from amanda.tools.diff._failing import failing
from amanda.tools.diff._float64 import Float64Tool
from amanda.tools.diff._programs import Command, Extra, Function, Program
from amanda.tools.diff._replaced import ReplacedTool
from amanda.tools.diff._run import Compiled, Run, Source, open_run
from amanda.tools.diff._start import Start
from amanda.tools.kit import Tensors

Control = Literal["again", "float64", "auto"]
_REPEATED = frozenset({"pytorch", "onnxruntime"})
"""Frameworks whose functions start from the same state each time."""


class Runs:
    """The runs a and b, which are recorded in a folder where they are programs.

    told: sentences on how they ran.  recorded: runs by "a", "b" and, if there is one, "control".
    failure: the op of b that fails where it is compiled, and the failure in words.
    """

    def __init__(
        self, folder: Path, a: Source, b: Source, inputs: Sequence[Any], compiled: Compiled, max_bytes: int
    ) -> None:
        self._folder = folder

        def program(source: Source) -> Program | None:
            if isinstance(source, Command):
                return source
            return Function(source, inputs, compiled, max_bytes) if callable(source) else None

        self._programs = program(a), program(b)
        if inputs and not any(isinstance(one, Function) for one in self._programs):
            raise AmandaError(f"{len(inputs)} inputs were given, and neither a nor b is a function to call")
        self._start: Start | None = None
        self.told: list[str] = []
        self.failure: tuple[int, str] | None = None
        self.a, self.b = (
            open_run(source, label) if one is None else self._first(label, one)
            for label, source, one in zip("ab", (a, b), self._programs, strict=True)
        )
        for one in (self.a, self.b):
            self.told += one.told
        self.recorded = {"a": self.a, "b": self.b}

    def _first(self, label: str, program: Program) -> Run:
        """Record a or b; where compiled code of b fails, with eager ops from the one that fails on."""
        try:
            run = self._record(label, program)
        except Exception as error:
            if label == "a" or program.compiled == "eager":
                raise
            tries = count()
            run, op = failing(lambda tool: self._record(f"b{next(tries)}", program, tool), error)
            cause = getattr(error, "inner_exception", error)
            line = str(cause).strip().partition("\n")[0]
            self.failure = (
                op,
                f"{type(cause).__name__} ({line}) where it is compiled, none where it is eager code",
            )
            self.told.append("Ops of b from the one that fails on ran as eager code")
            return run
        if isinstance(program, Function) and run.in_graph and run.framework in _REPEATED:
            self._begin(program)
            try:
                self.told += _observed(label, program.returned, program.unobserved())
            except Exception as error:
                self.told.append(
                    f"{label} raised {type(error).__name__} without a tool, and nothing with one"
                )
        return run

    def _record(self, label: str, program: Program, *extra: Extra) -> Run:
        self._begin(program)
        return program.record(self._folder / label, *extra)

    def _begin(self, program: Program) -> None:
        """Bring the process to the state that its first run started from."""
        if isinstance(program, Function):
            if self._start is None:
                self._start = Start()
            else:
                self._start.restore()

    def expected(self, control: Control | Source | None) -> Expected | None:
        """Return the relative error that the control shows of each op of a; None without a control.

        Raises AmandaError for a control that cannot be run.
        """
        if control is None:
            return None
        asked = isinstance(control, str) and control in get_args(Control)
        run = self._control(cast("Control", control)) if asked else open_run(control, "control")
        told = run.name if not asked else f"a {self._way}"
        self.told.append(f"Errors up to {MARGIN:g} times those of a against {told} are expected")
        self.told += run.told
        self.recorded["control"] = run
        found, _ = Comparing(self.a, run, None).ops({})
        is_wider = any(one.dtypes[0] != one.dtypes[1] for _, one in found)
        return {
            (pair[0].op, pair[0].execution): max(one.relative, _rounding(one.dtypes[0]) if is_wider else 0.0)
            for pair, one in found
        }

    def _control(self, control: Control) -> Run:
        program = self._programs[0]
        if program is None:
            raise AmandaError(
                f"control is {control!r}, and a is no program to run; give a dump as the control"
            )
        if control != "again":
            try:
                return self._in_float64(program)
            except AmandaError as error:
                if control == "float64":
                    raise
                self.told.append(str(error))
        self._way = "once more"
        return self._record("again", program)

    def _in_float64(self, program: Program) -> Run:
        """Run a in float64; raise AmandaError where that cannot be."""
        if self.a.framework != "pytorch":
            raise AmandaError(f"Float64 is for PyTorch, and a is {self.a.framework}")
        self._way = "in float64"
        try:
            return self._record("control", replace(program, compiled="eager"), (Float64Tool, {}))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise AmandaError(f"a cannot be run in float64 ({cause}), only again") from error

    def with_value(self, pair: Pair) -> Run | None:
        """Run b with what an op of a gave in place of what the op of b gives; None where that cannot be.

        Raises AmandaError where b is no program.
        """
        program = self._programs[1]
        if program is None:
            raise AmandaError("bisect runs b again, and b is no program to run")
        one, other = pair
        if self.a.is_derived(one) or self.b.is_derived(other):
            return None
        if self.a.dump is None or self.b.dump is None or self.b.ops[other.op].type == "returned":
            return None
        if one.op >= len(self.a.dump.ops) or other.op >= len(self.b.dump.ops):  # one tensor of a list
            return None
        options = {
            "source": self.a.dump.folder, "op": one.op, "target": self.b.dump.folder, "other": other.op
        }  # fmt: skip
        return self._record("replaced", program, (ReplacedTool, options))


def _observed(label: str, seen: Sequence[Any], unseen: Sequence[Any]) -> list[str]:
    """Say where a function returns other numbers under tools than without."""
    if len(seen) != len(unseen) or any(
        one.shape != other.shape for one, other in zip(seen, unseen, strict=True)
    ):
        return [f"{label} returned other tensors without a tool than with one"]
    worst = max((array_distance(*pair).relative for pair in zip(seen, unseen, strict=True)), default=0.0)
    if not worst:
        return []
    return [
        f"The compiled code of {label} returned other numbers without a tool, by a relative error of "
        f"{worst:.2g}: it was compiled otherwise there, and this comparison is of the code with tools in it"
    ]


def _rounding(dtype: str) -> float:
    """Return the root mean square of the relative error of rounding to an element type; 0 for integers."""
    if not dtype.startswith(("float", "bfloat")):
        return 0.0
    from ml_dtypes import finfo

    bits: int = finfo(Tensors.numpy_type(dtype)).nmant  # type: ignore[no-untyped-call]
    return float(2.0**-bits / 4)
