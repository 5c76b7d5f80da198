"""Comparing two runs: op by op, or, across frameworks, module by module."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from amanda.errors import AmandaError
from amanda.tools.diff._align import dotted, is_compute, same_modules, same_ops, within
from amanda.tools.diff._compare import Distance, distance, matched, scale, tolerance
from amanda.tools.diff._result import Comparison, DiffResult, Read
from amanda.tools.diff._run import Compiled, Run, Source, open_run, record, visits
from amanda.tools.dump import Entry, Op
from amanda.tools.select import Phase

By = Literal["op", "module"]
Made = tuple[list[Entry], list[Entry]]

_READS = frozenset({"ReadVariableOp", "Const", "Shape", "StopGradient", "VarHandleOp"})


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
    """Where two runs begin to differ, and how the difference grows.

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
        told = _told_of_compiled(run, other)
        if by == "op" or (by is None and run.is_like(other)):
            return _ops(run, other, mapping or {}, rtol, told)
        if by is None:
            told.append(
                f"Modules were compared, not ops: a ran as {_mode(run)}, b as {_mode(other)}; "
                'by="op" compares ops'
            )
        names = same_modules(run, other) if mapping is None else mapping
        compared = _in_order(run, list(_modules(run, other, names, rtol)))
        return DiffResult(run.name, other.name, compared, modules=list(names), told=told)


def _mode(run: Run) -> str:
    return f"{run.framework or 'statistics'}{'/graph' if run.in_graph else ''}"


def _told_of_compiled(run: Run, other: Run) -> list[str]:
    """Sentences on compiled callables that ran as eager code."""
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
    """Raises AmandaError for a module that no op ran in."""
    inside = within(run, name)
    paths = {dotted(op.module) for op in run.ops if op.module}
    if not any(map(inside, paths)):
        near = get_close_matches(name, paths, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(paths)[:8])}"
        raise AmandaError(f"module {name!r} of the mapping executed nothing in {run.name}; {hint}")


def _in_order(run: Run, compared: Sequence[tuple[Entry, Comparison]]) -> list[Comparison]:
    """As run a executed; where a graph leaves that open, as its ops were met."""

    def place(pair: tuple[Entry, Comparison]) -> tuple[int, ...]:
        entry = pair[0]
        return (entry.order, entry.op) if run.ordered else (entry.execution, entry.op)

    if not compared:
        raise AmandaError("the two runs have no op in common; give a mapping of module names")
    found: list[Comparison] = []
    limit = 0.0
    for _, comparison in sorted(compared, key=place):  # precision that was lost is lost for what follows
        found.append(replace(comparison, tolerance=max(limit, comparison.by_type)))
        if comparison.relative:
            limit = max(limit, comparison.by_type)
    return found


# ---- op by op ----


def _ops(
    run: Run, other: Run, renamed: Mapping[str, str], rtol: float | None, told: Sequence[str]
) -> DiffResult:
    made: list[Made] = []
    alone: tuple[list[Op], list[Op]] = ([], [])
    for phase in get_args(Phase):
        pairs = same_ops(run, other, phase, renamed)
        made += [both for pair in pairs for both in _executions(run, other, *pair)]
        for side, one in enumerate((run, other)):
            paired = {pair[side] for pair in pairs}
            alone[side].extend(one.ops[i] for i in one.indices(phase) if i not in paired)
    made.sort(key=lambda both: both[0][0].order)  # as the tensors lie in their files
    found = [(both[0][0], _compared(run, other, *both, rtol)) for both in made]
    return DiffResult(run.name, other.name, _in_order(run, found), *alone, told=told)


def _executions(
    run: Run, other: Run, index: int, other_index: int
) -> Iterator[tuple[list[Entry], list[Entry]]]:
    """What an op gave at each execution that both runs have."""
    ones, others = run.made(index), other.made(other_index)
    for execution, other_execution in zip(sorted(ones), sorted(others), strict=False):
        pairs = list(matched(ones[execution], others[other_execution]))
        if pairs:
            yield [one for one, _ in pairs], [two for _, two in pairs]


def _compared(
    run: Run, other: Run, made: Sequence[Entry], other_made: Sequence[Entry], rtol: float | None
) -> Comparison:
    """What an op gave at one execution, by the tensor that is furthest off; what it read if they differ."""
    floor = max(scale(made), scale(other_made))
    pairs = list(zip(made, other_made, strict=True))
    judged = [(*_judged(run, other, pair, rtol, floor), pair) for pair in pairs]
    worst, limit, furthest = max(judged, key=lambda one: (one[0].relative > one[1], one[0].relative))
    read: list[Read] = []
    if worst.relative:
        sides = (
            one.read(entries[0].op, entries[0].execution, "input", "weight")
            for one, entries in ((run, made), (other, other_made))
        )
        for pair in matched(*sides):
            found, bound = _judged(run, other, pair, rtol, 0.0)
            read.append((pair[0].role, found.relative, found.relative <= bound))
    ops = run.ops[made[0].op], other.ops[other_made[0].op]
    return Comparison.of(*ops, furthest, worst, limit, read)


