"""The function that compares two runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from amanda.errors import AmandaError
from amanda.tools.diff._align import dotted, same_modules, within
from amanda.tools.diff._comparing import Comparing
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Compiled, Run, Source, open_run, record

By = Literal["op", "module"]


def diff(
    a: Source,
    b: Source,
    *,
    mapping: Mapping[str, str] | None = None,
    rtol: float | None = None,
    by: By | None = None,
    max_bytes: int = 8 << 30,
    compiled: Compiled = "eager",
) -> DiffResult:
    """Find where two runs begin to differ, and how the difference grows.

    a, b: functions, which are run with all their tensors kept in a temporary folder of at most `max_bytes`;
    dumps and statistics, or paths to them.  mapping: modules of a by their names in b.  rtol: the relative
    error up to which tensors agree; None for one by element type, `TOLERANCES`: that of the op, and of ops
    before it that both runs computed in a less precise type and that differ.

    by: "op" compares ops one by one: those of the same module and type, in order.  "module" compares
    modules by what they give, and by the gradients of their weights; without a mapping those with weights
    of the same sizes, in order.  None is "module" for different frameworks, or TensorFlow's eager mode and
    its graphs, and else "op"; the result says so.

    compiled: as of `amanda.apply`, for functions: "eager" runs what torch.compile made op by op, and the
    result says so; "instrument" compares the compiled code, and what the functions return.

    Raises AmandaError where nothing can be compared, and for a module of the mapping that ran nothing.
    """
    if by not in (None, "op", "module"):
        raise AmandaError(f'by is {by!r}; it is "op", "module" or None')
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) / "dump" for _ in (a, b)]
        run, other = (
            record(one, folder, max_bytes, compiled) if callable(one) else open_run(one)
            for one, folder in zip((a, b), folders, strict=True)
        )
        for name, other_name in (mapping or {}).items():
            _check_module(run, name)
            _check_module(other, other_name)
        told, comparing = _told_of_compiled(run, other), Comparing(run, other, rtol)
        if by == "op" or (by is None and run.is_like(other)):
            found, alone = comparing.ops(mapping or {})
            return DiffResult(run.name, other.name, comparing.in_order(found), *alone, told=told)
        if by is None:
            told.append(
                f"Modules were compared, not ops: a ran as {_mode(run)}, b as {_mode(other)}; "
                'by="op" compares ops'
            )
        names = same_modules(run, other) if mapping is None else mapping
        compared = comparing.in_order(comparing.modules(names))
        return DiffResult(run.name, other.name, compared, modules=list(names), told=told)


def _mode(run: Run) -> str:
    return f"{run.framework or 'statistics'}{'/graph' if run.in_graph else ''}"


def _told_of_compiled(run: Run, other: Run) -> list[str]:
    """Return sentences on compiled callables that ran as eager code."""
    told = [
        f"Eager code of {name}: {', '.join(one.op_by_op)} ran op by op"
        for name, one in (("a", run), ("b", other)) if one.op_by_op
    ]  # fmt: skip
    if told and not run.in_graph and not other.in_graph:
        told.insert(0, "Eager code was compared with eager code, and nothing that a compiler made")
    if told:
        told.append('compiled="instrument" (--compiled instrument) runs compiled code')
    return told


def _check_module(run: Run, name: str) -> None:
    """Raise AmandaError for a module that no op ran in."""
    inside = within(run, name)
    paths = {dotted(op.module) for op in run.ops if op.module}
    if not any(map(inside, paths)):
        near = get_close_matches(name, paths, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(paths)[:8])}"
        raise AmandaError(f"module {name!r} of the mapping executed nothing in {run.name}; {hint}")
