"""The tool: runs each differentiable op under hooks that keep the tensors it saves within a budget."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import amanda
from amanda.errors import OptionError, ToolError
from amanda.options import Name, NonNegativeInt, Where, checked
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.remat import _pytorch
from amanda.tools.remat._storage import HEURISTICS, HeuristicName, MemoryTotals, OpCounts
from amanda.tools.remat._store import RematStore
from amanda.tools.rerun import Rerun, rerun
from amanda.tools.results import Column, Result, amount, shortened

logger = logging.getLogger("amanda")

_MAX_SIZES = 10_000  # sizes kept at most
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)

_BUDGET_FORM = 'a number of bytes, or a string such as "2GiB" or "512 MB"'
Budget: TypeAlias = Annotated[
    NonNegativeInt | Name,
    Where(_BUDGET_FORM, lambda budget: isinstance(budget, int) or _AMOUNT.fullmatch(budget)),
]


class RematTool(amanda.Tool):
    """Train within a memory budget: evict tensors that autograd saves, and recompute them when needed.

    Source: Kirisame et al. 2021, "Dynamic Tensor Rematerialization".

    Args:
        budget: Bytes of the storages that recorded ops make, or a string, "2GiB" or "512 MB"; None: no bound.
        heuristic: Name in `HEURISTICS` of the score by which storages are evicted.
        cost: Of an op, its "time" or, for reproducible evictions, "count" (each op costs 1).
        strict: Raise BudgetError if the budget cannot be held, instead of a warning.

    `result` has the evictions, `clear` resets the counts.

    Raises:
        OptionError: For other options.
    """

    purpose = "change"
    is_copied_when_used = False

    @checked
    def __init__(
        self,
        budget: Budget | None = None,
        heuristic: HeuristicName = "h_dtr_eq",
        cost: Literal["time", "count"] = "time",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self._budget = _budget_bytes(budget)
        self._heuristic = HEURISTICS[heuristic]
        self._counts_ops = cost == "count"
        self._strict = strict
        self._counts: dict[int, OpCounts] = {}
        self._skipped_namespaces: set[amanda.Namespace] = set()
        self._has_warned_of_transforms = False
        self._result_bytes: dict[Hashable, int] = {}  # by type, shapes and values of inputs
        # Made at the first op, since torch may not be imported when the tool is.
        self._store: RematStore | None = None
        self._totals = MemoryTotals()
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", rerun]]))
        self.add_inst_for_op(self._instrument_op)

    @property
    def result(self) -> RematResult:
        """Return the evictions, and the ops that ran again, so far."""
        totals, counts = self._totals, [replace(op) for op in list(self._counts.values())]
        return RematResult(counts, self._budget, totals.peak, totals.short)

    def clear(self) -> None:
        """Reset the counts, and the peak to the bytes alive; evicted storages stay evicted."""
        for counts in self._counts.values():
            counts.evictions = counts.evicted_bytes = counts.rematerialisations = 0
            counts.seconds = 0.0
        self._totals.peak = self._totals.short = 0
        if self._store is not None:
            self._store.ledger.remove_freed_memory()
            self._store.ledger.update_peak()

    def scope_left(self) -> None:
        """Recompute all evicted storages, and drop the records of ops."""
        store, self._store = self._store, None
        if store is not None:
            store.restore()

    def _instrument_op(self, context: amanda.OpContext) -> None:
        """Replace a forward op that can run again by a recorded run; watch ops that write, leave others."""
        rerun_facts: Rerun | None = context.get("rerun")
        if rerun_facts is None:
            self._skip_op(context)
            return
        writes_nothing = rerun_facts.written == ()
        # None, for an op of which nobody knows what it writes, selects all inputs.
        if not writes_nothing:
            context.insert_before_op(self._before_write, inputs=rerun_facts.written)
        # An op with side effects must not run twice.
        if not rerun_facts.pure or context["phase"] != "forward":
            return
        counts = self._counts.setdefault(
            context.get_op_id(), OpCounts(context["type"], context.get_scope(), context.get_source())
        )
        context.replace_op(
            self._run_op, rerun_facts=rerun_facts, counts=counts, compute=context.get_computation()
        )

    def _skip_op(self, context: amanda.OpContext) -> None:
        """Leave an op unchanged, and warn once for its namespace.  Raises ToolError for an op in a file."""
        if context.is_static():
            raise ToolError(
                "remat acts while a model is trained in PyTorch's eager mode, not in a file: apply it to the "
                "program, with amanda.apply or `amanda run -t remat`"
            )
        if context.namespace not in self._skipped_namespaces:
            self._skipped_namespaces.add(context.namespace)
            is_jax = context.namespace.matches("jax")
            advice = "; mark what is computed again with jax.checkpoint" if is_jax else ""
            logger.warning(
                "remat is for PyTorch's eager mode; ops of %s run unchanged%s", context.namespace, advice
            )

    def _before_write(self, *values: Any) -> None:
        """Recompute evicted storages that depend on values, before the program writes these."""
        if self._store is not None:
            self._store.recompute_before_write(self._store.torch.tensors(values))

    def _run_op(self, *inputs: Any, rerun_facts: Rerun, counts: OpCounts, compute: _pytorch.Compute) -> Any:
        """Run and record the op; return NotImplemented, without a run, where autograd records nothing.

        Inside of transforms of torch.func too, with a warning.  Evicts before and after the run, as needed.
        Raises BudgetError with `strict` if the op does not fit into the budget.
        """
        # Batched and differentiated values of torch.func have no storage of their own to evict.
        if _pytorch.is_in_transform():
            if not self._has_warned_of_transforms:
                self._has_warned_of_transforms = True
                logger.warning("remat leaves ops inside of transforms of torch.func, such as vmap, unchanged")
            return NotImplemented
        if self._store is None:
            self._store = RematStore(self._totals, self._budget, self._heuristic, self._strict)
        store = self._store
        tensors = store.torch.tensors(inputs)
        if not store.torch.will_record(tensors):
            return NotImplemented
        # Without a budget no room is made, so sizes of results are of no use.
        key = None if self._budget is None else (counts.type, _input_signature(inputs))
        with store.lock:
            operation = store.record_op(counts, compute, inputs, tensors, rerun_facts.scratch)
            if key is not None:
                self._make_room_for_results(store, key, inputs, counts, compute)
        # An op that writes its inputs, or draws random numbers unexpectedly, cannot be run again.
        state_before = store.torch.versions_and_generators(inputs, tensors, rerun_facts.random)
        begin = perf_counter()
        try:
            # Hooks around this op alone: other ops, and autograd's own, save as they always do.
            with store.save_handles(operation):
                result = compute(inputs)
        except BaseException:
            # The op has failed half-way: what it made cannot be made again.
            operation.cut_history()
            raise
        seconds = perf_counter() - begin
        with store.lock:
            operation.cost = 1.0 if self._counts_ops else seconds
            state_after = store.torch.versions_and_generators(inputs, tensors, rerun_facts.random)
            store.record_results(operation, result, can_rerun=state_before == state_after)
            if key is not None:
                if len(self._result_bytes) >= _MAX_SIZES:  # numbers among the inputs may differ at each call
                    self._result_bytes.clear()
                self._result_bytes[key] = operation.size
            # What the op really made is known now, which may be more than was estimated.
            store.eviction.make_room(0, counts)
        return result

    def _make_room_for_results(
        self, store: RematStore, key: Hashable, inputs: Sequence[Any], counts: OpCounts,
        compute: _pytorch.Compute,
    ) -> None:  # fmt: skip
        """Evict until the results of an op fit into the budget: as large as at the last run with this key.

        key: type and input signature of the op.  At the first run with it, the size is estimated.
        """
        needed_bytes = self._result_bytes.get(key)
        is_exact = needed_bytes is not None
        if needed_bytes is None:  # the first run with such inputs: an estimate, which is not an upper bound
            needed_bytes = store.torch.expected_bytes(compute, inputs) or 0
        store.eviction.make_room(needed_bytes, counts, is_exact)


def _input_signature(value: Any) -> Hashable:
    """Return a hashable key of inputs, on which the bytes of an op's results depend."""
    if type(value) in (list, tuple):
        return tuple(map(_input_signature, value))
    if hasattr(value, "requires_grad"):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def _budget_bytes(budget: int | str | None) -> int | None:
    """Return a budget as a number of bytes; None for no bound.  Raises OptionError for another text."""
    if isinstance(budget, str) and (match := _AMOUNT.fullmatch(budget)) is not None:
        power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if budget is None or isinstance(budget, int):
        return budget
    raise OptionError(f'budget is {budget!r}; give a number of bytes, or a string such as "2GiB" or "512 MB"')