def _judged(
    run: Run, other: Run, pair: tuple[Entry, Entry], rtol: float | None, floor: float
) -> tuple[Distance, float]:
    """Distance, and how far may be."""
    layouts = tuple(
        op.weight_layout if "weight" in entry.role else op.layout
        for op, entry in ((run.ops[pair[0].op], pair[0]), (other.ops[pair[1].op], pair[1]))
    )
    found = distance((run, other), pair, layouts, floor)  # type: ignore[arg-type]
    return found, tolerance(pair[0].dtype, pair[1].dtype, rtol)


# ---- module by module ----


def _modules(
    run: Run, other: Run, names: Mapping[str, str], rtol: float | None
) -> Iterator[tuple[Entry, Comparison]]:
    for name, other_name in names.items():
        calls = [list(visits(one, within(one, n))) for one, n in ((run, name), (other, other_name))]
        for visit, other_visit in zip(*calls, strict=False):
            yield from _module_outputs(run, other, visit, other_visit, rtol)
        yield from _weight_gradients(run, other, name, other_name, rtol)


def _module_outputs(
    run: Run, other: Run, visit: Sequence[int], other_visit: Sequence[int], rtol: float | None
) -> Iterator[tuple[Entry, Comparison]]:
    """What the call of a module gave: at its end, or behind its product where the other has more in it."""
    heads, other_heads = _heads(run, visit), _heads(other, other_visit)
    weights = [
        [entry for i in one for entry in source.by_op[i] if entry.role == "weight"]
        for source, one in ((run, visit), (other, other_visit))
    ]
    for execution in sorted({entry.execution for entry in heads}):
        pairs = [
            (one, two) for one in heads for two in other_heads
            if one.execution == execution == two.execution
        ]  # fmt: skip
        judged = [(pair, *_judged(run, other, pair, rtol, 0.0)) for pair in pairs]
        if not judged:
            continue
        pair, found, limit = min(judged, key=lambda one: one[1].relative)
        of_weights = [
            ("weight", gap.relative, gap.relative <= bound)
            for one, two in zip(*weights, strict=False)
            if one.execution == execution == two.execution
            for gap, bound in [_judged(run, other, (one, two), rtol, 0.0)]
        ]
        ops = run.ops[pair[0].op], other.ops[pair[1].op]
        yield pair[0], Comparison.of(*ops, pair, found, limit, of_weights)


def _heads(run: Run, visit: Sequence[int]) -> list[Entry]:
    """What the last op gave, and what the last product gave with its bias."""
    shown = [i for i in visit if run.ops[i].type not in _READS]
    ends = {shown[-1]} if shown else set()
    products = [n for n, i in enumerate(shown) if is_compute(run.ops[i].type)]
    if products:
        ends.add(_behind(run, shown[products[-1] :]))
    return [
        entry for i in sorted(ends) for entry in run.by_op[i]
        if entry.role == "output" and entry.position == 0
    ]  # fmt: skip


def _behind(run: Run, ops: Sequence[int]) -> int:
    """The last op of a product with its bias: ops that add to it or shape it, and keep its size."""
    found, size = ops[0], _size(run, ops[0])
    for index in ops[1:]:
        if _size(run, index) != size:
            continue
        if run.ops[index].type not in ("add", "BiasAdd", "reshape", "squeeze"):
            break
        found = index
        if run.ops[index].type in ("add", "BiasAdd"):
            break
    return found


def _size(run: Run, index: int) -> int:
    outputs = [one for one in run.by_op[index] if one.role == "output"]
    return outputs[0].summary.statistics.elements


def _weight_gradients(
    run: Run, other: Run, name: str, other_name: str, rtol: float | None
) -> Iterator[tuple[Entry, Comparison]]:
    sides = []
    for one, n in ((run, name), (other, other_name)):
        inside = within(one, n)
        sides.append(
            [e for i in one.indices("backward") if inside(one.ops[i].module)
             for e in one.by_op[i] if e.role == "weight gradient"]
        )  # fmt: skip
    for pair in zip(*sides, strict=False):
        found, limit = _judged(run, other, pair, rtol, 0.0)
        ops = run.ops[pair[0].op], other.ops[pair[1].op]
        yield pair[0], Comparison.of(*ops, pair, found, limit, ())
