"""The programs that a comparison runs, functions or commands; the control of a; the state before each run."""

from __future__ import annotations

import gc
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import amanda
from amanda.action import routine_name
from amanda.errors import AmandaError
from amanda.options import Name, NonNegativeInt, checked
from amanda.tools.diff._comparison import expected_errors
from amanda.tools.diff._errors import MARGIN, Expected, Pair, array_distance
from amanda.tools.diff._run import Compiled, Run, Source, open_run, run_of_dump
from amanda.tools.diff._tools import Float64Tool, ReplacedTool, ToolAndOptions, find_failing_op
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 8 << 30
"""Bytes of tensors that are kept of a run."""


_logger = logging.getLogger("amanda")


def _is_not_in_result(record: logging.LogRecord) -> bool:
    """Return False for hints on compiled code of functions: their result says what ran, and what differs."""
    return not any(hint in record.getMessage() for hint in ("ran op by op", "control compares them"))


@dataclass
class FunctionProgram:
    """A function and what it is called with; returned: arrays that its last run gave, none of eager code."""

    call: Callable[..., Any]
    inputs: Sequence[Any]
    compiled: Compiled
    max_bytes: int
    returned: list[NDArray[Any]] = field(default_factory=list)

    def record(self, folder: Path, *tools_before: ToolAndOptions) -> Run:
        """Call the function under a `DumpTool` that keeps all tensors but inputs; return the run.

        Of compiled code, what the function returns is kept too: the compiler has the last word on it.
        tools_before: class and options of each.
        Raises AmandaError for a function without ops to compare, and for tensors that cannot be kept.
        """
        dump_tool = DumpTool(folder, **_dump_options(self.max_bytes))
        other_tools: list[Any] = [tool_class(**options) for tool_class, options in tools_before]
        _logger.addFilter(_is_not_in_result)
        try:
            # The recording tool comes last: it records what the tools before it changed.
            with amanda.apply(*other_tools, dump_tool, compiled=self.compiled):
                returned = self.call(*self.inputs)
        except BaseException:
            dump_tool.clear()  # else it would be written when the folder is gone
            raise
        finally:
            _logger.removeFilter(_is_not_in_result)
        if self.compiled == "instrument":
            dump_tool.add_returned(returned)
        result, name = dump_tool.result, routine_name(self.call)
        if not result.entries:
            raise AmandaError(f"{name} executed no op that could be compared")
        if result.failure:
            raise AmandaError(f"what {name} computed cannot be kept: {result.failure}")
        remarks = [remark for tool in other_tools for remark in tool.remarks]
        run = replace(run_of_dump(_complete_dump(result.folder, name)), name=name, remarks=remarks)
        self.returned = _arrays(returned) if run.in_graph else []
        return run


@checked
@dataclass
class Command:
    """Command line of a program, which runs under `amanda run`.

    Args:
        line: Program and arguments, such as "train.py --epochs 1".
        compiled: What becomes of compiled callables, as in `amanda.apply`.
        max_bytes: Limit of the temporary folder that keeps the tensors.
        python: Interpreter of the program.
    """

    line: Name
    compiled: Compiled = "instrument"
    max_bytes: NonNegativeInt = MAX_BYTES
    python: Name = sys.executable

    def record(self, folder: Path, *extra: ToolAndOptions) -> Run:
        """Run the program under a `DumpTool`, its output to standard error; return its run, or rank 0's.

        Args:
            folder: Folder for the dump.
            *extra: Further tools, which run ahead of the dump: the class and options of each.

        Raises:
            AmandaError: For a program that fails, cannot be run, or executes no op, and for a partial dump.
        """
        tools = [(f"{kind.__module__}.{kind.__qualname__}", options) for kind, options in extra]
        tools.append(("dump", {"folder": folder, **_dump_options(self.max_bytes)}))
        tool_arguments: list[str] = []
        for name, options in tools:
            texts = [f"{key}={_option_text(value)}" for key, value in options.items()]
            tool_arguments += ["-t", f"{name}:{','.join(texts)}"]
        command = [self.python, "-m", "amanda", "run", "-q", "--compiled", self.compiled, *tool_arguments]
        try:
            # Standard output is for the report alone.
            process = subprocess.run([*command, "--", *shlex.split(self.line)], stdout=sys.stderr.fileno())
        except OSError as error:
            raise AmandaError(f"{self.python} cannot be run: {error.strerror}") from None
        if process.returncode:
            self._check_interpreter()
            raise AmandaError(f"{self.line!r} ended with {_status_text(process.returncode)}")
        # Under a launcher each rank writes a folder of its own.
        dump_folder = folder if (folder / "index.json").exists() else folder / "rank0"
        if not (dump_folder / "index.json").exists():
            raise AmandaError(f"{self.line!r} executed no op that could be compared")
        run = run_of_dump(_complete_dump(dump_folder, repr(self.line)))
        remarks = [] if dump_folder == folder else ["Of several ranks, rank 0 alone was compared"]
        return replace(run, name=self.line, remarks=remarks)

    def _check_interpreter(self) -> None:
        """Raise AmandaError if another interpreter than this one lacks Amanda, or runs no code at all."""
        if self.python == sys.executable:
            return
        code = "import amanda.__main__, amanda.tools.dump"
        process = subprocess.run([self.python, "-c", code], capture_output=True, text=True, errors="replace")
        reason = process.stderr.strip().rpartition("\n")[2]
        if "ImportError" in reason or "ModuleNotFoundError" in reason:
            raise AmandaError(
                f"{self.python} does not have Amanda ({reason}); install amanda-tools there, and the driver "
                f"of the framework, as they are installed for {sys.executable}"
            )
        if process.returncode:
            raise AmandaError(
                f"{self.python} runs no Python code: it ended with {_status_text(process.returncode)}"
                f"{reason and f' ({reason})'}; give the interpreter of an environment that has Amanda"
            )