class RematResult(Result):
    """A row for each op that ran again or had storages evicted, the most seconds first.

    budget: bytes, None for no bound.  peak: the most bytes that were alive at once.
    short: the most bytes by which an op exceeded the budget, 0 where it was held.
    """

    name: ClassVar[str] = "remat"
    title = "Rematerialisation"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"),
        Column("type"),
        Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)),
        Column("evictions", show="{:,}".format, total=True, merge="sum"),
        Column("evicted", show=partial(amount, unit="B"), total=True, unit="B", merge="sum"),
        Column("rematerialisations", show="{:,}".format, total=True, merge="sum"),
        Column("seconds", show="{:.4f}".format, total=True, unit="s", merge="sum"),
    )

    def __init__(self, counts: Sequence[OpCounts], budget: int | None, peak: int, short: int) -> None:
        self._counts = sorted(
            (op for op in counts if op.evictions or op.rematerialisations),
            key=lambda op: (-op.seconds, -op.evicted_bytes),
        )
        self.budget = budget
        self.peak = peak
        self.short = max(short, 0 if budget is None else peak - budget)

    @property
    def evictions(self) -> int:
        """Number of evictions."""
        return sum(op.evictions for op in self._counts)

    @property
    def rematerialisations(self) -> int:
        """Number of ops that ran again."""
        return sum(op.rematerialisations for op in self._counts)

    @property
    def seconds(self) -> float:
        """Seconds in ops that ran again."""
        return sum(op.seconds for op in self._counts)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op."""
        return [
            ("forward", op.type, op.module, op.source, op.evictions, op.evicted_bytes, op.rematerialisations,
             op.seconds)
            for op in self._counts
        ]  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Return the budget, the peak, and the bytes by which the budget was exceeded."""
        return {"budget": self.budget, "peak": self.peak, "short": self.short}

    def notes(self) -> Sequence[str]:
        """Return sentences on the peak and the budget."""
        peak = f"At most {self.peak:,} bytes of storages that ops had made were alive"
        if self.budget is None:
            return [f"{peak}; there was no budget."]
        notes = [f"{peak}; the budget was {self.budget:,}."]
        if self.short:
            notes.append(f"The budget was exceeded by up to {self.short:,} bytes that could not be evicted.")
        return notes