Program = FunctionProgram | Command


def _complete_dump(folder: Path, program: str) -> Dump:
    """Read the dump of a program; raise AmandaError where something could not be written."""
    dump = Dump(folder)
    if dump.incomplete:
        raise AmandaError(
            f"what {program} computed could not all be written to {folder}, so nothing is compared"
        )
    return dump


def _status_text(code: int) -> str:
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


def _option_text(value: Any) -> str:
    """Return the value of an option for a command line, in quotes if it has a comma."""
    text = "none" if value is None else os.fspath(value) if isinstance(value, Path) else str(value)
    return f"'{text}'" if "," in text else text


def _arrays(value: Any) -> list[NDArray[Any]]:
    tensors = [leaf for leaf in leaves([value], structures=True) if hasattr(leaf, "shape")]
    dense_tensors = [(tensors_of(tensor), tensors_of(tensor).dense(tensor)) for tensor in tensors]
    return [library.exact(tensor) for library, tensor in dense_tensors if tensor is not None]


Control = Literal["again", "float64", "auto"]
_RESTORABLE = frozenset({"pytorch", "onnxruntime"})
"""Frameworks whose functions start from the same state each time."""


class RecordedRuns:
    """The runs a and b, the control of a, and reruns of b: recorded in a folder where they are programs.

    compiled: as in `amanda.apply`; with None a function that calls compiled callables runs once more, as
    compiled code.  remarks: sentences on how the runs ran.
    recorded: runs by "a", "b" and, if there is one, "control".
    failure: the op of b that fails where it is compiled, and the failure in words.
    Raises AmandaError for inputs without a function to call.
    """

    def __init__(
        self, folder: Path, a: Source, b: Source, inputs: Sequence[Any], compiled: Compiled | None,
        max_bytes: int,
    ) -> None:  # fmt: skip
        self._folder, self._may_record_compiled = folder, compiled is None

        def program(source: Source) -> Program | None:
            """Return a command, or a function with its inputs; None for what is recorded already."""
            if isinstance(source, Command):
                return source
            mode = compiled or "eager"
            return FunctionProgram(source, inputs, mode, max_bytes) if callable(source) else None

        self._programs = [program(a), program(b)]
        if inputs and not any(isinstance(program, FunctionProgram) for program in self._programs):
            raise AmandaError(f"{len(inputs)} inputs were given, and neither a nor b is a function to call")
        self._state_before_runs: ProcessState | None = None
        self.remarks: list[str] = []
        self.failure: tuple[int, str] | None = None
        self.a, self.b = (
            open_run(source, label) if code is None else self._record_eager_or_compiled(label, code)
            for label, source, code in zip("ab", (a, b), self._programs, strict=True)
        )
        self.remarks += [*self.a.remarks, *self.b.remarks]
        self.recorded = {"a": self.a, "b": self.b}

    def _record_eager_or_compiled(self, label: str, program: Program) -> Run:
        """Record a or b; if no mode was asked for, once more as compiled code where the function has any."""
        # Later runs are then compiled too.  Where compiled code of a fails under tools, the eager run stays.
        if not self._may_record_compiled or isinstance(program, Command):
            return self._record_checked(label, label, program)
        eager_run = self._record(label, program)
        if not eager_run.op_by_op:
            return eager_run
        # Whether a function calls compiled callables shows only as it runs.
        program = replace(program, compiled="instrument")
        try:
            run = self._record_checked(label, f"{label}-compiled", program)
        except Exception as error:
            if label == "b":
                raise
            self.remarks.append(f"Compiled code of a does not run under tools: {_error_text(error)}")
            return eager_run
        self._programs["ab".index(label)] = program
        return run

    def _record_checked(self, label: str, folder: str, program: Program) -> Run:
        """Record a or b; where compiled code of b fails, with eager ops from the one that fails on.

        `failure` names that op.  A compiled function also runs without a tool: `remarks` say if it differs.
        """
        try:
            run = self._record(folder, program)
        except Exception as error:
            # Run a is the reference: if it fails nothing can be compared.
            if label == "a" or program.compiled == "eager":
                raise
            # Runs b with ever other ops compiled; a folder holds one dump, and every try writes one.
            try_numbers = count()
            run, op_index = find_failing_op(
                lambda tool: self._record(f"b{next(try_numbers)}", program, tool), error
            )
            failure = _error_text(getattr(error, "inner_exception", error))
            self.failure = op_index, f"{failure} where it is compiled, none where it is eager code"
            self.remarks.append("Ops of b from the one that fails on ran as eager code")
            return run
        # A compiler may choose other kernels for code with routines in it.
        if isinstance(program, FunctionProgram) and run.in_graph and run.framework in _RESTORABLE:
            self._save_or_restore_state(program)
            try:
                returned_without_tool = _arrays(program.call(*program.inputs))
                self.remarks += _tool_effects(label, program.returned, returned_without_tool)
            except Exception as error:
                self.remarks.append(
                    f"{label} raised {type(error).__name__} without a tool, and nothing with one"
                )
        return run

    def _record(self, folder_name: str, program: Program, *tools_before: ToolAndOptions) -> Run:
        self._save_or_restore_state(program)
        return program.record(self._folder / folder_name, *tools_before)

    def _save_or_restore_state(self, program: Program) -> None:
        """Save the process's state before the first run of a function; restore it before later ones."""
        if isinstance(program, FunctionProgram):
            if self._state_before_runs is None:
                self._state_before_runs = ProcessState()
            else:
                self._state_before_runs.restore()

    def measure_expected(self, control: Control | Source | None) -> Expected | None:
        """Record or open the control, add remarks, and return the expected errors of a; None without one."""
        # Raises AmandaError for an unknown name, and for a control that cannot be recorded.
        if control is None:
            return None
        # A name: again, float64 or auto; else the path of a run, or one itself.
        is_named = isinstance(control, str) and control in get_args(Control)
        close_names = get_close_matches(control, get_args(Control), n=1) if isinstance(control, str) else []
        if close_names and not is_named and not Path(str(control)).exists():
            raise AmandaError(f"control is {str(control)!r}; did you mean {close_names[0]!r}?")
        run = self._record_control(cast("Control", control)) if is_named else open_run(control, "control")
        control_text = run.name if not is_named else f"a {self._control_kind}"
        self.remarks.append(f"Errors up to {MARGIN:g} times those of a against {control_text} are expected")
        self.remarks += run.remarks
        self.recorded["control"] = run
        return expected_errors(self.a, run)

    def _record_control(self, control: Control) -> Run:
        """Record the control, a in float64 or once more; raise AmandaError where that cannot be."""
        # "auto" is float64, or once more where that fails; `_control_kind` says which in words.
        program = self._programs[0]
        if program is None:
            raise AmandaError(
                f"control is {control!r}, but a is not a program to run; give a dump as the control"
            )
        if control != "again":
            try:
                return self._record_in_float64(program)
            except AmandaError as error:
                if control == "float64":
                    raise
                self.remarks.append(str(error))
        self._control_kind = "once more"
        return self._record("again", program)

    def _record_in_float64(self, program: Program) -> Run:
        """Record a in float64, op by op, then restore the state; raise AmandaError where that cannot be."""
        if self.a.framework != "pytorch":
            raise AmandaError(f"Float64 is for PyTorch, and a is {self.a.framework}")
        self._control_kind = "in float64"
        try:
            return self._record("control", replace(program, compiled="eager"), (Float64Tool, {}))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise AmandaError(f"a cannot be run in float64 ({cause}), only again") from error
        finally:
            # Gradients in float64 would stay at the program's parameters.
            self._save_or_restore_state(program)

    def rerun_with_value(self, pair: Pair) -> Run | None:
        """Run b with what an op of a gave in place of what the op of b gives; return the run.

        pair: the outputs of both.  None for tensors that are not in the dumps as they are.
        Raises AmandaError where b is not a program.
        """
        program = self._programs[1]
        if program is None:
            raise AmandaError("bisect runs b again, but b is not a program to run")
        entry_a, entry_b = pair
        if self.a.is_derived(entry_a) or self.b.is_derived(entry_b):
            return None
        if self.a.dump is None or self.b.dump is None or self.b.ops[entry_b.op].type == "returned":
            return None
        # `split_list_ops` puts ops for single tensors of a list behind those that the dump has.
        if entry_a.op >= len(self.a.dump.ops) or entry_b.op >= len(self.b.dump.ops):
            return None
        options = {
            "source": self.a.dump.folder, "op": entry_a.op,
            "target": self.b.dump.folder, "target_op": entry_b.op,
        }  # fmt: skip
        return self._record("replaced", program, (ReplacedTool, options))


def _error_text(error: Any) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__} ({line})"


def _tool_effects(label: str, with_tool: Sequence[Any], without_tool: Sequence[Any]) -> list[str]:
    """Return a sentence if a function returns other tensors under tools than without, in a list; else []."""
    if len(with_tool) != len(without_tool) or any(
        a.shape != b.shape for a, b in zip(with_tool, without_tool, strict=True)
    ):
        return [f"{label} returned other tensors without a tool than with one"]
    errors = (array_distance(*pair).relative for pair in zip(with_tool, without_tool, strict=True))
    largest = max(errors, default=0.0)
    if not largest:
        return []
    return [
        f"The compiled code of {label} returned other numbers without a tool, by a relative error of "
        f"{largest:.2g}: it was compiled otherwise there, and this comparison is of the code with tools in it"
    ]


class ProcessState:
    """State of the process before its first run, which every other run starts from again.

    It has the random state of Python, NumPy and PyTorch; parameters, buffers and gradients of all living
    modules; and the state of all living optimizers.
    """

    def __init__(self) -> None:
        self._python_random_state, self._numpy_random_state = random.getstate(), np.random.get_state()
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            with amanda.disabled(), self._torch.no_grad():
                self._save_torch(self._torch)

    def _save_torch(self, torch: Any) -> None:
        """Copy random states, and of all live modules and optimizers tensors, gradients and states."""
        self._cpu_random_state = torch.get_rng_state()
        self._cuda_random_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        tensor_by_id, self._optimizers_with_states = {}, []
        # A function may reach models by closures and globals: the garbage collector sees every live one.
        for item in gc.get_objects():
            # Not isinstance, which asks an object for `__class__`: a lazy proxy would load its object.
            kind = type(item)
            # A module whose `__init__` has not run yet has no parameters, and an optimizer no state.
            if issubclass(kind, torch.nn.Module) and "_parameters" in item.__dict__:
                for tensor in (*item.parameters(recurse=False), *item.buffers(recurse=False)):
                    if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                        # By id: modules may share a tensor, and tensors have no equality that is a bool.
                        tensor_by_id[id(tensor)] = tensor
            elif issubclass(kind, torch.optim.Optimizer) and hasattr(item, "state"):
                states = {key: _state_copy(value) for key, value in item.state.items()}
                self._optimizers_with_states.append((item, states))
        gradients = (tensor.grad if tensor.is_leaf else None for tensor in tensor_by_id.values())
        self._tensors_with_copies = [
            (tensor, tensor.detach().clone(), None if gradient is None else gradient.detach().clone())
            for tensor, gradient in zip(tensor_by_id.values(), gradients, strict=True)
        ]

    def restore(self) -> None:
        """Bring random states, tensors, gradients and states of optimizers back to what they were."""
        random.setstate(self._python_random_state)
        np.random.set_state(self._numpy_random_state)
        if self._torch is None:
            return
        with amanda.disabled(), self._torch.no_grad():
            self._torch.set_rng_state(self._cpu_random_state)
            if self._cuda_random_states:
                self._torch.cuda.set_rng_state_all(self._cuda_random_states)
            for tensor, value, gradient in self._tensors_with_copies:
                # In place where that is possible: views and optimizers keep the memory.  `.data` raises no
                # version.
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.clone()
                if tensor.is_leaf:
                    tensor.grad = None if gradient is None else gradient.clone()
            for optimizer, state in self._optimizers_with_states:
                # The same dict stays: it is a defaultdict to which others may hold references.
                optimizer.state.clear()
                optimizer.state.update({key: _state_copy(value) for key, value in state.items()})


def _state_copy(value: Any) -> Any:
    """Return a copy of the state of one parameter, with its tensors; a value that is not a dict, as it is."""
    if not isinstance(value, dict):
        return value
    return {name: tensor.clone() if hasattr(tensor, "clone") else tensor for name, tensor in value.items()}
